"""DNS messages: a question to bytes, and bytes to what they answer. Pure.

Only what finding workers needs: one question about a name's addresses or its service, and the
records A, AAAA, CNAME and SRV; others are stepped over. RFC 1035 says how a message is made, 2782
has SRV, 3596 AAAA and 6891 the word about how long an answer may be.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

RecordType = Literal["A", "AAAA", "SRV"]

MAX_UDP_PAYLOAD: Final = 1232
"""Bytes of an answer that come through in one datagram nearly everywhere."""
_TYPE_CODES: Final[Mapping[RecordType, int]] = {"A": 1, "AAAA": 28, "SRV": 33}
_TYPE_CNAME: Final = 5
_TYPE_OPT: Final = 41
_CLASS_INTERNET: Final = 1
_HEADER_SIZE: Final = 12
_FLAG_RECURSION_DESIRED: Final = 0x0100
"""Flags of a question: the nameserver is to find out what it does not know."""
_FLAG_RESPONSE, _OPCODE_MASK, _FLAG_TRUNCATED, _RCODE_MASK = 0x8000, 0x7800, 0x0200, 0x000F
_MAX_LABEL, _MAX_NAME = 63, 255
_POINTER_BITS: Final = 0xC0
_MAX_POINTERS: Final = 32
"""Pointers in one name. Honest names need a few; many make a short message long to read."""
_TTL_SIGN_BIT: Final = 1 << 31
_PLAIN_LABEL = re.compile(rb"[A-Za-z0-9_-]+")
_DNS_NAME = re.compile(r"(?=.{1,253}\.?\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_RCODE_TEXTS: Final[Mapping[int, str]] = {
    1: "it does not understand the question",
    2: "it failed",
    3: "there is no such name",
    4: "it does not know such questions",
    5: "it refuses",
}


class DnsError(Exception):
    """What came is no answer. Its text says why, for a log."""


class MismatchedResponse(DnsError):
    """It answers another question, or none: the answer may still come."""


class MalformedMessage(DnsError):
    """It is not a DNS message."""


class ServiceTarget(Struct, frozen=True):
    """Where a service is. Of several, the lowest ``priority`` is meant; "" means: nowhere."""

    priority: int
    weight: int
    port: int
    target: str


class DnsRecord(Struct, frozen=True):
    """A fact about a name. ``ttl``: for how many seconds it holds. An address is its text."""

    name: str
    ttl: int
    value: str | ServiceTarget


class DnsAnswer(Struct, frozen=True):
    """``found``: what was asked for, in the message's order. ``more``: addresses told unasked.

    ``ttl`` is in seconds, None where nothing was found. An answer that was ``cut`` off holds
    nothing; the whole of it is to be had over TCP.
    """

    code: int = 0
    truncated: bool = False
    records: tuple[DnsRecord, ...] = ()
    additional_addresses: tuple[DnsRecord, ...] = ()
    ttl: int | None = None

    @property
    def error_text(self) -> str:
        """What its code means, "" where all went well."""
        return (
            _RCODE_TEXTS.get(self.code, f"it answers with the code {self.code}")
            if self.code
            else ""
        )


def is_dns_name(text: str) -> bool:
    """Whether DNS can be asked about it."""
    return bool(_DNS_NAME.fullmatch(text))


def encode_query(number: int, name: str, kind: RecordType, *, extended: bool = True) -> bytes:
    """The question with this ``number`` (16 bits). Raises ValueError unless ``is_name(name)``.

    ``extended`` lets an answer be as long as LARGEST; not every nameserver knows what that is.
    """
    if not is_dns_name(name):
        raise ValueError(f"{name!r} is not a name that DNS can be asked about")
    head = _encode_numbers(number, _FLAG_RECURSION_DESIRED, 1, 0, 0, int(extended))
    labels = name.encode("ascii").rstrip(b".").split(b".")
    question = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    extension = b"\0" + _encode_numbers(_TYPE_OPT, MAX_UDP_PAYLOAD, 0, 0, 0) if extended else b""
    return head + question + _encode_numbers(_TYPE_CODES[kind], _CLASS_INTERNET) + extension


def decode_answer(data: bytes, number: int, name: str, kind: RecordType) -> DnsAnswer:
    """What ``data`` answers to the question with this ``number``. Raises Stray or Malformed."""
    if len(data) < _HEADER_SIZE:
        raise MismatchedResponse("it is too short for an answer")
    reader = _MessageReader(data)
    head = [reader.read_number(2) for _ in range(6)]
    flags, counts = head[1], head[2:]
    if head[0] != number or not flags & _FLAG_RESPONSE or flags & _OPCODE_MASK:
        raise MismatchedResponse("it is not an answer to the question's number")
    code = flags & _RCODE_MASK
    if counts[0] == 0 and code:
        return DnsAnswer(code)  # some leave the question out when they fail
    if counts[0] != 1:
        raise MalformedMessage("it does not repeat the one question")
    asked = name.lower().rstrip(".")
    if (reader.read_name(), reader.read_number(2), reader.read_number(2)) != (
        asked,
        _TYPE_CODES[kind],
        _CLASS_INTERNET,
    ):
        raise MismatchedResponse("it answers another question")
    if flags & _FLAG_TRUNCATED:
        return DnsAnswer(code, truncated=True)
    answers, _, more = ([reader.read_record() for _ in range(count)] for count in counts[1:])
    return _select_records(code, answers, more, asked, kind)


class _ResourceRecord(Struct, frozen=True):
    """A record of any kind that we know; ``kind`` 0 is one that we do not."""

    kind: int
    record: DnsRecord


def _select_records(
    code: int,
    answers: Sequence[_ResourceRecord],
    more: Sequence[_ResourceRecord],
    asked: str,
    kind: RecordType,
) -> DnsAnswer:
    """The records under the name asked for, or under what it is another name of."""
    aliases = {raw.record.name: raw.record for raw in answers if raw.kind == _TYPE_CNAME}
    name, ttls, left = asked, list[int](), dict(aliases)
    while alias := left.pop(name, None):
        ttls.append(alias.ttl)
        name = str(alias.value)
    wanted = _TYPE_CODES[kind]
    found = [raw.record for raw in answers if raw.kind == wanted and raw.record.name == name]
    ttls += [record.ttl for record in found]
    addresses = (_TYPE_CODES["A"], _TYPE_CODES["AAAA"])
    return DnsAnswer(
        code,
        records=tuple(dict.fromkeys(found)),
        additional_addresses=tuple(
            dict.fromkeys(raw.record for raw in more if raw.kind in addresses)
        ),
        ttl=min(ttls) if found else None,
    )


class _MessageReader:
    """Steps through a message. Whatever would lead out of it is Malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def read_number(self, size: int) -> int:
        """The next ``size`` bytes as a number."""
        return int.from_bytes(self._read_bytes(size))

    def read_name(self) -> str:
        """A name in lower case, without the dot at its end; odd bytes as numbers."""
        labels: list[str] = []
        back: int | None = None
        lowest, room, leaps = self._position, _MAX_NAME - 1, 0
        while length := self.read_number(1):
            if length >= _POINTER_BITS:
                target = (length - _POINTER_BITS) << 8 | self.read_number(1)
                back = self._position if back is None else back
                leaps += 1
                if target >= lowest or leaps > _MAX_POINTERS:
                    raise MalformedMessage("a name leads in circles")
                self._position = lowest = target
                continue
            if length > _MAX_LABEL:
                raise MalformedMessage("a name has a part of an unknown sort")
            room -= length + 1
            if room < 0:
                raise MalformedMessage("a name is too long")
            labels.append(_escape_label(self._read_bytes(length)))
        if back is not None:
            self._position = back
        return ".".join(labels)

    def read_record(self) -> _ResourceRecord:
        """The next record. One of a kind that we do not know, or not of the internet, is 0."""
        name, kind, family = self.read_name(), self.read_number(2), self.read_number(2)
        ttl, size = self.read_number(4), self.read_number(2)
        end = self._position + size
        if end > len(self._data):
            raise MalformedMessage("it ends too early")
        value = self._read_value(kind, size) if family == _CLASS_INTERNET else None
        if value is None:
            self._position, kind, value = end, 0, ""
        if self._position != end:
            raise MalformedMessage("a record is not as long as it says")
        # RFC 2181, 8: what would be a negative number of seconds is none
        return _ResourceRecord(kind, DnsRecord(name, ttl if ttl < _TTL_SIGN_BIT else 0, value))

    def _read_value(self, kind: int, size: int) -> str | ServiceTarget | None:
        if kind == _TYPE_CODES["A"]:
            return str(ipaddress.IPv4Address(self._read_exactly(4, size)))
        if kind == _TYPE_CODES["AAAA"]:
            return str(ipaddress.IPv6Address(self._read_exactly(16, size)))
        if kind == _TYPE_CODES["SRV"]:
            return ServiceTarget(
                self.read_number(2), self.read_number(2), self.read_number(2), self.read_name()
            )
        return self.read_name() if kind == _TYPE_CNAME else None

    def _read_exactly(self, wanted: int, size: int) -> bytes:
        if size != wanted:
            raise MalformedMessage("an address is not as long as it must be")
        return self._read_bytes(size)

    def _read_bytes(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise MalformedMessage("it ends too early")
        taken = self._data[self._position : end]
        self._position = end
        return taken


def _escape_label(label: bytes) -> str:
    if _PLAIN_LABEL.fullmatch(label):
        return label.decode("ascii").lower()
    return "".join(
        chr(byte).lower() if _PLAIN_LABEL.fullmatch(bytes((byte,))) else f"\\{byte:03d}"
        for byte in label
    )


def _encode_numbers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(2) for number in numbers)
