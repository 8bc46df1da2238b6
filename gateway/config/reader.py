"""Nodes to the values of Structs, by walking the tree and the types side by side.

Nothing stops at the first complaint: what can't be read is left UNSET, and the reading goes on. A
result that came with complaints is good for nothing but finding more of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec.inspect as types
import yaml
from msgspec import UNSET, Struct

from gateway.config.complaints import (
    DOCUMENT_START,
    ConfigPath,
    IssueCollector,
    SourcePosition,
    find_closest_name,
    join_names,
    quote,
    suggest_name,
)
from gateway.config.document import get_position
from gateway.config.leaves import ScalarDecoder
from gateway.config.pairs import KeyNodes, describe_node, is_null_node, read_mapping
from gateway.config.units import SCALAR_TYPES, Secret

StructTypes = Sequence[types.StructType]


class SourceLocation(Struct, frozen=True):
    """Where a value stands, and its key; ``text`` is a scalar's as it is written."""

    value_position: SourcePosition
    key_position: SourcePosition | None = None
    raw_text: str = ""


class ConfigDecoder:
    """Reads one document. ``places`` tells afterwards where everything was.

    ``files`` are those that the document names, by where it does.
    """

    def __init__(self, complaints: IssueCollector, env: Mapping[str, str]) -> None:
        self._issues = complaints
        self._scalars = ScalarDecoder(complaints, env)
        self.locations: dict[ConfigPath, SourceLocation] = {}
        self.files: Mapping[ConfigPath, str] = self._scalars.files

    def decode_document(self, root: yaml.Node, kind: types.Type) -> Any:
        """The value of the whole document."""
        self.locations[()] = SourceLocation(DOCUMENT_START)
        return self._decode_node(root, kind, ())

    def _decode_at(
        self, node: yaml.Node, kind: types.Type, path: ConfigPath, key: yaml.Node | None
    ) -> Any:
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        mark = get_position(key.start_mark) if key is not None else None
        self.locations[path] = SourceLocation(get_position(node.start_mark), mark, text)
        return self._decode_node(node, kind, path)

    def _decode_node(self, node: yaml.Node, kind: types.Type, path: ConfigPath) -> Any:
        match kind:
            case types.Metadata():
                return self._scalars.decode_scalar(node, _get_scalar_type(kind), path)
            case types.UnionType():
                return self._decode_union(node, kind.types, path)
            case types.StructType():
                return self._decode_struct(node, kind, path)
            case types.DictType():
                return self._decode_mapping(node, kind, path)
            case types.VarTupleType():
                return self._decode_list(node, kind, path)
            case types.CustomType(cls) if cls is Secret:
                return self._scalars.decode_secret(node, path)
            case _:
                return self._scalars.decode_plain(node, kind, path)

    def _decode_union(
        self, node: yaml.Node, kinds: tuple[types.Type, ...], path: ConfigPath
    ) -> Any:
        some = [kind for kind in kinds if not isinstance(kind, types.NoneType)]
        if len(some) < len(kinds) and is_null_node(node):
            return None
        if len(some) == 1:
            return self._decode_node(node, some[0], path)
        structs = [kind for kind in some if isinstance(kind, types.StructType)]
        return (
            self._decode_tagged(node, structs, path)
            if structs
            else self._scalars.decode_option(node, path)
        )

    def _decode_list(self, node: yaml.Node, kind: types.VarTupleType, path: ConfigPath) -> Any:
        if not isinstance(node, yaml.SequenceNode):
            return self._add_issue(
                node, f"must be a list, not {describe_node(node)}; write [one, two]", path
            )
        if len(node.value) < (kind.min_length or 0):
            return self._add_issue(node, "is empty; give at least one, or remove the key", path)
        return tuple(
            self._decode_at(one, kind.item_type, (*path, n), None)
            for n, one in enumerate(node.value)
        )

    def _decode_mapping(self, node: yaml.Node, kind: types.DictType, path: ConfigPath) -> Any:
        found = read_mapping(node, "a mapping", self._issues, path)
        if found is None:
            return UNSET
        if len(found) < (kind.min_length or 0):
            return self._add_issue(node, "is empty; give at least one", path)
        for key, (key_node, _) in found.items():
            self._check_key(key, key_node, kind.key_type, (*path, key))
        return {
            key: self._decode_at(value, kind.value_type, (*path, key), key_node)
            for key, (key_node, value) in found.items()
        }

    def _check_key(self, key: str, node: yaml.Node, kind: types.Type, path: ConfigPath) -> None:
        if isinstance(kind, types.Metadata):
            try:
                _get_scalar_type(kind).parse(key)
            except ValueError as error:
                self._add_issue(node, f"{quote(key)} {error}", path)

    # --- structs ---------------------------------------------------------------------------------

    def _decode_struct(self, node: yaml.Node, kind: types.StructType, path: ConfigPath) -> Any:
        short = getattr(kind.cls, "short", None)
        if short and isinstance(node, yaml.ScalarNode) and not is_null_node(node):
            self.locations[*path, short] = self.locations[path]
            field = next(one for one in kind.fields if one.name == short)
            return kind.cls(**{short: self._decode_node(node, field.type, path)})
        wanted = f"a {short}, or a mapping" if short else "a mapping"
        found = read_mapping(node, wanted, self._issues, path)
        return UNSET if found is None else self._decode_fields(node, kind, found, path)

    def _decode_tagged(self, node: yaml.Node, kinds: StructTypes, path: ConfigPath) -> Any:
        """One of several Structs: told by its tag, or by a key that implies it."""
        found = read_mapping(node, "a mapping", self._issues, path)
        if found is None:
            return UNSET
        field = str(kinds[0].tag_field)
        by_tag = {str(kind.tag): kind for kind in kinds}
        if field not in found:
            for kind in kinds:
                if kind.cls.implied_by in found:  # type: ignore[attr-defined]
                    return self._decode_fields(node, kind, found, path, kinds)
            return self._add_issue(node, _describe_missing_tag(field, by_tag, found), path)
        key, value = found[field]
        tag = self._decode_at(value, types.StrType(), (*path, field), key)
        if tag in by_tag:
            return self._decode_fields(node, by_tag[tag], found, path, kinds)
        if tag is not UNSET:
            message = f"{quote(str(value.value))} is no {field}; {suggest_name(tag, by_tag)}"
            self._add_issue(value, message, (*path, field))
        return UNSET

    def _decode_fields(
        self,
        node: yaml.Node,
        kind: types.StructType,
        found: KeyNodes,
        path: ConfigPath,
        others: StructTypes = (),
    ) -> Any:
        rest = getattr(kind.cls, "rest", None)
        fields = {one.name: one for one in kind.fields if one.name != rest}
        given: dict[str, Any] = {}
        more: dict[str, Any] = {}
        meant: set[str | None] = set()
        for key, (key_node, value) in found.items():
            steps = (*path, key)
            if key in fields:
                given[key] = self._decode_at(value, fields[key].type, steps, key_node)
            elif rest and key in (getattr(kind.cls, "rest_keys", None) or {key}):
                more[key] = self._decode_at(value, _get_extra_type(kind), steps, key_node)
            elif key in getattr(kind.cls, "former_files", ()):
                self.locations[steps] = SourceLocation(
                    get_position(value.start_mark), get_position(key_node.start_mark)
                )
                self._scalars.former_file(value, steps)
            elif key != kind.tag_field and (path or not key.startswith("x-")):
                self._add_issue(key_node, _describe_unknown_key(key, kind, others), steps)
                meant.add(find_closest_name(key, list_keys(kind)))
        for name, field in fields.items():
            if field.required and name not in given:
                given[name] = UNSET
                if name not in meant:
                    self._add_issue(node, f"{name!r} is missing; add it", path)
        if rest:
            given[rest] = more
        return kind.cls(**given)

    def _add_issue(self, node: yaml.Node, message: str, path: ConfigPath) -> Any:
        self._issues.add(get_position(node.start_mark), message, path)
        return UNSET


def list_keys(kind: types.StructType) -> list[str]:
    """What may stand in a Struct's mapping."""
    rest = getattr(kind.cls, "rest", None)
    names = [one.name for one in kind.fields if one.name != rest]
    return [*names, *sorted(getattr(kind.cls, "rest_keys", ()))]


def _get_scalar_type(kind: types.Metadata) -> Any:
    return SCALAR_TYPES[(kind.extra or {})["unit"]]


def _get_extra_type(kind: types.StructType) -> types.Type:
    rest = getattr(kind.cls, "rest", None)
    field = next(one.type for one in kind.fields if one.name == rest)
    return field.value_type if isinstance(field, types.DictType) else field


def _describe_missing_tag(
    field: str, by_tag: Mapping[str, types.StructType], found: KeyNodes
) -> str:
    fitting = [
        tag for tag, kind in by_tag.items() if found and found.keys() <= set(list_keys(kind))
    ]
    if len(fitting) == 1:
        return f"{field!r} is missing; add {field}: {fitting[0]}"
    return f"{field!r} is missing; give one of {join_names(by_tag)}"


def _describe_unknown_key(key: str, kind: types.StructType, others: StructTypes) -> str:
    """What to say of a key that is no field's: perhaps it is another kind's."""
    owners = [str(other.tag) for other in others if key in list_keys(other)]
    if owners:
        return (
            f"{quote(key)} belongs to {kind.tag_field} {join_names(owners)}, and this is {kind.tag}"
        )
    return f"there is no {quote(key)} here; {suggest_name(key, list_keys(kind))}"
