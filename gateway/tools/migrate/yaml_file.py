"""LiteLLM's YAML file, read value by value, and the new file, written with its comments.

Every value that is read is popped from its mapping, so that those that nobody read can be noted.
PyYAML cannot write comments; the writer here needs only the shapes of a configuration.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
import yaml
from msgspec import Struct

from gateway.config.errors import ConfigPath, IssueCollector, SourcePosition, format_path
from gateway.config.yaml_reader import get_position, read_mapping
from protocols.core import units

ValueT = TypeVar("ValueT")
NoteKind = Literal["left out", "changed", "needless"]

_NO_NUMBER: Final = "not a number; write it into the new file by hand"
_WIDTH: Final = 100
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
"""Words that some YAML reader takes for something else than a string."""

_ENVIRONMENT: Final = "os.environ/"
ENV_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_CONSTRUCT: Final = yaml.constructor.SafeConstructor().construct_object


class Env(Struct, frozen=True):
    """A reference to a variable of the environment; ``default`` replaces one that is not set."""

    name: str
    default: str | None = None


def _make_variable_name(text: str) -> str:
    """A name that a configuration may have for a variable; others can't be set in a shell."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return f"_{name}" if not name or name[0].isdigit() else name


class EnvText(Struct, frozen=True):
    """A text with references to variables of the environment, such as ``${BASE}/v1``."""

    text: str


class Note(Struct, frozen=True, order=True):
    """How a part of the file was migrated. ``path`` is such as ``model_list[0].model_name``."""

    line: int
    column: int
    path: str
    kind: NoteKind
    why: str

    def text(self, filename: str) -> str:
        """The note as one line."""
        name = f"{self.path}: " if self.path else ""  # none: the whole file
        return f"{filename}:{self.line}:{self.column}: {self.kind}: {name}{self.why}"


class UnsupportedEntry(Exception):
    """No backend of this gateway can serve an entry of the model list."""

    def __init__(self, value: "SourceValue", reason: str) -> None:
        self.value = value
        super().__init__(f"{reason}; the whole entry")


class NoteCollector:
    """Collects the notes of a migration."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def add(self, value: "SourceValue", kind: NoteKind, reason: str) -> None:
        """Add a note about a value."""
        position = value.position
        self.notes.append(
            Note(position.line, position.column, format_path(value.path), kind, reason)
        )


class SourceValue:
    """A value of the file and its position. It is read by YAML 1.1, as LiteLLM does."""

    def __init__(self, node: yaml.Node, path: ConfigPath, issues: IssueCollector) -> None:
        self.node = node
        self.path = path
        self.position: SourcePosition = get_position(node.start_mark)
        self._issues = issues

    @property
    def value(self) -> Any:
        """The plain value; a string that names variables is an Env or an EnvText.

        LiteLLM reads ``os.environ/NAME``; ``${NAME}`` is for files that another tool fills.
        """
        constructed = _CONSTRUCT(self.node, deep=True)
        if not isinstance(constructed, str):
            return constructed
        if constructed.startswith(_ENVIRONMENT):
            return Env(_make_variable_name(constructed.removeprefix(_ENVIRONMENT)))
        if match := ENV_REFERENCE.fullmatch(constructed):
            return Env(match[1])
        return EnvText(constructed) if ENV_REFERENCE.search(constructed) else constructed

    @property
    def text(self) -> str:
        """The value if it is a string and names no variable, or else an empty string."""
        value = self.value
        return value if isinstance(value, str) else ""

    def items(self) -> Iterator["SourceValue"]:
        """The items of a list; none if it is not a list."""
        if isinstance(self.node, yaml.SequenceNode):
            for n, node in enumerate(self.node.value):
                yield SourceValue(node, (*self.path, n), self._issues)

    def mapping(self) -> "SourceMapping":
        """The value as a mapping; if it is not one, an empty mapping, and an error."""
        fields = read_mapping(self.node, "a mapping", self._issues, self.path)
        return SourceMapping(self, fields or {}, self._issues)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self.node, yaml.MappingNode)


class SourceMapping:
    """A mapping of the file. ``note_unused`` adds notes about the keys that were not popped."""

    def __init__(
        self,
        source: SourceValue,
        fields: Mapping[str, tuple[yaml.Node, yaml.Node]],
        issues: IssueCollector,
    ) -> None:
        self.source = source
        self._remaining = {
            key: SourceValue(value, (*source.path, key), issues)
            for key, (_, value) in fields.items()
            if value.tag != "tag:yaml.org,2002:null"
        }

    def pop(self, *keys: str) -> SourceValue | None:
        """Remove and return the value of the first of these keys that is present."""
        for key in keys:
            if (value := self._remaining.pop(key, None)) is not None:
                return value
        return None

    def items(self) -> Iterator[tuple[str, SourceValue]]:
        """Remove and yield all remaining values."""
        remaining, self._remaining = self._remaining, {}
        yield from remaining.items()

    def fill_from(self, other: "SourceMapping", taken: set[str]) -> None:
        """Add the other's values for keys that this mapping lacks, and these keys to ``taken``."""
        taken |= other._remaining.keys() - self._remaining.keys()  # noqa: SLF001 - its own kind
        self._remaining = {**other._remaining, **self._remaining}  # noqa: SLF001 - as above

    def note_unused(
        self,
        notes: NoteCollector,
        reason: str,
        reasons: Mapping[str, str],
        needless: Mapping[str, str],
    ) -> None:
        """Add a note about each remaining key: with a reason of its own, or with ``reason``."""
        for key, value in self.items():
            if key in needless:
                notes.add(value, "needless", needless[key])
            else:
                notes.add(value, "left out", reasons.get(key, reason))


# --- values ---------------------------------------------------------------------------------------


def read_number(
    source: SourceValue | None, notes: NoteCollector, low: float, high: float
) -> float | None:
    """Read a number, limited to ``low`` and ``high``; None and a note if it is not a number."""
    if source is None:
        return None
    value = source.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        notes.add(source, "left out", _NO_NUMBER)
        return None
    if not low <= value <= high:
        limited = min(max(value, low), high)
        notes.add(source, "changed", f"is {limited:g} now: it may be from {low:g} to {high:g}")
        return limited
    return value


def read_integer(
    source: SourceValue | None, notes: NoteCollector, low: int, high: int
) -> int | None:
    """Read a number as ``read_number`` does, and drop its fraction."""
    number = read_number(source, notes, low, high)
    return None if number is None else int(number)


def read_duration(source: SourceValue | None, notes: NoteCollector) -> str | None:
    """Read a number of seconds as a duration of the new file."""
    seconds = read_number(source, notes, 0, 168 * 3600)
    if source is None or seconds is None:
        return None
    text = f"{seconds:.9f}".rstrip("0").rstrip(".")
    if text == "0":
        notes.add(source, "left out", "a timeout of 0")
        return None
    return f"{text}s"


def read_model_name(source: SourceValue, notes: NoteCollector) -> str | None:
    """Read the public name of a model; None and a note if it is not valid here."""
    return read_text(source, notes, units.parse_model_name)


def read_text(
    source: SourceValue, notes: NoteCollector, parse: Callable[[str], ValueT]
) -> ValueT | None:
    """Parse a string with ``read``; None and a note if that raises ValueError."""
    value = source.value
    if not isinstance(value, str):
        notes.add(source, "left out", "must be a string")
        return None
    try:
        return parse(value)
    except ValueError as error:
        notes.add(source, "left out", str(error))
        return None


def list_values(value: SourceValue | None) -> list[SourceValue]:
    """The items of a list, or the value itself if it is not a list."""
    if value is None:
        return []
    return [*value.items()] or [value]


def describe_value(value: Any) -> str:
    """A value, which is no secret, for a note."""
    return f"${{{value.name}}}" if isinstance(value, Env) else repr(value)


# --- the new file ---------------------------------------------------------------------------------


class CommentedValue(Struct, frozen=True):
    """A value and the comments to write above it."""

    value: Any
    comments: Sequence[str] = ()


def format_document(parts: Mapping[str, Any], preface: Sequence[str]) -> str:
    """Format the whole file."""
    lines = [f"# {line}" if line else "" for line in preface]
    for key, value in parts.items():
        lines += ["", *_entry(key, value, 0)]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(value, CommentedValue):
        yield from (f"{indent}# {comment}" for comment in value.comments)
        value = value.value
    start = f"{indent}{format_value(key)}:"
    if (
        not _has_comments(value)
        and len(line := f"{start} {format_value(value)}") <= _WIDTH
        and depth
    ):
        yield line
        return
    match value:
        case Mapping():
            yield start
            for name, inner in value.items():
                yield from _entry(name, inner, depth + 1)
        case list():
            yield start
            yield from (f"{indent}  - {format_value(comment)}" for comment in value)
        case _:
            yield f"{start} {format_value(value)}"


def _has_comments(value: Any) -> bool:
    """Whether the value or a part of it has comments."""
    return isinstance(value, CommentedValue) or (
        isinstance(value, Mapping) and any(map(_has_comments, value.values()))
    )


def format_value(value: Any) -> str:
    """Format a value in one line."""
    match value:
        case Mapping():
            inner = ", ".join(
                f"{format_value(key)}: {format_value(one)}" for key, one in value.items()
            )
            return f"{{{inner}}}"
        case list():
            return f"[{', '.join(map(format_value, value))}]"
        case Env(name, default):
            return f'"${{{name}}}"' if default is None else f'"${{{name}:-{default}}}"'
        case EnvText(text):
            return f'"{text}"'
        case str() if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        case str():
            return msgspec.json.encode(value.replace("$", "$$")).decode()
        case _:
            return msgspec.json.encode(value).decode()
