"""Bodies that name further models, which a worker might use instead of the one that was routed.

Hosted gateways read them: OpenRouter ``models``, LiteLLM ``fallbacks`` and the like, or settings
that may hold them: OpenRouter's ``preset``, ``providerOptions`` of Vercel's gateway. Fields that
this gateway does not know reach workers of the client's protocol, so a key that may not use every
model can't send these.
"""

import asyncio
import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import unquote

import msgspec

from gateway.pipeline.http import LARGE_BODY
from protocols.core.errors import ClientError, InvalidParameter
from protocols.core.interfaces import ClientRequest
from protocols.core.json_text import decode_json
from protocols.core.name_cache import NameCache
from protocols.json_body import get_decoded_fields

_NAMES: Final = frozenset(
    {
        "models",
        "fallbacks",
        "fallback_models",
        "model_list",
        "context_window_fallbacks",
        "context_window_fallback_dict",
        "content_policy_fallbacks",
        "user_config",
        "extra_body",
        "preset",
        "provideroptions",
        "router_settings_override",
    }
)
_JSON_LENGTH: Final = "inference-header-content-length"
"""The header of KServe's requests with bytes of tensors behind the JSON."""
_MAX_DIGITS: Final = 20
_may_name_models: Final = re.compile(
    rb'(?i:"(?:%b)"|\\u(?:00[4-7]|017f|212a))|\x00|\xc5\xbf|\xe2\x84\xaa'
    % "|".join(sorted(_NAMES)).encode()
).search
"""Finds the names in what is no JSON, and letters that are written as escapes, in UTF-16 or as the
long s and the Kelvin sign."""


async def check_named_models(call: ClientRequest) -> None:
    """For a caller who may use some models only. Raises InvalidParameter if others are named.

    Raises ClientError for a body that can't be read: a worker might read it.
    """
    fields = get_decoded_fields(call)
    if fields is not None:
        check_field_names(fields)
    else:
        await _check_undecoded_body(call.body, call.headers)


async def _check_undecoded_body(body: bytes, headers: Mapping[str, str]) -> None:
    length = headers.get(_JSON_LENGTH, "")
    if length.isdecimal() and len(length) <= _MAX_DIGITS and 0 < int(length) < len(body):
        body = body[: int(length)]
    elif length == "0" and not body.lstrip().startswith(b"{"):  # a tensor without JSON
        return
    if len(body) >= LARGE_BODY:
        await asyncio.to_thread(_check_body, body)
    else:
        _check_body(body)


def _check_body(body: bytes) -> None:
    try:
        fields = decode_json(body, dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not _may_name_models(body):  # the protocol refuses it in its own words
            return
        raise ClientError(
            f"an API key with a list of models needs a body of JSON in UTF-8: {error}"
        ) from None
    check_field_names(fields)


_names_models: Final = NameCache[str, bool](
    lambda name: unquote(name).partition("[")[0].strip().casefold() in _NAMES
)
"""Whether a field has one of the names, in any case: for some servers, a long s is an s."""


def check_field_names(names: Collection[str]) -> None:
    """The same for the names of fields; in forms, ``models[0]`` is a part of ``models``."""
    if not any(map(_names_models.__getitem__, names)):
        return
    name = next(name for name in names if _names_models[name])
    raise InvalidParameter(
        f"{name!r} names further models: an API key with a list of models can't use it",
        param=name,
    )
