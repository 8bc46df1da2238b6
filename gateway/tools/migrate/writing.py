"""A configuration as a file: what is said in one line where it fits, and why beside it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.tools.migrate.source import Env

_WIDTH: Final = 100
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
"""What some reader of YAML takes for no text."""


class Told(Struct, frozen=True):
    """A value, and what stands above it as a comment."""

    value: Any
    comments: Sequence[str] = ()


def document(parts: Mapping[str, Any], preface: Sequence[str]) -> str:
    """The whole file."""
    lines = [f"# {line}" if line else "" for line in preface]
    for key, value in parts.items():
        lines += ["", *_entry(key, value, 0)]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(value, Told):
        yield from (f"{indent}# {one}" for one in value.comments)
        value = value.value
    start = f"{indent}{written(key)}:"
    if not _is_told(value) and len(line := f"{start} {written(value)}") <= _WIDTH and depth:
        yield line
        return
    match value:
        case Mapping():
            yield start
            for name, inner in value.items():
                yield from _entry(name, inner, depth + 1)
        case list():
            yield start
            yield from (f"{indent}  - {written(one)}" for one in value)
        case _:
            yield f"{start} {written(value)}"


def _is_told(value: Any) -> bool:
    """Whether something in it has a comment."""
    return isinstance(value, Told) or (
        isinstance(value, Mapping) and any(map(_is_told, value.values()))
    )


def written(value: Any) -> str:
    """A value in one line."""
    match value:
        case Mapping():
            inner = ", ".join(f"{written(key)}: {written(one)}" for key, one in value.items())
            return f"{{{inner}}}"
        case list():
            return f"[{', '.join(map(written, value))}]"
        case Env(name):
            return f'"${{{name}}}"'
        case str() if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        case str():
            return msgspec.json.encode(value.replace("$", "$$")).decode()
        case _:
            return msgspec.json.encode(value).decode()
