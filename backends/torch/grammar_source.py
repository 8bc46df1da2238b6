"""The text of a grammar: its parts, and a writer that names rules and embeds JSON schemas."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

ANY_TEXT: Final = r"(.|\n)*"


class GrammarPart(NamedTuple):
    """A named part of a grammar; the first is the start, which refers to others as ``@name``.

    A ``lenient`` JSON Schema ignores unsupported keys.
    """

    name: str
    kind: Literal["json", "lenient", "regex", "lark", "grammar"]
    text: str


GrammarSource = tuple[GrammarPart, ...]


class GrammarWriter:
    """Collects the rules of one Lark grammar and the schemas that they refer to.

    ``special_tokens`` maps the text of the model's special tokens to their ids: a text can't match
    them, so they are written as ids.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._pieces_pattern = re.compile(rf"(\{{index\}}{'|' + names if names else ''})")
        self._rules: list[str] = []
        self._schemas: list[GrammarPart] = []

    def build_source(self, start: str) -> GrammarSource:
        """The grammar whose start is this expression."""
        rules = [f"start: {start}", *self._rules, f"TEXT: /{ANY_TEXT}/"]
        return (GrammarPart("answer", "lark", "\n".join(rules)), *self._schemas)

    def is_special(self, text: str) -> bool:
        """Whether this text is one special token."""
        return text in self._special_tokens

    def find_special(self, texts: str) -> list[str]:
        """The special tokens in these texts, as literals."""
        return [self.quote(text) for text in self._special_tokens if text in texts]

    def quote(self, text: str) -> str:
        """The literals for a text, which may be empty; ``{index}`` stands for a number."""
        return " ".join(self._quote_piece(one) for one in self._pieces_pattern.split(text) if one)

    def _quote_piece(self, text: str) -> str:
        if text == "{index}":
            return "/[0-9]{1,3}/"  # a model could write digits to its token limit
        token_id = self._special_tokens.get(text)
        return quote_literal(text) if token_id is None else f"<[{token_id}]>"

    def add_rule(self, expression: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def reserve_rule(self) -> str:
        """The name of a rule that refers to itself; ``set_rule`` must follow."""
        return self.add_rule("")

    def set_rule(self, name: str, expression: str) -> None:
        """Give a reserved rule its expression."""
        self._rules[int(name[1:])] = f"{name}: {expression}"

    def add_choice(self, expressions: Iterable[str]) -> str:
        """Add a rule with alternatives; returns its name."""
        return self.add_rule(" | ".join(one or '""' for one in expressions))

    def add_schema(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """Add a JSON Schema; returns the reference to it."""
        name = f"s{len(self._schemas)}"
        text = msgspec.json.encode(schema).decode()
        self._schemas.append(GrammarPart(name, "json" if strict else "lenient", text))
        return f"@{name}"

    def add_parts(self, parts: Iterable[GrammarPart]) -> None:
        """Add parts that are referred to by their own names."""
        self._schemas += parts

    def write_text_until(self, closing: str, pattern: str = ANY_TEXT) -> str:
        """The expression of the shortest text that ends with ``closing``."""
        pieces = [one for one in self._pieces_pattern.split(closing) if one]
        first = next((i for i, one in enumerate(pieces) if self.is_special(one)), None)
        if first is None:
            return self.add_rule(f"/{pattern}/ {self.quote(closing)}", "[lazy]")
        # A text has no special tokens, so it ends by itself before the first one.
        return f"/{pattern}/ {self.quote(''.join(pieces[first:]))}"


def quote_literal(text: str) -> str:
    """A Lark literal."""
    return msgspec.json.encode(text).decode()
