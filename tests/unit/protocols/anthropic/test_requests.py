"""A client's fields become the internal request, or are rejected."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from protocols.anthropic.endpoints import Anthropic
from protocols.core.catalog import ModelInfo
from protocols.core.errors import (
    ClientError,
    ContextTooLong,
    InvalidParameter,
    UnknownParameter,
    UnsupportedFeature,
)
from protocols.core.request import (
    FilePart,
    GenerationRequest,
    ImagePart,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ReasoningPart,
    TextPart,
)
from tests.unit.protocols.anthropic.conftest import MakeCall

HI = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "D"}


def decode(call: Any, model: ModelInfo | None = None, **options: Any) -> GenerationRequest:
    request = Anthropic(**options).decode_request(call, model)
    assert isinstance(request, GenerationRequest)
    return request


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content, **fields}


def decode_result(make: MakeCall, *blocks: Any) -> Message:
    request = decode(make({"messages": [HI, USE, user(result(list(blocks)))]}))
    return request.messages[-1]


# --- scalars --------------------------------------------------------------------------------------


def test_scalars_are_read(make: MakeCall) -> None:
    request = decode(
        make(
            {
                "stop_sequences": ["END"],
                "stream": True,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 7,
                "tools": None,
            }
        )
    )

    assert request.stopping.max_tokens == 100
    assert request.stopping.stop == ("END",)
    assert request.response_options.matched_stop
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    assert (request.sampling.top_k, request.stream) == (7, True)
    assert "tools" not in request.provided_fields


def test_top_k_zero_is_no_limit(make: MakeCall) -> None:
    assert decode(make({"top_k": 0})).sampling.top_k is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "model: Field required"),
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        ({"messages": []}, "messages: at least one message is required"),
        (
            {"messages": [{"role": "bot"}]},
            "messages.0.role: Input should be 'user', 'assistant' or 'system'",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "zz"}},
            "tool_choice.name: Tool 'zz' not found in provided tools",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1023}},
            "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
        ),
        ({"model": 5}, "model: Input should be a valid string"),
        ({"model": ""}, "model: String should have 1 to 256 characters"),
        ({"model": "m" * 257}, "model: String should have 1 to 256 characters"),
        ({"max_tokens": 2**40}, "max_tokens: Input should be less than or equal to 2147483647"),
        ({"stop_sequences": "x"}, "stop_sequences: Input should be a valid list of strings"),
        ({"stop_sequences": [" "]}, "stop_sequences.0: each stop sequence must contain"),
        ({"system": 5}, "system: Input should be a valid list"),
        ({"system": [5]}, "system.0: Input should be a valid dictionary"),
        ({"system": [{"type": "image"}]}, "system.0.type: Input should be 'text'"),
        ({"system": [{"text": "x"}]}, "system.0.type: Field required"),
        ({"messages": "x"}, "messages: Input should be a valid list"),
        ({"messages": None}, "messages: Field required"),
        ({"messages": [HI] * 100_001}, "messages: List should have at most 100000 items"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": 1}]}, "messages.0.role: Input should be a valid string"),
        ({"metadata": {"user_id": "x" * 1025}}, "metadata.user_id: String should have at most"),
        ({"metadata": 5}, "metadata: Input should be a valid dictionary"),
        ({"service_tier": "gold"}, "service_tier: Input should be 'auto' or 'standard_only'"),
        ({"mcp_servers": [{}]}, "mcp_servers: remote MCP servers are not available"),
        ({"tools": {}}, "tools: Input should be a valid list"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name: String should match"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools.0.name: String should match"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools.0.strict: Input should be a valid boolean"),
        ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
        ({"tool_choice": {"type": "any"}}, "tool_choice: tools are required"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type: Input should be 'auto', 'any'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
        ({"thinking": {"type": "x"}}, "thinking.type: Input should be 'enabled', 'adaptive'"),
        ({"thinking": {"type": "enabled"}}, "thinking.enabled.budget_tokens: Field required"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": "x"}},
            "thinking.enabled.budget_tokens: Input should be a valid integer",
        ),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display: Input should be"),
        ({"output_config": {"effort": "x"}}, "output_config.effort: Input should be 'low'"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema: Field required",
        ),
        ({"output_format": {"type": "x"}}, "output_format.type: Input should be 'json_schema'"),
    ],
)
def test_invalid_field_is_named(make: MakeCall, changed: dict[str, Any], message: str) -> None:
    check_error(make, changed, message)


def check_error(make: MakeCall, changed: dict[str, Any], message: str) -> None:
    call = make(changed)

    with pytest.raises(ClientError) as excinfo:
        decode(call)

    body = msgspec.json.decode(Anthropic().encode_error(excinfo.value, call).body)
    assert body["error"]["message"].startswith(message), body


@pytest.mark.parametrize("version", ["latest", "2023-06", "2023-6-011", "20x3-06-01"])
def test_version_that_is_no_date_is_rejected(make: MakeCall, version: str) -> None:
    with pytest.raises(ClientError, match="anthropic-version"):
        decode(make(anthropic_version=version))


def test_strict_version_rejects_sampling_of_the_newer_version_only(make: MakeCall) -> None:
    newer = {"anthropic_version": "2026-10-21"}

    with pytest.raises(UnknownParameter):
        decode(make({"top_p": 1}, **newer), strict_version=True)
    assert decode(make(**newer), strict_version=True).sampling.top_p is None
    assert decode(make({"top_p": 1}), strict_version=True).sampling.top_p == 1


def test_fields_of_the_service_are_kept_for_workers_that_know_them(make: MakeCall) -> None:
    marked = text("x", citations=[{"x": 1}])

    request = decode(
        make(
            {
                "messages": [user(marked, marked)],
                "metadata": {"user_id": "u"},
                "service_tier": "auto",
                "mcp_servers": [],
                "speed": "fast",
                "later": [1],
            }
        )
    )

    assert request.extra == {
        "metadata": Raw(b'{"user_id":"u"}'),
        "service_tier": Raw(b'"auto"'),
        "speed": Raw(b'"fast"'),
        "later": Raw(b"[1]"),
        **{f"messages[0].content[{k}].citations": Raw(b'[{"x":1}]') for k in (0, 1)},
    }
    assert decode(make({"messages": [user(text("x", citations={"enabled": False}))]})).extra == {}


def test_unknown_field_is_rejected_if_configured(make: MakeCall) -> None:
    with pytest.raises(UnknownParameter):
        decode(make({"later": 1}), unknown="reject")
    assert decode(make({"speed": "fast"}), unknown="reject").extra


@pytest.mark.parametrize(
    ("header", "stream", "timeout"),
    [("300", False, 300.0), ("NOT_GIVEN", False, None), ("-1", False, None), ("300", True, None)],
)
def test_timeout_of_the_client_limits_a_unary_response(
    make: MakeCall, header: str, timeout: float | None, *, stream: bool
) -> None:
    request = decode(make({"stream": stream}, x_stainless_timeout=header))

    assert request.timeout == timeout


# --- max_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "limit", "clamped"),
    [
        (ModelInfo("m", ()), 100, {}),
        (ModelInfo("m", (), max_tokens=200, context_length=4000), 100, {}),
        (ModelInfo("m", (), max_tokens=50), 50, {"max_tokens": "100 to 50"}),
        (ModelInfo("m", (), context_length=20), 19, {"max_tokens": "100 to 19"}),
        (ModelInfo("m", (), context_length=1), 1, {"max_tokens": "100 to 1"}),
    ],
)
def test_max_tokens_is_clamped_to_the_model(
    make: MakeCall, model: ModelInfo, limit: int, clamped: dict[str, str]
) -> None:
    request = decode(make(), model)

    assert (request.stopping.max_tokens, request.clamped_fields) == (limit, clamped)


def test_max_tokens_over_the_limit_is_an_error_if_configured(make: MakeCall) -> None:
    model = ModelInfo("m", (), max_tokens=50, context_length=20)

    with pytest.raises(ContextTooLong) as excinfo:
        decode(make(), model, over_limit="error")

    assert excinfo.value.message.startswith(
        "input length and `max_tokens` exceed context limit: 1 +"
    )

    # the worker counts a prompt's tokens if it does not fit
    decode(make({"messages": [{"role": "user", "content": "x " * 99}]}), model, over_limit="error")


def test_estimate_counts_tools_calls_and_images(make: MakeCall) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    messages = [user(image), USE, user(result("r"))]
    changed = {
        "messages": messages,
        "tools": [{**TOOL, "description": "d" * 30}],
        "max_tokens": 9999,
    }

    request = decode(make(changed), ModelInfo("m", (), context_length=2000))

    assert request.stopping.max_tokens is not None
    assert 400 < request.stopping.max_tokens < 490


def test_max_tokens_zero_generates_one_token(make: MakeCall) -> None:
    assert decode(make({"max_tokens": 0}), ModelInfo("m", ())).stopping.max_tokens == 1


# --- blocks ---------------------------------------------------------------------------------------


def test_parts_of_a_user(make: MakeCall) -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    picture = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "aQ=="},
    }
    nested = {"type": "content", "content": [text("A"), picture]}
    search_result = {"type": "search_result", "title": "T", "source": "S", "content": [text("x")]}

    [message] = decode(
        make(
            {
                "messages": [
                    user(
                        text(""),
                        text("t"),
                        picture,
                        search_result,
                        {"type": "document", "source": pdf, "title": "a.pdf"},
                        {"type": "document", "source": nested, "context": "C"},
                        {"type": "document", "source": {"type": "content", "content": "D"}},
                    )
                ]
            }
        )
    ).messages

    image = ImagePart("data:image/png;base64,aQ==")
    assert message.parts == (
        TextPart("t"),
        image,
        TextPart("T\nS\nx"),
        FilePart(file_data="data:application/pdf;base64,JVBE", filename="a.pdf"),
        TextPart("<document>\nC\nA"),
        image,
        TextPart("\n</document>"),
        TextPart("<document>\nD\n</document>"),
    )


def image_of(**source: Any) -> dict[str, Any]:
    return {"messages": [user({"type": "image", "source": source})]}


def document_of(**source: Any) -> dict[str, Any]:
    return {"messages": [user({"type": "document", "source": source})]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"messages": [user({"type": "image"})]}, "messages.0.content.0.source: Field required"),
        ({"messages": [user({"type": "document"})]}, "messages.0.content.0.source: Field required"),
        (image_of(type="url", url="file:///x"), "messages.0.content.0.source.url: Only http"),
        (image_of(type="file", file_id="f"), "messages.0.content.0.source: file sources are not"),
        (image_of(type="x"), "messages.0.content.0.source.type: Input should be 'base64'"),
        (
            image_of(type="base64", media_type="image/x", data=""),
            "messages.0.content.0.source.media_type: Input should be 'image/jpeg'",
        ),
        (document_of(type="url", url="x"), "messages.0.content.0.source: url sources are not"),
        (document_of(type="x"), "messages.0.content.0.source.type: Input should be 'base64'"),
        ({"messages": [user({"type": "x"})]}, "messages.0.content.0: Input tag 'x' found"),
        (
            {"messages": [user({"type": "container_upload"})]},
            "messages.0.content.0.type: container_upload is not supported",
        ),
        ({"messages": [user({"type": "tool_reference"})]}, "messages.0.content.0: Input tag"),
        ({"messages": [HI, assistant({"type": "x"})]}, "messages.1.content.0: Input tag"),
        (
            {"messages": [HI, assistant({"type": "mcp_tool_result"})]},
            "messages.1.content.0.type: mcp_tool_result is not supported",
        ),
        (
            {"messages": [HI, assistant(*USE["content"], *USE["content"])]},
            "messages.1.content: `tool_use` ids must be unique",
        ),
        (
            {"messages": [HI, assistant({**USE["content"][0], "input": 5})]},  # type: ignore[dict-item]
            "messages.1.content.0.input: Input should be a valid dictionary",
        ),
        (
            {"messages": [HI, USE, user(result("x"), result("y"))]},
            "messages.2.content.1: each `tool_use` must have a single result",
        ),
        ({"messages": [HI, USE, USE]}, "messages.2: `tool_use` ids were found without"),
        ({"messages": [HI, USE, HI]}, "messages.2: `tool_use` ids were found without"),
        (
            {"messages": [HI, USE, user({"type": "tool_result", "tool_use_id": "b"})]},
            "messages.2.content.0: unexpected `tool_use_id` found in `tool_result` blocks: b.",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type: Input should be 'text'",
        ),
    ],
)
def test_invalid_block_is_named(make: MakeCall, changed: dict[str, Any], message: str) -> None:
    check_error(make, changed, message)


def test_parts_of_a_result(make: MakeCall) -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    reference = {"type": "tool_reference", "tool_name": "g"}

    message = decode_result(make, text("a"), text("b"), picture, reference)

    assert message.role == "tool"
    assert message.tool_call_id == "a"
    assert message.parts == (
        TextPart("a\nb"),
        ImagePart("https://x"),
        TextPart("[tool g is now available]"),
    )


def test_failed_result_without_text_is_marked(make: MakeCall) -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    request = decode(make({"messages": [HI, USE, user(result([picture], is_error=True))]}))

    assert request.messages[-1].is_error
    assert request.messages[-1].parts == (TextPart("Error: "), ImagePart("https://x"))


@pytest.mark.parametrize("message", ["ERROR: no", "<tool_use_error>no"])
def test_failed_result_with_an_error_text_is_not_marked(make: MakeCall, message: str) -> None:
    request = decode(make({"messages": [HI, USE, user(result(message, is_error=True))]}))

    assert request.messages[-1].text == message


BAD_IMAGE = {"type": "base64", "media_type": "image/png", "data": "not base64!"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([user()], "messages.0: user messages must have non-empty content"),
        (
            [user(text("hi")), {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "f"}]}],
            "messages.1.content.0.input: Field required",
        ),
        (
            [user({"type": "image", "source": BAD_IMAGE})],
            "messages.0.content.0.source.data: Invalid base64 data",
        ),
        (
            [user({"type": "document",
                   "source": {**BAD_IMAGE, "media_type": "application/pdf"}})],
            "messages.0.content.0.source.data: Invalid base64 data",
        ),
    ],
)  # fmt: skip
def test_content_that_the_service_refuses(make: MakeCall, messages: list[Any], text: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        decode(make({"messages": messages}))
    assert caught.value.message == text


def test_parts_of_an_assistant(make: MakeCall) -> None:
    blocks = [
        {"type": "thinking", "thinking": "T", "signature": "theirs"},
        {"type": "thinking", "thinking": "own", "signature": "gw1.x"},
        {"type": "thinking", "thinking": "none"},
        {"type": "redacted_thinking", "data": "R"},
        {"type": "document", "source": TEXT_SOURCE},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"title": "T", "url": "U"}, 5],
        },
        {"type": "web_search_tool_result", "content": {"error_code": "unavailable"}},
        {"type": "code_execution_tool_result", "content": {}},
        {"type": "code_execution_tool_result"},
        {"type": "web_search_tool_result", "content": []},
    ]

    request = decode(make({"messages": [HI, assistant(*blocks)]}))

    *_, message = request.messages
    assert [*request.extra] == [
        "messages[1].content[6].content[1]",
        "messages[1].content[8].content",
    ]
    assert message.parts == (
        ReasoningPart("T", "theirs"),
        ReasoningPart("own"),
        ReasoningPart("none"),
        ReasoningPart("", redacted="R"),
        TextPart("<document>\nD\n</document>"),
        TextPart('[web_search: {"q":"x"}]'),
        TextPart("T - U"),
        TextPart("[web_search failed: unavailable]"),
        TextPart("[code_execution result]"),
        TextPart("[code_execution result]"),
        TextPart("[web_search result]"),
    )


def test_reasoning_before_the_last_question_is_kept(make: MakeCall) -> None:
    thinking = {"type": "thinking", "thinking": "T"}
    turn = assistant(thinking, text("x"))

    request = decode(make({"messages": [HI, turn, HI, turn]}))

    assert [len(message.parts) for message in request.messages] == [1, 2, 1, 2]


def test_last_message_of_the_assistant_is_continued(make: MakeCall) -> None:
    request = decode(make({"messages": [HI, {"role": "assistant", "content": "so"}]}))

    assert request.templating.continue_final is True
    assert request.templating.add_generation_prompt is False
    assert decode(make()).templating.continue_final is None


def test_system_messages_at_the_head_join_the_system(make: MakeCall) -> None:
    head = {"role": "system", "content": "B"}

    request = decode(make({"system": "A", "messages": [head, HI, head]}))

    assert request.messages == (
        Message("system", (TextPart("A\n\nB"),)),
        Message("user", (TextPart("hi"),)),
        Message("system", (TextPart("B"),)),
    )


def test_system_message_between_calls_and_results_follows_them(make: MakeCall) -> None:
    head = {"role": "system", "content": "B"}

    request = decode(make({"messages": [HI, USE, head, user(result("r"))]}))

    assert [message.role for message in request.messages] == ["user", "assistant", "tool", "system"]


@pytest.mark.parametrize("role", ["ctx", "msg"])
def test_other_roles_of_claude_code_are_users(make: MakeCall, role: str) -> None:
    request = decode(make({"messages": [{"role": role, "content": "x"}]}))

    assert request.messages[0].role == "user"


# --- tools, thinking and output -------------------------------------------------------------------


def test_tools_are_read(make: MakeCall) -> None:
    schema = {"$schema": "x", "properties": {"a": None}}
    tool = {"name": "f", "description": "D", "strict": True, "input_schema": schema, "type": None}

    [function] = decode(make({"tools": [tool]})).tools

    assert (function.name, function.description, function.strict) == ("f", "D", True)
    assert function.parameters == Raw(b'{"type":"object","$schema":"x","properties":{"a":null}}')


def test_server_tool_is_rejected_or_dropped(make: MakeCall) -> None:
    call = {"tools": [{"type": "bash_20250124", "name": "bash"}, TOOL]}

    with pytest.raises(UnsupportedFeature):
        decode(make(call))
    request = decode(make(call), server_tools="drop")
    assert [tool.name for tool in request.tools] == ["f"]
    assert "tools.bash_20250124" in request.extra


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", True),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, NamedTool("f"), None),
    ],
)
def test_tool_choice_is_read(
    make: MakeCall,
    choice: dict[str, Any],
    wanted: Any,
    parallel: bool | None,
) -> None:
    request = decode(make({"tools": [TOOL], "tool_choice": choice}))

    assert (request.tool_choice, request.parallel_tools) == (wanted, parallel)


@pytest.mark.parametrize(
    ("budget", "effort"), [(1024, "low"), (4096, "medium"), (16384, "high"), (30000, "high")]
)
def test_thinking_budget_is_also_an_effort(make: MakeCall, budget: int, effort: str) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}

    reasoning = decode(make({"max_tokens": 40_000, "thinking": thinking})).reasoning

    assert reasoning is not None
    assert (reasoning.budget, reasoning.effort, reasoning.include) == (budget, effort, True)


def test_interleaved_thinking_may_exceed_max_tokens(make: MakeCall) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    beta = {"anthropic_beta": "interleaved-thinking-2025-05-14"}

    request = decode(make({"tools": [TOOL], "thinking": thinking}, **beta))

    assert request.reasoning is not None
    with pytest.raises(ClientError):
        decode(make({"thinking": thinking}, **beta))


def test_output_config_and_its_older_form(make: MakeCall) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    wanted = JsonSchemaFormat(Raw(b'{"type":"object"}'), "output", strict=True)

    request = decode(make({"output_config": {"format": form, "effort": "low"}}))

    assert request.output == wanted
    assert request.reasoning is not None
    assert (request.reasoning.effort, request.clamped_fields) == ("low", {})
    assert decode(make({"output_format": form})).output == wanted
    assert decode(make({"output_config": {"effort": "max"}})).clamped_fields == {
        "output_config.effort": "max to high"
    }


def test_system_messages_between_others_are_folded_if_configured(make: MakeCall) -> None:
    head = {"role": "system", "content": "B"}
    reminder = "<system-reminder>\nB\n</system-reminder>"
    picture = {"type": "image", "source": {"type": "url", "url": "https://x"}}

    def fold(*messages: Any) -> list[tuple[str, str]]:
        request = decode(make({"system": "A", "messages": list(messages)}), mid_system="fold")
        assert request.messages[0] == Message("system", (TextPart("A"),))
        return [(message.role, message.text) for message in request.messages[1:]]

    spoken = {"role": "assistant", "content": "so"}
    assert fold(HI, head) == [("user", f"hi{reminder}")]
    assert fold(HI, spoken, head, HI) == [
        ("user", "hi"),
        ("assistant", "so"),
        ("user", f"{reminder}hi"),
    ]
    assert fold(HI, spoken, head)[-1] == ("user", reminder)
    assert fold(HI, USE, head, user(result("r")))[-1] == ("tool", f"r\n{reminder}")
    assert fold(HI, USE, head, user(result([picture])))[-1] == ("tool", reminder)


@pytest.mark.parametrize("kind", ["string", None, ["object"]])
def test_schema_of_a_tool_is_that_of_an_object(make: MakeCall, kind: Any) -> None:
    with pytest.raises(InvalidParameter, match="Input should be 'object'") as raised:
        decode(make({"tools": [{"name": "f", "input_schema": {"type": kind}}]}))

    assert raised.value.param == "tools.0.input_schema.type"
