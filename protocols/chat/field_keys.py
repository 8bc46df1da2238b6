"""Keys that the gateway does not know in fields that are objects, such as ``tool_choice``.

They are read from a client's body beside what the field means, and are written into the worker's
field of the same name. A worker that gets no such object does not get them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Raw

from protocols.chat.params import NULL
from protocols.core.extra import KeyTree, get_inner, is_known_word, list_paths, write_extra_value
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.loss import UnsupportedParameter
from protocols.core.request import ExtraFields, FieldPath

_NAME: Final[KeyTree] = {"name": None}
_TOOL_REFERENCE: Final[KeyTree] = {
    "type": frozenset({"function", "custom", "allowed_tools"}),
    "function": _NAME,
    "custom": _NAME,
}
_FIELDS: Final[KeyTree] = {
    "stream_options": dict.fromkeys(("include_usage", "continuous_usage_stats")),
    "tool_choice": {
        **_TOOL_REFERENCE,
        **_NAME,
        "allowed_tools": {"mode": frozenset({"auto", "required"}), "tools": _TOOL_REFERENCE},
    },
    "function_call": _NAME,
    "response_format": {
        "type": frozenset({"text", "json_object", "json_schema"}),
        "json_schema": dict.fromkeys(("name", "description", "schema", "strict")),
    },
    "structured_outputs": dict.fromkeys(("json", "regex", "choice", "grammar", "json_object")),
}
_PLACES: Final[Mapping[str, FieldPath]] = {"function_call": ("tool_choice", "function")}
"""Where workers get a field that has another name there."""
_decode_object = JsonDecoder(dict[str, Raw]).decode
_decode_array = JsonDecoder(list[Raw]).decode


def read_field_extra(fields: Mapping[str, Raw]) -> tuple[ExtraFields, ...]:
    """The unknown keys of the objects among these fields, all of which are valid."""
    if fields.keys().isdisjoint(_FIELDS):
        return ()
    found = []
    for name, known in _FIELDS.items():
        if name in fields and isinstance(known, Mapping):
            values = dict(_find_unknown_keys(fields[name], known))
            if values:
                found.append(ExtraFields(name, values, _PLACES.get(name, (name,))))
    return tuple(found)


def _find_unknown_keys(
    raw: Raw, known: KeyTree, at: FieldPath = ()
) -> Iterator[tuple[FieldPath, Any]]:
    if bytes(memoryview(raw)[:1]) != b"{":
        return
    for key, value in _decode_object(raw).items():
        inner = known.get(key)
        if key not in known:
            if value != NULL:
                yield (*at, key), decode_json(value)
        elif isinstance(inner, frozenset):
            word = decode_json(value)
            if not is_known_word(word, inner):
                yield (*at, key), word
        elif inner is None:
            continue
        elif bytes(memoryview(value)[:1]) == b"[":
            for i, item in enumerate(_decode_array(value)):
                yield from _find_unknown_keys(item, inner, (*at, f"{key}[{i}]"))
        else:
            yield from _find_unknown_keys(value, inner, (*at, key))


def write_field_extra(body: dict[str, Any], extra: ExtraFields) -> Iterator[str]:
    """Add the keys to a worker's fields; yields the client's path of each that has no place."""
    for path, value in extra.values.items():
        target: Any = body
        for step in (*extra.inside, *path[:-1]):
            target = get_inner(target, step)
        if isinstance(target, dict):
            write_extra_value(target, path[-1], value)
        else:
            yield from list_paths(extra.at, ((path, value),))


def find_lost_keys(
    body: dict[str, Any], extras: Iterable[ExtraFields]
) -> tuple[UnsupportedParameter, ...]:
    """The keys that have no place in a worker's body, which is changed."""
    lost = [path for extra in extras for path in write_field_extra(body, extra)]
    return tuple([UnsupportedParameter(path, "dropped") for path in lost])
