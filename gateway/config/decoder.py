"""Decodes the YAML tree into the Structs of the schema.

Decoding does not stop at the first issue: a value that can't be read becomes UNSET. A result with
issues is used only to find further issues.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec.inspect as types
import yaml
from msgspec import UNSET, Struct, UnsetType

from gateway.config.errors import (
    DOCUMENT_START,
    ConfigPath,
    IssueCollector,
    SourcePosition,
    find_closest_name,
    join_names,
    quote,
    suggest_name,
)
from gateway.config.scalar_decoder import ScalarDecoder
from gateway.config.yaml_reader import (
    KeyNodes,
    describe_node,
    get_position,
    is_null_node,
    read_mapping,
)
from protocols.core.units import (
    SCALAR_TYPES,
    Secret,
)

StructTypes = Sequence[types.StructType]


class SourceLocation(Struct, frozen=True, gc=False):
    """The positions of a value and its key; ``raw_text`` is the text of a scalar as written."""

    value_position: SourcePosition
    key_position: SourcePosition | None = None
    raw_text: str = ""


class ConfigDecoder:
    """Decodes one document, and collects the locations of its values.

    ``files`` are the files that the document names, by path of the value.
    """

    def __init__(self, issues: IssueCollector, env: Mapping[str, str]) -> None:
        self._issues = issues
        self._scalars = ScalarDecoder(issues, env)
        self.locations: dict[ConfigPath, SourceLocation] = {}
        self.files: Mapping[ConfigPath, str] = self._scalars.files

    def decode_document(self, root: yaml.Node, kind: types.Type) -> Any:
        """Decode the document."""
        self.locations[()] = SourceLocation(DOCUMENT_START)
        return self._decode_node(root, kind, ())

    def _decode_at(
        self, node: yaml.Node, kind: types.Type, path: ConfigPath, key: yaml.Node | None
    ) -> Any:
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        key_position = get_position(key.start_mark) if key is not None else None
        self.locations[path] = SourceLocation(get_position(node.start_mark), key_position, text)
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
        members = [kind for kind in kinds if not isinstance(kind, types.NoneType)]
        if len(members) < len(kinds) and is_null_node(node):
            return None
        if len(members) == 1:
            return self._decode_node(node, members[0], path)
        structs = [kind for kind in members if isinstance(kind, types.StructType)]
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
        entries = read_mapping(node, "a mapping", self._issues, path)
        if entries is None:
            return UNSET
        if len(entries) < (kind.min_length or 0):
            return self._add_issue(node, "is empty; give at least one", path)
        for key, (key_node, _) in entries.items():
            self._check_key(key, key_node, kind.key_type, (*path, key))
        return {
            key: self._decode_at(value, kind.value_type, (*path, key), key_node)
            for key, (key_node, value) in entries.items()
        }

    def _check_key(self, key: str, node: yaml.Node, kind: types.Type, path: ConfigPath) -> None:
        if isinstance(kind, types.Metadata):
            try:
                _get_scalar_type(kind).parse(key)
            except ValueError as error:
                self._add_issue(node, f"{quote(key)} {error}", path)

    # --- structs ---------------------------------------------------------------------------------

    def _decode_struct(self, node: yaml.Node, kind: types.StructType, path: ConfigPath) -> Any:
        shorthand = getattr(kind.cls, "shorthand_field", None)
        if shorthand and isinstance(node, yaml.ScalarNode) and not is_null_node(node):
            if self._scalars.is_url(node):
                shorthand = getattr(kind.cls, "shorthand_url_field", shorthand)
            self.locations[*path, shorthand] = self.locations[path]
            field = next(one for one in kind.fields if one.name == shorthand)
            return kind.cls(**{shorthand: self._decode_node(node, field.type, path)})
        expected = f"a {shorthand}, or a mapping" if shorthand else "a mapping"
        entries = read_mapping(node, expected, self._issues, path)
        return UNSET if entries is None else self._decode_fields(node, kind, entries, path)

    def _decode_tagged(self, node: yaml.Node, kinds: StructTypes, path: ConfigPath) -> Any:
        """Decode one of several Structs, selected by its tag or by a key that implies it."""
        entries = read_mapping(node, "a mapping", self._issues, path)
        if entries is None:
            return UNSET
        field = str(kinds[0].tag_field)
        by_tag = {str(kind.tag): kind for kind in kinds}
        if field not in entries:
            for kind in kinds:
                if kind.cls.implied_by in entries:  # type: ignore[attr-defined]
                    return self._decode_fields(node, kind, entries, path, kinds)
            return self._add_issue(node, _describe_missing_tag(field, by_tag, entries), path)
        key, value = entries[field]
        tag = self._decode_at(value, types.StrType(), (*path, field), key)
        if tag in by_tag:
            return self._decode_fields(node, by_tag[tag], entries, path, kinds)
        if tag is not UNSET:
            message = f"{quote(str(value.value))} is not a {field}; {suggest_name(tag, by_tag)}"
            self._add_issue(value, message, (*path, field))
        return UNSET

    def _decode_fields(
        self,
        node: yaml.Node,
        kind: types.StructType,
        entries: KeyNodes,
        path: ConfigPath,
        alternatives: StructTypes = (),
    ) -> Any:
        extra_field = getattr(kind.cls, "extra_field", None)
        fields = {one.name: one for one in kind.fields if one.name != extra_field}
        values: dict[str, Any] = {}
        extra_values: dict[str, Any] = {}
        intended_names: set[str | None] = set()
        for key, (key_node, value) in entries.items():
            steps = (*path, key)
            if key in fields:
                values[key] = self._decode_at(value, fields[key].type, steps, key_node)
            elif extra_field and key in (getattr(kind.cls, "extra_keys", None) or {key}):
                extra_values[key] = self._decode_at(value, _get_extra_type(kind), steps, key_node)
            elif key in getattr(kind.cls, "former_files", ()):
                self.locations[steps] = SourceLocation(
                    get_position(value.start_mark), get_position(key_node.start_mark)
                )
                self._scalars.former_file(value, steps)
            elif key != kind.tag_field and (path or not key.startswith("x-")):
                intended = find_closest_name(key, list_keys(kind))
                message = _describe_unknown_key(key, kind, alternatives)
                hint = _describe_field(kind, intended)
                self._issues.add(get_position(key_node.start_mark), message, steps, hint=hint)
                intended_names.add(intended)
        for name, field in fields.items():
            if field.required and name not in values:
                values[name] = UNSET
                if name not in intended_names:
                    self._add_issue(node, f"{name!r} is missing; add it", path)
        if extra_field:
            values[extra_field] = extra_values
        return kind.cls(**values)

    def _add_issue(self, node: yaml.Node, message: str, path: ConfigPath) -> Any:
        self._issues.add(get_position(node.start_mark), message, path)
        return UNSET


def list_keys(kind: types.StructType) -> list[str]:
    """The keys that a Struct's mapping may have."""
    extra_field = getattr(kind.cls, "extra_field", None)
    names = [one.name for one in kind.fields if one.name != extra_field]
    return [*names, *sorted(getattr(kind.cls, "extra_keys", ()))]


def _describe_field(kind: types.StructType, name: str | None) -> str | UnsetType:
    """A field and its description, if it has one."""
    from gateway.config.descriptions import describe_fields  # noqa: PLC0415 - reads the source

    description = None if name is None else describe_fields(kind.cls).get(name)
    return UNSET if description is None else f"{name}: {description}"


def _get_scalar_type(kind: types.Metadata) -> Any:
    return SCALAR_TYPES[(kind.extra or {})["unit"]]


def _get_extra_type(kind: types.StructType) -> types.Type:
    extra_field = getattr(kind.cls, "extra_field", None)
    field = next(one.type for one in kind.fields if one.name == extra_field)
    return field.value_type if isinstance(field, types.DictType) else field


def _describe_missing_tag(
    field: str, by_tag: Mapping[str, types.StructType], entries: KeyNodes
) -> str:
    tags = [
        tag for tag, kind in by_tag.items() if entries and entries.keys() <= set(list_keys(kind))
    ]
    if len(tags) == 1:
        return f"{field!r} is missing; add {field}: {tags[0]}"
    return f"{field!r} is missing; give one of {join_names(by_tag)}"


def _describe_unknown_key(key: str, kind: types.StructType, alternatives: StructTypes) -> str:
    """The message for an unknown key, which may belong to another kind of backend."""
    owners = [str(alternative.tag) for alternative in alternatives if key in list_keys(alternative)]
    if owners:
        return (
            f"{quote(key)} belongs to {kind.tag_field} {join_names(owners)}, and this is {kind.tag}"
        )
    return f"there is no {quote(key)} here; {suggest_name(key, list_keys(kind))}"
