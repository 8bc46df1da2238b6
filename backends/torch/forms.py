"""The grammar of an answer: the form it was asked to have, and the calls it may make."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from backends.torch.families import Family
from backends.torch.grammar import Part, Source
from backends.torch.reading import Refused
from backends.torch.spec import Calling, Form, Function

MOST_CALLS: Final = 16
"""In one answer: a weak model may know no end."""
_TEXT: Final = r"TEXT: /(.|\n)*/"
_OTHER_TEXT: Final = r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"
"""Where a brace is how a call begins."""


def of_form(form: Form) -> Source:
    """The grammar of a text of this form. Raises Refused."""
    match form.kind:
        case "json":
            if not form.text.lstrip().startswith("{"):
                raise Refused("invalid", "the schema is no object", param=form.param)
            return (Part("form", "lenient" if form.lenient else "json", form.text),)
        case "regex":
            return (Part("form", "regex", form.text),)
        case "grammar":
            return (Part("form", "grammar", form.text),)
        case "choice":
            options = msgspec.json.decode(form.text, type=list[str])
            if not options:
                raise Refused("invalid", "there is nothing to choose from", param=form.param)
            return (Part("form", "lark", f"start: {' | '.join(map(_quoted, options))}"),)


def of_calls(
    calling: Calling,
    functions: Sequence[Function],
    family: Family,
    special: Mapping[str, int],
    form: Form | None,
) -> Source:
    """The grammar of a text that may, or must, end in calls of ``functions``.

    Without calls it has ``form``, where one was asked for. ``special`` are the model's special
    tokens, by their text. Raises Refused.
    """
    literal = Literals(special)
    opens, rest = (
        family.call_prefix,
        (family.section_prefix + family.call_prefix)[len(family.trigger) :],
    )
    more = (
        f"({literal(family.call_separator)} call){{0,{MOST_CALLS - 1}}} "
        if calling.parallel
        else ""
    )
    end = more + literal(family.section_suffix)
    rules = [*_start(calling, family, special, free=form is None)]
    rules += _each("call", opens, functions, family, literal)
    if rules[0].endswith("marked"):
        rules += [f"marked: lead first {end}", *_each("first", rest, functions, family, literal)]
    else:
        rules.append(f"calls: {literal(family.section_prefix)} call {end}")
    parts = [Part("answer", "lark", "\n".join(rules))]
    parts += (
        Part(f"arguments{i}", "json" if one.strict else "lenient", _object(one))
        for i, one in enumerate(functions)
    )
    return (*parts, *(() if form is None or calling.required else of_form(form)))


def _each(
    rule: str, opens: str, functions: Sequence[Function], family: Family, literal: "Literals"
) -> list[str]:
    """A rule for a call of any of the functions, whose texts begin with ``opens``."""
    names = " | ".join(f"{rule}{i}" for i in range(len(functions)))
    return [f"{rule}: {names}"] + [
        f"{rule}{i}: {literal(opens + one.name + family.name_separator)} @arguments{i} "
        f"{literal(family.call_suffix)}"
        for i, one in enumerate(functions)
    ]


def _start(
    calling: Calling, family: Family, special: Mapping[str, int], *, free: bool
) -> Sequence[str]:
    if calling.required:
        return ("start: calls",)
    if not free:
        return ("start: calls | @form",)
    if not family.trigger:
        return ("start: calls | TEXT", _OTHER_TEXT)
    if family.trigger in special:
        return ("start: TEXT | TEXT calls", _TEXT)
    # The mark ends the text before it, and what is left of the calls follows.
    return ("start: TEXT | marked", f"lead[lazy]: TEXT {_quoted(family.trigger)}", _TEXT)


class Literals:
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
        return _quoted(text) if number is None else f"<[{number}]>"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _object(function: Function) -> str:
    """A function's schema, which is of an object whatever else it says. Raises Refused."""
    try:
        schema = msgspec.json.decode(function.parameters, type=dict[str, Any])
    except msgspec.ValidationError as error:
        text = f"the parameters of {function.name} are no JSON Schema"
        raise Refused("invalid", text, param="tools") from error
    if schema.setdefault("type", "object") != "object":
        text = f"the parameters of {function.name} are not those of an object"
        raise Refused("invalid", text, param="tools")
    return msgspec.json.encode(schema).decode()
