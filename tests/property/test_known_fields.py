"""Each parameter of a client's protocol reaches a worker, is reported, or is refused.

The parameters and a valid value of each come from the tables of the protocol, so that a new row is
checked without being listed here.
"""

import copy
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gateway.runtime.build import build_adapter
from protocols.core.errors import ClientError
from protocols.params import Param, ParamTableProvider
from tests.property.test_unknown_keys import list_workers, prepare
from tests.protocols import find_rows
from tests.support.path_routers import get_adapter

HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHAT = {"model": "m", "messages": HI, "tools": TOOLS}
ENDPOINTS: Mapping[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("openai", "chat"): ("/v1/chat/completions", CHAT),
    ("openai", "completion"): ("/v1/completions", {"model": "m", "prompt": "hi"}),
    ("openai", "embedding"): ("/v1/embeddings", {"model": "m", "input": "hi"}),
    ("openai", "response"): (
        "/v1/responses",
        {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    ),
    ("anthropic", "messages"): ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": HI}),
    ("ollama", "chat"): ("/api/chat", {**CHAT, "stream": False}),
    ("ollama", "generate"): ("/api/generate", {"model": "m", "prompt": "hi", "stream": False}),
    ("tgi", "generate"): ("/generate", {"inputs": "hi", "parameters": {}}),
    ("tgi", "chat"): ("/v1/chat/completions", CHAT),
    ("databricks", "invocations, of a conversation"): (
        "/serving-endpoints/m/invocations",
        {"messages": HI, "tools": TOOLS},
    ),
    ("databricks", "invocations, of a completion"): (
        "/serving-endpoints/m/invocations",
        {"prompt": "hi"},
    ),
    ("ovms", "chat"): ("/v3/chat/completions", CHAT),
    ("ovms", "completion"): ("/v3/completions", {"model": "m", "prompt": "hi"}),
    ("mindie", "chat"): ("/v1/chat/completions", CHAT),
    ("mindie", "text"): ("/v2/models/m/generate", {"text_input": "hi", "parameters": {}}),
    ("triton", "generate"): ("/v2/models/m/generate", {"text_input": "hi", "parameters": {}}),
    **{
        (name, operation): row
        for name, rows in find_rows("KNOWN_FIELDS").items()
        for operation, row in rows.items()
    },
}
COMPANIONS: Mapping[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "include_stop_str_in_output": {"stop": ["x"]},
    "continue_final_message": {"messages": [*HI, {"role": "assistant", "content": "so"}]},
}
"""Further fields of the request without which a field has no effect."""
RELATED: Mapping[str, str] = {
    "logprobs": "top_logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "top_n_tokens": "details",
    "parallel_tool_calls": "tools",
    **ChainMap(*find_rows("RELATED_FIELDS").values()),
}
"""Fields whose report covers another, which has no meaning without it."""
VALUES: Mapping[str, Any] = {"include_reasoning": False, "service_tier": "flex"}
"""Values of fields for which ``make_value`` would make one without effect."""
HANDLED: Mapping[str, str] = {
    "request_id": "the gateway's own id, for logs, cancellation and the response",
    "client_request_id": "as request_id",
    "stream": "the path or the form of the response",
    "store": "the gateway's store",
    "encoding_format": "the gateway writes the encoding that the client asked for",
    "do_sample": "sampling is the default",
    "raw": "a prompt without a template, as such workers take it anyway",
    "use_raw_prompt": "as raw",
    "truncate": "no worker cuts a prompt that is too long unless asked to",
    "add_generation_prompt": "true is the default",
    "timeout": "the gateway's deadline",
    "details": "the form of the response",
    "return_full_text": "the form of the response",
}
"""Fields that need not reach a worker."""
EVEN_SO: Mapping[str, frozenset[str]] = {
    "tgi-3": frozenset(
        {"echo", "skip_special_tokens", "add_special_tokens", "logprobs", "return_token_ids"}
    ),
    "anthropic-2023-06-01": frozenset({"continue_final_message"}),
}
"""Fields that need not be sent to such a worker.

It does this for every request, or the gateway takes it from what the worker always returns.
"""


def list_rows() -> Iterator[Any]:
    """Yield each parameter of each endpoint that must reach a worker."""
    for (name, operation), (path, body) in ENDPOINTS.items():
        client = build_adapter(name, None, {})
        assert isinstance(client, ParamTableProvider)
        for row in client.param_tables[operation]:
            if row.wire not in HANDLED:
                yield pytest.param(name, path, body, row, id=f"{name}-{operation}-{row.wire}")


def make_value(row: Param) -> Any:
    """Return a valid value that is not the default."""
    low = row.minimum if row.minimum is not None else 0
    match row.type:
        case "bool":
            return row.default is not True
        case "str":
            return next((one for one in row.choices if one != row.default), "text")
        case "strings" | "string list":
            return ["x"]
        case "ints":
            return [7]
        case "float":
            return round(low + ((1 + low if row.maximum is None else row.maximum) - low) / 4, 3)
        case _:
            value = max(int(low) + 1, 2)
            return value if row.maximum is None else min(value, int(row.maximum))


def set_field(body: dict[str, Any], wire: str, value: Any) -> None:
    """Set a field; ``options.x`` is set in the object ``options``."""
    target = body.get("parameters", body)
    *parents, name = wire.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[name] = value


@pytest.mark.parametrize(("name", "path", "body", "row"), list(list_rows()))
def test_a_parameter_reaches_the_worker_or_is_reported_or_refused(
    name: str, path: str, body: dict[str, Any], row: Param
) -> None:
    client = get_adapter(name)
    without = copy.deepcopy(body)
    for companion, value in COMPANIONS.get(row.wire, {}).items():
        set_field(without, companion, value)
    request = copy.deepcopy(without)
    set_field(request, row.wire, VALUES.get(row.wire, make_value(row)))
    lost = []
    for param in list_workers():
        (worker,), worker_name = param.values, param.id
        try:
            before, _ = prepare(client, worker, path, without)
            sent, reported = prepare(client, worker, path, request)
        except ClientError:
            continue
        is_reported = not {row.wire, RELATED.get(row.wire)}.isdisjoint(reported)
        if sent == before and not is_reported and row.wire not in EVEN_SO.get(worker_name, ()):
            lost.append(worker_name)

    assert lost == []
