"""Chat and completion requests: accepted fields, and the errors of invalid ones."""

from typing import Any

import msgspec
import pytest

from protocols.core.request import (
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    NamedTool,
    ReasoningOptions,
    TextPart,
    ToolCall,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "a b"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_NAME = (
    "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores and dashe "
    "within max length of 64, unexpected function name: "
)
COLD = (
    "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, "
    "but best_of is "
)


def build_message_body(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def build_tool_call_body(**changes: Any) -> dict[str, Any]:
    return build_message_body(role="assistant", tool_calls=[CALL | changes])


# --- errors of all releases -----------------------------------------------------------------------

SHAPE: tuple[tuple[Any, str], ...] = (
    ({"model": None}, "Request contains not model or model null"),
    ({"model": 5}, "Request param model must be string"),
    ({"model": ""}, "Request param model must be not empty"),
    ({"messages": None}, "Request param contains not messages or messages null"),
    ({"messages": []}, "Request param messages not arr or arr is empty"),
    ({"messages": "x"}, "Request param messages not arr or arr is empty"),
    ({"messages": None, "tools": [TOOL]}, "Request param messages is null"),
    ({"messages": [], "tools": [TOOL]}, "Request param messages is not arr or arr is empty"),
    ({"messages": ["x"]}, "Request param contains not role or role null"),
    (
        build_message_body(role="bot", content="x"),
        "Request param contains role must be system, assistant, user or tool",
    ),
    (build_message_body(role="user"), "Request param contains not content or content null"),
    (build_message_body(role="user", content=5), "The type of inputs is abnormal"),
    (
        build_message_body(role="user", content=[{"image_url": None}]),
        "Request param image_url null",
    ),
    (
        build_message_body(role="user", content="") | {"tools": [TOOL]},
        "Request param content len should not be 0",
    ),
    (
        build_message_body(role="tool", content="x"),
        "Request param contains not tool_call_id or tool_call_id null while role is tool",
    ),
    (
        build_message_body(role="tool", content="x", tool_call_id=5),
        "The type of tool_call_id is abnormal",
    ),
    (
        build_message_body(role="tool", content="x", tool_call_id=""),
        "Request param tool_call_id len should not be 0 while role is tool",
    ),
    (build_message_body(role="assistant"), "Request param contains not content or content null"),
    (
        build_message_body(role="assistant", content=5),
        'Request param "content" arguments expected to be a string',
    ),
    (
        build_message_body(role="assistant", content=[{"type": "text", "text": ""}]),
        'Request param "content" should not be empty',
    ),
    (
        build_message_body(role="assistant", content=""),
        'Request param "content" should not be empty',
    ),
    (build_tool_call_body(id=None), "Tool call param contains no id."),
    (build_tool_call_body(id=5), 'Tool call param "id" arguments expected to be a string'),
    (
        build_tool_call_body(type="x"),
        "The type of the tool. Currently, only function is supported.",
    ),
    (
        build_tool_call_body(function=5),
        "Tool call param contains no function that the model called.",
    ),
    (build_tool_call_body(function={}), "Tool call param contains no function name"),
    (
        build_tool_call_body(function={"name": 5}),
        "Tool call param function name expected to be a string",
    ),
    (build_tool_call_body(function={"name": "a b"}), NO_NAME + "a b"),
    (
        build_tool_call_body(function={"name": "f"}),
        "Tool call param contains no function arguments",
    ),
    (
        build_tool_call_body(function={"name": "f", "arguments": {}}),
        "Tool call param function arguments expected to be a string",
    ),
    (build_message_body(role="assistant", tool_calls=5), "Tool call param contains no id."),
)
PARAMETERS: tuple[tuple[Any, str], ...] = (
    ({"ignore_eos": 1}, "ignore_eos must be boolean type."),
    ({"stop": {}}, "Input validation error: param stop must be string or list[string]"),
    (
        {"stop": ""},
        "Input validation error: length of `stop` must be in [1, 32768], but got 0",
    ),
    (
        {"stop": ["x", 5]},
        (
            "Input validation error: `stop` must be list[string] if list, and item length in "
            "[1, 1024] with total <= 32768"
        ),
    ),
    (
        {"stop": ["x" * 1024] * 33},
        (
            "Input validation error: `stop` must be list[string] if list, and item length in "
            "[1, 1024] with total <= 32768"
        ),
    ),
    ({"stop_token_ids": 5}, "Parameter stop_token_ids not array"),
    ({"stop_token_ids": ["x"]}, "Parameter stop_token_ids not list[int]"),
    (
        {"stop": "x", "include_stop_str_in_output": 1},
        "include_stop_str_in_output must be boolean type.",
    ),
    ({"temperature": -1}, "Parameter temperature must be in (0.0,3.40282e+38], got -1."),
    ({"top_k": 0}, "Parameter top_k must be in -1 || (0,2147483647], got 0"),
    ({"top_p": 0}, "Parameter top_p must be in (0.0,1.0], got 0."),
    ({"seed": 1.5}, "seed must be unsigned type."),
    (
        {"chat_template_kwargs": {"thinking_budget": 0}},
        "Parameter thinking_budget must be in [1,2147483647], got 0",
    ),
    (
        {"chat_template_kwargs": {"thinking_budget": "x"}},
        "thinking_budget must be integer type.",
    ),
    (
        {"repetition_penalty": 2.5},
        "Parameter 'repetition_penalty' must be in (0.0, 2], got 2.5.",
    ),
    (
        {"frequency_penalty": -2.5},
        "Parameter frequency_penalty should be in [-2.0, 2.0], got -2.5.",
    ),
    (
        {"presence_penalty": 2.5},
        "Parameter presence_penalty not in [-2.0, 2.0], but got 2.5.",
    ),
    ({"skip_special_tokens": "x"}, "skip_special_tokens must be boolean type."),
    ({"best_of": 129}, "Parameter [best_of] should be in [1, 128], got 129."),
    ({"n": 0}, "Parameter [n] should be in [1, 8192], got 0. "),
    ({"n": -1}, "n must be unsigned type."),
    ({"use_beam_search": 1}, "use_beam_search must be boolean type."),
    ({"logprobs": 2}, "logprobs must be boolean type."),
    ({"top_logprobs": 21}, "Parameter top logprobs must be in [0, 20], got 21."),
    (
        {"logprobs": False, "top_logprobs": 2},
        "Value error, when using top_logprobs, logprobs must be true or null in chat completions",
    ),
    ({"max_tokens": "5"}, "Parameter max_tokens not number_integer"),
    ({"max_tokens": 0}, "Parameter max_tokens must be (0,2147483647], got 0"),
    ({"stream": "x"}, "stream must be boolean type."),
    ({"n": 2}, COLD + "None, n is 2."),
    ({"n": 2, "temperature": 0}, COLD + "None, n is 2."),
    ({"best_of": 2}, COLD + "2, n is None."),
    (
        {"n": 3, "best_of": 2, "temperature": 1},
        "best_of must be greater than or equal to n, but best_of is 2, n is 3.",
    ),
    (
        {"n": 1, "best_of": 2, "temperature": 1, "stream": True},
        "best_of must be equal to n in stream mode, but best_of is 2, n is 1.",
    ),
    (
        {"best_of": 2, "temperature": 1, "stream": True},
        "best_of must be equal to n in stream mode, but best_of is 2, n is None.",
    ),
    (
        {"use_beam_search": True},
        "Please set the max_tokens to be not larger than 128 when the use_beam_search is on.",
    ),
)
FORMS: tuple[tuple[Any, str], ...] = (
    ({"tool_choice": "x"}, "Parameter tool_choice string not in [none, auto, required]"),
    ({"tool_choice": 5}, "Parameter tool_choice not string or object"),
    ({"tool_choice": {}}, "Tool param invalid, tool type not exist"),
    ({"tools": {"x": 1}}, "Tools not array"),
    ({"tools": [5]}, "Tool param invalid, tool type not exist"),
    ({"tools": [{"type": None}]}, "Tool param invalid tool type"),
    ({"tools": [{"type": 5}]}, "Tool param invalid tool string type"),
    ({"tools": [{"type": "x"}]}, "Tool param not function type"),
    ({"tools": [{"type": "function"}]}, "Tool param invalid, tool function not exist"),
    ({"tools": [TOOL | {"function": 5}]}, "Tool param invalid function object"),
    ({"tools": [TOOL | {"function": {}}]}, "Function object invalid, function name not exist"),
    ({"tools": [TOOL | {"function": {"name": 5}}]}, "Function object invalid name type"),
    ({"tools": [TOOL | {"function": {"name": ""}}]}, NO_NAME),
    ({"chat_template": 5}, "Parameter chat_template not string"),
    ({"chat_template": ""}, "Parameter chat_template is not valid"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a JSON object"),
    (
        {"chat_template_kwargs": {"enable_thinking": 1}},
        "enable_thinking must be boolean, got number",
    ),
    (
        {"chat_template_kwargs": {"enable_thinking": None}},
        "enable_thinking must be boolean, got null",
    ),
    ({"response_format": 5}, "Parameter response_format must be an object"),
    ({"response_format": {}}, "Parameter response_format must contain 'type' field"),
    ({"response_format": {"type": 5}}, "Parameter response_format.type must be a string"),
    (
        {"response_format": {"type": "xml"}},
        "Parameter response_format.type must be 'json_object', 'json_schema' or 'text', got 'xml'",
    ),
)
SCHEMAS: tuple[tuple[Any, str], ...] = (
    (None, "Parameter response_format.json_schema is required when type is 'json_schema'"),
    (5, "Parameter response_format.json_schema must be an object"),
    ({}, "Parameter response_format.json_schema.name is required"),
    ({"name": 5}, "Parameter response_format.json_schema.name must be a string"),
    ({"name": ""}, "Parameter response_format.json_schema.name must be 1-64 characters"),
    (
        {"name": "x"},
        "Parameter response_format.json_schema.schema is required when type is 'json_schema'",
    ),
    (
        {"name": "x", "schema": 5},
        "Parameter response_format.json_schema.schema must be an object",
    ),
)


@pytest.mark.parametrize(("fields", "message"), [*SHAPE, *PARAMETERS, *FORMS])
def test_invalid_chat_field_returns_422(bench: Any, fields: Any, message: str) -> None:
    assert bench().refused(CHAT, HI | fields) == (422, message)


@pytest.mark.parametrize(("schema", "message"), SCHEMAS)
def test_invalid_json_schema_format_returns_422(bench: Any, schema: Any, message: str) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert bench().refused(CHAT, HI | form) == (422, message)


def test_tool_choice_of_an_undefined_tool_returns_422(bench: Any) -> None:
    choice = TOOL | {"function": {"name": "g"}}
    status, message = bench().refused(CHAT, HI | {"tools": [TOOL], "tool_choice": choice})

    assert status == 422
    assert "'g'" in message


@pytest.mark.parametrize("tools", [False, True])
def test_messages_over_the_length_limit_return_422(bench: Any, tools: bool) -> None:
    body = (
        HI
        | build_message_body(role="user", content="x" * (4 << 20))
        | ({"tools": [TOOL]} if tools else {})
    )
    end = "]" if tools else ""

    assert bench("1x").refused(CHAT, body) == (
        422,
        f"Messages len not in (0, 4194304{end}, but the length of inputs is 4194334",
    )


# --- the server's validator -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.1}, "Parameter temperature must be in (0.0,2], got 2.1."),
        ({"top_k": -1}, "Parameter top_k must be in -1 || (0,2147483647], got -1"),
        (
            {"stop": "x" * 1025},
            "Input validation error: length of `stop` must be in [1, 1024], but got 1025",
        ),
    ],
)
def test_native_validator_enforces_narrower_parameter_ranges(
    bench: Any, fields: Any, message: str
) -> None:
    assert bench(vllm_validator=False).refused(CHAT, HI | fields) == (422, message)
    bench().decode(CHAT, HI | fields)


def test_native_validator_ignores_parameters_that_vllm_checks(bench: Any) -> None:
    body = HI | {"top_k": 0, "response_format": 5, "chat_template_kwargs": {"thinking_budget": 0}}
    request = bench(vllm_validator=False).decode(CHAT, body)

    assert request.sampling.top_k is None
    assert set(request.extra) == {"response_format"}


# --- accepted requests ----------------------------------------------------------------------------


def test_scalar_chat_parameters_are_decoded(bench: Any) -> None:
    body = HI | {
        "temperature": 0,
        "top_k": -1,
        "max_tokens": 5,
        "stop": "x",
        "include_stop_str_in_output": False,
        "n": 1,
        "foo": 1,
        "stream": True,
    }
    request = bench().decode(CHAT, body)

    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, None)
    assert (request.stopping.max_tokens, request.stopping.stop) == (5, ("x",))
    assert request.stopping.include_stop is False
    assert (request.n, request.stream) == (1, True)
    assert {name: bytes(raw) for name, raw in request.extra.items()} == {"foo": b"1"}
    assert bench().decode(CHAT, HI).stopping.max_tokens is None
    assert bench(max_iter_times=512).decode(CHAT, HI).stopping.max_tokens == 512


def test_null_means_that_the_parameter_is_absent(bench: Any) -> None:
    names = (
        *("temperature", "top_k", "top_p", "seed", "max_tokens", "stop", "stream", "n", "best_of"),
        *("stop_token_ids", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format"),
        *("chat_template", "presence_penalty", "frequency_penalty", "use_beam_search"),
        *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    )
    assert bench().decode(CHAT, HI | dict.fromkeys(names)) == bench().decode(CHAT, HI)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, LogprobsOptions(0)),
        ({"top_logprobs": 2}, LogprobsOptions(2)),
        ({"logprobs": True, "top_logprobs": 0}, LogprobsOptions(0)),
    ],
)
def test_chat_logprobs_options_are_decoded(bench: Any, fields: Any, logprobs: Any) -> None:
    assert bench().decode(CHAT, HI | fields).logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "n", "beams"),
    [
        ({}, None, None),
        ({"n": 2, "temperature": 1}, 2, None),
        ({"best_of": 3, "temperature": 1}, 3, None),
        ({"n": 2, "best_of": 3, "temperature": 1}, 3, None),
        ({"n": 2, "best_of": 2, "temperature": 1, "stream": True}, 2, None),
        ({"n": 2, "best_of": 4, "use_beam_search": True, "max_tokens": 9}, 2, 4),
        ({"use_beam_search": True, "max_tokens": 9}, None, 1),
    ],
)
def test_n_and_best_of_set_choice_count_and_beam_width(
    bench: Any, fields: Any, n: Any, beams: Any
) -> None:
    """The server returns all candidates."""
    request = bench().decode(CHAT, HI | fields)
    assert (request.n, request.best_of, request.sampling.beam_width) == (n, None, beams)


def test_chat_messages_with_tool_calls_and_images_are_decoded(bench: Any) -> None:
    messages = [
        {"role": "system", "content": "be brief", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"image_url": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "so", "tool_calls": [CALL]},
        {"role": "assistant", "content": [{"text": "or"}], "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        {"role": "assistant", "content": "no"},
    ]
    request = bench().decode(
        CHAT, {"model": "m", "messages": messages, "tools": [TOOL], "tool_choice": TOOL}
    )

    call = (ToolCall("c1", "f", "{}"),)

    assert request.messages == (
        Message("system", (TextPart("be brief"),), "s"),
        Message("user", (TextPart("what"), ImagePart("u"))),
        Message("assistant", tool_calls=call),
        Message("assistant", (TextPart("so"),), tool_calls=call),
        Message("assistant", (TextPart("or"),), tool_calls=call),
        Message("tool", (TextPart(""),), tool_call_id="c1"),
        Message("assistant", (TextPart("yes"),)),
        Message("assistant", (TextPart("no"),)),
    )
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.tool_choice == NamedTool("f")
    assert request.extra == {}


def test_empty_content_list_is_an_empty_text_part(bench: Any) -> None:
    request = bench().decode(CHAT, HI | build_message_body(role="user", content=[]))
    assert request.messages == (Message("user", (TextPart(""),)),)


def test_chat_template_and_thinking_options_are_decoded(bench: Any) -> None:
    body = HI | {
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 9, "x": 1},
    }
    request = bench().decode(CHAT, body)
    assert request.templating.template == "{{ messages }}"

    arguments = {name: bytes(raw) for name, raw in (request.templating.arguments or {}).items()}
    assert arguments == {"enable_thinking": b"true", "thinking_budget": b"9", "x": b"1"}
    assert request.reasoning == ReasoningOptions(budget=9)

    off = HI | {"chat_template_kwargs": {"enable_thinking": False, "thinking_budget": 9}}
    assert bench().decode(CHAT, off).reasoning is None


def test_response_format_is_decoded(bench: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    one = bench()

    assert one.decode(CHAT, HI | {"response_format": {"type": "text"}}).output is None
    assert one.decode(CHAT, HI | {"response_format": {"type": "json_object"}}).output == (
        JsonObjectFormat()
    )
    assert one.decode(CHAT, HI | {"response_format": schema}).output == JsonSchemaFormat(
        msgspec.Raw(b'{"type":"object"}'), "x"
    )


# --- early releases -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0}, "Parameter temperature must be in (0.0,2], got 0."),
        ({"temperature": 2.1}, "Parameter temperature must be in (0.0,2], got 2.1."),
        ({"seed": 0}, "Parameter seed must be in (0, 18446744073709551615], got 0."),
        ({"model": "-m"}, "Got model -m, but not found in server"),
        ({"model": "m_"}, "Got model m_, but not found in server"),
        ({"model": "a/b"}, "Got model a/b, but not found in server"),
        (build_message_body(role="user", content=""), "Request param content len should not be 0"),
    ],
)
def test_rc1_rejects_values_that_later_releases_accept(
    bench: Any, fields: Any, message: str
) -> None:
    assert bench("rc1").refused(CHAT, HI | fields) == (422, message)


def test_rc1_ignores_tools_n_stop_and_response_format(bench: Any) -> None:
    body = HI | {"tools": 5, "n": 3, "stop": ["x"], "response_format": 5}
    request = bench("rc1").decode(CHAT, body)

    assert (request.tools, request.n, request.stopping.stop) == ((), None, ())
    assert set(request.extra) == {"tools", "n", "stop", "response_format"}


# --- completions ----------------------------------------------------------------------------------


def test_completion_request_is_decoded(bench: Any) -> None:
    body = PROMPT | {"logprobs": 2, "max_tokens": 7, "response_format": {"type": "json_object"}}
    request = bench().decode(TEXT, body)

    assert request.prompts == ("a b",)
    assert (request.kind, request.templating.mode) == ("completion", "raw")
    assert request.logprobs == LogprobsOptions(2)
    assert request.output == JsonObjectFormat()
    assert request.stopping.max_tokens == 7
    assert bench().decode(TEXT, PROMPT | {"prompt": [1, 2]}).prompts == ((1, 2),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "Request contains not model or model null"),
        ({"prompt": None}, "Contains not prompt or prompt null"),
        (
            {"prompt": ""},
            (
                "Length of Prompt text should be greater than 0 and less than or equal to "
                "41943040, but got 0"
            ),
        ),
        ({"prompt": []}, "Prompt array cannot be empty."),
        ({"prompt": ["a"]}, "All elements of the prompt array must be integers."),
        (
            {"prompt": [0] * 1048577},
            (
                "Length of Prompt token should be greater than 0 and less than or equal to "
                "1048576, but got 1048577"
            ),
        ),
        ({"prompt": 5}, "The type of prompt is abnormal,prompt must be str or integer list."),
        ({"logprobs": 6}, "logprobs should be in range [0, 5], got 6."),
        ({"logprobs": True}, "logprobs must be unsigned type."),
        (
            {"n": 3, "best_of": 2, "temperature": 1},
            "Best_of must be greater than or equal to n, but best_of is 2 and n is 3.",
        ),
        (
            {"n": 1, "best_of": 2, "temperature": 1, "stream": True},
            "best_of must be equal to n, but best_of is 2 and n is 1.",
        ),
        (
            {"best_of": 2, "temperature": 1, "stream": True},
            "best_of must be equal to n in stream mode, but best_of is 2, n is None.",
        ),
        (
            {"n": 2},
            (
                "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of "
                "is null and n is 2."
            ),
        ),
    ],
)
def test_invalid_completion_field_returns_422(bench: Any, fields: Any, message: str) -> None:
    assert bench().refused(TEXT, PROMPT | fields) == (422, message)


def test_field_names_map_internal_paths_to_wire_names(bench: Any) -> None:
    """Fields without an internal path have no entry."""
    one = bench()
    chat = one.adapter.field_names(one.call(CHAT, HI))
    assert chat["stopping.max_tokens"] == "max_tokens"
    assert chat["reasoning.budget"] == "chat_template_kwargs"
    assert chat["output"] == "response_format"

    text = one.adapter.field_names(one.call("/v2/models/m/generate", b""))
    assert text["stopping.max_tokens"] == "max_new_tokens"
    assert one.adapter.field_names(one.call("/v2/models/m/generate_stream", b"")) == text
    assert one.adapter.field_names(one.call(TEXT, PROMPT))["logprobs.top"] == "logprobs"
    assert not [path for names in (chat, text) for path in names if path.startswith("request.")]
