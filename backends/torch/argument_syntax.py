"""How models write the arguments of a call: as JSON, in tags, as Python, as Gemma's objects.

Each syntax reads, writes, and describes itself as a grammar, so that what is read can be enforced.
"""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from backends.torch.grammar_source import ANY_TEXT, GrammarWriter
from backends.torch.rejection import RequestRejectedError
from protocols.core.json_text import decode_json

_Schema = Mapping[str, Any]
_MAX_DEPTH: Final = 8
"""References that are followed in a schema of one argument."""
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$schema", "$id", "$comment", "$defs", "definitions", "type", "strict", "nullable"}
)  # fmt: skip
"""Keys that a grammar need not enforce."""
_OBJECT_KEYS: Final = _ANNOTATIONS | {"properties", "required", "additionalProperties"}
_ARRAY_KEYS: Final = _ANNOTATIONS | {"items", "minItems", "maxItems"}
_STRING_KEYS: Final = _ANNOTATIONS | {"minLength", "maxLength"}
"""Keys that are enforced where values are not JSON."""


class ArgumentSyntax(Struct, frozen=True):
    """How the arguments of one call are written."""

    @property
    def texts(self) -> str:
        """All marks, one after another; they may be special tokens."""
        return ""

    def read(self, text: str, schema: _Schema) -> dict[str, Any]:
        """The arguments. Raises ValueError or another error of parsing."""
        raise NotImplementedError

    def write(self, arguments: str) -> str:
        """The text of arguments that are given as JSON."""
        raise NotImplementedError

    def build_rule(self, writer: GrammarWriter, schema: _Schema, *, strict: bool) -> str:
        """The expression of arguments with this schema. Raises RequestRejectedError."""
        raise NotImplementedError


class JsonArguments(ArgumentSyntax, frozen=True):
    """A JSON object."""

    def read(self, text: str, schema: _Schema) -> dict[str, Any]:
        """See ``ArgumentSyntax``."""
        del schema
        return read_object(decode_json(text.strip() or "{}"))

    def write(self, arguments: str) -> str:
        """See ``ArgumentSyntax``."""
        return arguments

    def build_rule(self, writer: GrammarWriter, schema: _Schema, *, strict: bool) -> str:
        """See ``ArgumentSyntax``."""
        return writer.add_schema(schema, strict=strict)


class TagArguments(ArgumentSyntax, frozen=True):
    """A tag for each argument: ``opening VALUE closing``.

    In the marks ``{key}`` is the argument's name, ``{type}`` its JSON type, and ``{is_string}`` is
    ``true`` or ``false``. Strings have no quotes; other values are JSON.
    """

    opening: str
    closing: str
    item: str = ""
    """The tag of an entry of a list, in formats that write lists and objects as tags, too."""

    @property
    def texts(self) -> str:
        """See ``ArgumentSyntax``."""
        return self.opening + self.closing

    def read(self, text: str, schema: _Schema) -> dict[str, Any]:
        """See ``ArgumentSyntax``."""
        return self._read_object(text, schema, schema, 0)

    def _read_object(self, text: str, schema: _Schema, root: _Schema, depth: int) -> dict[str, Any]:
        return {
            key: self._read_argument(value, get_property(schema, key), root, kind, depth)
            for key, value, kind in self._split(text)
        }

    def _read_argument(
        self, text: str, declared: Any, root: _Schema, kind: str | None, depth: int
    ) -> Any:
        """A value, which may be of tags if the format has nested ones. Raises ValueError."""
        if not self.item or not text.lstrip().startswith(self.opening.partition("{key}")[0]):
            return _read_value(text, declared, root, kind)
        if depth > _MAX_DEPTH:
            raise ValueError("the arguments are nested too deeply")
        branches = list_branches(declared, root)
        parts = self._split(text)
        if all(key == self.item for key, _, _ in parts) and not any(
            get_property(one, self.item) for one in branches
        ):
            items = next((one["items"] for one in branches if "items" in one), None)
            return [self._read_argument(part, items, root, None, depth + 1) for _, part, _ in parts]
        objects = [one for one in branches if "properties" in one]
        return self._read_object(text, objects[0] if objects else {}, root, depth + 1)

    def _split(self, text: str) -> list[tuple[str, str, str | None]]:
        """The key, value and JSON type of each tag. Raises ValueError for text between them."""
        opening = self._build_opening_pattern()
        parts, at, size = list[tuple[str, str, str | None]](), 0, len(text.rstrip())
        while at < size:
            start = opening.match(text, at)
            end = start and self._build_closing_pattern(start["key"]).search(text, start.end())
            if start is None or end is None:
                raise ValueError("text between the arguments")
            at, value, marks = end.end(), text[start.end() : end.start()], start.groupdict()
            data = _CDATA.fullmatch(value)
            is_string = marks.get("is_string") or ""
            kind = marks.get("type") or {"true": "string", "false": "json"}.get(is_string)
            parts.append((marks["key"].strip(), value if data is None else data[1], kind))
        return parts

    def _build_opening_pattern(self) -> re.Pattern[str]:
        marks = {
            "{key}": '(?P<key>[^<>"\\n]+?)',
            "{type}": "(?P<type>[a-z]+)",
            "{is_string}": "(?P<is_string>true|false)",
        }
        return re.compile(rf"\s*{_escape_mark(self.opening, marks)}{self._line_break}")

    def _build_closing_pattern(self, key: str) -> re.Pattern[str]:
        closing = _escape_mark(self.closing, {"{key}": re.escape(key)})
        return re.compile(f"{self._line_break}{closing}")

    @property
    def _line_break(self) -> str:
        """The line break around a value that is not a part of it.

        Only marks that name the type keep strings apart from the line breaks around them.
        """
        return "" if "{type}" in self.opening or "{is_string}" in self.opening else "\\n?"

    def write(self, arguments: str) -> str:
        """See ``ArgumentSyntax``."""
        values = read_object(decode_json(arguments))
        return "".join(
            self._write_opening(key, _get_type(value))
            + (value if isinstance(value, str) else write_json(value))
            + self.closing.replace("{key}", key)
            for key, value in values.items()
        )

    def _write_opening(self, key: str, kind: str) -> str:
        is_string = "true" if kind == "string" else "false"
        text = self.opening.replace("{key}", key).replace("{is_string}", is_string)
        return text.replace("{type}", "number" if kind == "integer" else kind)

    def build_rule(self, writer: GrammarWriter, schema: _Schema, *, strict: bool) -> str:
        """See ``ArgumentSyntax``."""
        check_keys(schema, _OBJECT_KEYS, strict=strict)
        pieces = []
        for key, is_required in list_properties(schema):
            closing = self.closing.replace("{key}", key)
            branches = list_branches(get_property(schema, key), schema)
            options = [
                f"{writer.quote(self._write_opening(key, kind))} {value}"
                for kind, value in _write_raw_values(
                    writer, branches, schema, closing, strict=strict
                )
            ]
            pieces.append(writer.add_choice(options) + ("" if is_required else "?"))
        if allows_other_properties(schema) and "{key}" not in self.closing:
            start, end = self._write_opening("\0", "string").split("\0")
            value = writer.write_text_until(self.closing)
            other = f"{writer.quote(start)} /[\\w.-]+/ {writer.quote(end)} {value}"
            pieces.append(f"{writer.add_rule(other)}*")
        return " ".join(pieces)


def _write_raw_values(
    writer: GrammarWriter, branches: Sequence[_Schema], root: _Schema, closing: str, *, strict: bool
) -> Iterable[tuple[str, str]]:
    """The JSON type and the expression of each kind of value with its closing mark."""
    texts = [one for one in branches if is_free_string(one)]
    if texts:
        yield "string", writer.write_text_until(closing, build_length_pattern(texts, strict=strict))
    for branch in branches:
        if "const" in branch:
            value = branch["const"]
            text = value if isinstance(value, str) else write_json(value)
            yield _get_type(value), f"{writer.quote(text)} {writer.quote(closing)}"
        elif not is_free_string(branch):
            reference = writer.add_schema(add_definitions(branch, root), strict=strict)
            yield branch.get("type", "object"), f"{reference} {writer.quote(closing)}"


class PythonArguments(ArgumentSyntax, frozen=True):
    """Named Python literals: ``a="x", n=2``; ``true``, ``false`` and ``null`` are read, too."""

    def read(self, text: str, schema: _Schema) -> dict[str, Any]:
        """See ``ArgumentSyntax``."""
        del schema
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call):
            raise TypeError("an expression is no call")
        return read_keywords(call)

    def write(self, arguments: str) -> str:
        """See ``ArgumentSyntax``."""
        values = read_object(decode_json(arguments))
        return ", ".join(f"{key}={_write_python(value)}" for key, value in values.items())

    def build_rule(self, writer: GrammarWriter, schema: _Schema, *, strict: bool) -> str:
        """See ``ArgumentSyntax``."""
        check_keys(schema, _OBJECT_KEYS, strict=strict)
        needed, optional = list[str](), list[str]()
        for key, is_required in list_properties(schema):
            values = [
                _write_python_branch(writer, one, schema, strict=strict)
                for one in list_branches(get_property(schema, key), schema)
            ]
            rule = writer.add_rule(f"{writer.quote(f'{key}=')} {writer.add_choice(values)}")
            (needed if is_required else optional).append(rule)
        return _write_list(writer, needed, optional, ", ")


def _write_python(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    return write_json(value)


def _write_python_branch(
    writer: GrammarWriter, branch: _Schema, root: _Schema, *, strict: bool
) -> str:
    if "const" in branch:
        return writer.quote(_write_python(branch["const"]))
    match branch.get("type"):
        case "boolean":
            return '("True" | "False")'
        case "null":
            return '"None"'
        case _:
            return writer.add_schema(add_definitions(branch, root), strict=strict)


_PYTHON_WORDS: Final = {"None": "null", "True": "true", "False": "false"}
"""Words that chat templates write instead of those of JSON."""
_CDATA: Final = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)


class GemmaArguments(ArgumentSyntax, frozen=True):
    """An object without quotes around its keys, and with a mark of its own around strings."""

    quote: str

    @property
    def texts(self) -> str:
        """See ``ArgumentSyntax``."""
        return self.quote

    def read(self, text: str, schema: _Schema) -> dict[str, Any]:
        """See ``ArgumentSyntax``."""
        del schema
        strings: list[str] = []

        def hold(found: re.Match[str]) -> str:
            strings.append(msgspec.json.encode(found[1]).decode())
            return f"\0{len(strings) - 1}\0"

        mark = re.escape(self.quote)
        body = re.sub(f"{mark}(.*?){mark}", hold, text.strip() or "{}", flags=re.DOTALL)
        body = re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:", r'\1"\2":', body)
        body = re.sub(r"([{,]\s*)(\0\d+\0)\s*:", r"\1\2:", body)
        body = re.sub(
            r"(?<=[:,\[])\s*(None|True|False)\b", lambda found: _PYTHON_WORDS[found[1]], body
        )
        body = re.sub("\0(\\d+)\0", lambda found: strings[int(found[1])], body)
        return read_object(decode_json(body))

    def write(self, arguments: str) -> str:
        """See ``ArgumentSyntax``."""
        return self.write_value(decode_json(arguments))

    def write_value(self, value: Any) -> str:
        """A value as the model writes it."""
        match value:
            case str():
                return f"{self.quote}{value}{self.quote}"
            case dict():
                return f"{{{','.join(f'{k}:{self.write_value(v)}' for k, v in value.items())}}}"
            case list():
                return f"[{','.join(map(self.write_value, value))}]"
            case _:
                return write_json(value)

    def build_rule(self, writer: GrammarWriter, schema: _Schema, *, strict: bool) -> str:
        """See ``ArgumentSyntax``."""
        return _GemmaWriter(writer, self, schema, strict=strict).build_object(schema, 0)


class _GemmaWriter:
    """Writes the grammar of one function's arguments."""

    def __init__(
        self, writer: GrammarWriter, syntax: GemmaArguments, root: _Schema, *, strict: bool
    ) -> None:
        self._writer = writer
        self._syntax = syntax
        self._root = root
        self._strict = strict
        self._any_value: str | None = None
        self._containers: dict[int, tuple[_Schema, str]] = {}
        """Each schema of an object or array with its rule, by its id while it is kept here."""

    def build_object(self, schema: _Schema, depth: int) -> str:
        """The expression of an object."""
        if depth > _MAX_DEPTH:
            raise RequestRejectedError("unsupported", "the schema is nested too deeply")
        check_keys(schema, _OBJECT_KEYS, strict=self._strict)
        needed, optional = list[str](), list[str]()
        for key, is_required in list_properties(schema):
            value = self._build_value(get_property(schema, key), depth)
            rule = self._writer.add_rule(f"{self._writer.quote(f'{key}:')} {value}")
            (needed if is_required else optional).append(rule)
        if not (needed or optional) and allows_other_properties(schema):
            return self._build_any_object()
        return f'"{{" {_write_list(self._writer, needed, optional, ",")} "}}"'

    def _build_value(self, schema: Any, depth: int) -> str:
        branches = list_branches(schema, self._root)
        return self._writer.add_choice(self._build_branch(one, depth) for one in branches)

    def _build_branch(self, branch: _Schema, depth: int) -> str:
        if "const" in branch:
            return self._writer.quote(self._syntax.write_value(branch["const"]))
        match branch.get("type"):
            case "string":
                return self._build_string(build_length_pattern([branch], strict=self._strict))
            case "object" | "array":
                return self._build_container(branch, depth + 1)
            case None:
                return self._build_any_value()
            case _:
                schema = add_definitions(branch, self._root)
                return self._writer.add_schema(schema, strict=self._strict)

    def _build_container(self, branch: _Schema, depth: int) -> str:
        """The rule of an object or array, one for each schema, so that it may contain itself."""
        if id(branch) not in self._containers:
            name = self._writer.reserve_rule()
            self._containers[id(branch)] = branch, name
            build = self.build_object if branch["type"] == "object" else self._build_array
            self._writer.set_rule(name, build(branch, depth))
        return self._containers[id(branch)][1]

    def _build_array(self, branch: _Schema, depth: int) -> str:
        check_keys(branch, _ARRAY_KEYS, strict=self._strict)
        item = self._build_value(branch.get("items"), depth)
        low, high = branch.get("minItems", 0), branch.get("maxItems")
        if high == 0:
            return '"[]"'
        counts = f"{max(low - 1, 0)},{'' if high is None else high - 1}"
        return f'"[" ({item} ("," {item}){{{counts}}}){"" if low else "?"} "]"'

    def _build_string(self, pattern: str = ANY_TEXT) -> str:
        quote = self._syntax.quote
        return f"{self._writer.quote(quote)} {self._writer.write_text_until(quote, pattern)}"

    def _build_any_object(self) -> str:
        field = f'/[\\w.-]+/ ":" {self._build_any_value()}'
        return f'"{{" ({field} ("," {field})*)? "}}"'

    def _build_any_value(self) -> str:
        if self._any_value is None:
            self._any_value = name = self._writer.reserve_rule()
            atom = r"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null/"
            items = f'"[" ({name} ("," {name})*)? "]"'
            self._writer.set_rule(
                name, f"{self._build_string()} | {atom} | {items} | {self._build_any_object()}"
            )
        return self._any_value


# --- schemas of arguments -----------------------------------------------------------------------


def list_properties(schema: _Schema) -> list[tuple[str, bool]]:
    """The names of the arguments, and whether they are required."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    needed = [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
    return [(name, name in needed) for name in dict.fromkeys([*names, *needed])]


def get_property(schema: _Schema, key: str) -> Any:
    """The schema of an argument; None if it has none."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def allows_other_properties(schema: _Schema) -> bool:
    """Whether further arguments are expected: only said so, or if none is named."""
    return bool(schema.get("additionalProperties", not schema.get("properties")))


def list_branches(schema: Any, root: _Schema) -> list[_Schema]:
    """The alternatives of a schema, each with at most one type, or with one value (``const``)."""
    return _list_branches(schema, root, set(), 0) or [{}]


def _list_branches(schema: Any, root: _Schema, seen: set[str], depth: int) -> list[_Schema]:
    """The alternatives; a reference that was ``seen`` adds none, so that the cost stays linear."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return [{}]
    if isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return []
        seen.add(reference)
        return _list_branches(_resolve_reference(reference, root), root, seen, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            found = [_list_branches(one, root, seen, depth + 1) for one in options]
            return [branch for branches in found for branch in branches]
    if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
        return _list_branches(parts[0], root, seen, depth + 1)
    if isinstance(values := schema.get("enum"), list) and values:
        return [{"const": value} for value in values]
    if "const" in schema:
        return [{"const": schema["const"]}]
    if isinstance(kinds := schema.get("type"), list) and kinds:
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _resolve_reference(reference: str, root: _Schema) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def is_free_string(branch: _Schema) -> bool:
    """Whether a value may be any string, or a string of some length."""
    return "const" not in branch and branch.get("type", "string") == "string"


def build_length_pattern(branches: Sequence[_Schema], *, strict: bool) -> str:
    """The pattern of a string without quotes. Raises RequestRejectedError."""
    for branch in branches:
        check_keys(branch, _STRING_KEYS, strict=strict)
    if len(branches) > 1:
        return ANY_TEXT
    low, high = branches[0].get("minLength", 0), branches[0].get("maxLength", "")
    return rf"(.|\n){{{low},{high}}}" if low or high != "" else ANY_TEXT


def check_keys(schema: _Schema, known: frozenset[str], *, strict: bool) -> None:
    """Raises RequestRejectedError for keys that are not enforced, if a function is strict."""
    if strict and (unknown := sorted(schema.keys() - known)):
        raise RequestRejectedError(
            "unsupported",
            f"the schema has unsupported keys: {', '.join(unknown)}; "
            "the model does not write these values as JSON",
            param="tools",
        )


def add_definitions(schema: _Schema, root: _Schema) -> _Schema:
    """A part of a schema with the definitions that it may refer to."""
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**named, **schema}


def write_json(value: Any) -> str:
    """JSON in the style of chat templates, which grammars enforce."""
    match value:
        case dict():
            fields = (f"{write_json(str(key))}: {write_json(one)}" for key, one in value.items())
            return f"{{{', '.join(fields)}}}"
        case list():
            return f"[{', '.join(map(write_json, value))}]"
        case _:
            return msgspec.json.encode(value).decode()


def read_object(value: Any) -> dict[str, Any]:
    """The value, if it is an object. Raises TypeError."""
    if not isinstance(value, dict):
        raise TypeError("the arguments are no object")
    return value


def read_keywords(call: ast.Call) -> dict[str, Any]:
    """The named arguments of a Python call. Raises ValueError."""
    if call.args or None in [one.arg for one in call.keywords]:
        raise ValueError("an argument has no name")
    names = {"true": True, "false": False, "null": None}

    class _Constants(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Constant(names[node.id]) if node.id in names else node

    return {str(one.arg): ast.literal_eval(_Constants().visit(one.value)) for one in call.keywords}


def _read_value(text: str, declared: Any, root: _Schema, kind: str | None) -> Any:
    """An argument's value: JSON if its schema, or ``kind`` of its mark, has another type."""
    if kind == "string":
        return text
    branches = list_branches(declared, root)
    constants = [one["const"] for one in branches if "const" in one]
    if text in constants:
        return text
    types = {_get_type(one) for one in constants}
    types |= {str(one["type"]) for one in branches if "type" in one}
    try:
        value = _decode_value(text, types)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if "string" not in types or kind is not None:
        return value
    types |= {"integer"} if "number" in types else set()
    return value if not isinstance(value, str) and _get_type(value) in types else text


def _decode_value(text: str, types: set[str]) -> Any:
    """JSON, or a Python literal of these types, as chat templates write some. Raises ValueError."""
    try:
        return decode_json(text)
    except msgspec.DecodeError:
        value = ast.literal_eval(text.strip())
        if _get_type(value) not in types - {"string", "integer", "number"}:
            raise
        return value


def _get_type(value: Any) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _write_list(
    writer: GrammarWriter, needed: Sequence[str], optional: Sequence[str], separator: str
) -> str:
    """The expression of a list: first what is required, then what is not."""
    comma = writer.quote(separator)
    if needed:
        rest = "".join(f" ({comma} {one})?" for one in optional)
        return f" {comma} ".join(needed) + rest
    starts = [
        first + "".join(f" ({comma} {one})?" for one in optional[i + 1 :])
        for i, first in enumerate(optional)
    ]
    return f"({' | '.join(starts)})?" if starts else ""


def _escape_mark(text: str, groups: Mapping[str, str]) -> str:
    """The pattern of a mark, without white space around it; line breaks may be missing."""
    pattern = re.escape(text.strip())
    for name, group in groups.items():
        pattern = pattern.replace(re.escape(name), group, 1)
    return pattern.replace("\\\n", "\\s*")


JSON_ARGUMENTS: Final = JsonArguments()
