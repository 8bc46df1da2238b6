"""A JSON body as this dialect needs it: its fields in the order they were sent, and all of them."""

from typing import Any

import msgspec
from msgspec import Raw

from protocols.triton import careful, faults


class _Name:
    """A field's name that equals no other, so that a dict keeps two fields of one name."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _name(_: type, text: str) -> _Name:
    return _Name(text)


_members = msgspec.json.Decoder(dict[_Name, Raw], dec_hook=_name).decode
_anything = msgspec.json.Decoder().decode


class Fields:
    """The fields of an object: ``names`` as sent, and of each name the first value."""

    __slots__ = ("_values", "names")

    def __init__(self, members: list[tuple[str, Raw]]) -> None:
        self.names = [name for name, _ in members]
        self._values: dict[str, Raw] = {}
        for name, raw in members:
            self._values.setdefault(name, raw)

    def __getitem__(self, name: str) -> Raw:
        return self._values[name]

    def get(self, name: str) -> Raw | None:
        """The first value of this name, as it was sent."""
        return self._values.get(name)


def fields(text: bytes) -> Fields:
    """The object that ``text`` holds. Raises Malformed, also when it holds none."""
    try:
        if not isinstance(_anything(text), dict):
            raise faults.no_object()
        return Fields([(name.text, raw) for name, raw in _members(text).items()])
    except RecursionError:
        raise faults.too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Fields(careful.members(text))


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
