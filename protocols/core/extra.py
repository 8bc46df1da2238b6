"""Keys inside a message, part, tool or tool call that the internal request has no place for.

Each typed object carries its own as ``ExtraFields``. A worker of the client's protocol gets them in
their place; for any other, ``remove_extra_fields`` takes them out and reports the path of each. The
keys of a response come as ``ResponseExtra`` events, which an encoder of the same protocol writes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocols.core.loss import UnsupportedParameter
from protocols.core.request import (
    NO_KEYS,
    AnyRequest,
    ContentPart,
    ExtraFields,
    FieldPath,
    GenerationRequest,
    KeptKeys,
    Message,
    TextPart,
    TokenizeRequest,
)

KeyTree = Mapping[str, "KeyTree | frozenset[str] | None"]
"""The known keys of an object; those of an object in it, or the words of an enumeration, if a key
has one. A key with another word is unknown."""

_NULL: Final = Raw(b"null")
_encode = msgspec.json.Encoder().encode
_DEFAULT_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("default", "standard"),
    "inference_geo": ("not_available", "global"),
    "caller": ({"type": "direct"},),
    "include_obfuscation": (False,),
}
"""Values that services send in every response; they say no more than their absence."""
_CACHED_TOKENS: Final = frozenset(
    ("usage", name)
    for name in (
        "prompt_cache_hit_tokens",
        "prompt_cache_miss_tokens",
        "cached_tokens",
        "cache_read_input_tokens",
    )
)
"""Counts that are read: clients get them under the names of their own protocol, if it has any."""


def find_unknown_keys(value: Mapping[str, Any], known: KeyTree) -> dict[FieldPath, Any]:
    """The values of an object that are not ``known``, by their path in the object."""
    found: dict[FieldPath, Any] = {}
    for key, one in value.items():
        inner = known.get(key)
        if key not in known or (isinstance(inner, frozenset) and not is_known_word(one, inner)):
            found[(key,)] = one
        elif isinstance(inner, Mapping):
            listed = {key: one} if isinstance(one, dict) else _list_items(key, one)
            for step, item in listed.items():
                for path, nested in find_unknown_keys(item, inner).items():
                    found[(step, *path)] = nested
    return found


def _list_items(key: str, value: Any) -> dict[str, dict[str, Any]]:
    """The objects in a list under this key, by their steps in a path: ``key[0]``."""
    items = enumerate(value if isinstance(value, list) else ())
    return {f"{key}[{i}]": item for i, item in items if isinstance(item, dict)}


_ITEM_STEP: Final = re.compile(r"(.*)\[(\d+)\]")


def get_inner(target: Any, step: str) -> Any:
    """What stands under a key, or in a list under it (``key[0]``); None if nothing does."""
    item = _ITEM_STEP.fullmatch(step)
    found = target.get(item[1] if item else step) if isinstance(target, dict) else None
    if item is None:
        return found
    position = int(item[2])
    return found[position] if isinstance(found, list) and position < len(found) else None


def is_known_word(word: Any, words: frozenset[str]) -> bool:
    """Whether it is one of an enumeration's words, or null."""
    return word is None or (isinstance(word, str) and word in words)


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
    """Add the values at their paths; see ``write_extra_value``.

    A value inside an item of a list that was not written has no place, and is left out with it.
    """
    for (*parents, key), value in values.items():
        last = max((i for i, one in enumerate(parents) if one.endswith("]")), default=-1)
        target: Any = reduce(get_inner, parents[: last + 1], written)
        for parent in parents[last + 1 :] if isinstance(target, dict) else ():
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
        if isinstance(target, dict):
            write_extra_value(target, key, value)


def write_extra_value(target: dict[str, Any], key: str, value: Any) -> None:
    """Add a value to an object that was written.

    What is written already stays, unless it is null, or a known word in the place of an unknown.
    """
    present = target.get(key)
    if present is None or (isinstance(present, str) and isinstance(value, str)):
        target[key] = value


def write_extra(written: dict[str, Any], extra: ExtraFields) -> None:
    """Add the keys to what is written for their object."""
    inside = extra.inside
    write_extra_fields(written, {(*inside, *path): one for path, one in extra.values.items()})


def has_content(value: Any) -> bool:
    """Whether a value says anything: null, an empty list and 0 do not, and are no loss."""
    if isinstance(value, dict) and value:
        return any(map(has_content, value.values()))
    return value is not None and value != [] and not (value == 0 and value is not False)


def list_paths(
    at: str, values: Iterable[tuple[FieldPath, Any]], separator: str = "."
) -> Iterator[str]:
    """The complete paths of the values that say anything."""
    for path, value in values:
        is_said = value in _DEFAULT_VALUES.get(path[-1], ()) or path in _CACHED_TOKENS
        if has_content(value) and not is_said:
            yield separator.join((at, *path) if at else path)


_WITH_MESSAGES: Final = GenerationRequest | TokenizeRequest
RequestT = TypeVar("RequestT", bound=AnyRequest)


def remove_extra_fields(
    request: RequestT, keeps: KeptKeys | None = NO_KEYS
) -> tuple[RequestT, tuple[UnsupportedParameter, ...]]:
    """The request without the keys inside its messages and tools, and these keys as losses.

    ``keeps`` are keys that the target has, too; None: it has all, since it speaks the client's
    protocol.
    """
    removed: list[ExtraFields] = []
    changes: dict[str, Any] = {}
    if keeps is not None and isinstance(request, _WITH_MESSAGES) and _has_extra_inside(request):
        changes["messages"] = tuple(
            [_strip_message(one, keeps, removed) for one in request.messages]
        )
        changes["tools"] = tuple([_strip(one, keeps, removed) for one in request.tools])
    if keeps is not None and request.field_extra:
        fields = [_split(one, _NONE, removed) for one in request.field_extra]
        changes["field_extra"] = tuple([one for one in fields if one is not None])
    if not removed:
        return request, ()
    paths = [path for extra in removed for path in list_paths(extra.at, extra.values.items())]
    losses = tuple([UnsupportedParameter(path, "dropped") for path in paths])
    return replace(request, **changes), losses


def _has_extra_inside(request: GenerationRequest | TokenizeRequest) -> bool:
    """Whether a message or a tool has such a key; nearly none has."""
    for message in request.messages:
        if message.extra is not None:
            return True
        for part in message.parts:
            if part.extra is not None:
                return True
        for call in message.tool_calls:
            if call.extra is not None:
                return True
    return bool(request.tools) and any(tool.extra is not None for tool in request.tools)


def _strip_message(message: Message, keeps: KeptKeys, removed: list[ExtraFields]) -> Message:
    count = len(removed)
    parts = tuple([_strip(part, keeps, removed) for part in message.parts])
    calls = tuple([_strip(call, keeps, removed) for call in message.tool_calls])
    stripped: Message = _strip(message, keeps, removed)
    if len(removed) == count:
        return message
    return replace(stripped, parts=_join_texts(parts), tool_calls=calls)


def _join_texts(parts: Iterable[ContentPart]) -> tuple[ContentPart, ...]:
    """The parts, with the texts joined that nothing keeps apart any longer."""
    joined: list[ContentPart] = []
    for part in parts:
        last = joined[-1] if joined and joined[-1].extra is None else None
        if isinstance(part, TextPart) and part.continues and isinstance(last, TextPart):
            joined[-1] = replace(last, text=last.text + part.text, extra=part.extra)
        else:
            joined.append(part)
    return tuple(joined)


def _strip(item: Any, keeps: KeptKeys, removed: list[ExtraFields]) -> Any:
    if item.extra is None:
        return item
    kept = _split(item.extra, keeps.get(type(item), _NONE), removed)
    return item if kept is item.extra else replace(item, extra=kept)


_NONE: Final[frozenset[str]] = frozenset()


def _split(
    extra: ExtraFields, keeps: frozenset[str], removed: list[ExtraFields]
) -> ExtraFields | None:
    """The keys that the target has, too; the others are added to ``removed``."""
    kept = {path: value for path, value in extra.values.items() if path[-1] in keeps}
    if len(kept) == len(extra.values):
        return extra
    lost = {path: value for path, value in extra.values.items() if path not in kept}
    removed.append(replace(extra, values=lost))
    return replace(extra, values=kept) if kept else None
