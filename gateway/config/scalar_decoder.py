"""Decodes YAML scalars into strings, numbers, enumerations, secrets and paths."""

import os.path
from collections.abc import Mapping
from typing import Any

import msgspec.inspect as types
import yaml
from msgspec import UNSET

from gateway.config import yaml_scalars
from gateway.config.errors import ConfigPath, IssueCollector, find_closest_name, join_names, quote
from gateway.config.yaml_reader import describe_node, get_position, read_mapping
from gateway.config.yaml_scalars import YamlScalar
from protocols.core.units import PathKind, ScalarType, parse_bearer_token

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
            return yaml_scalars.parse_scalar(scalar.text)
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
            return "://" in yaml_scalars.expand_env(node.value, self._env)
        except ValueError:  # the value itself is reported
            return False

    def _read_scalar(self, node: yaml.Node, expected: str, path: ConfigPath) -> YamlScalar | None:
        """A scalar with environment variables expanded. None after an issue, and for null."""
        if not isinstance(node, yaml.ScalarNode):
            self._add_issue(node, f"must be {expected}, not {describe_node(node)}", path)
            return None
        try:
            text = yaml_scalars.expand_env(node.value, self._env)
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
        number = yaml_scalars.parse_integer(scalar.text)
    except ValueError as error:
        raise ValueError(f"{error}, not {scalar.quoted_raw}") from None
    low, high = kind.ge, kind.le
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"must be from {low} to {high}, not {scalar.quoted_raw}")
    return number


def _convert_float(scalar: YamlScalar, kind: types.FloatType) -> float:
    if not scalar.is_plain and not scalar.has_env:
        raise ValueError(f"must be a number, not the string {scalar.quoted_raw}; remove the quotes")
    number = yaml_scalars.parse_scalar(scalar.text)
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
