"""The documentation's table of chat templates matches the engine."""

import pytest

from tests.integration.torch.template_table import (
    PAGE,
    build_table,
    check_template,
    load_templates,
    replace_table,
)

pytestmark = pytest.mark.slow
KNOWN_FAULTS = {
    "LFM2.5-8B-A1B": ["marks in a text", "lines"],
    "NVIDIA-Nemotron-Nano-v2": ["content before a call"],
}
"""Templates that escape nothing, nest their own tags, or write two messages."""


def test_outputs_of_chat_templates_are_parsed() -> None:
    try:
        templates = load_templates()
    except RuntimeError as error:
        pytest.skip(str(error))

    results = {name: check_template(template) for name, template in templates.items()}

    assert {name: one.wrong for name, one in results.items() if one.wrong} == KNOWN_FAULTS
    assert sum(one.cases for one in results.values()) > 500

    page = PAGE.read_text("utf-8")
    assert replace_table(page, build_table(templates)) == page
