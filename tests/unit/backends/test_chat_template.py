"""Chat templates: what a model's own makes of a conversation."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Raw

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


def ask(*said: tuple[str, str], **more: Any) -> GenerationRequest:
    messages = tuple(Message(role, (TextPart(text),)) for role, text in said)  # type: ignore[arg-type]
    return GenerationRequest(model="m", kind="chat", messages=messages, **more)


def folder(path: Path, **described: Any) -> Path:
    (path / "tokenizer_config.json").write_bytes(msgspec.json.encode(described))
    return path


def test_a_tokenizers_folder_brings_its_template_and_its_special_tokens(tmp_path: Path) -> None:
    folder(tmp_path, chat_template=CHATML, bos_token={"content": "<s>"}, eos_token=None)

    text = ChatTemplate(str(tmp_path)).render_prompt(ask(("system", "Be brief."), ("user", "Hi")))

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
def test_the_default_one_of_several_is_taken(tmp_path: Path, described: dict[str, Any]) -> None:
    template = ChatTemplate(str(folder(tmp_path, **described)))
    assert template.render_prompt(ask(("user", "Hi"))) == "Hi"


def test_a_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    folder(tmp_path, chat_template="no")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")

    assert ChatTemplate(str(tmp_path)).render_prompt(ask(("user", "Hi"))) == "user"
    assert (
        ChatTemplate(str(tmp_path / "chat_template.jinja")).render_prompt(ask(("tool", "")))
        == "tool"
    )


def test_an_assistants_message_is_gone_on_with(tmp_path: Path) -> None:
    template = ChatTemplate(str(folder(tmp_path, chat_template=CHATML, bos_token="")))
    going_on = PromptOptions(continue_final=True)

    text = template.render_prompt(
        ask(("user", "Count."), ("assistant", "One, "), templating=going_on)
    )

    assert text.endswith("<|im_start|>assistant\nOne, ")


def test_calls_and_tools_are_seen_as_objects(tmp_path: Path) -> None:
    source = (
        "{{ tools | tojson }}|{{ messages[0].tool_calls[0].function.arguments.city }}"
        "|{{ messages[1].tool_call_id }}|{{ messages[1].name }}|{{ style }}"
    )
    template = ChatTemplate(str(folder(tmp_path, chat_template=source)))
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


def test_arguments_that_are_no_json_are_seen_as_they_are(tmp_path: Path) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}{{ none | tojson(indent=2) }}"
    template = ChatTemplate(str(folder(tmp_path, chat_template=source)))
    call = Message("assistant", tool_calls=(ToolCall("c", "f", "{oops"),))

    request = GenerationRequest(model="m", kind="chat", messages=(call,))
    assert template.render_prompt(request) == "{oopsnull"


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
def test_a_template_that_refuses_is_the_clients_to_mend(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(str(folder(tmp_path, chat_template=source)))
    with pytest.raises(InvalidParameter) as caught:
        template.render_prompt(ask(("user", "Hi")))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (b"{}", "no chat template"),
        (b'{"chat_template": 5}', "no chat template"),
        (b"{", "invalid tokenizer_config"),
        (b'{"chat_template": "{% if %}"}', "invalid chat template"),
    ],
)
def test_a_folder_without_a_template_is_told_of(
    tmp_path: Path, described: bytes, said: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(described)
    with pytest.raises(ValueError, match=said):
        ChatTemplate(str(tmp_path))


def test_an_empty_folder_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(str(tmp_path))


def test_the_date_is_there_for_those_that_tell_it(tmp_path: Path) -> None:
    template = ChatTemplate(str(folder(tmp_path, chat_template="{{ strftime_now('%Y') }}")))
    assert len(template.render_prompt(ask(("user", "Hi")))) == 4


@given(
    st.sampled_from(["role", "content", "items", "keys", "get", "absent", "mro", "__class__", "_"]),
    st.dictionaries(st.sampled_from(["role", "items", "get", "mro", "__class__", "_"]), st.text()),
)
def test_an_item_is_found_as_the_sandbox_finds_it(name: str, item: dict[str, str]) -> None:
    found = [str(one().getattr(item, name)) for one in (_Sandbox, ImmutableSandboxedEnvironment)]
    assert found[0].partition(" at 0x")[0] == found[1].partition(" at 0x")[0]


def test_a_template_sees_what_all_templates_see_unless_a_request_says_otherwise(
    tmp_path: Path,
) -> None:
    file = tmp_path / "seen.jinja"
    file.write_text("{% for i in range(2) %}{{ i }}{% endfor %}{{ strftime_now and bos_token }}")
    template = ChatTemplate(str(file))
    own = PromptOptions(arguments={"range": Raw(b'"no"'), "bos_token": Raw(b'"<s>"')})

    assert template.render_prompt(ask(("user", "Hi"))) == "01"
    with pytest.raises(InvalidParameter, match="not callable"):
        template.render_prompt(ask(("user", "Hi"), templating=own))
    assert template.render_prompt(ask(("user", "Hi"))) == "01", (
        "one request changes nothing for others"
    )
