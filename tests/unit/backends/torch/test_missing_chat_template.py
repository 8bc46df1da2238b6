"""A model without a chat template rejects conversations and serves prompts."""

import copy
from typing import Any

import pytest
import torch

from backends.torch.ipc import ChatTurn, GenerateCommand, PromptInput, StopParams
from backends.torch.loaded_model import LoadedModel
from backends.torch.tokenization import InputProcessor
from tests.support.tiny_model import EngineDriver


@pytest.fixture
def engine_runner(tiny: LoadedModel) -> EngineDriver:
    plain: Any = copy.deepcopy(tiny.tokenizer)
    plain.chat_template = None
    reader = InputProcessor(plain, context=128, vocabulary=259, defaults={"temperature": 0.0})
    return EngineDriver(tiny._replace(tokenizer=plain, input_processor=reader))


def test_chat_without_a_template_is_rejected(engine_runner: EngineDriver) -> None:
    failed = engine_runner.run(GenerateCommand(1, PromptInput((ChatTurn("user", "hi"),)))).failed()
    assert (failed.kind, failed.param) == ("unsupported", "messages")
    assert failed.message == "this model has no chat template; it takes prompts"


@pytest.mark.parametrize("wrap", [False, True])
def test_prompts_are_used_unchanged_without_a_template(
    engine_runner: EngineDriver, reference: Any, wrap: bool
) -> None:
    command = GenerateCommand(
        1,
        PromptInput(prompts=("hi",), as_user_message=wrap),
        stopping=StopParams(max_tokens=1),
        token_ids=True,
    )
    with torch.inference_mode():
        expected = int(reference(torch.tensor([list(b"hi")])).logits[0, -1].argmax())

    assert engine_runner.run(command).ids() == [expected]
