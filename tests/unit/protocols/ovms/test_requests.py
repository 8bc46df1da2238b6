"""Valid requests, and the server's errors for invalid ones."""

from typing import Any

import msgspec
import pytest

from protocols.core.errors import GatewayError
from protocols.core.interfaces import ClientRequest, HttpResponse, RoutingInfo
from protocols.core.request import (
    AudioPart,
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
)
from protocols.ovms.endpoints import OVMS

CHAT = "/v3/chat/completions"
TEXT = "/v3/completions"
EMBED = "/v3/embeddings"
HI = [{"role": "user", "content": "say hi"}]


def build_chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "llama3", "messages": HI} | fields


def build_completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": "llama3", "prompt": "a b"} | fields


def decode_generation(call: ClientRequest, adapter: OVMS | None = None) -> GenerationRequest:
    request = (adapter or OVMS()).decode_request(call)
    assert isinstance(request, GenerationRequest)
    return request


def decode_or_encode_error(adapter: OVMS, call: ClientRequest) -> HttpResponse | None:
    try:
        adapter.read_routing_info(call)
        adapter.decode_request(call)
    except GatewayError as error:
        return adapter.encode_error(error, call)
    return None


def decode_error(adapter: OVMS, call: ClientRequest) -> tuple[int, str]:
    """Return status and text of the error: like the server, first ``peek`` and then ``decode``."""
    reply = decode_or_encode_error(adapter, call)
    assert reply is not None
    body = msgspec.json.decode(reply.body)
    assert list(body) == ["error"]
    return reply.status, body["error"]


def format_graph_error(inner: str, node: str = "LLMExecutor") -> tuple[int, str]:
    return 400, (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
        f'\nCalculator::Process() for node "{node}" failed: {inner}'
    )


SEED = {
    "model": "llama3",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "hello"},
    ],
    "stream": False,
}


@pytest.mark.parametrize("profile", OVMS.profiles)
def test_documented_chat_request_is_decoded(make: Any, profile: str) -> None:
    call = make(CHAT, SEED)
    adapter = OVMS(profile)
    assert adapter.read_routing_info(call) == RoutingInfo("llama3", stream=False)

    request = decode_generation(call, adapter)
    assert request.kind == "chat"
    assert request.messages == (
        Message("system", (TextPart("You are a helpful assistant."),)),
        Message("user", (TextPart("hello"),)),
    )
    assert request.sampling.temperature == (0.0 if profile == "2024" else None)
    assert request.response_options.usage == ("none" if profile == "2024" else "final")
    assert request.provided_fields == {"model", "messages", "stream"}


def test_documented_request_with_unquoted_key_returns_412(make: Any) -> None:
    """The documentation prints ``stream: false`` without quotes."""
    body = b'{"model":"llama3","messages":[{"role":"user","content":"hello"}],stream: false}'
    expected = 412, "The file is not valid json - Cannot parse JSON body"
    assert decode_error(OVMS(), make(CHAT, body)) == expected


def test_scalar_chat_parameters_are_decoded(make: Any) -> None:
    request = decode_generation(
        make(
            CHAT,
            build_chat_body(
                ignore_eos=True,
                max_tokens=7,
                max_completion_tokens=9,
                frequency_penalty=1,
                presence_penalty=-2,
                repetition_penalty=1.5,
                length_penalty=0.5,
                temperature=2.0,
                top_p=0,
                min_p=0.5,
                top_k=40,
                seed=4294967295,
                stop=["a", "b"],
                include_stop_str_in_output=True,
                best_of=4,
                n=3,
                skip_special_tokens=False,
                logprobs=True,
                chat_template_kwargs={"enable_thinking": False},
                user="u1",
                max_ngram_size=3,
            ),
        )
    )
    sampling, stopping = request.sampling, request.stopping

    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.0, -2.0)
    assert (sampling.repetition_penalty, sampling.length_penalty) == (1.5, 0.5)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (2.0, 0.0, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.beam_width) == (40, 4294967295, 4)
    assert stopping.max_tokens == 9  # max_completion_tokens takes precedence
    assert (stopping.stop, stopping.include_stop) == (("a", "b"), True)
    assert (stopping.ignore_eos, stopping.skip_special_tokens) == (True, False)
    assert (request.n, request.best_of) == (3, None)
    assert request.logprobs is not None
    assert request.logprobs.top == 0
    assert request.templating.mode == "chat"
    assert request.templating.arguments == {"enable_thinking": msgspec.Raw(b"false")}
    assert request.labels == {"user": "u1"}
    assert request.extra == {"max_ngram_size": msgspec.Raw(b"3")}


def test_values_that_disable_a_parameter_are_decoded_as_absent(make: Any) -> None:
    request = decode_generation(
        make(CHAT, build_chat_body(top_k=-1, best_of=1, n=1, stop=[], temperature=None))
    )
    assert request.sampling == type(request.sampling)()
    assert request.stopping.stop == ()
    assert {"top_k", "best_of"} <= request.provided_fields
    assert "temperature" not in request.provided_fields


def test_null_means_that_the_parameter_is_absent(make: Any) -> None:
    names = (
        "ignore_eos", "temperature", "top_p", "min_p", "top_k", "seed", "stop", "best_of", "n",
        "stream_options", "logprobs", "tools", "tool_choice", "response_format",
        "max_completion_tokens", "chat_template_kwargs", "include_stop_str_in_output",
    )  # fmt: skip
    request = decode_generation(make(CHAT, build_chat_body(**dict.fromkeys(names))))

    assert request == decode_generation(make(CHAT, build_chat_body()))


@pytest.mark.parametrize(
    ("options", "usage"),
    [(None, "none"), ({}, "none"), ({"include_usage": False}, "none"),
     ({"include_usage": True}, "final")],
)  # fmt: skip
def test_include_usage_option_is_decoded(make: Any, options: Any, usage: str) -> None:
    request = decode_generation(make(CHAT, build_chat_body(stream=True, stream_options=options)))
    assert request.stream
    assert request.response_options.usage == usage


def test_streaming_request_includes_the_stop_string(make: Any) -> None:
    assert (
        decode_generation(make(CHAT, build_chat_body(stop="x", stream=True))).stopping.include_stop
        is True
    )
    assert decode_generation(make(CHAT, build_chat_body(stop="x"))).stopping.include_stop is None


def test_completion_request_is_decoded(make: Any) -> None:
    request = decode_generation(
        make(TEXT, build_completion_body(max_tokens=0, echo=True, logprobs=1))
    )
    assert request.kind == "completion"
    assert request.prompts == ("a b",)
    assert request.templating.mode == "raw"
    assert (request.echo, request.stopping.max_tokens) == (True, 0)
    assert request.logprobs is not None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v3/v1/chat/completions"])
def test_v1_paths_are_decoded_as_chat(make: Any, path: str) -> None:
    assert decode_generation(make(path, build_chat_body())).kind == "chat"


# --- checks before the graph ----------------------------------------------------------------------

INVALID_BEFORE_THE_GRAPH = [
    (CHAT, b"{", "Cannot parse JSON body"),
    (CHAT, b"", "Cannot parse JSON body"),
    (CHAT, b'{"model":"\xff"}', "Cannot parse JSON body"),
    (CHAT, b"[]", "JSON body must be an object"),
    (CHAT, b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "JSON body exceeds maximum nesting depth"),
    (CHAT, {"messages": HI}, "model field is missing in JSON body"),
    (CHAT, build_chat_body(model=5), "model field is not a string"),
    (CHAT, build_chat_body(model=None), "model field is not a string"),
    (CHAT, build_chat_body(stream="true"), "stream field is not a boolean"),
    (CHAT, build_chat_body(stream=None), "stream field is not a boolean"),
    (TEXT, build_completion_body(stream=1), "stream field is not a boolean"),
]


@pytest.mark.parametrize(("path", "body", "detail"), INVALID_BEFORE_THE_GRAPH)
def test_malformed_json_or_model_returns_412(make: Any, path: str, body: Any, detail: str) -> None:
    expected = 412, f"The file is not valid json - {detail}"
    assert decode_error(OVMS(), make(path, body)) == expected


def test_stream_field_of_embeddings_is_ignored(make: Any) -> None:
    call = make(EMBED, {"model": "gte", "input": "a", "stream": "yes"})
    assert OVMS().read_routing_info(call) == RoutingInfo("gte")


@pytest.mark.parametrize("content_type", ["text/plain", None, "application/x-www-form-urlencoded"])
def test_model_name_of_non_json_request_is_the_path(make: Any, content_type: str | None) -> None:
    call = make(CHAT, build_chat_body(), content_type=content_type)
    assert OVMS().read_routing_info(call).model == "chat/completions"

    expected = format_graph_error("Non-json request received in text generation calculator")
    assert decode_error(OVMS(), call) == expected


def test_model_name_of_empty_model_field_is_the_path(make: Any) -> None:
    assert (
        OVMS().read_routing_info(make(CHAT, build_chat_body(model=""))).model == "chat/completions"
    )

    json = "application/json; charset=utf-8"
    assert (
        OVMS().read_routing_info(make(CHAT, build_chat_body(), content_type=json)).model == "llama3"
    )


# --- the graph ------------------------------------------------------------------------------------

UINT = 4294967295
NO_JSON_TOOL = "Function object does not contain a valid name field"

CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"stream_options": {"include_usage": True}},
        "stream_options provided, but stream not set to true",
    ),
    ({"stream": True, "stream_options": 1}, "stream_options is not an object"),
    (
        {"stream": True, "stream_options": {"x": 1}},
        "Found unexpected stream options. Properties accepted in stream_options: include_usage",
    ),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage is not a boolean",
    ),
    ({"messages": {}}, "Messages are not an array"),
    ({"messages": None}, "Messages are not an array"),
    ({"messages": []}, "Messages array cannot be empty"),
    ({"messages": ["x"]}, "Message is not a JSON object"),
    ({"messages": [{"content": "a"}]}, "Every message must have 'role' field"),
    ({"messages": [{"role": 1, "content": "a"}]}, "Every message must have 'role' field"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "Unsupported content type"),
    (
        {"messages": [{"role": "user", "content": ["a"]}]},
        "Invalid message structure - content array should contain objects",
    ),
    (
        {"messages": [{"role": "user", "content": [{}]}]},
        "Invalid message structure - content object type missing",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "Invalid message structure - content text missing",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "Invalid message structure - image_url does not have url field",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        "Each tool_call must be an object",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "Each tool_call must have a 'function' object",
    ),
    ({"messages": [{"role": "bot"}]}, "Invalid message structure - unknown role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "Invalid message structure - content image_url missing",
    ),
    ({"max_tokens": 0}, "max_tokens value should be greater than 0"),
    ({"max_tokens": None}, "max_tokens is not an unsigned integer"),
    ({"max_tokens": -1}, "max_tokens is not an unsigned integer"),
    ({"max_tokens": 1.5}, "max_tokens is not an unsigned integer"),
    ({"max_tokens": "5"}, "max_tokens is not an unsigned integer"),
    ({"max_tokens": True}, "max_tokens is not an unsigned integer"),
    ({"max_tokens": UINT + 1}, "max_tokens value can't be greater than 4294967295"),
    ({"max_completion_tokens": 0}, "max_tokens value should be greater than 0"),
    ({"max_completion_tokens": -1}, "max_completion_tokens is not an unsigned integer"),
    (
        {"max_completion_tokens": UINT + 1},
        "max_completion_tokens value can't be greater than 4294967295",
    ),
    ({"ignore_eos": 1}, "ignore_eos accepts values true or false"),
    ({"temperature": 2.1}, "temperature out of range(0.0, 2.0)"),
    ({"temperature": -0.1}, "temperature out of range(0.0, 2.0)"),
    ({"temperature": "1"}, "temperature is not a valid number"),
    ({"temperature": True}, "temperature is not a valid number"),
    ({"temperature": 3000000000}, "temperature is not a valid number"),
    ({"length_penalty": 3000000000}, "length_penalty is not a valid number"),
    ({"top_p": 1.1}, "top_p out of range(0.0, 1.0)"),
    ({"top_k": 0}, "top_k must be -1 (all tokens) or a positive integer"),
    ({"top_k": -2}, "top_k must be -1 (all tokens) or a positive integer"),
    ({"top_k": 1.0}, "top_k is not an integer"),
    ({"top_k": 3000000000}, "top_k is not an integer"),
    ({"min_p": 1.0}, "min_p out of range [0.0, 1.0)"),
    ({"min_p": "x"}, "min_p is not a valid number"),
    ({"frequency_penalty": -2.1}, "frequency_penalty out of range(-2.0, 2.0)"),
    ({"presence_penalty": 2.1}, "presence_penalty out of range(-2.0, 2.0)"),
    ({"repetition_penalty": "x"}, "repetition_penalty is not a valid number"),
    ({"seed": -1}, "seed out of range [0, 4294967295]"),
    ({"seed": UINT + 1}, "seed out of range [0, 4294967295]"),
    ({"seed": 1.5}, "seed is not an integer"),
    ({"seed": 2**70}, "seed is not an integer"),
    ({"stop": 5}, "stop is not a string or array of strings"),
    ({"stop": ["a", 1]}, "stop array contains non string element"),
    ({"stop": ["a"] * 17}, "stop array must have no more than 16 strings"),
    (
        {"include_stop_str_in_output": 1},
        "include_stop_str_in_output accepts values true or false",
    ),
    (
        {"include_stop_str_in_output": False, "stream": True},
        "include_stop_str_in_output cannot be set to false if streaming is used",
    ),
    ({"skip_special_tokens": 1}, "skip_special_tokens is not a bool"),
    ({"n": 2}, "n value cannot be greater than best_of"),
    ({"n": 0}, "n value should be greater than 0"),
    ({"n": -1}, "n is not an unsigned integer"),
    ({"best_of": 0}, "best_of value should be greater than 0"),
    ({"best_of": "2"}, "best_of is not an unsigned integer"),
    ({"best_of": 20}, "best_of exceeds limit provided in graph config: 20"),
    ({"best_of": 1, "stream": True}, "best_of cannot be used in streaming mode"),
    ({"logprobs": 1}, "logprobs accepts values true or false"),
    ({"logprobs": True, "stream": True}, "logprobs are not supported in streaming mode."),
    ({"tool_choice": "any"}, "tool_choice should be either 'none' or 'auto' or 'required'"),
    ({"tool_choice": 1}, "tool_choice is not a valid JSON object or string"),
    ({"tool_choice": {}}, "tool_choice.function is not a valid JSON object"),
    (
        {"tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name is not a valid string",
    ),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name is not a valid string"),
    ({"tools": 1}, "Tools are not an array"),
    ({"tools": [1]}, "Tool is not a JSON object"),
    ({"tools": [{"function": 1}]}, "Function is not a valid JSON object"),
    ({"tools": [{"function": {}}]}, NO_JSON_TOOL),
    ({"tools": [{}]}, "Tool type is missing or invalid"),
    ({"tools": [{"type": "custom"}]}, "Only function tools are supported"),
    (
        {"tools": [{"function": {"name": "f", "parameters": 1}}]},
        "Function parameters are not a valid JSON object",
    ),
    ({"response_format": "json"}, "response_format is not an object"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs must be an object"),
]


@pytest.mark.parametrize(("fields", "inner"), CHAT_REFUSED)
def test_invalid_chat_field_returns_a_graph_error(
    make: Any, fields: dict[str, Any], inner: str
) -> None:
    assert decode_error(OVMS(), make(CHAT, build_chat_body(**fields))) == format_graph_error(inner)


def test_missing_messages_return_a_graph_error(make: Any) -> None:
    body = {"model": "llama3"}
    assert decode_error(OVMS(), make(CHAT, body)) == format_graph_error(
        "Messages missing in request"
    )


TEXT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt is not a string"),
    ({"prompt": ["a"]}, "prompt is not a string"),
    ({"prompt": None}, "prompt is not a string"),
    ({"prompt": ""}, "prompt is missing"),
    ({"max_tokens": 0}, "max_tokens value should be greater than 0 unless echo is set"),
    ({"logprobs": 2}, "accepted logprobs value is currently 1 only"),
    ({"logprobs": True}, "logprobs accepts integer values"),
    ({"logprobs": 1.0}, "logprobs accepts integer values"),
    ({"logprobs": 1, "stream": True}, "logprobs are not supported in streaming mode."),
    ({"echo": 1}, "echo accepts values true or false"),
]


@pytest.mark.parametrize(("fields", "inner"), TEXT_REFUSED)
def test_invalid_completion_field_returns_a_graph_error(
    make: Any, fields: dict[str, Any], inner: str
) -> None:
    assert decode_error(OVMS(), make(TEXT, build_completion_body(**fields))) == format_graph_error(
        inner
    )


@pytest.mark.parametrize("path", ["/v3/foo", "/v3/foo/bar", "/v3/score"])
def test_unknown_v3_path_returns_a_graph_error(make: Any, path: str) -> None:
    call = make(path, build_chat_body())
    assert OVMS().read_routing_info(call).model == "llama3"
    assert decode_error(OVMS(), call) == format_graph_error(
        "Wrong endpoint. Allowed endpoints: /v[13]/chat/completions, /v[13]/completions, "
        "/v[13]/responses, /v[13]/tokenize"
    )


def test_first_invalid_field_in_server_order_is_reported(make: Any) -> None:
    call = make(CHAT, build_chat_body(messages=[], temperature=9, max_tokens="x"))
    assert decode_error(OVMS(), call) == format_graph_error("max_tokens is not an unsigned integer")


# --- messages and tools ---------------------------------------------------------------------------


def test_messages_of_every_role_and_part_type_are_decoded(make: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    bare = {"id": "c2", "function": {"name": "g"}}
    loose = {"id": "c3", "function": {"name": "h", "arguments": {"y": 2}}}
    sent = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call, bare, loose],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3", "name": "f"},
        {"role": "user"},
    ]

    assert decode_generation(make(CHAT, build_chat_body(messages=sent))).messages == (
        Message(
            "user",
            (TextPart("look"), ImagePart("data:image/png;base64,AA=="), AudioPart("AA==", "wav")),
        ),
        Message(
            "assistant",
            (ReasoningPart("hm"),),
            tool_calls=(
                ToolCall("c1", "f", '{"x":1}'),
                ToolCall("c2", "g", "{}"),
                ToolCall("c3", "h", '{"y":2}'),
            ),
        ),
        Message("tool", (TextPart("3"),), name="f", tool_call_id="c1"),
        Message("user", (TextPart(""),)),
    )


def build_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


F = Tool("f", None, msgspec.Raw(b'{"type":"object"}'))
G = Tool("g", None, msgspec.Raw(b'{"type":"object"}'))


@pytest.mark.parametrize(
    ("choice", "tools", "chosen"),
    [
        (None, (F, G), None),
        ("auto", (F, G), "auto"),
        ("required", (F, G), "required"),
        ("none", (), None),
        ({"type": "function", "function": {"name": "g"}}, (G,), NamedTool("g")),
        ({"type": "function", "name": "g"}, (G,), NamedTool("g")),
        ({"type": "function", "function": {"name": "h"}}, (), None),
    ],
)
def test_tool_choice_selects_the_tools(
    make: Any, choice: Any, tools: tuple[Tool, ...], chosen: Any
) -> None:
    body = build_chat_body(tools=[build_tool("f"), build_tool("g")], tool_choice=choice)
    request = decode_generation(make(CHAT, body))
    assert (request.tools, request.tool_choice) == (tools, chosen)


def test_flat_tool_definition_is_decoded(make: Any) -> None:
    request = decode_generation(
        make(CHAT, build_chat_body(tools=[{"type": "function", "name": "f", "strict": True}]))
    )
    assert request.tools == (Tool("f", strict=True),)


def test_response_format_is_decoded(make: Any) -> None:
    def output(form: Any) -> object:
        return decode_generation(make(CHAT, build_chat_body(response_format=form))).output

    assert output({"type": "text"}) is None
    assert output({"type": "json_object"}) == JsonObjectFormat()

    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    assert output(schema) == JsonSchemaFormat(msgspec.Raw(b'{"type":"object"}'), "s")

    nothing = format_graph_error("response_format type is not supported")
    assert (
        decode_error(OVMS(), make(CHAT, build_chat_body(response_format={"type": "x"}))) == nothing
    )


# --- embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a b", ("a b",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_embedding_inputs_are_decoded(make: Any, value: Any, inputs: tuple[Any, ...]) -> None:
    request = OVMS().decode_request(
        make(EMBED, {"model": "gte", "input": value, "dimensions": 3, "encoding_format": "float"})
    )
    assert isinstance(request, EmbeddingRequest)
    assert request.inputs == inputs
    assert request.encoding == "float"
    assert request.extra == {"dimensions": msgspec.Raw(b"3")}


@pytest.mark.parametrize(
    ("fields", "inner"),
    [
        ({"encoding_format": "x"}, "encoding_format should either base64 or float"),
        ({"encoding_format": None}, "encoding_format should be string"),
        ({"input": []}, "input array should not be empty"),
        ({"input": [[]]}, "inner arrays in input should not be empty"),
        ({"input": ["a", 1]}, "input must be homogeneous"),
        ({"input": [[1, "a"]]}, "input must be homogeneous"),
        (
            {"input": [["a"]]},
            "input must be either array of strings or array of array of integers",
        ),
        ({}, "input field is required"),
        ({"input": [None]}, "every element in input array should be either string or int"),
        ({"input": 5}, "input should be string, array of strings or array of integers"),
    ],
)
def test_invalid_embedding_field_returns_a_graph_error(
    make: Any, fields: dict[str, Any], inner: str
) -> None:
    body = {"model": "gte"} | (
        fields if "input" in fields or not fields else {"input": "a"} | fields
    )
    call = make(EMBED, body)
    assert decode_error(OVMS(), call) == format_graph_error(inner, "EmbeddingsExecutor")


def test_embedding_input_count_is_limited_to_500(make: Any) -> None:
    most = OVMS().decode_request(make(EMBED, {"model": "gte", "input": ["a"] * 500}))
    assert isinstance(most, EmbeddingRequest)
    assert len(most.inputs) == 500

    text = "The number of input documents exceeds allowed configured value: 500"
    call = make(EMBED, {"model": "gte", "input": ["a"] * 501})
    assert decode_error(OVMS(), call) == format_graph_error(text, "EmbeddingsExecutor")

    ids = OVMS().decode_request(make(EMBED, {"model": "gte", "input": list(range(501))}))
    assert isinstance(ids, EmbeddingRequest)
    assert len(ids.inputs) == 1


def test_non_json_embedding_request_returns_a_graph_error(make: Any) -> None:
    call = make(EMBED, b"a", content_type="text/plain")
    text = "Non-json request received in embeddings calculator"
    assert decode_error(OVMS(), call) == format_graph_error(text, "EmbeddingsExecutor")


# --- the early release ----------------------------------------------------------------------------


def test_profile_2024_limits_max_tokens_with_ignore_eos(make: Any) -> None:
    early = OVMS("2024")
    assert (
        decode_generation(make(CHAT, build_chat_body(ignore_eos=True)), early).stopping.max_tokens
        == 4000
    )

    most = build_chat_body(ignore_eos=True, max_tokens=4000)
    assert decode_generation(make(CHAT, most), early).stopping.max_tokens == 4000

    call = make(CHAT, build_chat_body(ignore_eos=True, max_tokens=4001))
    text = "when ignore_eos is true max_tokens can not be greater than 4000"
    assert decode_error(early, call) == format_graph_error(text)


@pytest.mark.parametrize("profile", ["2026", "2024"])
def test_fields_of_another_endpoint_are_kept_as_unknown(make: Any, profile: str) -> None:
    body = build_chat_body(echo=True, prompt="hi", encoding_format="float", suffix="x")

    request = decode_generation(make(CHAT, body), OVMS(profile))

    assert set(request.extra) == {"echo", "prompt", "encoding_format", "suffix"}


def test_profile_2024_ignores_unknown_parameters(make: Any) -> None:
    body = build_chat_body(
        stop=5, tools="x", min_p=9, logprobs=7, stream=True, stream_options=1, top_k=0
    )
    request = decode_generation(make(CHAT, body), OVMS("2024"))

    assert request.stopping.stop == ()
    assert request.tools == ()
    assert request.sampling.top_k is None
    assert request.logprobs is None
    assert set(request.extra) == {"stop", "tools", "min_p", "logprobs", "stream_options"}


@pytest.mark.parametrize(
    ("fields", "inner"),
    [
        ({"top_p": 0}, "top_p out of range(0.0, 1.0)"),
        ({"n": 3, "best_of": 2}, "n value cannot be greater than best_of"),
        ({"max_tokens": 0}, "max_tokens value should be greater than 0"),
        ({"diversity_penalty": "x"}, "diversity_penalty is not a valid number"),
        ({"seed": -1}, "seed is not an unsigned integer"),
    ],
)
def test_profile_2024_rejects_invalid_parameters(
    make: Any, fields: dict[str, Any], inner: str
) -> None:
    assert decode_error(OVMS("2024"), make(CHAT, build_chat_body(**fields))) == format_graph_error(
        inner
    )


def test_profile_2024_beam_search_parameters_are_decoded(make: Any) -> None:
    body = build_chat_body(n=2, best_of=4, diversity_penalty=1, length_penalty=0.5, temperature=0.7)
    request = decode_generation(make(CHAT, body), OVMS("2024"))
    sampling = request.sampling

    assert (sampling.beam_width, sampling.diversity_penalty, request.n) == (4, 1.0, 2)
    assert (sampling.length_penalty, sampling.temperature) == (0.5, 0.7)
