"""What a scalar says: the environment put in, and the type that YAML 1.2 gives it.

YAML 1.1 reads ``no`` as false, ``017`` as 15 and ``12:30:45`` as 45045. Here they are a text, the
number 17 and a text.
"""

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from gateway.config.complaints import quoted

Kind = Literal["null", "bool", "int", "float", "str"]

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_DIGITS = 18

_REFERENCE = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::([-?])(.*))?", re.DOTALL)
_FORMS = "write ${NAME}, ${NAME:-default}, ${NAME:?message}, or $$ for a dollar sign"


class Scalar(Struct, frozen=True):
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
    def kind(self) -> Kind:
        """The type by YAML 1.2."""
        return kind(self.text) if self.is_plain else "str"

    @property
    def is_null(self) -> bool:
        """Whether nothing is said."""
        return self.is_plain and self.raw in _NULL

    @property
    def quoted_raw(self) -> str:
        """As a complaint shows it: what the environment holds may be a secret, and is not shown."""
        return quoted(self.raw)


def kind(text: str) -> Kind:
    """The type of a plain scalar by YAML 1.2's core schema."""
    if text in _NULL:
        return "null"
    if text in _BOOL:
        return "bool"
    if _INT.fullmatch(text):
        return "int"
    return "float" if _FLOAT.fullmatch(text) or text in _NAN else "str"


def value(text: str) -> bool | int | float | str | None:
    """The value of a plain scalar. Raises ValueError for a number that is too long."""
    match kind(text):
        case "null":
            return None
        case "bool":
            return _BOOL[text]
        case "int":
            return integer(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


def integer(text: str) -> int:
    """A whole number as YAML 1.2 writes it. Raises ValueError."""
    if not _INT.fullmatch(text):
        raise ValueError("must be a whole number")
    if len(text) > _DIGITS:
        raise ValueError(f"must be a number of at most {_DIGITS} digits")
    if text[:2] in ("0o", "0x"):
        return int(text, 0)
    return int(text)


def replace(text: str, env: Mapping[str, str]) -> str:
    """``text`` with the environment put in. Raises ValueError for what is not set."""
    return _REFERENCE.sub(lambda match: _resolve(match[0], match[1], env), text)


def _resolve(whole: str, inner: str | None, env: Mapping[str, str]) -> str:
    if whole == "$$":
        return "$"
    named = _NAMED.fullmatch(inner or "")
    if named is None:
        raise ValueError(f"{quoted(whole)} names nothing of the environment; {_FORMS}")
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
