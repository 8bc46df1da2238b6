"""A client's own bytes for a server of the same release. See ``protocols.openai.relay``.

What is looked at together with something else (beams, and how many answers they give) goes the long
way; so do tokens that the early release counts on its own when it may not stop.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from protocols.openai import faults
from protocols.openai.passage import create_passthrough_decoder
from protocols.openai.relay import (
    ENCODINGS,
    MESSAGES,
    OPTIONAL_BOOL,
    OPTIONAL_STRING,
    PLAIN_MESSAGES,
    STREAM_OPTIONS,
    TOOL_FIELDS,
    PassthroughRule,
    PassthroughRules,
)
from protocols.openai.worker import RequestWriter
from protocols.ovms import tables
from protocols.ovms.profiles import WORKER_PROFILES
from protocols.ovms.requests import MAX_INPUTS
from protocols.ovms.worker import map_worker_error

_ROOT: Final = "/v3"
_GATEWAY_CHECKED_FIELDS: Final = frozenset({"best_of", "n", "echo"})
_EARLY_GATEWAY_CHECKED_FIELDS: Final = _GATEWAY_CHECKED_FIELDS | {"ignore_eos"}
_NonemptyString = Annotated[str, Meta(min_length=1)]
_INPUTS_TYPE: Final = (
    _NonemptyString | Annotated[list[_NonemptyString], Meta(min_length=1, max_length=MAX_INPUTS)]
)
_EVENT_STREAM_HEADERS: Final = (("Content-Type", "text/event-stream"),)

_COMMON_FIELD_TYPES: Final[Mapping[str, Any]] = {"stream": OPTIONAL_BOOL, "user": OPTIONAL_STRING}
_CHAT_FIELD_TYPES: Final = {
    **_COMMON_FIELD_TYPES,
    **TOOL_FIELDS,
    "messages": MESSAGES,
    "stream_options": STREAM_OPTIONS,
    "logprobs": OPTIONAL_BOOL,
}
_COMPLETION_FIELD_TYPES: Final = {
    **_COMMON_FIELD_TYPES,
    "prompt": _NonemptyString,
    "stream_options": STREAM_OPTIONS,
    "logprobs": Literal[1] | UnsetType,
}
_EARLY_CHAT_FIELD_TYPES: Final = {**_COMMON_FIELD_TYPES, "messages": PLAIN_MESSAGES}
_EARLY_COMPLETION_FIELD_TYPES: Final = {**_COMMON_FIELD_TYPES, "prompt": _NonemptyString}


def build_passthrough(release: str) -> PassthroughRules:
    """For the servers of one release."""
    early, profile = release == "2024", WORKER_PROFILES[release]
    rows = tables.EARLY_PARAM_TABLES if early else tables.PARAM_TABLES
    form = partial(
        PassthroughRule,
        gateway_fields=_EARLY_GATEWAY_CHECKED_FIELDS if early else _GATEWAY_CHECKED_FIELDS,
        forwards_field=RequestWriter(profile, _ROOT, powers=False).forwards_field,
        is_valid_body=_is_stream_supported,
    )
    return PassthroughRules(
        {
            "chat": form(
                path=f"{_ROOT}/chat/completions",
                field_types=_EARLY_CHAT_FIELD_TYPES if early else _CHAT_FIELD_TYPES,
                worker_params=profile.chat,
                client_params=rows["chat"],
            ),
            "completion": form(
                path=f"{_ROOT}/completions",
                field_types=_EARLY_COMPLETION_FIELD_TYPES if early else _COMPLETION_FIELD_TYPES,
                worker_params=profile.completion,
                client_params=rows["completion"],
            ),
            "embedding": form(
                path=f"{_ROOT}/embeddings",
                field_types={
                    "input": _INPUTS_TYPE,
                    "encoding_format": ENCODINGS,
                    "user": OPTIONAL_STRING,
                },
                worker_params=(),
                client_params=(),
            ),
        },
        read=partial(
            create_passthrough_decoder,
            complaint=partial(faults.raise_worker_error, judge=map_worker_error),
        ),
        stream=_EVENT_STREAM_HEADERS,
    )


def _is_stream_supported(body: Any, said: AbstractSet[str]) -> bool:
    """A stream has no log probabilities, and keeps its stop strings."""
    del said
    if getattr(body, "stream", False) is not True:
        return True
    kept = getattr(body, "include_stop_str_in_output", True) is not False
    return kept and not getattr(body, "logprobs", UNSET)
