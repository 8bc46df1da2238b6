"""The descriptions of the configuration: the docstrings of its Structs and of their fields.

They are read from the source, for the JSON Schema, the reference page and hints of ``check``.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from msgspec import Struct
from msgspec import inspect as types

from gateway.config.schema import Config
from protocols.core.units import ConfigSection


def list_sections() -> Sequence[types.StructType]:
    """Every Struct of the configuration, each once; those of a field follow the one that has it."""
    found: dict[type, types.StructType] = {}
    waiting: list[Any] = [types.type_info(Config)]
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, types.StructType):
            if kind.cls in found:
                continue
            found[kind.cls] = kind
        waiting[:0] = list_inner_types(kind)
    return list(found.values())


def list_inner_types(kind: Any) -> Sequence[Any]:
    """The types of which a type consists: of a Struct's fields, or of a container's values."""
    match kind:
        case types.StructType():
            return [field.type for field in kind.fields]
        case types.Metadata(type=inner):
            return [inner]
        case types.UnionType(types=inner):
            return list(inner)
        case types.DictType(value_type=inner) | types.VarTupleType(item_type=inner):
            return [inner]
        case _:
            return []


def describe_section(section: type) -> str:
    """A Struct's docstring, with code in single backquotes, as in Markdown."""
    return _format_code(inspect.getdoc(section) or "")


def describe_fields(section: type[Struct]) -> Mapping[str, str]:
    """The description of each field of a Struct that has one, on one line, as in Markdown.

    Inherited fields and the tag are included.
    """
    texts: dict[str, str] = {}
    if tag_field := section.__struct_config__.tag_field:
        texts[tag_field] = inspect.getdoc(getattr(section, tag_field)) or ""
    for cls in reversed(section.__mro__):
        if issubclass(cls, ConfigSection):
            texts |= _read_docstrings(sys.modules[cls.__module__]).get(cls.__name__, {})
    return {name: " ".join(_format_code(text).split()) for name, text in texts.items()}


@cache
def _read_docstrings(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """The docstrings of the fields of a module's classes, by class and field."""
    statements = ast.parse(inspect.getsource(module)).body
    return {
        one.name: dict(_find_docstrings(one.body))
        for one in statements
        if isinstance(one, ast.ClassDef)
    }


def _find_docstrings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Each annotated field of a class that a string follows, and the string."""
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, text
            case _:
                pass


def _format_code(text: str) -> str:
    return text.replace("``", "`")
