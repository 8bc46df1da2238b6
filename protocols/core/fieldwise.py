"""Decodes workers' JSON by field: a value of another type costs itself, not the whole response.

A response is decoded with its type first, so that one as it should be costs nothing more. If that
fails, ``convert_by_field`` takes out what does not fit and converts the rest. What was taken out is
put aside as an unknown key of its object, which clients of the worker's protocol get, or is
returned, to be reported. A list of plain values is taken out whole: without one of them, the others
would have other positions. Unknown keys of types that forbid them are taken out first.
"""

import re
from functools import cache
from itertools import takewhile
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import inspect

from protocols.core.events import Event, FieldValues, ResponseExtra
from protocols.core.json_text import decode_json

T = TypeVar("T")

_MAX_REMOVED: Final = 32
"""How many values are taken out of one object."""
_PATH: Final = re.compile(r" - at `\$(.*)`$")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")

_Step = str | int
_Place = tuple[Any, _Step]
"""A container, and the key or the index in it."""


def decode_fields(body: bytes | bytearray, kind: type[T]) -> tuple[T, FieldValues]:
    """The body without what does not fit, and that by its path. Raises one of JSON_ERRORS."""
    try:
        return decode_json(body, kind=kind), ()
    except msgspec.ValidationError:
        return convert_by_field(decode_json(body), kind)


def convert_by_field(value: Any, kind: type[T], extra_key: str = "") -> tuple[T, FieldValues]:
    """The value without what does not fit, and that by its path. It is changed.

    ``extra_key`` is the key under which objects have their unknown keys, if they do. Raises
    ValidationError if too little fits.
    """
    lost: list[tuple[tuple[str, ...], Any]] = []
    if not extra_key:
        _take_unknown_keys(value, _get_type(cast("Any", kind)), (), lost)
    for _ in range(_MAX_REMOVED):
        try:
            return msgspec.convert(value, kind), tuple(lost)
        except msgspec.ValidationError as e:
            places = _keep_lists_whole(_find_places(value, str(e)))
            if not places:
                raise
            owner, path = _find_object(places, extra_key)
            if owner is not None:
                container = owner
                for step in path[:-1]:
                    container = container[step]
                owner[extra_key] = (*owner[extra_key], (path, container.pop(path[-1])))
            else:
                container, key = places[-1]
                lost.append((_format_path(places), container.pop(key)))
    return msgspec.convert(value, kind), tuple(lost)


@cache
def _get_type(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _take_unknown_keys(
    value: Any, kind: inspect.Type, at: tuple[str, ...], lost: list[tuple[tuple[str, ...], Any]]
) -> None:
    """Take the unknown keys out of all objects whose types forbid them."""
    match kind:
        case inspect.UnionType(types):
            for one in types:
                _take_unknown_keys(value, one, at, lost)
        case inspect.ListType(item_type) if isinstance(value, list) and (
            isinstance(item_type, inspect.StructType | inspect.ListType)
        ):
            *parents, name = at or ("",)
            for i, item in enumerate(value):
                _take_unknown_keys(item, item_type, (*parents, f"{name}[{i}]"), lost)
        case inspect.StructType(fields=fields, array_like=True) if isinstance(value, list):
            for i, (item, field) in enumerate(zip(value, fields, strict=False)):
                _take_unknown_keys(item, field.type, (f"[{i}]",), lost)
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            types_by_key = {field.encode_name: field.type for field in fields}
            for key in [*value]:
                if key in types_by_key:
                    _take_unknown_keys(value[key], types_by_key[key], (*at, key), lost)
                elif kind.forbid_unknown_fields and (one := value.pop(key)) is not None:
                    lost.append(((*at, key), one))


def _find_places(value: Any, message: str) -> list[_Place]:
    """The containers on the way to the value that an error is about, outermost first."""
    found = _PATH.search(message)
    places: list[_Place] = []
    for key, index, _ in _STEP.findall(found[1] if found else ""):
        step: _Step = int(index) if index else key
        if step == "":  # some key, which the message does not tell
            break
        try:
            inner = value[step]
        except (KeyError, IndexError, TypeError):
            break
        places.append((value, step))
        value = inner
    return places


def _keep_lists_whole(places: list[_Place]) -> list[_Place]:
    """The places up to the first of the innermost lists that holds no object."""
    while places and isinstance(places[-1][0], list) and not _holds_object(places[-1][0]):
        places = places[:-1]
    return places


def _holds_object(values: list[Any]) -> bool:
    return any(isinstance(one, dict) for one in values)


def has_lost_element(lost: FieldValues, key: str) -> bool:
    """Whether an element of this list of the body was taken out, so that others moved."""
    return any(len(path) == 1 and path[0].startswith(f"{key}[") for path, _ in lost)


def _find_object(places: list[_Place], extra_key: str) -> tuple[Any, tuple[str, ...]]:
    """The innermost object that has unknown keys, and the path of what is put aside.

    No object if there is none, and for an element of a list of such an object.
    """
    objects = [i for i, (one, _) in enumerate(places) if isinstance(one, dict) and extra_key in one]
    if not (extra_key and objects):
        return None, ()
    if isinstance(places[-1][0], list) and objects[-1] == len(places) - 2:
        return None, ()
    below = [step for _, step in places[objects[-1] :]]
    path = tuple([str(one) for one in takewhile(lambda step: isinstance(step, str), below)])
    return places[objects[-1]][0], path


def _format_path(places: list[_Place]) -> tuple[str, ...]:
    path: list[str] = []
    for _, step in places:
        if isinstance(step, str):
            path.append(step)
        elif path:
            path[-1] += f"[{step}]"
        else:
            path.append(f"[{step}]")
    return tuple(path)


def report_lost_fields(lost: FieldValues, events: list[Event]) -> None:
    """Add the event of fields that were taken out: no encoder writes them."""
    if lost:
        events.append(ResponseExtra("", "response", lost))
