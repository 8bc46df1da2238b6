"""A text to its tree of nodes: bounded, without tags and without the text's tricks.

The text is first read as events, which costs nothing that grows: nesting, the number of nodes once
the aliases are written out, and aliases within themselves are refused there, before a tree is made.
"""

from typing import Any

import yaml
from msgspec import Struct

from gateway.config.complaints import START, Complaints, Mark, quoted

DEPTH = 32
"""How deep values may be nested."""
NODES = 10_000
"""How many values there may be, aliases written out."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EMPTY = (
    "the configuration is empty; the least is a backend and a model, such as "
    "{backends: {a: {kind: echo}}, models: {chat: {backend: a}}}"
)
_MENDS = {
    "tab character": "indent with spaces",
    "cannot start any token": "put the value in quotes; indent with spaces",
    "undefined alias": "write &name where it is first used; a text that starts with * needs quotes",
    "duplicate anchor": "give each anchor its own name",
    "another document": "keep one document in a file",
    "mapping values are not allowed": "put a text that holds ': ' in quotes, or indent it less",
    "expected ',' or": "add the comma or the bracket; a text that holds {, [ or , needs quotes",
    "could not find expected ':'": "write key: value",
    "expected key": "mend the indentation: what belongs together starts in one column",
    "expected <block end>": "mend the indentation: what belongs together starts in one column",
    "invalid Unicode character escape": "write the character itself",
    "while scanning a quoted scalar": "close the quotes",
}


class _Open(Struct):
    """A list or mapping that has begun."""

    position: Mark
    anchor: str | None
    size: int = 1
    height: int = 1


def compose(text: str, complaints: Complaints) -> yaml.Node:
    """The root node. Raises ConfigError where the text can't be read at all."""
    _refuse_characters(text, complaints)
    try:
        _guard(text, complaints)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise complaints.build_error(at(mark) if mark else START, _syntax(error)) from None
    if root is None:
        raise complaints.build_error(START, _EMPTY)
    return root


def at(mark: Any) -> Mark:
    """Where a node or event starts."""
    return Mark(mark.line + 1, mark.column + 1)


def spot(text: str, index: int) -> Mark:
    """Where a character of the text stands."""
    return Mark(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def decode(data: bytes, filename: str) -> str:
    """The text of a file. Raises ConfigError unless it is UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise Complaints(filename).build_error(spot(before, len(before)), message) from None


def _syntax(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or "this is not YAML"
    mark = getattr(error, "context_mark", None)
    start = f" that starts on line {mark.line + 1}" if mark else ""
    where = f" {getattr(error, 'context', None) or ''}{start}"
    said = problem + where if where.startswith(" while") else f"{where}, {problem}".lstrip(" ,")
    mend = next((mend for sign, mend in _MENDS.items() if sign in said), None)
    return f"{said}; {mend}" if mend else said


def _refuse_characters(text: str, complaints: Complaints) -> None:
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        raise complaints.build_error(
            spot(text, bad.start()),
            f"the character U+{ord(bad[0]):04X} has no place in a configuration; remove it",
        )


def _guard(text: str, complaints: Complaints) -> None:
    """Raises ConfigError for nesting, size and cycles; complains of tags."""
    stack: list[_Open] = [_Open(START, None, 0, 0)]
    anchors: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=_LOADER):
        match event:
            case yaml.ScalarEvent() | yaml.CollectionStartEvent():
                if event.tag is not None:
                    complaints.add(at(event.start_mark), _no_tag(event.tag))
                opened = _Open(at(event.start_mark), event.anchor)
                if isinstance(event, yaml.ScalarEvent):
                    _close(opened, stack, anchors)
                else:
                    stack.append(opened)
            case yaml.CollectionEndEvent():
                _close(stack.pop(), stack, anchors)
            case yaml.AliasEvent():
                mark = at(event.start_mark)
                if any(one.anchor == event.anchor for one in stack):
                    message = f"*{event.anchor} stands within what it names; write the value out"
                    raise complaints.build_error(mark, message)
                _close(_Open(mark, None, *anchors.get(str(event.anchor), (1, 1))), stack, anchors)
            case _:
                continue
        _measure(stack, complaints)


def _close(done: _Open, stack: list[_Open], anchors: dict[str, tuple[int, int]]) -> None:
    """Count a complete value into the one around it."""
    if done.anchor is not None:
        anchors[done.anchor] = done.size, done.height
    around = stack[-1]
    around.size += done.size
    around.height = max(around.height, done.height + 1)


def _measure(stack: list[_Open], complaints: Complaints) -> None:
    inner = stack[-1]
    if len(stack) - 2 + inner.height > DEPTH:
        message = f"this is nested deeper than {DEPTH}; a configuration needs less than ten"
        raise complaints.build_error(inner.position, message)
    if sum(one.size for one in stack) > NODES:
        message = f"there are more than {NODES} values, aliases written out; use fewer aliases"
        raise complaints.build_error(inner.position, message)


def _no_tag(tag: str) -> str:
    short = tag.replace("tag:yaml.org,2002:", "!!")
    return f"the tag {quoted(short)} has no meaning here; remove it (a text is put in quotes)"
