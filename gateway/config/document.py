"""A text to its tree of nodes: bounded, without tags and without the text's tricks.

The text is first read as events, which costs nothing that grows: nesting, the number of nodes once
the aliases are written out, and aliases within themselves are refused there, before a tree is made.
"""

from typing import Any

import yaml
from msgspec import Struct

from gateway.config.complaints import DOCUMENT_START, IssueCollector, SourcePosition, quote

MAX_DEPTH = 32
"""How deep values may be nested."""
MAX_NODES = 10_000
"""How many values there may be, aliases written out."""

_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EMPTY_CONFIG_MESSAGE = (
    "the configuration is empty; the least is a backend and a model, such as "
    "{backends: {a: {kind: echo}}, models: {chat: {backend: a}}}"
)
_SYNTAX_HINTS = {
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


class _OpenNode(Struct):
    """A list or mapping that has begun."""

    position: SourcePosition
    anchor: str | None
    size: int = 1
    height: int = 1


def compose_yaml(text: str, complaints: IssueCollector) -> yaml.Node:
    """The root node. Raises ConfigError where the text can't be read at all."""
    _check_characters(text, complaints)
    try:
        _check_bounds(text, complaints)
        root = yaml.compose(text, Loader=_YAML_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise complaints.build_error(
            get_position(mark) if mark else DOCUMENT_START, _describe_syntax_error(error)
        ) from None
    if root is None:
        raise complaints.build_error(DOCUMENT_START, _EMPTY_CONFIG_MESSAGE)
    return root


def get_position(mark: Any) -> SourcePosition:
    """Where a node or event starts."""
    return SourcePosition(mark.line + 1, mark.column + 1)


def locate_index(text: str, index: int) -> SourcePosition:
    """Where a character of the text stands."""
    return SourcePosition(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def decode_utf8(data: bytes, filename: str) -> str:
    """The text of a file. Raises ConfigError unless it is UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise IssueCollector(filename).build_error(
            locate_index(before, len(before)), message
        ) from None


def _describe_syntax_error(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or "this is not YAML"
    mark = getattr(error, "context_mark", None)
    start = f" that starts on line {mark.line + 1}" if mark else ""
    where = f" {getattr(error, 'context', None) or ''}{start}"
    said = problem + where if where.startswith(" while") else f"{where}, {problem}".lstrip(" ,")
    mend = next((mend for sign, mend in _SYNTAX_HINTS.items() if sign in said), None)
    return f"{said}; {mend}" if mend else said


def _check_characters(text: str, complaints: IssueCollector) -> None:
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        raise complaints.build_error(
            locate_index(text, bad.start()),
            f"the character U+{ord(bad[0]):04X} has no place in a configuration; remove it",
        )


def _check_bounds(text: str, complaints: IssueCollector) -> None:
    """Raises ConfigError for nesting, size and cycles; complains of tags."""
    stack: list[_OpenNode] = [_OpenNode(DOCUMENT_START, None, 0, 0)]
    anchors: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=_YAML_LOADER):
        match event:
            case yaml.ScalarEvent() | yaml.CollectionStartEvent():
                if event.tag is not None:
                    complaints.add(get_position(event.start_mark), _describe_tag(event.tag))
                opened = _OpenNode(get_position(event.start_mark), event.anchor)
                if isinstance(event, yaml.ScalarEvent):
                    _close_node(opened, stack, anchors)
                else:
                    stack.append(opened)
            case yaml.CollectionEndEvent():
                _close_node(stack.pop(), stack, anchors)
            case yaml.AliasEvent():
                mark = get_position(event.start_mark)
                if any(one.anchor == event.anchor for one in stack):
                    message = f"*{event.anchor} stands within what it names; write the value out"
                    raise complaints.build_error(mark, message)
                _close_node(
                    _OpenNode(mark, None, *anchors.get(str(event.anchor), (1, 1))), stack, anchors
                )
            case _:
                continue
        _check_size(stack, complaints)


def _close_node(
    done: _OpenNode, stack: list[_OpenNode], anchors: dict[str, tuple[int, int]]
) -> None:
    """Count a complete value into the one around it."""
    if done.anchor is not None:
        anchors[done.anchor] = done.size, done.height
    around = stack[-1]
    around.size += done.size
    around.height = max(around.height, done.height + 1)


def _check_size(stack: list[_OpenNode], complaints: IssueCollector) -> None:
    inner = stack[-1]
    if len(stack) - 2 + inner.height > MAX_DEPTH:
        message = f"this is nested deeper than {MAX_DEPTH}; a configuration needs less than ten"
        raise complaints.build_error(inner.position, message)
    if sum(one.size for one in stack) > MAX_NODES:
        message = f"there are more than {MAX_NODES} values, aliases written out; use fewer aliases"
        raise complaints.build_error(inner.position, message)


def _describe_tag(tag: str) -> str:
    short = tag.replace("tag:yaml.org,2002:", "!!")
    return f"the tag {quote(short)} has no meaning here; remove it (a text is put in quotes)"
