"""Decodes the YAML tree into the Structs of the schema.

Decoding does not stop at the first issue: a value that can't be read becomes UNSET. A result with
issues is used only to find further issues.
"""

import os.path
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec.inspect as types
import yaml
from msgspec import UNSET, Struct, UnsetType

from gateway.config import yaml_reader
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
from gateway.config.yaml_reader import (
    KeyNodes,
    YamlScalar,
    describe_node,
    get_position,
    is_null_node,
    read_mapping,
)
from protocols.core.units import (
    SCALAR_TYPES,
    PathKind,
    ScalarType,
    Secret,
    parse_bearer_token,
)

# Scalars: strings, numbers, enumerations, scalar types and secrets.

_NO_VALUE_MESSAGE = "has no value; give it one or remove the key"
_EXTERNAL_HINT = "a secret is a string, {env: NAME} or {file: PATH}"
_MAX_SECRET_SIZE = 1 << 16
_KIND_NAMES = {"int": "a number", "float": "a number", "bool": "true or false"}


class ScalarDecoder:
    """Decodes scalars. A value that can't be read is reported and becomes UNSET."""

    def __init__(self, issues: IssueCollector, env: Mapping[str, str]) -> None:
        self._issues = issues
        self._env = env
        self._folder = os.path.dirname(issues.filename)  # noqa: PTH120 - "" is to stay ""
        if self._folder and not os.path.isabs(self._folder):  # noqa: PTH117
            self._folder = os.path.join(".", self._folder)  # noqa: PTH118 - plainly no hub's name
        self.files: dict[ConfigPath, str] = {}
        """The files that the document names, by path of the value."""

    def decode_plain(self, node: yaml.Node, kind: types.Type, path: ConfigPath) -> Any:
        """Decode a string, a number, a boolean or an enumeration."""
        scalar = self._read_scalar(node, _describe_type(kind), path)
        if scalar is None:
            return UNSET
        try:
            return _convert_scalar(scalar, kind)
        except ValueError as error:
            return self._add_issue(node, str(error), path)

    def decode_option(self, node: yaml.Node, path: ConfigPath) -> Any:
        """Decode a protocol's option: a string, a number or a boolean."""
        scalar = self._read_scalar(node, "a string, a number, true or false", path)
        if scalar is None:
            return UNSET
        if not scalar.is_plain:
            return scalar.text
        try:
            return yaml_reader.parse_scalar(scalar.text)
        except ValueError as error:
            return self._add_issue(node, f"{scalar.quoted_raw} {error}", path)

    def decode_scalar(self, node: yaml.Node, unit: ScalarType, path: ConfigPath) -> Any:
        """Decode a value of a scalar type."""
        scalar = self._read_scalar(node, "a string or a number", path)
        if scalar is None:
            return UNSET
        text = scalar.text
        if unit.path_kind and (unit.path_kind != "weights" or text.startswith(".")):
            text = self._resolve_path(text)
        if unit.path_kind in ("file", "template"):
            self.files[path] = text
        try:
            value = unit.parse(text)
            check_path(unit.path_kind, text)
        except ValueError as error:
            subject = "this" if unit.is_secret else scalar.quoted_raw
            return self._add_issue(node, f"{subject} {error}", path)
        return value

    def former_file(self, node: yaml.Node, path: ConfigPath) -> None:
        """Record the file that a former key names, whether or not it exists."""
        if isinstance(node, yaml.ScalarNode) and node.value:
            self.files[path] = self._resolve_path(node.value)

    def decode_secret(self, node: yaml.Node, path: ConfigPath) -> Any:
        """Decode a string, ``{env: NAME}`` or ``{file: PATH}``. No issue shows the secret."""
        if isinstance(node, yaml.ScalarNode):
            scalar = self._read_scalar(node, "a string", path)
            text, source = None if scalar is None else scalar.text, "this secret"
        else:
            text, source = self._read_external_secret(node, path)
        if text is None:
            return UNSET
        try:
            return parse_bearer_token(text)
        except ValueError as error:
            return self._add_issue(node, f"{source} {error}", path)

    def _read_external_secret(self, node: yaml.Node, path: ConfigPath) -> tuple[str | None, str]:
        """Read a secret from the environment or a file; returns it and the name of its source."""
        entries = read_mapping(node, "a string, {env: NAME} or {file: PATH}", self._issues, path)
        if entries is None:
            return None, ""
        if len(entries) != 1 or not entries.keys() <= {"env", "file"}:
            return self._add_issue(node, _EXTERNAL_HINT, path) or None, ""
        ((source, (_, value)),) = entries.items()
        steps = (*path, source)
        name = self.decode_plain(value, types.StrType(min_length=1), steps)
        if name is UNSET:
            return None, ""
        if source == "env":
            if name not in self._env:
                self._add_issue(value, f"{name} is not set in the environment; set it", steps)
            return self._env.get(name), f"what {name} holds"
        source_name = self.files[steps] = self._resolve_path(name)
        try:
            with open(source_name, encoding="utf-8") as file:  # noqa: PTH123
                return file.read(_MAX_SECRET_SIZE).rstrip(
                    "\r\n"
                ), f"what the file {quote(name)} holds"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            self._add_issue(value, f"the file {quote(name)} can't be read: {reason}", steps)
        return None, ""

    def _resolve_path(self, path: str) -> str:
        """A path relative to the configuration's folder."""
        return os.path.join(self._folder, os.path.expanduser(path))  # noqa: PTH111, PTH118

    def is_url(self, node: yaml.ScalarNode) -> bool:
        """Whether a scalar is a URL, with environment variables expanded."""
        try:
            return "://" in yaml_reader.expand_env(node.value, self._env)
        except ValueError:  # the value itself is reported
            return False

    def _read_scalar(self, node: yaml.Node, expected: str, path: ConfigPath) -> YamlScalar | None:
        """A scalar with environment variables expanded. None after an issue, and for null."""
        if not isinstance(node, yaml.ScalarNode):
            self._add_issue(node, f"must be {expected}, not {describe_node(node)}", path)
            return None
        try:
            text = yaml_reader.expand_env(node.value, self._env)
        except ValueError as error:
            self._add_issue(node, str(error), path)
            return None
        scalar = YamlScalar(node.value, text, not node.style)
        if scalar.is_null:
            self._add_issue(node, _NO_VALUE_MESSAGE, path)
            return None
        return scalar

    def _add_issue(self, node: yaml.Node, message: str, path: ConfigPath) -> Any:
        self._issues.add(get_position(node.start_mark), message, path)
        return UNSET


def check_path(kind: PathKind, path: str) -> None:
    """Raises ValueError if what must exist at a path, or the folder of an output, does not."""
    match kind:
        case "file" if not os.path.isfile(path):  # noqa: PTH113 - that of Path may raise
            message = "is not a file"
        case "output" if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or "."):  # noqa: PTH112, PTH120 - as above
            message = "is not in an existing folder"
        case "folder" if not os.path.isdir(path) and (  # noqa: PTH112 - as above
            os.path.exists(path) or not os.path.isdir(os.path.dirname(path.rstrip("/")) or ".")  # noqa: PTH110, PTH112, PTH120
        ):
            message = "is not a folder, or a new one in an existing folder"
        case "template" if not os.path.exists(path):  # noqa: PTH110 - as above
            message = "is not a file or folder"
        case "weights" if path.startswith(("/", ".", "~")) and not os.path.exists(  # noqa: PTH110
            os.path.expanduser(path)  # noqa: PTH111
        ):
            message = "is not a file or folder"
        case _:
            return
    raise ValueError(f"{message}; relative paths start at the configuration's folder")


def _describe_type(kind: types.Type) -> str:
    match kind:
        case types.IntType():
            return "a whole number"
        case types.FloatType():
            return "a number"
        case types.BoolType():
            return "true or false"
        case types.LiteralType(values):
            return f"one of {join_names(_list_values(values))}"
        case _:
            return "a string"


def _convert_scalar(scalar: YamlScalar, kind: types.Type) -> Any:
    """The value of a scalar. Raises ValueError with the complete message."""
    match kind:
        case types.StrType():
            return _convert_str(scalar, kind)
        case types.IntType():
            return _convert_int(scalar, kind)
        case types.FloatType():
            return _convert_float(scalar, kind)
        case types.BoolType():
            return _convert_bool(scalar)
        case types.LiteralType(values):
            return _convert_literal(scalar, values)
        case _:
            raise TypeError(f"no configuration holds {kind}")


def _convert_str(scalar: YamlScalar, kind: types.StrType) -> str:
    if not scalar.has_env and scalar.kind in _KIND_NAMES:
        raise ValueError(
            f'must be a string, not {_KIND_NAMES[scalar.kind]}; write it in quotes: "{scalar.text}"'
        )
    if len(scalar.text) < (kind.min_length or 0):
        raise ValueError("is empty; give it a value or remove the key")
    return scalar.text


def _convert_int(scalar: YamlScalar, kind: types.IntType) -> int:
    if not scalar.is_plain and not scalar.has_env:
        raise ValueError(
            f"must be a whole number, not the string {scalar.quoted_raw}; remove the quotes"
        )
    try:
        number = yaml_reader.parse_integer(scalar.text)
    except ValueError as error:
        raise ValueError(f"{error}, not {scalar.quoted_raw}") from None
    low, high = kind.ge, kind.le
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"must be from {low} to {high}, not {scalar.quoted_raw}")
    return number


def _convert_float(scalar: YamlScalar, kind: types.FloatType) -> float:
    if not scalar.is_plain and not scalar.has_env:
        raise ValueError(f"must be a number, not the string {scalar.quoted_raw}; remove the quotes")
    number = yaml_reader.parse_scalar(scalar.text)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"must be a number, not {scalar.quoted_raw}")  # noqa: TRY004 - an issue
    if number < (kind.ge or 0) or number > (kind.le or number) or number == kind.gt:
        low = f"from {kind.ge:g}" if kind.gt is None else f"more than {kind.gt:g}, up"
        raise ValueError(f"must be {low} to {kind.le:g}, not {scalar.quoted_raw}")
    return float(number)


def _convert_bool(scalar: YamlScalar) -> bool:
    value = {"true": True, "false": False}.get(scalar.text)
    if value is None or not (scalar.is_plain or scalar.has_env):
        raise ValueError(f"must be true or false, not {scalar.quoted_raw}")
    return value


def _convert_literal(scalar: YamlScalar, values: tuple[Any, ...]) -> Any:
    for value in values:
        if scalar.text == str(value) and (
            isinstance(value, str) or scalar.is_plain or scalar.has_env
        ):
            return value
    names = [str(value) for value in values]
    if len(names) == 1:
        raise ValueError(f"must be {names[0]}, not {scalar.quoted_raw}")
    if scalar.text in names:
        raise ValueError(
            f"must be the number {scalar.text}, not the string {scalar.quoted_raw}; "
            "remove the quotes"
        )
    words = [value for value in values if isinstance(value, str)]
    suggestion = find_closest_name(scalar.text, words)
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    accepted = join_names(_list_values(values))
    raise ValueError(f"must be one of {accepted}, not {scalar.quoted_raw}{hint}")


def _list_values(values: tuple[Any, ...]) -> list[str]:
    """The names of accepted values; a row of numbers becomes a range."""
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) > 2 and list(range(numbers[0], numbers[-1] + 1)) == numbers:  # noqa: PLR2004
        words = [value for value in values if isinstance(value, str)]
        return [f"{numbers[0]} to {numbers[-1]}", *words]
    return [str(value) for value in values]


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
