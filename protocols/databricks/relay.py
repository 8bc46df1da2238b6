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

from gateway.core.ports import About, Call, Relay
from protocols.databricks import tables
from protocols.databricks.answers import STYLE
from protocols.databricks.profiles import profile
from protocols.databricks.requests import Task
from protocols.databricks.tables import MOST_PROPERTIES, MOST_TOOLS
from protocols.databricks.worker import meaning
from protocols.openai import faults
from protocols.openai.chunks import heading
from protocols.openai.passage import reader
from protocols.openai.relay import (
    FLAG,
    INPUTS,
    LABEL,
    PLAIN_MESSAGES,
    PROMPTS,
    TOOLS,
    Form,
    Relays,
    fits_chat,
    up_to,
)

_NO_NAMES: Final = ("", ".", "..")
"""What no path can name."""
_OURS: Final = frozenset({"n", "echo", "suffix", "error_behavior"})
"""What depends on the kind of endpoint, or is the gateway's to do."""


class _Schema(Struct):
    properties: Annotated[dict[str, Raw], Meta(max_length=MOST_PROPERTIES)] | UnsetType = UNSET


class _Function(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | UnsetType = UNSET
    parameters: _Schema | UnsetType = UNSET


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


_BOTH: Final[Mapping[str, Any]] = {
    "stream": FLAG,
    "client_request_id": LABEL,
    "usage_context": dict[str, str] | UnsetType,
}
_CHAT: Final[Mapping[str, Any]] = {
    **_BOTH,
    "messages": PLAIN_MESSAGES,
    "tools": Annotated[list[_Tool], Meta(min_length=1, max_length=MOST_TOOLS)] | UnsetType,
    "tool_choice": TOOLS["tool_choice"],
    "logprobs": FLAG,
    "top_logprobs": up_to(20),
}
_COMPLETION: Final[Mapping[str, Any]] = {**_BOTH, "prompt": PROMPTS, "use_raw_prompt": FLAG}
_EMBEDDING: Final[Mapping[str, Any]] = {
    "input": INPUTS,
    "encoding_format": Literal["float"] | UnsetType,
    "client_request_id": LABEL,
    "usage_context": dict[str, str] | UnsetType,
}


_ENDPOINT: Final = "/serving-endpoints/{model}/invocations"
_OPENAI: Final[Mapping[Task, str]] = {
    "chat": "/serving-endpoints/chat/completions",
    "completion": "/serving-endpoints/completions",
    "embedding": "/serving-endpoints/embeddings",
}


def relays() -> Relays:
    """For every endpoint: what only some take goes the long way."""
    taken = profile(pay_per_token=False, extra=False)
    form = partial(Form, gateway_fields=_OURS)
    forms: Mapping[Task, Form] = {
        "chat": form(
            path=_ENDPOINT,
            field_types=_CHAT,
            worker_params=taken.chat,
            client_params=tables.CHAT,
            is_valid_body=fits_chat,
        ),
        "completion": form(
            path=_ENDPOINT,
            field_types=_COMPLETION,
            worker_params=taken.completion,
            client_params=tables.COMPLETION,
        ),
        "embedding": form(
            path=_ENDPOINT,
            field_types=_EMBEDDING,
            worker_params=taken.embedding,
            client_params=tables.EMBEDDING,
        ),
    }
    return Relays(
        {
            **{f"{task} of an endpoint": one for task, one in forms.items()},
            **{task: replace(one, path=_OPENAI[task]) for task, one in forms.items()},
        },
        read=partial(reader, complaint=partial(faults.complain, judge=meaning)),
    )


def relay(relays: Relays, call: Call, about: About, task: Task, *, stream: bool) -> Relay | None:
    """See ``gateway.core.ports.Relaying``.

    ``stream`` is what the client means, also by silence: whatever the worker takes that for, the
    client gets what it waits for.
    """
    if about.backend_model in _NO_NAMES:
        return None
    form = f"{task} of an endpoint" if call.endpoint.operation == "invocations" else task
    streams = stream and task != "embedding"
    names = {"model": about.backend_model}
    headers = heading(STYLE, about, ())
    return relays.prepare_passthrough(form, call, about, headers, names=names, stream=streams)
