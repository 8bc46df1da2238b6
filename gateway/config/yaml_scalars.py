"""The types of YAML scalars, by YAML 1.2, and the environment variables in them.

YAML 1.1 reads ``no`` as false, ``017`` as 15 and ``12:30:45`` as 45045. Here they are a string,
the number 17 and a string.
"""

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from gateway.config.errors import quote

ScalarKind = Literal["null", "bool", "int", "float", "str"]

_NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL_WORDS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_INT_PATTERN = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT_PATTERN = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
)
_NAN_WORDS = frozenset({".nan", ".NaN", ".NAN"})
_MAX_DIGITS = 18

_ENV_REFERENCE = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
_ENV_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::([-?])(.*))?", re.DOTALL)
_ENV_HINT = "write ${NAME}, ${NAME:-default}, ${NAME:?message}, or $$ for a dollar sign"


class YamlScalar(Struct, frozen=True):
    """A scalar: ``raw`` as written, ``text`` with environment variables expanded."""

    raw: str
    text: str
    is_plain: bool
    """Not in quotes."""

    @property
    def has_env(self) -> bool:
        """Whether it contains environment variables, so that the field decides its type."""
        return self.raw != self.text

    @property
    def kind(self) -> ScalarKind:
        """The type of the text by YAML 1.2."""
        return resolve_kind(self.text) if self.is_plain else "str"

    @property
    def is_null(self) -> bool:
        """Whether it is null."""
        return self.is_plain and self.raw in _NULL_WORDS

    @property
    def quoted_raw(self) -> str:
        """The text for an issue: as written, since environment variables may hold secrets."""
        return quote(self.raw)


def resolve_kind(text: str) -> ScalarKind:
    """The type of a plain scalar by YAML 1.2's core schema."""
    if text in _NULL_WORDS:
        return "null"
    if text in _BOOL_WORDS:
        return "bool"
    if _INT_PATTERN.fullmatch(text):
        return "int"
    return "float" if _FLOAT_PATTERN.fullmatch(text) or text in _NAN_WORDS else "str"


def parse_scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain scalar. Raises ValueError for a number that is too long."""
    match resolve_kind(text):
        case "null":
            return None
        case "bool":
            return _BOOL_WORDS[text]
        case "int":
            return parse_integer(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def parse_integer(text: str) -> int:
    """An integer by YAML 1.2. Raises ValueError."""
    if not _INT_PATTERN.fullmatch(text):
        raise ValueError("must be a whole number")
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"must be a number of at most {_MAX_DIGITS} digits")
    if text[:2] in ("0o", "0x"):
        return int(text, 0)
    return int(text)


def expand_env(text: str, env: Mapping[str, str]) -> str:
    """``text`` with environment variables expanded. Raises ValueError for one that is not set."""
    return _ENV_REFERENCE.sub(lambda match: _expand_reference(match[0], match[1], env), text)


def _expand_reference(reference: str, inner: str | None, env: Mapping[str, str]) -> str:
    if reference == "$$":
        return "$"
    named = _ENV_NAME.fullmatch(inner or "")
    if named is None:
        raise ValueError(f"{quote(reference)} is not an environment variable; {_ENV_HINT}")
    name, sign, default = named.groups()
    value = env.get(name)
    if sign is None and value is not None:
        return value
    if value:
        return value
    if sign == "-":
        return str(default)
    if sign == "?":
        raise ValueError(f"{name} is not set in the environment: {default or 'set it'}")
    raise ValueError(f"{name} is not set in the environment; set it, or write ${{{name}:-default}}")
