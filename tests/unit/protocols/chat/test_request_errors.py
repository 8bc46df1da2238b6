"""Rejected requests and their errors: cases W4 to W81 of the wire document."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from protocols.core.errors import ClientError, GatewayError
from protocols.core.interfaces import ClientRequest, Endpoint
from protocols.core.request import AnyRequest
from protocols.openai.endpoints import OpenAI

MakeCall = Callable[..., ClientRequest]
ADAPTER = OpenAI()
MESSAGES = [{"role": "user", "content": "say hi"}]
C: dict[str, Any] = {"model": "mock", "messages": MESSAGES}
P = {"model": "mock", "prompt": "a b"}
E = {"model": "mock", "input": "a b"}
F: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
BODIES: dict[str, dict[str, Any]] = {"chat": C, "completion": P, "embedding": E}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def decode_error(
    call: ClientRequest, adapter: OpenAI = ADAPTER
) -> tuple[int, str | None, str | None]:
    """Return status, code and param of the error of a request."""

    def read() -> AnyRequest:
        adapter.read_routing_info(call)
        return adapter.decode_request(call)

    with pytest.raises(ClientError) as excinfo:
        read()
    reply = adapter.encode_error(excinfo.value, call)
    error = json.loads(reply.body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    return reply.status, error["code"], error["param"]


# variant, changed fields, code, param
REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("chat", {"model": None, "stream": True}, "missing_required_parameter", "model"),
    ("chat", {"tools": 5}, "invalid_type", "tools"),
    ("chat", {"request_id": 5}, "invalid_type", "request_id"),
    ("chat", {"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    ("chat", {"max_tokens": "5"}, "invalid_type", "max_tokens"),
    ("chat", {"max_tokens": True}, "invalid_type", "max_tokens"),
    ("chat", {"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    ("chat", {"max_completion_tokens": 0}, "integer_below_min_value", "max_completion_tokens"),
    ("chat", {"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    ("chat", {"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    ("chat", {"temperature": "1"}, "invalid_type", "temperature"),
    ("chat", {"top_p": 1.5}, "decimal_above_max_value", "top_p"),
    ("chat", {"n": 0}, "integer_below_min_value", "n"),
    ("chat", {"n": 129}, "integer_above_max_value", "n"),
    ("chat", {"stop": [1]}, "invalid_type", "stop"),
    ("chat", {"stop": ""}, "empty_string", "stop"),
    ("chat", {"top_logprobs": 2}, None, "top_logprobs"),
    ("chat", {"top_logprobs": 21, "logprobs": True}, "integer_above_max_value", "top_logprobs"),
    ("chat", {"presence_penalty": -2.5}, "decimal_below_min_value", "presence_penalty"),
    ("chat", {"frequency_penalty": 2.5}, "decimal_above_max_value", "frequency_penalty"),
    ("chat", {"seed": 2**63}, "integer_above_max_value", "seed"),
    ("chat", {"seed": -(2**63) - 1}, "integer_below_min_value", "seed"),
    ("chat", {"stream": 1}, "invalid_type", "stream"),
    ("chat", {"stream_options": {"include_usage": True}}, None, "stream_options"),
    (
        "chat",
        {"stream": True, "stream_options": {"include_usage": 1}},
        "invalid_type",
        "stream_options.include_usage",
    ),
    ("chat", {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ("chat", {"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    ("chat", {"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    ("chat", {"messages": None}, "missing_required_parameter", "messages"),
    ("chat", {"messages": []}, "empty_array", "messages"),
    ("chat", {"messages": "hi"}, "invalid_type", "messages"),
    ("chat", {"messages": ["hi"]}, "invalid_type", "messages[0]"),
    ("chat", {"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    (
        "chat",
        {"messages": [{"role": "bot", "content": "x"}]},
        "invalid_value",
        "messages[0].role",
    ),
    ("chat", {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    (
        "chat",
        {"messages": [{"role": "assistant", "content": None}]},
        "missing_required_parameter",
        "messages[0].content",
    ),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": []}]}, "empty_array", "messages[0].content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "invalid_value",
        "messages[0].content[0].type",
    ),
    (
        "chat",
        {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]},
        "invalid_value",
        "messages[0].content[0].type",
    ),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "missing_required_parameter",
        "messages[0].content[0].image_url.url",
    ),
    ("chat", {"messages": [*MESSAGES, ANSWERED]}, None, "messages.[1].role"),
    ("chat", {"messages": [*MESSAGES, CALLED]}, None, "messages.[1].role"),
    ("chat", {"messages": [*MESSAGES, CALLED, *MESSAGES]}, None, "messages.[2].role"),
    (
        "chat",
        {"messages": [*MESSAGES, CALLED, {"role": "tool", "content": "4"}]},
        "missing_required_parameter",
        "messages[2].tool_call_id",
    ),
    (
        "chat",
        {"messages": [{"role": "assistant", "audio": {"id": "a"}}]},
        "unsupported_value",
        "messages[0].audio",
    ),
    ("chat", {"tools": []}, "empty_array", "tools"),
    ("chat", {"tools": [{"type": "web"}]}, "invalid_value", "tools[0].type"),
    (
        "chat",
        {"tools": [{"type": "function"}]},
        "missing_required_parameter",
        "tools[0].function",
    ),
    (
        "chat",
        {"tools": [{"type": "function", "function": {}}]},
        "missing_required_parameter",
        "tools[0].function.name",
    ),
    ("chat", {"tool_choice": "auto"}, "invalid_value", "tool_choice"),
    ("chat", {"tools": [F], "tool_choice": "some"}, "invalid_value", "tool_choice"),
    (
        "chat",
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "invalid_value",
        "tool_choice",
    ),
    ("chat", {"parallel_tool_calls": False}, None, "parallel_tool_calls"),
    ("chat", {"functions": []}, "empty_array", "functions"),
    ("chat", {"function_call": "auto"}, None, "function_call"),
    (
        "chat",
        {"response_format": {"type": "json_schema"}},
        "missing_required_parameter",
        "response_format.json_schema",
    ),
    ("chat", {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "invalid_value",
        "response_format.json_schema.name",
    ),
    ("chat", {"metadata": {"k": 1}}, "invalid_type", "metadata.k"),
    ("chat", {"metadata": {"k": "v" * 513}}, "string_above_max_length", "metadata.k"),
    ("chat", {"metadata": {str(i): "" for i in range(17)}}, "invalid_value", "metadata"),
    ("chat", {"safety_identifier": "x" * 65}, "string_above_max_length", "safety_identifier"),
    ("chat", {"top_k": -2}, "integer_below_min_value", "top_k"),
    ("chat", {"structured_outputs": {"regex": "a", "json": {}}}, None, "structured_outputs"),
    ("chat", {"tools": [F], "functions": [F["function"]]}, None, "functions"),
    ("chat", {"modalities": "text"}, "invalid_type", "modalities"),
    ("chat", {"modalities": ["text", 1]}, "invalid_type", "modalities[1]"),
    ("chat", {"logit_bias": {"1": "x"}}, "invalid_type", "logit_bias.1"),
    ("chat", {"metadata": {"k" * 65: ""}}, "string_above_max_length", "metadata." + "k" * 64),
    (
        "chat",
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        None,
        "structured_outputs",
    ),
    (
        "chat",
        {"continue_final_message": True, "add_generation_prompt": True},
        None,
        "continue_final_message",
    ),
    ("chat", {"model": None}, "missing_required_parameter", "model"),
    ("chat", {"model": ""}, "missing_required_parameter", "model"),
    ("chat", {"model": 5}, "invalid_type", "model"),
    ("completion", {"logprobs": 6}, "integer_above_max_value", "logprobs"),
    ("completion", {"logprobs": True}, "invalid_type", "logprobs"),
    ("completion", {"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    ("completion", {"prompt": []}, "empty_array", "prompt"),
    ("completion", {"prompt": None}, "missing_required_parameter", "prompt"),
    ("completion", {"prompt": ["a", 1]}, "invalid_type", "prompt"),
    ("completion", {"prompt": [1, "a"]}, "invalid_type", "prompt[1]"),
    ("completion", {"prompt": [[]]}, "empty_array", "prompt[0]"),
    ("completion", {"prompt": [-1]}, "integer_below_min_value", "prompt[0]"),
    ("completion", {"best_of": 2, "n": 3}, None, "best_of"),
    ("completion", {"best_of": 2, "stream": True}, None, "best_of"),
    ("completion", {"best_of": 21}, "integer_above_max_value", "best_of"),
    ("embedding", {"input": ""}, "empty_string", "input"),
    ("embedding", {"input": []}, "empty_array", "input"),
    ("embedding", {"input": ["a", ""]}, "empty_string", "input[1]"),
    ("embedding", {"input": ["a"] * 2049}, "array_above_max_length", "input"),
    ("embedding", {"input": [1] * 2049}, "array_above_max_length", "input"),
    ("embedding", {"input": {"a": 1}}, "invalid_type", "input"),
    ("embedding", {"encoding_format": "int8"}, "invalid_value", "encoding_format"),
    ("embedding", {"dimensions": 0}, "integer_below_min_value", "dimensions"),
]


@pytest.mark.parametrize(("variant", "fields", "code", "param"), REFUSED)
def test_invalid_field_returns_its_code_and_param(
    make_call: MakeCall, variant: str, fields: dict[str, Any], code: str | None, param: str
) -> None:
    call = make_call(variant, {**BODIES[variant], **fields})
    assert decode_error(call) == (400, code, param)


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b"null", b"\xff", b"[" * 100_000])
def test_body_that_is_no_object_returns_400(make_call: MakeCall, body: bytes) -> None:
    assert decode_error(make_call("chat", body)) == (400, None, None)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_missing_required_field_is_rejected(make_call: MakeCall, field: str) -> None:
    body = {name: value for name, value in C.items() if name != field}
    assert decode_error(make_call("chat", body)) == (400, "missing_required_parameter", field)


def test_unknown_field_is_rejected_only_if_configured(make_call: MakeCall) -> None:
    call = make_call("chat", {**C, "foo": 1})
    assert decode_error(call, OpenAI(unknown="reject")) == (400, "unknown_parameter", "foo")
    assert ADAPTER.decode_request(call).extra.keys() == {"foo"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = sorted(
    {p for table in ("chat", "completion", "embedding") for p in BODIES[table]}
    | {"tools", "tool_choice", "functions", "function_call", "response_format", "logit_bias"}
    | {"stop", "n", "seed", "stream", "stream_options", "metadata", "structured_outputs"}
    | {"logprobs", "top_logprobs", "modalities", "chat_template_kwargs", "encoding_format"}
)
ROWS = {e.operation: e for e in ADAPTER.endpoints}


def get_response_status(call: ClientRequest) -> int:
    try:
        ADAPTER.read_routing_info(call)
        ADAPTER.decode_request(call)
    except GatewayError as error:
        return ADAPTER.encode_error(error, call).status
    return 200


@forall(
    st.sampled_from(["chat", "completion", "embedding"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
)
def test_arbitrary_fields_raise_only_gateway_errors(variant: str, fields: dict[str, Any]) -> None:
    row: Endpoint = ROWS[variant]
    body = json.dumps({**BODIES[variant], **fields}).encode()
    call = ClientRequest(row, {}, {}, "", body, row.path)

    assert get_response_status(call) in (200, 400)
