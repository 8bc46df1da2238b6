"""A client's own bytes for serving endpoints. See ``protocols.openai.relay``.

A call goes to a path of the kind that it came by: what becomes of a prompt is not the same on those
of OpenAI's clients. Where the path names the model the body does not. Only what the reference names
goes along: all else has its place in ``extra_params``, where the long way puts it, and
``stream_options`` the service refuses.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from protocols.core.interfaces import ClientRequest, PassthroughRequest, ResponseContext
from protocols.databricks import tables
from protocols.databricks.answers import RESPONSE_STYLE
from protocols.databricks.profiles import build_profile
from protocols.databricks.requests import RequestTask
from protocols.databricks.tables import MAX_TOOL_PROPERTIES, MAX_TOOLS
from protocols.databricks.worker import map_worker_error
from protocols.openai import faults
from protocols.openai.chunks import create_header_builder
from protocols.openai.passage import create_passthrough_decoder
from protocols.openai.relay import (
    INPUTS,
    OPTIONAL_BOOL,
    OPTIONAL_STRING,
    PLAIN_MESSAGES,
    PROMPTS,
    TOOL_FIELDS,
    PassthroughRule,
    PassthroughRules,
    build_count_type,
    is_valid_chat,
)

_INVALID_NAMES: Final = ("", ".", "..")
"""What no path can name."""
_GATEWAY_FIELDS: Final = frozenset({"n", "echo", "suffix", "error_behavior"})
"""What depends on the kind of endpoint, or is the gateway's to do."""


class _ParametersSchema(Struct):
    properties: Annotated[dict[str, Raw], Meta(max_length=MAX_TOOL_PROPERTIES)] | UnsetType = UNSET


class _DatabricksFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | UnsetType = UNSET
    parameters: _ParametersSchema | UnsetType = UNSET


class _DatabricksTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _DatabricksFunction


_SHARED_FIELD_TYPES: Final[Mapping[str, Any]] = {
    "stream": OPTIONAL_BOOL,
    "client_request_id": OPTIONAL_STRING,
    "usage_context": dict[str, str] | UnsetType,
}
_CHAT_FIELD_TYPES: Final[Mapping[str, Any]] = {
    **_SHARED_FIELD_TYPES,
    "messages": PLAIN_MESSAGES,
    "tools": Annotated[list[_DatabricksTool], Meta(min_length=1, max_length=MAX_TOOLS)] | UnsetType,
    "tool_choice": TOOL_FIELDS["tool_choice"],
    "logprobs": OPTIONAL_BOOL,
    "top_logprobs": build_count_type(20),
}
_COMPLETION_FIELD_TYPES: Final[Mapping[str, Any]] = {
    **_SHARED_FIELD_TYPES,
    "prompt": PROMPTS,
    "use_raw_prompt": OPTIONAL_BOOL,
}
_EMBEDDING_FIELD_TYPES: Final[Mapping[str, Any]] = {
    "input": INPUTS,
    "encoding_format": Literal["float"] | UnsetType,
    "client_request_id": OPTIONAL_STRING,
    "usage_context": dict[str, str] | UnsetType,
}


_INVOCATIONS_PATH: Final = "/serving-endpoints/{model}/invocations"
_OPENAI_PATHS: Final[Mapping[RequestTask, str]] = {
    "chat": "/serving-endpoints/chat/completions",
    "completion": "/serving-endpoints/completions",
    "embedding": "/serving-endpoints/embeddings",
}


def build_passthrough_rules() -> PassthroughRules:
    """For every endpoint: what only some take goes the long way."""
    taken = build_profile(pay_per_token=False, extra=False)
    form = partial(PassthroughRule, gateway_fields=_GATEWAY_FIELDS)
    forms: Mapping[RequestTask, PassthroughRule] = {
        "chat": form(
            path=_INVOCATIONS_PATH,
            field_types=_CHAT_FIELD_TYPES,
            worker_params=taken.chat,
            client_params=tables.CHAT_PARAMS,
            is_valid_body=is_valid_chat,
        ),
        "completion": form(
            path=_INVOCATIONS_PATH,
            field_types=_COMPLETION_FIELD_TYPES,
            worker_params=taken.completion,
            client_params=tables.COMPLETION_PARAMS,
        ),
        "embedding": form(
            path=_INVOCATIONS_PATH,
            field_types=_EMBEDDING_FIELD_TYPES,
            worker_params=taken.embedding,
            client_params=tables.EMBEDDING_PARAMS,
        ),
    }
    return PassthroughRules(
        {
            **{f"{task} of an endpoint": one for task, one in forms.items()},
            **{task: replace(one, path=_OPENAI_PATHS[task]) for task, one in forms.items()},
        },
        read=partial(
            create_passthrough_decoder,
            complaint=partial(faults.raise_worker_error, judge=map_worker_error),
        ),
    )


def build_passthrough(
    relays: PassthroughRules,
    call: ClientRequest,
    about: ResponseContext,
    task: RequestTask,
    *,
    stream: bool,
) -> PassthroughRequest | None:
    """See ``protocols.core.interfaces.SupportsPassthrough``.

    ``stream`` is what the client means, also by silence: whatever the worker takes that for, the
    client gets what it waits for.
    """
    if about.backend_model in _INVALID_NAMES:
        return None
    form = f"{task} of an endpoint" if call.endpoint.operation == "invocations" else task
    streams = stream and task != "embedding"
    names = {"model": about.backend_model}
    headers = create_header_builder(RESPONSE_STYLE, about, ())
    return relays.prepare_passthrough(form, call, about, headers, names=names, stream=streams)
