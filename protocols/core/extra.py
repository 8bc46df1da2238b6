"""Keys inside a message, part, tool or tool call that the internal request has no place for.

Each typed object carries its own as ``ExtraFields``. A worker of the client's protocol gets them in
their place; for any other, ``remove_extra_fields`` takes them out and reports the path of each. The
keys of a response come as ``ResponseExtra`` events, which an encoder of the same protocol writes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    AnyRequest,
    ExtraFields,
    FieldPath,
    GenerationRequest,
    Message,
    TokenizeRequest,
)

KeyTree = Mapping[str, "KeyTree | None"]
"""The known keys of an object; those of an object in it, if a key has one."""

MAX_REPORTED: Final = 100
"""How many keys of a request are reported one by one."""


_NULL: Final = Raw(b"null")
_encode = msgspec.json.Encoder().encode
_DEFAULT_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("default", "standard"),
    "inference_geo": ("not_available", "global"),
    "caller": ({"type": "direct"},),
}
"""Values that services send in every response; they say no more than their absence."""


def find_unknown_keys(value: Mapping[str, Any], known: KeyTree) -> dict[FieldPath, Any]:
    """The values of an object that are not ``known``, by their path in the object."""
    found: dict[FieldPath, Any] = {}
    for key, one in value.items():
        if key not in known:
            found[(key,)] = one
        elif (inner := known[key]) is not None and isinstance(one, dict):
            for path, nested in find_unknown_keys(one, inner).items():
                found[(key, *path)] = nested
    return found


def read_extra_fields(value: Mapping[str, Any], at: str, known: KeyTree) -> ExtraFields | None:
    """What ``known`` lacks of the object at this path; None if it lacks nothing."""
    if value.keys() <= known.keys() and not any(map(known.get, value)):
        return None
    values = find_unknown_keys(value, known)
    return ExtraFields(at, values) if values else None


def add_unknown_keys(
    into: dict[str, Raw], value: Mapping[str, Any], at: str, known: KeyTree
) -> None:
    """Add what ``known`` lacks of the object at this path to the extra fields of a request.

    For protocols whose own workers get such objects only as they are, by pass-through.
    """
    if value.keys() <= known.keys() and not any(map(known.get, value)):
        return
    for path, one in find_unknown_keys(value, known).items():
        if one is not None and one != _NULL:
            into[".".join((at, *path))] = one if isinstance(one, Raw) else Raw(_encode(one))


def write_extra_fields(written: dict[str, Any], values: Mapping[FieldPath, Any]) -> None:
    """Add the values at their paths; what is written already stays."""
    for (*parents, key), value in values.items():
        target: Any = written
        for parent in parents:
            target = target.setdefault(parent, {})
        target.setdefault(key, value)


def has_content(value: Any) -> bool:
    """Whether a value says anything: null, an empty list and 0 do not, and are no loss."""
    if isinstance(value, dict) and value:
        return any(map(has_content, value.values()))
    return value is not None and value != [] and not (value == 0 and value is not False)


def list_paths(at: str, values: Mapping[FieldPath, Any], separator: str = ".") -> Iterator[str]:
    """The complete paths of the values that say anything."""
    for path, value in values.items():
        if has_content(value) and value not in _DEFAULT_VALUES.get(path[-1], ()):
            yield separator.join((at, *path))


RequestT = TypeVar("RequestT", bound=AnyRequest)


def remove_extra_fields(
    request: RequestT, keeps: frozenset[str] | None = frozenset()
) -> tuple[RequestT, tuple[UnsupportedParameter, ...]]:
    """The request without the keys inside its messages and tools, and these keys as losses.

    ``keeps`` are keys that the target has, too; None: it has all, since it speaks the client's
    protocol.
    """
    if keeps is None or not isinstance(request, GenerationRequest | TokenizeRequest):
        return request, ()
    removed: list[ExtraFields] = []
    messages = tuple([_strip_message(one, keeps, removed) for one in request.messages])
    tools = tuple([_strip(one, keeps, removed) for one in request.tools])
    if not removed:
        return request, ()
    paths = [path for extra in removed for path in list_paths(extra.at, extra.values)]
    losses = [UnsupportedParameter(path, "dropped") for path in paths[:MAX_REPORTED]]
    if (rest := len(paths) - MAX_REPORTED) > 0:
        losses.append(UnsupportedParameter("messages", "dropped", f"{rest} further keys"))
    return replace(request, messages=messages, tools=tools), tuple(losses)


def _strip_message(message: Message, keeps: frozenset[str], removed: list[ExtraFields]) -> Message:
    count = len(removed)
    parts = tuple([_strip(part, keeps, removed) for part in message.parts])
    calls = tuple([_strip(call, keeps, removed) for call in message.tool_calls])
    stripped: Message = _strip(message, keeps, removed)
    if len(removed) == count:
        return message
    return replace(stripped, parts=parts, tool_calls=calls)


def _strip(item: Any, keeps: frozenset[str], removed: list[ExtraFields]) -> Any:
    extra: ExtraFields | None = item.extra
    if extra is None:
        return item
    kept = {path: value for path, value in extra.values.items() if path[-1] in keeps}
    if len(kept) == len(extra.values):
        return item
    lost = {path: value for path, value in extra.values.items() if path not in kept}
    removed.append(ExtraFields(extra.at, lost))
    return replace(item, extra=ExtraFields(extra.at, kept) if kept else None)
