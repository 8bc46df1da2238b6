"""Recursive JSON schemas cost no more than their size."""

from typing import Any

import msgspec
import pytest

from backends.torch.argument_syntax import list_branches
from backends.torch.call_formats import CALL_FORMATS
from backends.torch.ipc import FunctionChoice, FunctionDefinition
from backends.torch.output_grammar import OutputConstraint, build_output_grammar

ITSELF = {"$ref": "#/$defs/A"}


def test_references_are_followed_once() -> None:
    root = {"$defs": {"A": {"anyOf": [*[ITSELF] * 200, {"type": "null"}]}}}

    assert list_branches(ITSELF, root) == [{"type": "null"}]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": ITSELF},
        {"type": "object", "properties": {"a": ITSELF, "b": ITSELF}},
    ],
)
def test_gemma_grammar_of_recursive_schema_is_small(schema: Any) -> None:
    parameters = {"type": "object", "$defs": {"A": schema}, "properties": {"x": ITSELF}}
    gemma = next(one for one in CALL_FORMATS if one.family == "Gemma 4")
    function = FunctionDefinition("f", None, msgspec.json.encode(parameters))
    choice = FunctionChoice(("f",), True)

    parts = build_output_grammar(OutputConstraint(None, choice, (function,), gemma), {})

    assert sum(len(part.text) for part in parts) < 2000
