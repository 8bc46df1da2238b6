"""Chat, generate and embeddings requests."""

from typing import Any

import msgspec
import pytest

from protocols.core.catalog import ModelInfo
from protocols.core.errors import ClientError, InvalidParameter, UnsupportedFeature
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
)
from protocols.ollama import Ollama
from protocols.ollama.requests import read_keep_alive
from tests.unit.protocols.ollama.conftest import MakeCall

HI = {"role": "user", "content": "hi"}
PNG = "iVBORw0KGgo="
DEFAULT = ModelInfo("m", ())
ABLE = ModelInfo(
    "m", (), protocol_options={"ollama": {"thinking": True, "insert": True, "vision": True}}
)
UNABLE = ModelInfo("m", (), protocol_options={"ollama": {"tools": False, "vision": False}})
VECTORS = ModelInfo("m", (), task="embedding")


@pytest.fixture
def read(make: MakeCall) -> Any:
    """Decode a chat request, or one for ``path``."""

    def decode(
        fields: dict[str, Any], path: str = "/api/chat", model: ModelInfo | None = None
    ) -> Any:
        minimal = {"model": "m", "messages": [HI]} if path == "/api/chat" else {"model": "m"}
        return Ollama().decode_request(make(path, {**minimal, **fields}), model)

    return decode


def test_chat_streams_by_default(read: Any) -> None:
    assert read({}).stream
    assert read({"stream": None}).stream
    assert not read({"stream": False}).stream


def test_minimal_chat_sets_nothing_else(read: Any) -> None:
    request = read({"tools": [], "format": "", "options": {}, "think": None})

    expected = GenerationRequest(
        model="m", kind="chat", messages=(Message("user", (TextPart("hi"),)),), stream=True
    )
    assert msgspec.structs.replace(request, provided_fields=frozenset()) == expected


def test_options_become_parameters(read: Any) -> None:
    options = {
        "temperature": 1, "top_p": 0.5, "top_k": 4.9, "min_p": 0.1, "typical_p": 0.9,
        "num_predict": 7, "stop": "x", "seed": 3, "repeat_penalty": 1.2, "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }  # fmt: skip

    request = read({"options": options})

    assert dict(request.set_fields) | {"messages": ()} == {
        "model": "m", "kind": "chat", "messages": (), "stream": True,
        "provided_fields": frozenset({"model", "messages", "options"}),
        "sampling.temperature": 1.0, "sampling.top_p": 0.5, "sampling.top_k": 4,
        "sampling.min_p": 0.1, "sampling.typical_p": 0.9, "stopping.max_tokens": 7,
        "stopping.stop": ("x",), "sampling.seed": 3, "sampling.repetition_penalty": 1.2,
        "sampling.presence_penalty": 0.1, "sampling.frequency_penalty": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"num_predict": -1}, {"num_predict": 0}, {"top_k": 0}, {"seed": -1}, {"seed": 1 << 64},
        {"temperature": None}, {"num_ctx": None}, {"stop": ["", ""]},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_off_set_nothing(read: Any, options: dict[str, Any]) -> None:
    request = read({"options": options})

    assert request.sampling == GenerationRequest(model="m", kind="chat").sampling
    assert request.stopping == GenerationRequest(model="m", kind="chat").stopping
    assert request.extra == {}


def test_fields_without_a_place_are_extra(read: Any) -> None:
    body = {"keep_alive": "5m", "shift": True, "options": {"num_ctx": 5, "foo": 1}}

    request = read(body)
    assert request.extra.keys() == {"shift", "options.num_ctx", "options.foo"}
    assert request.keep_alive == 300


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": "hot"}, 'option "temperature" must be of type float32'),
        ({"top_k": True}, 'option "top_k" must be of type integer'),
        ({"stop": 5}, 'option "stop" must be of type array'),
    ],
)
def test_options_of_a_wrong_type_are_rejected(
    read: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read({"options": options})

    assert excinfo.value.message == text
    assert excinfo.value.param == f"options.{next(iter(options))}"


def test_truncate_is_the_rule_for_long_prompts(read: Any) -> None:
    assert read({"truncate": True}).stopping.overflow == "truncate"
    assert read({"truncate": False}).stopping.overflow == "error"
    assert read({}).stopping.overflow is None


def test_top_logprobs_count_only_with_logprobs(read: Any) -> None:
    assert read({"logprobs": True, "top_logprobs": 3}).logprobs.top == 3
    assert read({"logprobs": True}).logprobs.top == 0
    assert read({"top_logprobs": 3}).logprobs is None


@pytest.mark.parametrize(
    ("think", "effort"),
    [(True, "medium"), ("low", "low"), ("high", "high"), ("max", "xhigh"), (False, "none")],
)
def test_think_is_the_effort_of_a_thinking_model(read: Any, think: bool | str, effort: str) -> None:
    assert read({"think": think}, model=ABLE).reasoning.effort == effort
    assert read({"think": think}).reasoning.effort == effort


def test_think_of_other_models_is_off_or_an_error(read: Any) -> None:
    request = read({"think": False}, model=DEFAULT)
    assert request.reasoning is None
    assert request.response_options.hides_reasoning
    assert not read({}, model=DEFAULT).response_options.hides_reasoning
    with pytest.raises(UnsupportedFeature, match='"m" does not support thinking'):
        read({"think": True}, model=DEFAULT)


@pytest.mark.parametrize("think", ["huge", 5, []])
def test_other_values_of_think_are_rejected(read: Any, think: Any) -> None:
    with pytest.raises(InvalidParameter, match="invalid think value"):
        read({"think": think})


KEEP_ALIVES = [
    (5, 5.0), (-1, -1.0), (0.5, 0.5), ("5m", 300.0), ("1h30m", 5400.0), ("-1s", -1.0), ("0", 0.0),
    ("1.5s", 1.5), ("100ms", 0.1), (None, None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "seconds"), KEEP_ALIVES, ids=str)
def test_keep_alive_is_seconds_or_a_duration(value: Any, seconds: float | None) -> None:
    fields = {"keep_alive": msgspec.Raw(msgspec.json.encode(value))}

    assert read_keep_alive(fields) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "Unsupported type: 'bool'"),
        ([], "Unsupported type: '[]interface {}'"),
        ({}, "Unsupported type: 'map[string]interface {}'"),
        ("soon", 'time: invalid duration "soon"'),
        ("1" * 70 + "s", "time: invalid duration"),
    ],
)
def test_other_values_of_keep_alive_are_rejected(read: Any, value: Any, text: str) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read({"keep_alive": value})

    assert text in excinfo.value.message


def test_format_is_json_or_a_schema(read: Any) -> None:
    assert read({"format": "json"}).output == JsonObjectFormat()
    schema = JsonSchemaFormat(msgspec.Raw(b'{"type":"object"}'), "response", strict=False)
    assert read({"format": {"type": "object"}}).output == schema


@pytest.mark.parametrize("value", ["xml", 5, []])
def test_other_formats_are_rejected(read: Any, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=r'invalid format: .*; expected "json" or a valid'):
        read({"format": value})


# --- messages -------------------------------------------------------------------------------------


def test_keys_that_messages_of_a_role_do_not_have_are_extra(read: Any) -> None:
    keys = {"images": ["aGk="], "thinking": "t", "tool_name": "f", "tool_calls": [], "name": ""}
    user = {"role": "user", "content": "a", **keys}
    call = {"function": {"name": "f", "arguments": {}}}
    assistant = {"role": "assistant", "tool_calls": [call], "tool_name": "f"}

    tool = {"role": "tool", "content": "1", **keys}
    request = read({"messages": [user, assistant, tool]})

    assert set(request.extra) == {
        "messages[0].thinking",
        "messages[0].tool_name",
        "messages[1].tool_name",
        "messages[2].images",
        "messages[2].thinking",
    }


def test_roles_may_have_any_case(read: Any) -> None:
    assert read({"messages": [{"role": "System", "content": "x"}]}).messages[0].role == "system"


def test_missing_content_is_empty(read: Any) -> None:
    messages = [{"role": "user"}, {"role": "assistant", "content": None}]

    assert [one.parts for one in read({"messages": messages}).messages] == [(TextPart(""),)] * 2


def test_absent_messages_are_none(read: Any) -> None:
    assert read({"messages": None}).messages == ()


def test_thinking_of_the_assistant_is_reasoning(read: Any) -> None:
    [message] = read(
        {"messages": [{"role": "assistant", "thinking": "hm", "content": "a"}]}
    ).messages

    assert message.parts == (ReasoningPart("hm"), TextPart("a"))


IMAGES = [
    (PNG, f"data:image/png;base64,{PNG}"),
    ("/9j/4AAQ", "data:image/jpeg;base64,/9j/4AAQ"),
    ("R0lGODlh", "data:image/gif;base64,R0lGODlh"),
    ("UklGRgAAAABXRUJQ", "data:image/webp;base64,UklGRgAAAABXRUJQ"),
    ("AAAA", "data:image/png;base64,AAAA"),
    (f"data:image/gif;base64,{PNG}", f"data:image/png;base64,{PNG}"),
]


@pytest.mark.parametrize(("sent", "url"), IMAGES, ids=str)
def test_images_become_data_urls_of_their_type(read: Any, sent: str, url: str) -> None:
    message = {**HI, "images": [sent]}

    [read_message] = read({"messages": [message]}, model=DEFAULT).messages

    assert read_message.parts == (TextPart("hi"), ImagePart(url))


@pytest.mark.parametrize("images", [["%"], [""], [5], "x"], ids=str)
def test_invalid_images_are_rejected(read: Any, images: Any) -> None:
    with pytest.raises(InvalidParameter):
        read({"messages": [{**HI, "images": images}]})


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"x": 1}}, **fields}


def test_tool_results_are_paired_by_id_by_name_and_by_order(read: Any) -> None:
    calls = [call("f", id="one"), call("g"), call("f"), {"function": {"name": "h"}}]
    results = [
        {"role": "tool", "tool_call_id": "one", "tool_name": "g", "content": "a"},
        {"role": "tool", "tool_name": "f", "content": "b"},
        {"role": "tool", "name": "other", "content": "c"},
        {"role": "tool", "content": "d"},
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}

    assistant, *answers = read({"messages": [turn, *results]}).messages

    assert assistant.tool_calls == (
        ToolCall("one", "f", '{"x":1}'),
        ToolCall("call_00000002", "g", '{"x":1}'),
        ToolCall("call_00000003", "f", '{"x":1}'),
        ToolCall("call_00000004", "h", "{}"),
    )

    ids = [one.tool_call_id for one in answers]
    assert ids == ["one", "call_00000003", "call_00000002", "call_00000004"]


@pytest.mark.parametrize(("name", "text"), [({"tool_name": "f"}, "[tool f] 42"), ({}, "[tool] 42")])
def test_tool_result_without_a_call_becomes_a_message_and_a_loss(
    read: Any, name: dict[str, str], text: str
) -> None:
    request = read({"messages": [HI, {"role": "tool", "content": "42", **name}]})

    assert request.messages[1] == Message("user", (TextPart(text),))
    assert request.extra.keys() == {"messages[1].role"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "bot"}, {}, {"role": "user", "content": ["a"]}, {"role": 5}, "text",
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": "f"},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_messages_are_rejected(read: Any, message: Any) -> None:
    with pytest.raises(InvalidParameter):
        read({"messages": [message]})


def test_tools_are_functions(read: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    assert [one.name for one in read({"tools": [tool]}, model=DEFAULT).tools] == ["f"]
    with pytest.raises(UnsupportedFeature, match=r"^m does not support tools$"):
        read({"tools": [tool]}, model=UNABLE)


# --- generate -------------------------------------------------------------------------------------


def test_prompt_is_a_message(read: Any) -> None:
    body = {"prompt": "a", "system": "s", "images": [PNG]}

    request = read(body, "/api/generate")

    assert request.kind == "chat"

    image = ImagePart(f"data:image/png;base64,{PNG}")
    assert request.messages == (
        Message("system", (TextPart("s"),)),
        Message("user", (TextPart("a"), image)),
    )


def test_raw_prompt_has_no_template(read: Any) -> None:
    request = read({"prompt": "a", "raw": True}, "/api/generate")

    assert (request.kind, request.prompts, request.templating.mode) == ("completion", ("a",), "raw")


def test_suffix_needs_a_model_that_inserts(read: Any) -> None:
    assert read({"prompt": "a", "suffix": "z"}, "/api/generate", ABLE).insert_before == "z"
    with pytest.raises(UnsupportedFeature, match="m does not support insert"):
        read({"prompt": "a", "suffix": "z"}, "/api/generate", DEFAULT)


@pytest.mark.parametrize("fields", [{"template": "t"}, {"system": "s"}, {"context": [1]}], ids=str)
def test_raw_prompt_excludes_what_templates_use(read: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="raw mode does not support template"):
        read({"prompt": "a", "raw": True, **fields}, "/api/generate")


def test_raw_prompt_excludes_images(read: Any) -> None:
    with pytest.raises(UnsupportedFeature, match="takes no images"):
        read({"prompt": "a", "raw": True, "images": [PNG]}, "/api/generate")


def test_template_and_context_are_losses(read: Any) -> None:
    request = read({"prompt": "a", "template": "t", "context": [1]}, "/api/generate")

    assert request.extra.keys() == {"template", "context"}


def test_images_need_a_model_that_sees(read: Any) -> None:
    with pytest.raises(UnsupportedFeature, match="m does not support vision"):
        read({"prompt": "a", "images": [PNG]}, "/api/generate", UNABLE)
    assert read({"prompt": "a", "images": []}, "/api/generate", UNABLE).messages


# --- embeddings -----------------------------------------------------------------------------------


def test_embed_has_one_or_more_inputs(read: Any) -> None:
    assert read({"input": "a"}, "/api/embed", VECTORS).inputs == ("a",)
    assert read({"input": ["a", "b"]}, "/api/embed").inputs == ("a", "b")
    assert read({"prompt": "a"}, "/api/embeddings").inputs == ("a",)


def test_truncate_of_embed_is_the_rule_for_long_inputs(read: Any) -> None:
    assert read({"input": "a", "truncate": True}, "/api/embed").overflow == "truncate"
    assert read({"input": "a", "truncate": False}, "/api/embed").overflow == "error"


def test_embed_reports_all_options_as_losses(read: Any) -> None:
    body = {"input": "a", "options": {"temperature": 1, "num_ctx": None}, "dimensions": 2}

    request = read(body, "/api/embed")

    assert isinstance(request, EmbeddingRequest)
    assert request.extra.keys() == {"options.temperature"}
    assert request.dimensions is None


@pytest.mark.parametrize("value", [5, {}, ["a", 5]])
def test_other_inputs_are_rejected(read: Any, value: Any) -> None:
    with pytest.raises(InvalidParameter, match="invalid input type"):
        read({"input": value}, "/api/embed")


@pytest.mark.parametrize(
    ("path", "model", "text"),
    [
        ("/api/chat", VECTORS, '"m" does not support chat'),
        ("/api/generate", VECTORS, '"m" does not support generate'),
        ("/api/embed", DEFAULT, '"m" does not support embeddings'),
    ],
)
def test_requests_for_a_model_of_another_task_are_rejected(
    read: Any, path: str, model: ModelInfo, text: str
) -> None:
    with pytest.raises(UnsupportedFeature, match=text):
        read({}, path, model)


@pytest.mark.parametrize("fields", [{"model": 5}, {"options": 5}, {"stream": "yes"}, {"raw": 1}])
def test_fields_of_a_wrong_type_are_rejected(read: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ClientError):
        read({"prompt": "a", **fields}, "/api/generate")
