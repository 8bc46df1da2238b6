"""The chat template is the request's, else the configuration's, else the model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.torch.ipc import ChatTurn, FunctionDefinition, PromptInput, StopParams
from backends.torch.loaded_model import load_model, load_template
from backends.torch.loader import ModelLocation
from backends.torch.model_files import ModelError

Drive = Callable[..., Any]
HI = (ChatTurn("user", "hi"),)


def test_template_is_read_from_a_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own", "utf-8")
    assert load_template(str(tmp_path / "own.jinja")) == "own"

    described = tmp_path / "tokenizer_config.json"
    described.write_bytes(msgspec.json.encode({"chat_template": "one"}))
    assert load_template(str(tmp_path)) == "one"

    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    described.write_bytes(msgspec.json.encode({"chat_template": several}))
    assert load_template(str(tmp_path)) == {"default": "a", "tool_use": "b"}

    (tmp_path / "chat_template.jinja").write_text("apart", "utf-8")
    assert load_template(str(tmp_path)) == "apart"


@pytest.mark.parametrize("described", [None, b"{}", b"no", b'{"chat_template":[1]}'])
def test_folder_without_a_chat_template_is_rejected(
    tmp_path: Path, described: bytes | None
) -> None:
    if described is not None:
        (tmp_path / "tokenizer_config.json").write_bytes(described)
    with pytest.raises(ModelError, match="no chat template in"):
        load_template(str(tmp_path))


def test_configured_template_overrides_that_of_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("[{{ messages[0].content }}]", "utf-8")
    model = load_model(ModelLocation(str(tiny_folder), "generate"), "cpu", "auto", None, str(own))

    (ids,) = model.input_processor.tokenize_prompts(PromptInput(turns=HI), StopParams())

    assert model.tokenizer.decode(ids) == "[hi]"


def render_prompt(driver: Any, **fields: Any) -> str:
    (ids,) = driver.engine._input_processor.tokenize_prompts(PromptInput(**fields), StopParams())
    prompt: str = driver.engine._tokenizer.decode(ids)
    return prompt


def test_template_of_the_request_overrides_both(noisy: Drive) -> None:
    assert render_prompt(noisy(), turns=HI) == "<user>hi<assistant>"

    own = "{{ tools[0].function.name }}: {{ messages[0].content }}, {{ mood }}"
    arguments = b'{"mood": "gay", "tools": [], "chat_template": "x"}'
    functions = (FunctionDefinition("f"),)
    prompt = render_prompt(
        noisy(), turns=HI, functions=functions, template=own, template_arguments=arguments
    )

    assert prompt == "f: hi, gay"


def test_tool_use_template_is_used_for_functions(noisy: Drive) -> None:
    driver = noisy()
    driver.engine._tokenizer.chat_template = {"default": "plain", "tool_use": "with {{ tools }}"}

    assert render_prompt(driver, turns=HI) == "plain"
    assert render_prompt(driver, turns=HI, functions=(FunctionDefinition("f"),)).startswith(
        "with ["
    )


def test_continue_final_continues_the_assistant_message(noisy: Drive) -> None:
    turns = (*HI, ChatTurn("assistant", "Well, I"))
    assert render_prompt(noisy(), turns=turns, continue_final=True) == "<user>hi<assistant>Well, I"
    assert render_prompt(noisy(), turns=turns) == "<user>hi<assistant>Well, I<assistant>"
    assert render_prompt(noisy(), turns=HI, generation_prompt=False) == "<user>hi"


def test_prompt_is_wrapped_as_user_message_on_request(noisy: Drive) -> None:
    assert render_prompt(noisy(), prompts=("hi",), as_user_message=True) == "<user>hi<assistant>"
    assert render_prompt(noisy(), prompts=("hi",)) == "hi"
