"""A JSON body as this dialect needs it: its fields in the order they were sent, and all of them."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from protocols.core.interfaces import ClientRequest
from protocols.triton import careful, faults


class _UniqueName(str):
    """A field's name that equals no other, so that a dict keeps two fields of one name."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


_decode_members = msgspec.json.Decoder(dict[_UniqueName, Raw], dec_hook=str.__new__).decode
_decode_any = msgspec.json.Decoder().decode


class OrderedFields(dict[str, Raw]):
    """The fields of an object: ``names`` as sent, and of each name the first value."""

    __slots__ = ("names",)

    def __init__(self, names: list[str], values: Iterable[Raw]) -> None:
        self.names = names
        pairs = [*zip(names, values, strict=True)]
        super().__init__(pairs)
        if len(self) < len(pairs):
            self.update(reversed(pairs))


def parse_fields(text: bytes) -> OrderedFields:
    """The object that ``text`` holds. Raises Malformed, also when it holds none."""
    try:
        if type(_decode_any(text)) is not dict:
            raise faults.build_not_object_error()
        members = _decode_members(text)
        return OrderedFields([*map(str, members)], members.values())
    except RecursionError:
        raise faults.build_depth_error() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = careful.parse_rapidjson_members(text)
        return OrderedFields([name for name, _ in found], [raw for _, raw in found])


def fields_of(call: ClientRequest) -> OrderedFields:
    """The object that is a call's body, which is read once. Raises Malformed."""
    kept: OrderedFields | None = call.__dict__.get("fields")
    if kept is None:
        kept = call.__dict__["fields"] = parse_fields(call.body)
    return kept


def parse_value(text: bytes) -> Any:
    """What ``text`` holds. Raises Malformed."""
    try:
        return _decode_any(text)
    except RecursionError:
        raise faults.build_depth_error() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return careful.parse_rapidjson_value(bytes(text))  # a Raw can not be cut


def encode_raw(what: Any) -> Raw:
    """JSON text for ``Request.extra``."""
    return Raw(msgspec.json.encode(what))
