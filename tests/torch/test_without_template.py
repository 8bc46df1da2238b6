"""A model whose tokenizer has no chat template: conversations are refused, prompts are not."""

import copy
from typing import Any

import pytest
import torch

from backends.torch.assembly import Model
from backends.torch.reading import Reader
from backends.torch.spec import Ending, Generate, Input, Turn
from tests.torch.conftest import Driven


@pytest.fixture
def driven(tiny: Model) -> Driven:
    plain: Any = copy.deepcopy(tiny.tokenizer)
    plain.chat_template = None
    reader = Reader(plain, context=128, vocabulary=259, defaults={"temperature": 0.0})
    return Driven(tiny._replace(tokenizer=plain, input_processor=reader))


def test_a_conversation_is_refused(driven: Driven) -> None:
    failed = driven.run(Generate(1, Input((Turn("user", "hi"),)))).failed()
    assert (failed.kind, failed.param) == ("unsupported", "messages")
    assert failed.message == "this model has no chat template; it takes prompts"


@pytest.mark.parametrize("wrap", [False, True])
def test_prompts_are_taken_as_they_are(driven: Driven, reference: Any, wrap: bool) -> None:
    asked = Generate(
        1,
        Input(prompts=("hi",), as_user_message=wrap),
        stopping=Ending(max_tokens=1),
        token_ids=True,
    )
    with torch.inference_mode():
        expected = int(reference(torch.tensor([list(b"hi")])).logits[0, -1].argmax())
    assert driven.run(asked).ids() == [expected]
