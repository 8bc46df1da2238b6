"""A chat template that is nested too deep is refused: no failure of the engine."""

import pytest

from backends.torch.ipc import ChatTurn, GenerateCommand, PromptInput
from backends.torch.loaded_model import LoadedModel
from tests.support.tiny_model import EngineDriver


@pytest.mark.parametrize(
    "template",
    [
        "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
        "{{" + "a + " * 2000 + "b }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=["parentheses", "conditions", "loops", "sums", "recursive macro"],
)
def test_template_that_is_nested_too_deep_is_refused(tiny: LoadedModel, template: str) -> None:
    engine = EngineDriver(tiny)
    turns = (ChatTurn("user", "hi"),)

    failed = engine.run(GenerateCommand(1, PromptInput(turns, template=template))).failed()

    assert (failed.kind, failed.param) == ("invalid", "messages")
    assert failed.message == "the chat template is nested too deep, or calls itself"
