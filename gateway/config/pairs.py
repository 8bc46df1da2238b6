"""The keys of a mapping node: merged, and never given twice."""

from collections.abc import Iterator, Mapping

import yaml

from gateway.config.complaints import ConfigPath, IssueCollector, quote
from gateway.config.document import get_position
from gateway.config.scalars import YamlScalar

KeyNodes = Mapping[str, tuple[yaml.Node, yaml.Node]]
"""The nodes of key and value, by the key's text."""

_MERGE_KEY = "<<"


def read_mapping(
    node: yaml.Node, wanted: str, complaints: IssueCollector, path: ConfigPath
) -> KeyNodes | None:
    """The mapping's own keys, then those merged into it. None where it is no mapping."""
    if not isinstance(node, yaml.MappingNode):
        complaints.add(
            get_position(node.start_mark), f"must be {wanted}, not {describe_node(node)}", path
        )
        return None
    own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged: list[KeyNodes] = []
    for key, value in node.value:
        mark = get_position(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            complaints.add(mark, "a key must be a plain name", path)
        elif key.value == _MERGE_KEY and not key.style:
            merged += _read_merged_mappings(value, complaints, (*path, _MERGE_KEY))
        elif key.value in own:
            line = own[key.value][0].start_mark.line + 1
            message = f"{quote(key.value)} was already given on line {line}; keep one of the two"
            complaints.add(mark, message, (*path, key.value))
        else:
            own[key.value] = key, value
    for more in merged:
        own |= {key: value for key, value in more.items() if key not in own}
    return own


def _read_merged_mappings(
    node: yaml.Node, complaints: IssueCollector, path: ConfigPath
) -> Iterator[KeyNodes]:
    """In the order of their weight: of two that give one key, the first counts."""
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        found = read_mapping(one, "a mapping, or a list of mappings, to merge", complaints, path)
        if found is not None:
            yield found


def describe_node(node: yaml.Node) -> str:
    """What a node is, for a complaint. A value is not shown: it may be a misplaced secret."""
    match node:
        case yaml.MappingNode():
            return "a mapping"
        case yaml.SequenceNode():
            return "a list"
        case _:
            return "nothing" if is_null_node(node) else "a single value"


def is_null_node(node: yaml.Node) -> bool:
    """Whether it is null."""
    return isinstance(node, yaml.ScalarNode) and YamlScalar(node.value, "", not node.style).is_null
