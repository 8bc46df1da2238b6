"""Bodies that name further models, which a worker might use instead of the one that was routed.

Fields that this gateway does not know reach workers of the client's protocol, and hosted gateways
read models in many of them: OpenRouter ``models`` and ``plugins[].allowed_models``, LiteLLM
``fallbacks``, hosted tools their own ``model``, Triton and SGLang the adapters of a model. A key
that may not use every model can name only its own ones there, wherever in the body, and as their
workers call them. What a body says to a model, or of a function, names none: texts, arguments,
documents, metadata, and the names that a JSON Schema declares.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from msgspec import Raw

from gateway.pipeline.http import LARGE_BODY
from protocols.core.errors import ClientError, InvalidParameter
from protocols.core.interfaces import ClientRequest, RoutingInfo
from protocols.core.json_text import JsonTooDeep, count_rare, decode_all_fields, decode_pairs
from protocols.core.name_cache import NameCache
from protocols.json_body import get_decoded_fields

_WORDS: Final = ("model", "fallback", "lora_", "adapter_id")
"""What the names of fields that name models contain."""
_SETTINGS: Final = frozenset(
    {"preset", "extra_body", "user_config", "provideroptions", "router_settings_override"}
)
"""Fields of the body that may hold any setting, by name or as an object."""
_MODEL: Final = "model"
_FREE_FIELDS: Final = frozenset({"metadata", "documents", "chat_template_kwargs"})
"""Fields of the body with names of the client's own."""
_CONVERSATIONS: Final = frozenset({"messages", "input"})
_FREE_IN_CONVERSATIONS: Final = frozenset({"arguments", "input", "data", "attributes"})
"""What functions and documents got or are, where it is no text."""
_SCHEMAS: Final = frozenset(
    {"parameters", "input_schema", "output_schema", "schema", "json_schema", "format", "value",
     "json", "guided_json"}
)  # fmt: skip
_FREE_IN_SCHEMAS: Final = frozenset(
    {"properties", "patternproperties", "$defs", "definitions", "dependentschemas",
     "dependentrequired", "default", "const", "examples", "example"}
)  # fmt: skip
"""Keywords of JSON Schema whose values have names of the client's own."""
_CONTAINERS: Final = frozenset({list, tuple})
"""The types of arrays and objects that are decoded as pairs."""
_NOTHING: Final[frozenset[str]] = frozenset()
_JSON_LENGTH: Final = "inference-header-content-length"
"""The header of KServe's requests with bytes of tensors behind the JSON."""
_MAX_DIGITS: Final = 20
_MAX_SHOWN: Final = 100
"""Letters of a name that errors show."""
_LARGE_SEARCH: Final = 16 << 10
"""Bytes of a body that are searched in a thread: that takes up to a microsecond for each."""
_MAX_ESCAPES: Final = 1 << 20
"""Of a large body whose names are listed: taking out millions of them would delay others."""
_search_lock: Final = threading.Lock()
"""One large body is searched at a time, as it takes several times its size meanwhile."""
_FOLDED: Final = tuple(letter.encode() for letter in "\u017f\u212a\ufb01")
"""The letters beyond ASCII that names of the kind may have in another case: for s, k, and fi."""
_may_name_models: Final = re.compile(
    rb'(?i:"(?:%b|[^"\\]*(?:%b))|\\u(?:00[4-7]|017f|212a|fb01))|\x00|%b'
    % (
        "|".join(sorted(_SETTINGS)).encode(),
        b'models|fallback|lora_|adapter_id|[^"\\\\]model',
        b"|".join(_FOLDED),
    )
).search
"""Finds the names in what is no JSON, and letters that are written as escapes, in UTF-16 or as
those of ``_FOLDED``."""
_TEXT_OF_NAMES: Final = (
    b"fallbac", b"lora_", b"adapter_id", b"\\u", b"%", b"\0", *_FOLDED,
    *(name.encode() for name in sorted(_SETTINGS)),
)  # fmt: skip
"""Text in lower case without these has no name of the kind, but for those with ``model``."""

_is_plain: Final = NameCache[bytes, bool](
    lambda name: (
        name == b"model"
        or not any(part in name.lower() for part in (*_TEXT_OF_NAMES, b"model", b"datatype"))
    )
)
"""Whether a name, as JSON has it, names no models but as ``model``, and no type of a tensor, whose
name is a value."""

_fold: Final = NameCache[str, str](lambda name: unquote(name).strip().casefold())
"""A name in any case, or in the form of a URL: for some servers, a long s is an s."""
_names_models: Final = NameCache[str, bool](
    lambda name: any(word in _fold[name] for word in _WORDS)
)

_Place = str | tuple[Any, str | int]
"""A field, or a place and a name or number in it: as text, a long name would be copied often."""
IsAllowed = Callable[[str], bool]
"""Whether the key may use the model that workers call so."""


async def check_named_models(call: ClientRequest, info: RoutingInfo, is_allowed: IsAllowed) -> None:
    """For a caller who may use some models only. Raises InvalidParameter if others are named.

    Raises ClientError for a body that can't be read: a worker might read it.
    """
    if len(call.body) >= _LARGE_SEARCH:
        await asyncio.to_thread(_check_large_body, call, info, is_allowed)
    else:
        _check_body(call, info, is_allowed)


def names_only_routed_model(call: ClientRequest, info: RoutingInfo) -> bool:
    """Whether this is plain to see: nearly all requests are spared ``check_named_models``."""
    return len(call.body) < LARGE_BODY and _names_only_routed_model(call, info)


def _names_only_routed_model(call: ClientRequest, info: RoutingInfo) -> bool:
    if "fields" in call.__dict__:  # it is JSON
        names = _list_names(call.body)
        if all(map(_is_plain.__getitem__, names)):
            return _is_routed(names.count(b"model"), call, info)
    text = call.body.lower()
    for part in _TEXT_OF_NAMES:  # any() would resume a generator for each
        if part in text:
            return False
    return _is_routed(text.count(b"model"), call, info)


def _is_routed(count: int, call: ClientRequest, info: RoutingInfo) -> bool:
    """Whether so many names of models in a body are the one model that was routed."""
    if count == 0:
        return True
    fields = get_decoded_fields(call)
    return (
        count == 1
        and fields is not None
        and fields.get(_MODEL) == Raw(b'"%b"' % info.model.encode())
    )


def _list_names(body: bytes) -> list[bytes]:
    """The names of all objects of a valid JSON text, as they are written.

    Of escapes, those of a backslash and a quote are missing.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = body.split(b'"')  # what is in strings, and what is between them
    return [name for name, after in zip(parts[1::2], parts[2::2], strict=True) if b":" in after]


def _check_large_body(call: ClientRequest, info: RoutingInfo, is_allowed: IsAllowed) -> None:
    with _search_lock:
        is_json = "fields" in call.__dict__ and count_rare(call.body, b"\\") <= _MAX_ESCAPES
        if not (is_json and _names_only_routed_model(call, info)):
            _check_body(call, info, is_allowed)


def _check_body(call: ClientRequest, info: RoutingInfo, is_allowed: IsAllowed) -> None:
    decoded = get_decoded_fields(call)  # workers get them written anew, each once
    fields = _decode_body(call.body, call.headers) if decoded is None else decoded.items()
    check_fields(fields, info, is_allowed)


def _decode_body(body: bytes, headers: Mapping[str, str]) -> Iterable[tuple[str, Raw]]:
    """All fields of a body that workers may get as it is."""
    length = headers.get(_JSON_LENGTH, "")
    if length.isdecimal() and len(length) <= _MAX_DIGITS and 0 < int(length) < len(body):
        body = body[: int(length)]
    elif length == "0" and not body.lstrip().startswith(b"{"):  # a tensor without JSON
        return ()
    try:
        return decode_all_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not _may_name_models(body):  # the protocol refuses it in its own words
            return ()
        raise _build_reading_error(error) from None


def check_fields(
    fields: Iterable[tuple[str, bytes | Raw]], info: RoutingInfo, is_allowed: IsAllowed
) -> None:
    """The same for the fields of a body, with their values as JSON."""
    routed = ("", None, info.model, *info.other_names)
    for name, raw in fields:
        folded = _fold[name]
        root = folded.partition("[")[0].strip()  # of ``models[0]`` in a form
        if root in _SETTINGS:
            raise _build_error(name)
        if root in _FREE_FIELDS or (
            name == _MODEL and (info.replaces_model or _decode(raw) in routed)
        ):
            continue
        if _names_models[name]:
            _check_value(name, _decode(raw), is_allowed)
        elif _may_hold_names(raw):
            free = _FREE_IN_CONVERSATIONS if folded in _CONVERSATIONS else _NOTHING
            for place, value in _find_names(_decode(raw), name, free, is_schema=folded in _SCHEMAS):
                _check_value(place, value, is_allowed)


def _may_hold_names(raw: bytes | Raw) -> bool:
    """Whether a value must be decoded: most images and texts are spared the memory for that."""
    text = bytes(raw)
    if not text.startswith((b"{", b"[")):
        return False
    text = text.lower()
    return b"model" in text or any(part in text for part in _TEXT_OF_NAMES)


def _decode(raw: bytes | Raw) -> Any:
    try:
        return decode_pairs(bytes(raw))
    except (JsonTooDeep, ValueError) as error:
        raise _build_reading_error(error) from None


def _find_names(
    value: Any, place: _Place, free: frozenset[str], *, is_schema: bool
) -> Iterator[tuple[_Place, Any]]:
    """The places that name models in a value of ``decode_pairs``, and their values.

    An object's names are all looked at: of one that stands twice, a worker may read the other one.
    """
    if type(value) is list:
        for i, inner in enumerate(value):
            if type(inner) in _CONTAINERS:
                yield from _find_names(inner, (place, i), free, is_schema=is_schema)
    elif type(value) is tuple:
        is_tensor = any(_fold[name] == "datatype" for name, _ in value)
        for name, inner in value:
            folded = _fold[name]
            if folded in free or (is_schema and folded in _FREE_IN_SCHEMAS):
                continue
            if _names_models[name] or (is_tensor and folded == "name" and _is_name(inner)):
                yield (place, name), inner
            elif type(inner) in _CONTAINERS:
                within = is_schema or folded in _SCHEMAS
                yield from _find_names(inner, (place, name), free, is_schema=within)


def _is_name(value: Any) -> bool:
    """Whether a tensor of this name names a model."""
    return type(value) is str and _names_models[value]


def _check_value(place: _Place, value: Any, is_allowed: IsAllowed) -> None:
    names = value if type(value) is list else [value]
    if not names or not all(type(name) is str and is_allowed(name) for name in names):
        raise _build_error(place)


def _build_error(place: _Place) -> InvalidParameter:
    path = _format_place(place)
    return InvalidParameter(
        f"{path!r} names further models: an API key with a list of models can name only those of "
        "its list, as their workers call them",
        param=path,
    )


def _format_place(place: _Place) -> str:
    steps = []
    while isinstance(place, tuple):
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:_MAX_SHOWN]}")
    return f"{place[:_MAX_SHOWN]}{''.join(reversed(steps))}"


def _build_reading_error(error: Exception) -> ClientError:
    return ClientError(f"an API key with a list of models needs a body of JSON in UTF-8: {error}")
