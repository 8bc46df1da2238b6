"""Scalar nodes to values: texts, numbers, words, units and secrets."""

import os.path
from collections.abc import Mapping
from typing import Any

import msgspec.inspect as types
import yaml
from msgspec import UNSET

from gateway.config import scalars
from gateway.config.complaints import (
    ConfigPath,
    IssueCollector,
    find_closest_name,
    join_names,
    quote,
)
from gateway.config.document import get_position
from gateway.config.pairs import describe_node, read_mapping
from gateway.config.scalars import YamlScalar
from gateway.config.units import ScalarType, parse_bearer_token

_NO_VALUE_MESSAGE = "has no value; give it one or remove the key"
_SECRET_HINT = "a secret is a text, {env: NAME} or {file: PATH}"
_MAX_SECRET_SIZE = 1 << 16
_KIND_NAMES = {"int": "a number", "float": "a number", "bool": "true or false"}


class ScalarDecoder:
    """Reads what has no parts. Whatever can't be read is UNSET, after a complaint."""

    def __init__(self, complaints: IssueCollector, env: Mapping[str, str]) -> None:
        self._issues = complaints
        self._env = env
        self._folder = os.path.dirname(complaints.filename)  # noqa: PTH120 - "" is to stay ""
        if self._folder and not os.path.isabs(self._folder):  # noqa: PTH117
            self._folder = os.path.join(".", self._folder)  # noqa: PTH118 - plainly no hub's name
        self.files: dict[ConfigPath, str] = {}
        """The files that are named, by where."""

    def decode_plain(self, node: yaml.Node, kind: types.Type, path: ConfigPath) -> Any:
        """A text, a whole number, or one of several words."""
        scalar = self._read_scalar(node, _describe_type(kind), path)
        if scalar is None:
            return UNSET
        try:
            return _convert_scalar(scalar, kind)
        except ValueError as error:
            return self._add_issue(node, str(error), path)

    def decode_option(self, node: yaml.Node, path: ConfigPath) -> Any:
        """A text, a number or a truth: whichever it says."""
        scalar = self._read_scalar(node, "a text, a number, true or false", path)
        if scalar is None:
            return UNSET
        if not scalar.is_plain:
            return scalar.text
        try:
            return scalars.parse_scalar(scalar.text)
        except ValueError as error:
            return self._add_issue(node, f"{scalar.quoted_raw} {error}", path)

    def decode_scalar(self, node: yaml.Node, unit: ScalarType, path: ConfigPath) -> Any:
        """A value with a form of its own."""
        scalar = self._read_scalar(node, "a text or number", path)
        if scalar is None:
            return UNSET
        text = scalar.text
        if unit.path_kind in ("always", "written") or (
            unit.path_kind == "dotted" and text.startswith(".")
        ):
            text = self._resolve_path(text)
        if unit.path_kind == "always":
            self.files[path] = text
        try:
            return unit.parse(text)
        except ValueError as error:
            what = "this" if unit.is_secret else scalar.quoted_raw
            return self._add_issue(node, f"{what} {error}", path)

    def former_file(self, node: yaml.Node, path: ConfigPath) -> None:
        """Note the file that a former key names, whether or not there is one."""
        if isinstance(node, yaml.ScalarNode) and node.value:
            self.files[path] = self._resolve_path(node.value)

    def decode_secret(self, node: yaml.Node, path: ConfigPath) -> Any:
        """A text, ``{env: NAME}`` or ``{file: PATH}``. No complaint shows it."""
        if isinstance(node, yaml.ScalarNode):
            scalar = self._read_scalar(node, "a text", path)
            text, where = None if scalar is None else scalar.text, "this secret"
        else:
            text, where = self._read_external_secret(node, path)
        if text is None:
            return UNSET
        try:
            return parse_bearer_token(text)
        except ValueError as error:
            return self._add_issue(node, f"{where} {error}", path)

    def _read_external_secret(self, node: yaml.Node, path: ConfigPath) -> tuple[str | None, str]:
        """A secret that is kept elsewhere, and where."""
        found = read_mapping(node, "a text, {env: NAME} or {file: PATH}", self._issues, path)
        if found is None:
            return None, ""
        if len(found) != 1 or not found.keys() <= {"env", "file"}:
            return self._add_issue(node, _SECRET_HINT, path) or None, ""
        ((source, (_, value)),) = found.items()
        steps = (*path, source)
        named = self.decode_plain(value, types.StrType(min_length=1), steps)
        if named is UNSET:
            return None, ""
        if source == "env":
            if named not in self._env:
                self._add_issue(value, f"{named} is not set in the environment; set it", steps)
            return self._env.get(named), f"what {named} holds"
        where = self.files[steps] = self._resolve_path(named)
        try:
            with open(where, encoding="utf-8") as file:  # noqa: PTH123
                return file.read(_MAX_SECRET_SIZE).rstrip(
                    "\r\n"
                ), f"what the file {quote(named)} holds"
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not a text"
            self._add_issue(value, f"the file {quote(named)} can't be read: {why}", steps)
        return None, ""

    def _resolve_path(self, path: str) -> str:
        """A path as seen from where the configuration lies."""
        return os.path.join(self._folder, os.path.expanduser(path))  # noqa: PTH111, PTH118

    def _read_scalar(self, node: yaml.Node, wanted: str, path: ConfigPath) -> YamlScalar | None:
        """A scalar with the environment put in. None after a complaint, and for null."""
        if not isinstance(node, yaml.ScalarNode):
            self._add_issue(node, f"must be {wanted}, not {describe_node(node)}", path)
            return None
        try:
            text = scalars.expand_env(node.value, self._env)
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


def _describe_type(kind: types.Type) -> str:
    match kind:
        case types.IntType():
            return "a whole number"
        case types.FloatType():
            return "a number"
        case types.BoolType():
            return "true or false"
        case types.LiteralType(values):
            return f"one of {join_names(map(str, values))}"
        case _:
            return "a text"


def _convert_scalar(scalar: YamlScalar, kind: types.Type) -> Any:
    """The value. Raises ValueError with the whole complaint."""
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
            f'must be a text, not {_KIND_NAMES[scalar.kind]}; write it in quotes: "{scalar.text}"'
        )
    if len(scalar.text) < (kind.min_length or 0):
        raise ValueError("is empty; give it a value or remove the key")
    return scalar.text


def _convert_int(scalar: YamlScalar, kind: types.IntType) -> int:
    if not scalar.is_plain and not scalar.has_env:
        raise ValueError(
            f"must be a whole number, not the text {scalar.quoted_raw}; remove the quotes"
        )
    try:
        found = scalars.parse_integer(scalar.text)
    except ValueError as error:
        raise ValueError(f"{error}, not {scalar.quoted_raw}") from None
    low, high = kind.ge, kind.le
    if (low is not None and found < low) or (high is not None and found > high):
        raise ValueError(f"must be from {low} to {high}, not {scalar.quoted_raw}")
    return found


def _convert_float(scalar: YamlScalar, kind: types.FloatType) -> float:
    if not scalar.is_plain and not scalar.has_env:
        raise ValueError(f"must be a number, not the text {scalar.quoted_raw}; remove the quotes")
    found = scalars.parse_scalar(scalar.text)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"must be a number, not {scalar.quoted_raw}")  # noqa: TRY004 - a complaint
    if found < (kind.ge or 0) or found > (kind.le or found) or found == kind.gt:
        low = f"from {kind.ge:g}" if kind.gt is None else f"more than {kind.gt:g}, up"
        raise ValueError(f"must be {low} to {kind.le:g}, not {scalar.quoted_raw}")
    return float(found)


def _convert_bool(scalar: YamlScalar) -> bool:
    found = {"true": True, "false": False}.get(scalar.text)
    if found is None or not (scalar.is_plain or scalar.has_env):
        raise ValueError(f"must be true or false, not {scalar.quoted_raw}")
    return found


def _convert_literal(scalar: YamlScalar, values: tuple[Any, ...]) -> Any:
    for one in values:
        if scalar.text == str(one) and (isinstance(one, str) or scalar.is_plain or scalar.has_env):
            return one
    known = [str(one) for one in values]
    if len(known) == 1:
        raise ValueError(f"must be {known[0]}, not {scalar.quoted_raw}")
    meant = find_closest_name(scalar.text, known)
    hint = f"; did you mean {meant}?" if meant else ""
    raise ValueError(f"must be one of {join_names(known)}, not {scalar.quoted_raw}{hint}")
