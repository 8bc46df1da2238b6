"""The grammar of an answer: the form it was asked to have, and the calls it may make."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from backends.torch.families import ToolCallFormat
from backends.torch.grammar import GrammarPart, GrammarSource
from backends.torch.reading import RequestRejectedError
from backends.torch.wishes import FunctionChoice, FunctionDefinition, OutputFormat

MAX_CALLS: Final = 16
"""In one answer: a weak model may know no end."""
_TEXT_RULE: Final = r"TEXT: /(.|\n)*/"
_NON_JSON_TEXT_RULE: Final = r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"
"""Where a brace is how a call begins."""


def build_format_grammar(form: OutputFormat) -> GrammarSource:
    """The grammar of a text of this form. Raises Refused."""
    match form.kind:
        case "json":
            if not form.text.lstrip().startswith("{"):
                raise RequestRejectedError("invalid", "the schema is no object", param=form.param)
            return (GrammarPart("form", "lenient" if form.lenient else "json", form.text),)
        case "regex":
            return (GrammarPart("form", "regex", form.text),)
        case "grammar":
            return (GrammarPart("form", "grammar", form.text),)
        case "choice":
            options = msgspec.json.decode(form.text, type=list[str])
            if not options:
                raise RequestRejectedError(
                    "invalid", "there is nothing to choose from", param=form.param
                )
            return (
                GrammarPart("form", "lark", f"start: {' | '.join(map(_quote_literal, options))}"),
            )


def build_calls_grammar(
    calling: FunctionChoice,
    functions: Sequence[FunctionDefinition],
    family: ToolCallFormat,
    special: Mapping[str, int],
    form: OutputFormat | None,
) -> GrammarSource:
    """The grammar of a text that may, or must, end in calls of ``functions``.

    Without calls it has ``form``, where one was asked for. ``special`` are the model's special
    tokens, by their text. Raises Refused.
    """
    literal = LarkLiterals(special)
    opens, rest = (
        family.call_prefix,
        (family.section_prefix + family.call_prefix)[len(family.trigger) :],
    )
    more = (
        f"({literal(family.call_separator)} call){{0,{MAX_CALLS - 1}}} " if calling.parallel else ""
    )
    end = more + literal(family.section_suffix)
    rules = [*_build_start_rules(calling, family, special, free=form is None)]
    rules += _build_call_rule("call", opens, functions, family, literal)
    if rules[0].endswith("marked"):
        rules += [
            f"marked: lead first {end}",
            *_build_call_rule("first", rest, functions, family, literal),
        ]
    else:
        rules.append(f"calls: {literal(family.section_prefix)} call {end}")
    parts = [GrammarPart("answer", "lark", "\n".join(rules))]
    parts += (
        GrammarPart(f"arguments{i}", "json" if one.strict else "lenient", _build_object_schema(one))
        for i, one in enumerate(functions)
    )
    return (*parts, *(() if form is None or calling.required else build_format_grammar(form)))


def _build_call_rule(
    rule: str,
    opens: str,
    functions: Sequence[FunctionDefinition],
    family: ToolCallFormat,
    literal: "LarkLiterals",
) -> list[str]:
    """A rule for a call of any of the functions, whose texts begin with ``opens``."""
    names = " | ".join(f"{rule}{i}" for i in range(len(functions)))
    return [f"{rule}: {names}"] + [
        f"{rule}{i}: {literal(opens + one.name + family.name_separator)} @arguments{i} "
        f"{literal(family.call_suffix)}"
        for i, one in enumerate(functions)
    ]


def _build_start_rules(
    calling: FunctionChoice, family: ToolCallFormat, special: Mapping[str, int], *, free: bool
) -> Sequence[str]:
    if calling.required:
        return ("start: calls",)
    if not free:
        return ("start: calls | @form",)
    if not family.trigger:
        return ("start: calls | TEXT", _NON_JSON_TEXT_RULE)
    if family.trigger in special:
        return ("start: TEXT | TEXT calls", _TEXT_RULE)
    # The mark ends the text before it, and what is left of the calls follows.
    return (
        "start: TEXT | marked",
        f"lead[lazy]: TEXT {_quote_literal(family.trigger)}",
        _TEXT_RULE,
    )


class LarkLiterals:
    """Texts as Lark has them; the tokens among them by their numbers."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special_pattern = re.compile(f"({names})") if names else None

    def __call__(self, text: str) -> str:
        """One text, which may be empty."""
        pieces = self._special_pattern.split(text) if self._special_pattern else [text]
        return " ".join(self._format_piece(piece) for piece in pieces if piece)

    def _format_piece(self, text: str) -> str:
        number = self._special.get(text)
        return _quote_literal(text) if number is None else f"<[{number}]>"


def _quote_literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _build_object_schema(function: FunctionDefinition) -> str:
    """A function's schema, which is of an object whatever else it says. Raises Refused."""
    try:
        schema = msgspec.json.decode(function.parameters, type=dict[str, Any])
    except msgspec.ValidationError as error:
        text = f"the parameters of {function.name} are no JSON Schema"
        raise RequestRejectedError("invalid", text, param="tools") from error
    if schema.setdefault("type", "object") != "object":
        text = f"the parameters of {function.name} are not those of an object"
        raise RequestRejectedError("invalid", text, param="tools")
    return msgspec.json.encode(schema).decode()
