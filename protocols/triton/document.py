"""A JSON body as this dialect needs it: its fields in the order they were sent, and all of them."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from gateway.core.ports import Call
from protocols.triton import careful, faults


class _Name(str):
    """A field's name that equals no other, so that a dict keeps two fields of one name."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


_members = msgspec.json.Decoder(dict[_Name, Raw], dec_hook=str.__new__).decode
_anything = msgspec.json.Decoder().decode


class Fields(dict[str, Raw]):
    """The fields of an object: ``names`` as sent, and of each name the first value."""

    __slots__ = ("names",)

    def __init__(self, names: list[str], values: Iterable[Raw]) -> None:
        self.names = names
        pairs = [*zip(names, values, strict=True)]
        super().__init__(pairs)
        if len(self) < len(pairs):
            self.update(reversed(pairs))


def fields(text: bytes) -> Fields:
    """The object that ``text`` holds. Raises Malformed, also when it holds none."""
    try:
        if type(_anything(text)) is not dict:
            raise faults.no_object()
        members = _members(text)
        return Fields([*map(str, members)], members.values())
    except RecursionError:
        raise faults.too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = careful.members(text)
        return Fields([name for name, _ in found], [raw for _, raw in found])


def fields_of(call: Call) -> Fields:
    """The object that is a call's body, which is read once. Raises Malformed."""
    kept: Fields | None = call.__dict__.get("fields")
    if kept is None:
        kept = call.__dict__["fields"] = fields(call.body)
    return kept


def value(text: bytes) -> Any:
    """What ``text`` holds. Raises Malformed."""
    try:
        return _anything(text)
    except RecursionError:
        raise faults.too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return careful.value(bytes(text))  # a Raw can not be cut


def compact(what: Any) -> Raw:
    """JSON text for ``Request.extra``."""
    return Raw(msgspec.json.encode(what))
