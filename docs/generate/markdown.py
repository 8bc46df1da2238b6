"""The bits of Markdown that the reference pages are written in."""

import inspect
from collections.abc import Iterable, Sequence

HEADER = "<!-- Made by `make docs` from the code. What is wrong here is mended there. -->"

_LARGE = 2**31 - 1
_PRECISE = 10**15


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def code(text: object) -> str:
    """As code; nothing of nothing."""
    if text in (None, ""):
        return ""
    return f"`` {text} ``" if "`" in str(text) else f"`{text}`"


def prose(thing: object) -> str:
    """A docstring, its marks of code as Markdown has them."""
    return (inspect.getdoc(thing) or "").replace("``", "`")


def number(value: float) -> str:
    """A number as people write it; large whole ones by their power of two."""
    if abs(value) >= _LARGE and float(value).is_integer():
        for near, rest in ((int(value), ""), (int(value) + 1, " - 1")):
            if abs(near).bit_count() == 1:
                return f"{'-' if near < 0 else ''}2^{abs(near).bit_length() - 1}{rest}"
    whole = float(value).is_integer() and abs(value) < _PRECISE
    return str(int(value)) if whole else f"{value:g}"
