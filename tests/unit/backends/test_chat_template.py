"""Chat templates render conversations as prompts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Raw

from backends import chat_template
from backends.chat_template import ChatTemplate, _Sandbox
from protocols.core.errors import InvalidParameter
from protocols.core.request import (
    GenerationRequest,
    Message,
    PromptOptions,
    TextPart,
    Tool,
    ToolCall,
)

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat(*turns: tuple[str, str], **fields: Any) -> GenerationRequest:
    messages = tuple(Message(role, (TextPart(text),)) for role, text in turns)  # type: ignore[arg-type]
    return GenerationRequest(model="m", kind="chat", messages=messages, **fields)


def write_tokenizer_config(path: Path, **described: Any) -> Path:
    (path / "tokenizer_config.json").write_bytes(msgspec.json.encode(described))
    return path


def test_template_and_special_tokens_are_read_from_the_tokenizer_folder(tmp_path: Path) -> None:
    write_tokenizer_config(
        tmp_path, chat_template=CHATML, bos_token={"content": "<s>"}, eos_token=None
    )

    text = ChatTemplate(str(tmp_path)).render_prompt(
        make_chat(("system", "Be brief."), ("user", "Hi"))
    )

    assert text == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "described",
    [
        {"chat_template": [{"name": "tool_use", "template": "no"},
                           {"name": "default", "template": "{{ messages[0].content }}"}]},
        {"chat_template": "{{ messages[0].content }}"},
    ],
    ids=["several", "one"],
)  # fmt: skip
def test_default_of_several_templates_is_used(tmp_path: Path, described: dict[str, Any]) -> None:
    template = ChatTemplate(str(write_tokenizer_config(tmp_path, **described)))
    assert template.render_prompt(make_chat(("user", "Hi"))) == "Hi"


def test_template_file_takes_precedence(tmp_path: Path) -> None:
    write_tokenizer_config(tmp_path, chat_template="no")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")

    assert ChatTemplate(str(tmp_path)).render_prompt(make_chat(("user", "Hi"))) == "user"
    assert (
        ChatTemplate(str(tmp_path / "chat_template.jinja")).render_prompt(make_chat(("tool", "")))
        == "tool"
    )


def test_continue_final_leaves_the_assistant_message_open(tmp_path: Path) -> None:
    template = ChatTemplate(
        str(write_tokenizer_config(tmp_path, chat_template=CHATML, bos_token=""))
    )
    going_on = PromptOptions(continue_final=True)

    text = template.render_prompt(
        make_chat(("user", "Count."), ("assistant", "One, "), templating=going_on)
    )

    assert text.endswith("<|im_start|>assistant\nOne, ")


def test_template_gets_tool_calls_and_tools_as_objects(tmp_path: Path) -> None:
    source = (
        "{{ tools | tojson }}|{{ messages[0].tool_calls[0].function.arguments.city }}"
        "|{{ messages[1].tool_call_id }}|{{ messages[1].name }}|{{ style }}"
    )
    template = ChatTemplate(str(write_tokenizer_config(tmp_path, chat_template=source)))
    request = GenerationRequest(
        model="m",
        kind="chat",
        messages=(
            Message("assistant", tool_calls=(ToolCall("c1", "weather", '{"city":"Ulm"}'),)),
            Message("tool", (TextPart("rain"),), "weather", tool_call_id="c1"),
        ),
        tools=(Tool("weather", parameters=Raw(b'{"type":"object"}')), Tool("plain", "does it")),
        templating=PromptOptions(arguments={"style": Raw(b'"x"'), "messages": Raw(b"[]")}),
    )

    assert template.render_prompt(request) == (
        '[{"type":"function","function":{"name":"weather","description":"",'
        '"parameters":{"type":"object"}}},{"type":"function","function":{"name":"plain",'
        '"description":"does it"}}]|Ulm|c1|weather|x'
    )


def test_template_gets_invalid_json_arguments_as_an_object(tmp_path: Path) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}{{ none | tojson(indent=2) }}"
    template = ChatTemplate(str(write_tokenizer_config(tmp_path, chat_template=source)))
    call = Message("assistant", tool_calls=(ToolCall("c", "f", "{oops"),))

    request = GenerationRequest(model="m", kind="chat", messages=(call,))
    assert template.render_prompt(request) == "{'arguments': '{oops'}null"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ messages.pop() }}",
    ],
)
def test_template_error_is_an_invalid_messages_parameter(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(str(write_tokenizer_config(tmp_path, chat_template=source)))
    with pytest.raises(InvalidParameter) as excinfo:
        template.render_prompt(make_chat(("user", "Hi")))
    assert excinfo.value.param == "messages"


def test_prompt_of_a_template_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that repeats a message is stopped before its prompt is larger than the limit."""
    monkeypatch.setattr(chat_template, "_MAX_PROMPT", 1000)
    source = "{% for i in range(count) %}{{ messages[0].content }}{% endfor %}"
    template = ChatTemplate(str(write_tokenizer_config(tmp_path, chat_template=source)))

    def render(count: int) -> str:
        options = PromptOptions(arguments={"count": Raw(str(count).encode())})
        return template.render_prompt(make_chat(("user", "x" * 100), templating=options))

    assert len(render(10)) == 1000
    with pytest.raises(InvalidParameter, match="more than 1000 characters"):
        render(100_000)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (b"{}", "no chat template"),
        (b'{"chat_template": 5}', "no chat template"),
        (b"{", "invalid tokenizer_config"),
        (b'{"chat_template": "{% if %}"}', "invalid chat template"),
    ],
)
def test_folder_without_a_valid_template_is_rejected(
    tmp_path: Path, described: bytes, message: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(described)
    with pytest.raises(ValueError, match=message):
        ChatTemplate(str(tmp_path))


def test_empty_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(str(tmp_path))


def test_template_can_format_the_date(tmp_path: Path) -> None:
    template = ChatTemplate(
        str(write_tokenizer_config(tmp_path, chat_template="{{ strftime_now('%Y') }}"))
    )
    assert len(template.render_prompt(make_chat(("user", "Hi")))) == 4


@given(
    st.sampled_from(["role", "content", "items", "keys", "get", "absent", "mro", "__class__", "_"]),
    st.dictionaries(st.sampled_from(["role", "items", "get", "mro", "__class__", "_"]), st.text()),
)
def test_attribute_lookup_matches_the_jinja_sandbox(name: str, item: dict[str, str]) -> None:
    texts = [str(one().getattr(item, name)) for one in (_Sandbox, ImmutableSandboxedEnvironment)]
    assert texts[0].partition(" at 0x")[0] == texts[1].partition(" at 0x")[0]


def test_template_arguments_override_globals_for_one_request_only(
    tmp_path: Path,
) -> None:
    file = tmp_path / "seen.jinja"
    file.write_text("{% for i in range(2) %}{{ i }}{% endfor %}{{ strftime_now and bos_token }}")
    template = ChatTemplate(str(file))
    own = PromptOptions(arguments={"range": Raw(b'"no"'), "bos_token": Raw(b'"<s>"')})

    assert template.render_prompt(make_chat(("user", "Hi"))) == "01"
    with pytest.raises(InvalidParameter, match="not callable"):
        template.render_prompt(make_chat(("user", "Hi"), templating=own))
    assert template.render_prompt(make_chat(("user", "Hi"))) == "01", (
        "one request changes nothing for others"
    )
