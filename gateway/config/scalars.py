"""What a scalar says: the environment put in, and the type that YAML 1.2 gives it.

YAML 1.1 reads ``no`` as false, ``017`` as 15 and ``12:30:45`` as 45045. Here they are a text, the
number 17 and a text.
"""

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from gateway.config.complaints import quote

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
    """A scalar of the file. ``raw`` is as it is written there, ``text`` what it comes to."""

    raw: str
    text: str
    is_plain: bool
    """Not in quotes."""

    @property
    def has_env(self) -> bool:
        """Whether the environment had a part in it, so that its type is the field's choice."""
        return self.raw != self.text

    @property
    def kind(self) -> ScalarKind:
        """The type by YAML 1.2."""
        return resolve_kind(self.text) if self.is_plain else "str"

    @property
    def is_null(self) -> bool:
        """Whether nothing is said."""
        return self.is_plain and self.raw in _NULL_WORDS

    @property
    def quoted_raw(self) -> str:
        """As a complaint shows it: what the environment holds may be a secret, and is not shown."""
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
    """A whole number as YAML 1.2 writes it. Raises ValueError."""
    if not _INT_PATTERN.fullmatch(text):
        raise ValueError("must be a whole number")
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"must be a number of at most {_MAX_DIGITS} digits")
    if text[:2] in ("0o", "0x"):
        return int(text, 0)
    return int(text)


def expand_env(text: str, env: Mapping[str, str]) -> str:
    """``text`` with the environment put in. Raises ValueError for what is not set."""
    return _ENV_REFERENCE.sub(lambda match: _expand_reference(match[0], match[1], env), text)


def _expand_reference(whole: str, inner: str | None, env: Mapping[str, str]) -> str:
    if whole == "$$":
        return "$"
    named = _ENV_NAME.fullmatch(inner or "")
    if named is None:
        raise ValueError(f"{quote(whole)} names nothing of the environment; {_ENV_HINT}")
    name, sign, rest = named.groups()
    found = env.get(name)
    if sign is None and found is not None:
        return found
    if found:
        return found
    if sign == "-":
        return str(rest)
    if sign == "?":
        raise ValueError(f"{name} is not set in the environment: {rest or 'set it'}")
    raise ValueError(f"{name} is not set in the environment; set it, or write ${{{name}:-default}}")
