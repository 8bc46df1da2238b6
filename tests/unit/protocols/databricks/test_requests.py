"""The fields of each path are decoded, and invalid ones rejected."""

from typing import Any

import msgspec
import pytest

from protocols.core.catalog import ModelInfo
from protocols.core.errors import GatewayError, InvalidParameter
from protocols.core.interfaces import ClientRequest, HttpResponse, RoutingInfo
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningPart,
    Request,
    TextPart,
    Tool,
    ToolCall,
)
from protocols.databricks.endpoints import Databricks

PATH = "/serving-endpoints/mock/invocations"
CHAT = "/serving-endpoints/chat/completions"
TEXT = "/serving-endpoints/completions"
EMBED = "/serving-endpoints/embeddings"
HI = [{"role": "user", "content": "say hi"}]


def decode_generation(call: ClientRequest, adapter: Databricks | None = None) -> GenerationRequest:
    request = (adapter or Databricks()).decode_request(call)
    assert isinstance(request, GenerationRequest)
    return request


def decode_or_encode_error(adapter: Databricks, call: ClientRequest) -> Request | HttpResponse:
    """Decode like the server, first with ``peek`` and then with ``decode``."""
    try:
        adapter.read_routing_info(call)
        return adapter.decode_request(call)
    except GatewayError as error:
        return adapter.encode_error(error, call)


def decode_error(call: ClientRequest, adapter: Databricks | None = None) -> tuple[int, str, str]:
    reply = decode_or_encode_error(adapter or Databricks(), call)
    assert isinstance(reply, HttpResponse)
    body = msgspec.json.decode(reply.body)
    assert list(body) == ["error_code", "message"]
    return reply.status, body["error_code"], body["message"]


def decode_invalid_parameter(call: ClientRequest, adapter: Databricks | None = None) -> str:
    status, code, message = decode_error(call, adapter)
    assert (status, code) == (400, "INVALID_PARAMETER_VALUE")
    return message


def build_chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": HI} | fields


# --- chat -----------------------------------------------------------------------------------------


def test_all_documented_chat_fields_are_decoded(make: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    call = make(
        PATH,
        build_chat_body(
            max_tokens=7,
            stream=True,
            temperature=2,
            top_p=1.0,
            top_k=1,
            stop=["a", "b", "c", "d", "e"],
            n=3,
            tool_choice={"type": "function", "function": {"name": "f"}},
            tools=[{"type": "function", "function": function}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
            },
            logprobs=True,
            top_logprobs=20,
        ),
    )

    assert Databricks().read_routing_info(call) == RoutingInfo("mock", stream=True)

    request = decode_generation(call)
    assert request.kind == "chat"
    assert request.model == "mock"
    assert request.messages == (Message("user", (TextPart("say hi"),)),)
    assert (request.stopping.max_tokens, request.n, request.stream) == (7, 3, True)
    assert (request.sampling.temperature, request.sampling.top_p) == (2.0, 1.0)
    assert request.sampling.top_k == 1
    assert request.stopping.stop == ("a", "b", "c", "d", "e")
    assert request.tool_choice == NamedTool("f")

    written = msgspec.Raw(msgspec.json.encode(schema))
    assert request.tools == (Tool("f", "d", written, strict=True),)
    assert request.output == JsonSchemaFormat(msgspec.Raw(b'{"type":"object"}'), "s", strict=True)
    assert request.logprobs is not None
    assert request.logprobs.top == 20
    assert request.extra == {}


def test_absent_chat_fields_leave_the_target_defaults(make: Any) -> None:
    request = decode_generation(make(PATH, build_chat_body()))
    assert request == GenerationRequest(
        model="mock",
        kind="chat",
        messages=(Message("user", (TextPart("say hi"),)),),
        provided_fields=frozenset({"messages"}),
    )


def test_null_means_that_the_parameter_is_absent(make: Any) -> None:
    names = (
        "max_tokens", "stream", "temperature", "top_p", "top_k", "stop", "n", "tool_choice",
        "tools", "response_format", "logprobs", "top_logprobs", "extra_params", "usage_context",
        "client_request_id", "thinking", "stream_options", "seed", "user",
    )  # fmt: skip
    assert decode_generation(
        make(PATH, build_chat_body(**dict.fromkeys(names)))
    ) == decode_generation(make(PATH, build_chat_body()))


@pytest.mark.parametrize(
    ("stream_field", "default", "stream"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_stream_default_option_applies_without_a_stream_field(
    make: Any, stream_field: bool | None, default: bool, stream: bool
) -> None:
    """The reference says true, while the service's SDK expects one JSON object."""
    adapter = Databricks(stream_default=default)
    call = make(PATH, build_chat_body(stream=stream_field))

    assert adapter.read_routing_info(call).stream is stream
    assert decode_generation(call, adapter).stream is stream


def test_embeddings_ignore_stream(make: Any) -> None:
    adapter = Databricks(stream_default=True)
    call = make(PATH, {"input": "a"})
    assert adapter.read_routing_info(call) == RoutingInfo("mock")
    assert isinstance(adapter.decode_request(call), EmbeddingRequest)

    body = {"model": "gte", "input": "a", "stream": True}
    assert adapter.read_routing_info(make(EMBED, body)) == RoutingInfo("gte")


@pytest.mark.parametrize(
    ("fields", "usage"),
    [
        ({}, "final"),
        ({"stream": True}, "final"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "final"),
        ({"stream": True, "stream_options": {"include_usage": False}}, "none"),
    ],
)
def test_include_usage_option_is_decoded(make: Any, fields: dict[str, Any], usage: str) -> None:
    assert decode_generation(make(PATH, build_chat_body(**fields))).response_options.usage == usage


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be in [0, 2], got 3"),
        ({"temperature": -0.5}, "temperature must be in [0, 2], got -0.5"),
        ({"temperature": "1"}, "'temperature' must be a number, got a string"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": True}, "'max_tokens' must be an integer, got True"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be in [0, 20], got 21"),
        ({"stop": 5}, "'stop' must be a string or a list of strings, got 5"),
        ({"reasoning_effort": "huge"}, "'reasoning_effort' must be one of 'low', 'medium', 'high'"),
        ({"tool_choice": "any"}, "Invalid value: 'any'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "'xml'"),
        ({"top_logprobs": 2}, "'logprobs' is true"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "'bot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"stream": "yes"}, "'stream'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": 1}, "thinking"),
        ({"usage_context": {"a": 1}}, "usage_context"),
        ({"extra_params": []}, "extra_params"),
        ({"extra_params": {"top_k": "many"}}, "'top_k' must be an integer, got a string"),
    ],
)
def test_invalid_chat_field_is_rejected(make: Any, fields: dict[str, Any], message: str) -> None:
    assert message in decode_invalid_parameter(make(PATH, build_chat_body(**fields)))


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"messages":"\xff"}'])
def test_malformed_json_returns_bad_request(make: Any, body: bytes) -> None:
    status, code, message = decode_error(make(PATH, body))
    assert (status, code) == (400, "BAD_REQUEST")
    assert message.startswith("Bad request: json: ")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (build_chat_body(inputs={}), "inputs"),
        (build_chat_body(prompt="a"), "prompt"),
        (build_chat_body(functions=[]), "functions"),
        ({"inputs": {}}, "inputs"),
        ({"max_tokens": 1, "dataframe_split": {}}, "dataframe_split"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"input": "a", "max_tokens": 2}, "max_tokens"),
    ],
)
def test_unknown_field_is_rejected_by_name(make: Any, body: Any, field: str) -> None:
    expected = 400, "BAD_REQUEST", f'Bad request: json: unknown field "{field}"'
    assert decode_error(make(PATH, body)) == expected


def test_body_without_messages_prompt_or_input_is_rejected(make: Any) -> None:
    text = "one of messages, prompt and input is required"
    assert decode_invalid_parameter(make(PATH, {"max_tokens": 3})) == text


def test_openai_paths_keep_unknown_fields_as_extra(make: Any) -> None:
    request = decode_generation(make(CHAT, build_chat_body(model="mock", foo=1, min_p=0.1)))
    assert request.extra == {"foo": msgspec.Raw(b"1")}
    assert request.sampling.min_p == 0.1


def build_tools(count: int, properties: int = 1) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(properties)}}
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}}
        for i in range(count)
    ]


def test_tool_count_and_property_limits(make: Any) -> None:
    assert len(decode_generation(make(PATH, build_chat_body(tools=build_tools(32)))).tools) == 32
    assert "tools" in decode_invalid_parameter(make(PATH, build_chat_body(tools=build_tools(33))))
    assert (
        decode_generation(make(PATH, build_chat_body(tools=build_tools(1, 15)))).tools[0].name
        == "f0"
    )

    message = "the parameters of 'f0' have 16 properties; at most 15 are allowed"
    assert (
        decode_invalid_parameter(make(PATH, build_chat_body(tools=build_tools(1, 16)))) == message
    )
    assert decode_generation(make(PATH, build_chat_body(tools=[]))).tools == ()

    bare = [{"type": "function", "function": {"name": "f"}}]
    assert (
        decode_generation(make(PATH, build_chat_body(tools=bare, tool_choice="auto"))).tool_choice
        == "auto"
    )

    custom = [{"type": "custom", "custom": {"name": "f"}}]
    assert (
        decode_invalid_parameter(make(PATH, build_chat_body(tools=custom)))
        == "tools[0].type must be function"
    )


def test_extra_params_are_converted_to_the_field_type(make: Any) -> None:
    extra = {
        "top_k": "5",
        "temperature": "0.5",
        "ignore_eos": "true",
        "user": "7",
        "stop": '["a"]',
        "max_tokens": 9,
        "foo": "3",
        "bar": "word",
    }
    request = decode_generation(make(PATH, build_chat_body(extra_params=extra, max_tokens=4)))

    assert request.sampling.top_k == 5
    assert request.sampling.temperature == 0.5
    assert request.stopping.ignore_eos is True
    assert request.stopping.stop == ("a",)
    assert request.stopping.max_tokens == 4  # the named field takes precedence
    assert request.labels == {"user": "7"}
    assert request.extra == {"foo": msgspec.Raw(b"3"), "bar": msgspec.Raw(b'"word"')}


def test_labels_reasoning_seed_and_client_id_are_decoded(make: Any) -> None:
    request = decode_generation(
        make(
            PATH,
            build_chat_body(
                client_request_id="c1",
                usage_context={"team": "a"},
                user="u",
                metadata={"k": "v"},
                thinking={"type": "enabled", "budget_tokens": 100},
                seed=-1,
                max_completion_tokens=3,
            ),
        )
    )
    assert request.client_id == "c1"
    assert request.labels == {"usage_context.team": "a", "user": "u", "metadata.k": "v"}
    assert request.reasoning is not None
    assert (request.reasoning.budget, request.reasoning.include) == (100, True)
    assert request.sampling.seed == -1

    off = decode_generation(
        make(PATH, build_chat_body(thinking={"type": "disabled"}, reasoning_effort="low"))
    )
    assert off.reasoning is not None
    assert (off.reasoning.effort, off.reasoning.include) == ("low", False)


def test_response_format_is_decoded(make: Any) -> None:
    assert (
        decode_generation(make(PATH, build_chat_body(response_format={"type": "text"}))).output
        is None
    )
    wanted = build_chat_body(response_format={"type": "json_object"})
    assert decode_generation(make(PATH, wanted)).output == JsonObjectFormat()


# --- roles ----------------------------------------------------------------------------------------

S, U, A = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
F = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
C = {"role": "assistant", "content": None, "tool_calls": [F]}
T = {"role": "tool", "content": "3", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    "messages",
    [[U], [S, U], [U, A, U], [S, U, A, U], [U, C, T], [U, C, T, T, A, U], [U, C, T, U]],
)
def test_role_order_accepted_by_strict_and_lenient_rules(make: Any, messages: list[Any]) -> None:
    for order in ("strict", "lenient"):
        adapter = Databricks(role_rules=order)
        request = decode_generation(make(PATH, {"messages": messages}), adapter)
        assert [m.role for m in request.messages] == [m["role"] for m in messages]


@pytest.mark.parametrize(
    "messages",
    [
        [S, S, U],
        [U, S],
        [S],
        [A],
        [U, U],
        [U, A],
        [U, A, A, U],
        [U, C, U],
        [U, C],
        [U, T],
        [U, {**C, "content": "real words"}, T],
    ],
)
def test_role_order_accepted_only_by_lenient_rules(make: Any, messages: list[Any]) -> None:
    call = make(PATH, {"messages": messages})
    assert decode_generation(call).messages
    assert decode_invalid_parameter(call, Databricks(role_rules="strict"))


def test_developer_role_is_decoded_as_system(make: Any) -> None:
    messages = [{"role": "developer", "content": "d"}, U]
    request = decode_generation(make(PATH, {"messages": messages}), Databricks(role_rules="strict"))
    assert request.messages[0] == Message("system", (TextPart("d"),))


@pytest.mark.parametrize("content", ["", " ", None])
def test_blank_content_of_a_tool_call_message_is_ignored(make: Any, content: str | None) -> None:
    messages = [U, {**C, "content": content}, T]
    request = decode_generation(make(PATH, {"messages": messages}), Databricks(role_rules="strict"))
    assert request.messages[1] == Message("assistant", tool_calls=(ToolCall("c1", "f", '{"x":1}'),))


def test_tool_call_id_is_rejected_outside_tool_messages(make: Any) -> None:
    for nothing in ("", None):
        request = decode_generation(make(PATH, {"messages": [{**U, "tool_call_id": nothing}]}))
        assert request.messages[0].tool_call_id is None
    text = "messages[0].tool_call_id must be empty unless the role is tool"
    assert decode_invalid_parameter(make(PATH, {"messages": [{**U, "tool_call_id": "c1"}]})) == text


def test_image_and_reasoning_parts_are_decoded(make: Any) -> None:
    summary = [{"type": "summary_text", "text": "hm", "signature": "s"}]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "summary": summary},
                {"type": "text", "text": "yes"},
            ],
        },
    ]

    assert decode_generation(make(PATH, {"messages": messages})).messages == (
        Message("user", (TextPart("look"), ImagePart("https://x/y.png"))),
        Message("assistant", (ReasoningPart("hm", "s"), TextPart("yes"))),
    )


def test_tool_call_arguments_may_be_an_object(make: Any) -> None:
    """The reference describes them as an object, "as a serialized dictionary"."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [U, {"role": "assistant", "tool_calls": [call]}]

    request = decode_generation(make(PATH, {"messages": messages}))

    assert request.messages[1].tool_calls == (ToolCall("c1", "f", '{"x":1}'),)


# --- completions ----------------------------------------------------------------------------------


def test_all_documented_completion_fields_are_decoded(make: Any) -> None:
    body = {
        "prompt": ["a", "b"],
        "max_tokens": 7,
        "stream": False,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "error_behavior": "truncate",
        "n": 2,
        "stop": "x",
        "suffix": "<e>",
        "echo": True,
        "use_raw_prompt": True,
    }
    request = decode_generation(make(PATH, body))

    assert (request.kind, request.prompts, request.choice_count) == ("completion", ("a", "b"), 4)
    assert (request.stopping.max_tokens, request.stopping.stop) == (7, ("x",))
    assert request.stopping.overflow == "truncate"
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 3)
    assert (request.suffix, request.insert_before, request.echo) == ("<e>", None, True)
    assert request.templating.mode == "raw"
    assert request.extra == {}


@pytest.mark.parametrize(
    ("path", "use_raw_prompt", "mode"),
    [
        (PATH, None, "server"),
        (PATH, False, "server"),
        (PATH, True, "raw"),
        (TEXT, None, "raw"),
        (TEXT, False, "server"),
    ],
)
def test_use_raw_prompt_selects_the_template_mode(
    make: Any, path: str, use_raw_prompt: bool | None, mode: str
) -> None:
    body = {"prompt": "a", "use_raw_prompt": use_raw_prompt} | (
        {"model": "m"} if path == TEXT else {}
    )
    assert decode_generation(make(path, body)).templating.mode == mode


def test_completion_has_no_default_max_tokens(make: Any) -> None:
    for path in (PATH, TEXT):
        request = decode_generation(make(path, {"prompt": "a", "model": "m", "suffix": ""}))
        assert request.stopping.max_tokens is None
        assert request.suffix is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"error_behavior": "ignore"}, "'error_behavior' must be one of 'truncate', 'error'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"use_raw_prompt": 1}, "'use_raw_prompt' must be true or false"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_invalid_completion_field_is_rejected(
    make: Any, fields: dict[str, Any], message: str
) -> None:
    assert message in decode_invalid_parameter(make(PATH, {"prompt": "a"} | fields))


def test_openai_completion_client_request_is_decoded(make: Any) -> None:
    body = {
        "model": "mock",
        "prompt": ["hi"],
        "max_tokens": 256,
        "temperature": 0.7,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "n": 1,
        "top_p": 1,
        "logprobs": None,
        "seed": None,
        "best_of": 1,
    }
    request = decode_generation(make(TEXT, body))

    assert request.prompts == ("hi",)
    assert request.best_of == 1


# --- embeddings -----------------------------------------------------------------------------------


def test_embedding_request_is_decoded(make: Any) -> None:
    request = Databricks().decode_request(make(PATH, {"input": ["a b", "c"], "instruction": "q: "}))
    assert isinstance(request, EmbeddingRequest)
    assert (request.model, request.inputs) == ("mock", ("a b", "c"))
    assert request.instruction == "q: "
    assert request.encoding == "float"


def test_openai_embedding_request_is_decoded(make: Any) -> None:
    body = {"model": "gte", "input": "a", "encoding_format": "base64"}
    request = Databricks().decode_request(make(EMBED, body))

    assert isinstance(request, EmbeddingRequest)
    assert (request.model, request.encoding) == ("gte", "base64")


@pytest.mark.parametrize("value", [[1, 2], [[1]], [], "", None, 5])
def test_invalid_embedding_input_is_rejected(make: Any, value: Any) -> None:
    assert "input" in decode_invalid_parameter(make(PATH, {"input": value}))


# --- choice of the model --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        (PATH, build_chat_body(), "mock"),
        (PATH, build_chat_body(model="other"), "mock"),
        ("/serving-endpoints/org%2Fm1/invocations", build_chat_body(), "org/m1"),
        (CHAT, build_chat_body(model="ep1"), "ep1"),
        (
            "/ai-gateway/mlflow/v1/chat/completions",
            build_chat_body(model="system.ai.x"),
            "system.ai.x",
        ),
        ("/ai-gateway/mlflow/v1/completions", {"model": "m", "prompt": "a"}, "m"),
        ("/ai-gateway/mlflow/v1/embeddings", {"model": "m", "input": "a"}, "m"),
    ],
)
def test_model_is_read_from_path_or_body(make: Any, path: str, body: Any, model: str) -> None:
    call = make(path, body)
    assert Databricks().read_routing_info(call).model == model
    assert Databricks().decode_request(call).model == model


def test_model_field_is_required_on_openai_paths(make: Any) -> None:
    assert "model" in decode_invalid_parameter(make(CHAT, build_chat_body()))
    assert "model" in decode_invalid_parameter(make(CHAT, build_chat_body(model="")))


# --- rules of models ------------------------------------------------------------------------------

PAID = ModelInfo("ep-ppt", (), protocol_options={"databricks": {"pay_per_token": True}})
PROVISIONED = ModelInfo("mock", ())
ONE = "n must be 1 on a pay-per-token endpoint, got 2"
ONLY_THERE = "error_behavior is accepted by pay-per-token endpoints only"


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (PAID, build_chat_body(n=2), ONE),
        (PAID, {"prompt": "a", "n": 2}, ONE),
        (PAID, build_chat_body(extra_params={"n": "2"}), ONE),
        (PAID, build_chat_body(n=1), ""),
        (PAID, build_chat_body(n=None), ""),
        (PAID, {"prompt": "a", "error_behavior": "truncate"}, ""),
        (PAID, {"input": "a"}, ""),
        (PROVISIONED, build_chat_body(n=2), ""),
        (PROVISIONED, {"prompt": "a", "error_behavior": "truncate"}, ONLY_THERE),
        (PROVISIONED, {"prompt": "a", "error_behavior": "error"}, ONLY_THERE),
        (PROVISIONED, {"prompt": "a", "extra_params": {"error_behavior": "error"}}, ONLY_THERE),
        (PROVISIONED, {"prompt": "a", "error_behavior": None}, ""),
        (PROVISIONED, {"input": "a"}, ""),
    ],
)
def test_pay_per_token_models_limit_n_and_error_behavior(
    make: Any, model: ModelInfo, body: Any, message: str
) -> None:
    call = make(PATH, body)
    if not message:
        Databricks().decode_request(call, model)
        return

    with pytest.raises(InvalidParameter) as excinfo:
        Databricks().decode_request(call, model)
    assert excinfo.value.message == message
    assert Databricks().encode_error(excinfo.value, call).status == 400
