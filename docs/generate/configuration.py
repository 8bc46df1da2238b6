"""The reference page of the configuration, generated from its Structs."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec import inspect as types

from docs.generate.configuration_examples import EXAMPLES
from docs.generate.markdown import HEADER, code, number, table
from gateway.config.descriptions import (
    describe_fields,
    describe_section,
    list_inner_types,
    list_sections,
)
from protocols.core.units import SCALAR_TYPES

_INTRO = """# Configuration

The configuration is one YAML file. Unknown fields and invalid values are rejected with their line
and column, as by `interlingua check`. `${NAME}` and `${NAME:-default}` in a scalar are replaced
by environment variables. Top-level keys that begin with `x-` are ignored: use them for YAML
anchors and notes.
"""


def configuration_page() -> str:
    """The page."""
    lines = [HEADER, "", _INTRO]
    lines += map(_struct, list_sections())
    lines += ["## Units", "", table(("unit", "means"), _units())]
    return "\n".join(lines)


def _struct(kind: types.StructType) -> str:
    cls: Any = kind.cls
    lines = [f"## {cls.__name__}", "", describe_section(cls), ""]
    if short := getattr(cls, "shorthand_field", None):
        url = getattr(cls, "shorthand_url_field", None)
        of_urls = f", or `{url}` if it is a URL" if url else ""
        lines += [f"A single value in place of the mapping sets `{short}`{of_urls}.", ""]
    rows = list(_rows(kind))
    lines.append(table(("field", "type", "default", "meaning"), rows))
    if example := EXAMPLES.get(cls):
        lines += ["```yaml", example.rstrip(), "```", ""]
    return "\n".join(lines)


def _rows(kind: types.StructType) -> Iterator[tuple[str, str, str, str]]:
    cls: Any = kind.cls
    descriptions = describe_fields(cls)
    if kind.tag_field:
        implied = getattr(cls, "implied_by", None)
        default = f"implied by `{implied}`" if implied else "required"
        yield code(kind.tag_field), code(kind.tag), default, descriptions[kind.tag_field]
    for field in kind.fields:
        name, inner = code(field.encode_name), field.type
        if field.name == getattr(cls, "extra_field", None):
            keys = getattr(cls, "extra_keys", None)
            name = "any other" if keys is None else ", ".join(map(code, sorted(keys)))
            [inner] = list_inner_types(inner)
        yield name, _type(inner), _default(field), descriptions[field.name]


def _type(kind: Any) -> str:
    match kind:
        case types.Metadata(type=inner, extra=extra):
            unit = (extra or {}).get("unit")
            return f"[{unit}](#units)" if unit else _type(inner)
        case types.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case types.UnionType(types=inner):
            return " or ".join(_type(one) for one in inner if not isinstance(one, types.NoneType))
        case types.DictType(key_type=key, value_type=inner):
            return f"a mapping from {_type(key)} to {_type(inner)}"
        case types.VarTupleType(item_type=inner):
            return f"a list of {_type(inner)}"
        case types.LiteralType(values=values):
            return " or ".join(map(code, values))
        case _:
            return _scalar(kind)


def _scalar(kind: Any) -> str:
    names: Mapping[Any, str] = {
        types.StrType: "a string",
        types.BoolType: "true or false",
        types.IntType: "a whole number",
        types.FloatType: "a number",
    }
    limits = [
        f"{word} {number(limit)}"
        for word, limit in (
            ("from", getattr(kind, "ge", None)),
            ("above", getattr(kind, "gt", None)),
            ("to", getattr(kind, "le", None)),
        )
        if limit is not None
    ]
    return " ".join([names.get(type(kind), "a secret"), *limits])


def _default(field: types.Field) -> str:
    default = field.default
    if default is NODEFAULT and field.default_factory is not NODEFAULT:
        default = field.default_factory()
    if default is NODEFAULT:
        return "required"
    if isinstance(default, Struct):
        return "its defaults"
    if default is None or default in ((), {}, ""):
        return ""
    unit = (field.type.extra or {}).get("unit") if isinstance(field.type, types.Metadata) else None
    if unit:
        return code(SCALAR_TYPES[unit].format_value(default))
    return code(msgspec.json.encode(default).decode().strip('"'))


def _units() -> Iterator[tuple[str, str]]:
    for name, unit in SCALAR_TYPES.items():
        text = unit.description or inspect.getdoc(unit.parse) or ""
        yield code(name), " ".join(text.replace("``", "`").split())
