"""Parses YAML text into a tree of nodes: bounded, and without tags.

The text is first parsed as a stream of events, in constant memory. Deep nesting, aliases that
repeat too many values, and recursive aliases are rejected there, before the tree is built.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from msgspec import Struct

from gateway.config.errors import DOCUMENT_START, ConfigPath, IssueCollector, SourcePosition, quote
from gateway.config.yaml_scalars import YamlScalar

MAX_DEPTH = 32
"""How deep values may be nested."""
MAX_ALIASED_NODES = 200_000
"""How many values aliases may add to those that are written out."""
MAX_FILE_SIZE = 64 << 20
"""The maximum size of a configuration, in bytes. It bounds the number of values."""

_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_EMPTY_CONFIG_MESSAGE = (
    "the configuration is empty; it needs a backend and a model, such as "
    "{backends: {a: {kind: echo}}, models: {chat: {backend: a}}}"
)
_SYNTAX_HINTS = {
    "tab character": "indent with spaces",
    "cannot start any token": "put the value in quotes; indent with spaces",
    "undefined alias": "write &name where it is first used; quote a string that starts with *",
    "duplicate anchor": "give each anchor its own name",
    "another document": "keep one document in a file",
    "mapping values are not allowed": "quote a string that contains ': ', or indent it less",
    "expected ',' or": "add the comma or the bracket; quote a string that contains {, [ or ,",
    "could not find expected ':'": "write key: value",
    "expected key": "correct the indentation: the keys of a section start in one column",
    "expected <block end>": "correct the indentation: the keys of a section start in one column",
    "invalid Unicode character escape": "write the character itself",
    "while scanning a quoted scalar": "close the quotes",
}


class _OpenNode(Struct):
    """A list or mapping whose end has not been read."""

    position: SourcePosition
    anchor: str | None
    size: int = 1
    height: int = 1


def compose_yaml(
    text: str, issues: IssueCollector, *, empty_message: str = _EMPTY_CONFIG_MESSAGE
) -> yaml.Node:
    """The root node. Raises ConfigError if the text is not YAML, exceeds a limit, or is empty."""
    _check_characters(text, issues)
    try:
        _check_bounds(text, issues)
        root = yaml.compose(text, Loader=_YAML_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise issues.build_error(
            get_position(mark) if mark else DOCUMENT_START, _describe_syntax_error(error)
        ) from None
    if root is None:
        raise issues.build_error(DOCUMENT_START, empty_message)
    return root


def get_position(mark: Any) -> SourcePosition:
    """The start of a node or event."""
    return SourcePosition(mark.line + 1, mark.column + 1)


def locate_index(text: str, index: int) -> SourcePosition:
    """The position of a character of the text."""
    return SourcePosition(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def decode_utf8(data: bytes, filename: str) -> str:
    """The text of a file. Raises ConfigError if it is too large or not UTF-8."""
    if len(data) > MAX_FILE_SIZE:
        message = f"the file is larger than {MAX_FILE_SIZE >> 20} MiB, the limit; split it"
        raise IssueCollector(filename).build_error(DOCUMENT_START, message)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        valid_text = data[: error.start].decode("utf-8-sig", "replace")
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise IssueCollector(filename).build_error(
            locate_index(valid_text, len(valid_text)), message
        ) from None


def _describe_syntax_error(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or "this is not YAML"
    start_mark = getattr(error, "context_mark", None)
    start = f" that starts on line {start_mark.line + 1}" if start_mark else ""
    location = f" {getattr(error, 'context', None) or ''}{start}"
    description = (
        problem + location
        if location.startswith(" while")
        else f"{location}, {problem}".lstrip(" ,")
    )
    hint = next(
        (hint for character, hint in _SYNTAX_HINTS.items() if character in description), None
    )
    return f"{description}; {hint}" if hint else description


def _check_characters(text: str, issues: IssueCollector) -> None:
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match:
        raise issues.build_error(
            locate_index(text, match.start()),
            f"the character U+{ord(match[0]):04X} is not allowed in a configuration; remove it",
        )


def _check_bounds(text: str, issues: IssueCollector) -> None:
    """Raises ConfigError for nesting, alias expansion and cycles; reports tags."""
    stack: list[_OpenNode] = [_OpenNode(DOCUMENT_START, None, 0, 0)]
    anchors: dict[str, tuple[int, int]] = {}
    aliased_size = 0
    for event in yaml.parse(text, Loader=_YAML_LOADER):
        match event:
            case yaml.ScalarEvent() | yaml.CollectionStartEvent():
                if event.tag is not None:
                    issues.add(get_position(event.start_mark), _describe_tag(event.tag))
                node = _OpenNode(get_position(event.start_mark), event.anchor)
                if isinstance(event, yaml.ScalarEvent):
                    _close_node(node, stack, anchors)
                else:
                    stack.append(node)
            case yaml.CollectionEndEvent():
                _close_node(stack.pop(), stack, anchors)
            case yaml.AliasEvent():
                mark = get_position(event.start_mark)
                if any(one.anchor == event.anchor for one in stack):
                    message = f"*{event.anchor} refers to itself; write the value out"
                    raise issues.build_error(mark, message)
                size, height = anchors.get(str(event.anchor), (1, 1))
                aliased_size += size
                if aliased_size > MAX_ALIASED_NODES:
                    message = (
                        f"aliases repeat more than {MAX_ALIASED_NODES} values; use fewer aliases"
                    )
                    raise issues.build_error(mark, message)
                _close_node(_OpenNode(mark, None, size, height), stack, anchors)
            case _:
                continue
        _check_depth(stack, issues)


def _close_node(
    closed: _OpenNode, stack: list[_OpenNode], anchors: dict[str, tuple[int, int]]
) -> None:
    """Add the size of a complete value to its parent."""
    if closed.anchor is not None:
        anchors[closed.anchor] = closed.size, closed.height
    around = stack[-1]
    around.size += closed.size
    around.height = max(around.height, closed.height + 1)


def _check_depth(stack: list[_OpenNode], issues: IssueCollector) -> None:
    inner = stack[-1]
    if len(stack) - 2 + inner.height > MAX_DEPTH:
        message = f"this is nested deeper than {MAX_DEPTH}; a configuration needs less than ten"
        raise issues.build_error(inner.position, message)


def _describe_tag(tag: str) -> str:
    short = tag.replace("tag:yaml.org,2002:", "!!")
    return f"the tag {quote(short)} is not supported; remove it (strings are written in quotes)"


KeyNodes = Mapping[str, tuple[yaml.Node, yaml.Node]]
"""The nodes of key and value, by the key's text."""

_MERGE_KEY = "<<"


def read_mapping(
    node: yaml.Node, expected: str, issues: IssueCollector, path: ConfigPath
) -> KeyNodes | None:
    """The entries of a mapping: its own keys, then merged ones. None if it is no mapping.

    A duplicate key is an issue.
    """
    if not isinstance(node, yaml.MappingNode):
        issues.add(
            get_position(node.start_mark), f"must be {expected}, not {describe_node(node)}", path
        )
        return None
    entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged: list[KeyNodes] = []
    for key, value in node.value:
        mark = get_position(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            issues.add(mark, "a key must be a plain name", path)
        elif key.value == _MERGE_KEY and not key.style:
            merged += _read_merged_mappings(value, issues, (*path, _MERGE_KEY))
        elif key.value in entries:
            line = entries[key.value][0].start_mark.line + 1
            message = f"{quote(key.value)} was already given on line {line}; keep one of the two"
            issues.add(mark, message, (*path, key.value))
        else:
            entries[key.value] = key, value
    for more in merged:
        entries |= {key: value for key, value in more.items() if key not in entries}
    return entries


def _read_merged_mappings(
    node: yaml.Node, issues: IssueCollector, path: ConfigPath
) -> Iterator[KeyNodes]:
    """The merged mappings by precedence: the first that has a key counts."""
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        entries = read_mapping(one, "a mapping, or a list of mappings, to merge", issues, path)
        if entries is not None:
            yield entries


def describe_node(node: yaml.Node) -> str:
    """The kind of a node, for an issue. Its value may be a misplaced secret and is not shown."""
    match node:
        case yaml.MappingNode():
            return "a mapping"
        case yaml.SequenceNode():
            return "a list"
        case _:
            return "nothing" if is_null_node(node) else "a single value"


def is_null_node(node: yaml.Node) -> bool:
    """Whether the node is null."""
    return isinstance(node, yaml.ScalarNode) and YamlScalar(node.value, "", not node.style).is_null
