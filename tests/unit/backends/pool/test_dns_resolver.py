"""Queries and what is read of the responses, made here byte by byte."""

from contextlib import suppress
from typing import Any

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.pool.dns_resolver import (
    DnsAnswer,
    HostAddresses,
    RecordType,
    ServiceTarget,
    decode_datagram,
    read_answer,
)

A, CNAME, NULL, TXT, AAAA, SRV = 1, 5, 10, 16, 28, 33
NAME = b"\x01w\x05local\x00"
QUESTION = NAME + b"\x00\x01\x00\x01"
EVIL = b"\x04evil\x00"
AT_QUESTION = b"\xc0\x0c"
"""A pointer to where the question has its name."""
SERVICE = b"\x05_http\x04_tcp\x01w\x05local\x00"


def two(number: int) -> bytes:
    return number.to_bytes(2)


def head(
    answers: int = 0, more: int = 0, *, number: int = 7, flags: int = 0x8180, questions: int = 1
) -> bytes:
    return b"".join(map(two, (number, flags, questions, answers, 0, more)))


def record(kind: int, data: bytes, *, name: bytes = AT_QUESTION, ttl: int = 30) -> bytes:
    return name + two(kind) + two(1) + ttl.to_bytes(4) + two(len(data)) + data


def a(last: int, **more: Any) -> bytes:
    return record(A, bytes((10, 0, 0, last)), **more)


def receive(
    data: bytes, name: str = "w.local", record_type: RecordType = "A"
) -> dns.message.QueryMessage | None:
    return decode_datagram(data, dns.message.make_query(name, record_type, id=7))


def read(data: bytes, name: str = "w.local", record_type: RecordType = "A") -> DnsAnswer:
    response = receive(data, name, record_type)
    assert response is not None
    return read_answer(response)


# --- answers -------------------------------------------------------------------------------------


def test_addresses_and_for_how_long_they_hold() -> None:
    answer = read(head(3) + QUESTION + a(1) + a(2, ttl=5) + a(1))

    assert answer == DnsAnswer(addresses=("10.0.0.1", "10.0.0.2"), ttl=5)


def test_an_address_of_sixteen_bytes() -> None:
    question = NAME + two(AAAA) + two(1)

    answer = read(head(1) + question + record(AAAA, bytes(15) + b"\x01"), record_type="AAAA")

    assert answer.addresses == ("::1",)


def test_a_service_and_the_addresses_sent_along() -> None:
    target = b"\x01b\xc0\x17"  # b.w.local: the question has w.local from its 24th byte on
    service = record(SRV, two(1) + two(60) + two(8000) + target)
    additional = a(4, name=b"\x01B\x01w\x05LOCAL\x00") + record(AAAA, bytes(16), name=target)
    unused = record(TXT, b"\x00", name=target)

    answer = read(
        head(1, 3) + SERVICE + two(SRV) + two(1) + service + additional + unused,
        "_http._tcp.w.local",
        "SRV",
    )

    assert answer.targets == (ServiceTarget(1, 60, 8000, "b.w.local"),)
    assert answer.additional == (
        HostAddresses("b.w.local", ("10.0.0.4",), 30),
        HostAddresses("b.w.local", ("::",), 30),
    )


def test_a_service_that_is_nowhere_has_no_host() -> None:
    service = record(SRV, bytes(6) + b"\x00")

    answer = read(head(1) + SERVICE + two(SRV) + two(1) + service, "_HTTP._tcp.w.local.", "SRV")

    assert answer.targets == (ServiceTarget(0, 0, 0, ""),)


def test_an_alias_is_followed_and_its_time_counts() -> None:
    other = b"\x01x\x05local\x00"
    aliases = record(CNAME, other, ttl=3)

    answer = read(head(3) + QUESTION + a(1, name=other) + aliases + a(2, name=EVIL))

    assert answer == DnsAnswer(addresses=("10.0.0.1",), ttl=3)


def test_aliases_in_a_circle_are_malformed() -> None:
    other = b"\x01x\x05local\x00"
    circle = record(CNAME, other) + record(CNAME, AT_QUESTION, name=other)

    with pytest.raises(dns.exception.DNSException):
        read(head(2) + QUESTION + circle)


def test_records_of_another_name_type_or_class_do_not_count() -> None:
    chaos = AT_QUESTION + two(A) + two(3) + bytes(4) + two(3) + bytes(3)
    records = a(1, name=EVIL) + record(TXT, b"\x03abc") + chaos + a(2)

    assert read(head(4) + QUESTION + records).addresses == ("10.0.0.2",)


def test_a_time_that_would_be_negative_is_none() -> None:
    assert read(head(1) + QUESTION + a(1, ttl=1 << 31)).ttl == 0
    assert read(head(1) + QUESTION + a(1, ttl=(1 << 31) - 1)).ttl == (1 << 31) - 1


@pytest.mark.parametrize("questions", [0, 1])
@pytest.mark.parametrize("code", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
def test_a_response_may_be_an_error(code: dns.rcode.Rcode, questions: int) -> None:
    response = receive(head(flags=0x8180 | code, questions=questions) + QUESTION * questions)

    assert response is not None
    assert response.rcode() == code


def test_a_response_may_say_that_there_is_no_such_name() -> None:
    assert read(head(flags=0x8183) + QUESTION) == DnsAnswer(name_exists=False)


def test_a_truncated_response_has_the_flag_wherever_it_was_cut() -> None:
    response = receive(head(9, flags=0x8380) + QUESTION + a(1)[:5])

    assert response is not None
    assert response.flags & dns.flags.TC


def test_odd_bytes_in_a_name_stay_apart_from_plain_ones() -> None:
    target = b"\x03a.b\x02\xffC\x00"

    answer = read(
        head(1) + SERVICE + two(SRV) + two(1) + record(SRV, bytes(6) + target),
        "_http._tcp.w.local",
        "SRV",
    )

    assert answer.targets == (ServiceTarget(0, 0, 0, "a\\.b.\\255c"),)


# --- what is none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        head()[:11],
        head(number=8) + QUESTION,
        head(flags=0x0100) + QUESTION,
        head(flags=0x9180) + QUESTION,
        head() + b"\x01x\x05local\x00" + QUESTION[-4:],
        head() + NAME + two(AAAA) + two(1),
        head() + NAME + two(A) + two(3),
        head(questions=0) + QUESTION,
        head(number=8) + b"\xff",
    ],
    ids=[
        "empty",
        "short",
        "number",
        "question",
        "opcode",
        "name",
        "type",
        "class",
        "no question",
        "malformed, of another number",
    ],
)
def test_what_answers_another_question_is_ignored(data: bytes) -> None:
    assert receive(data) is None


@pytest.mark.parametrize(
    "data",
    [
        head(questions=2) + QUESTION * 2,
        head(),
        head() + b"\xc0\x0c" + QUESTION[-4:],
        head() + b"\x01x\xc0\x0c" + QUESTION[-4:],
        head(1) + QUESTION + b"\xc0\xff" + a(1)[2:],
        head(1) + QUESTION + b"\x40x" + a(1)[2:],
        head(1) + QUESTION + b"\x80x" + a(1)[2:],
        head(1) + QUESTION + (b"\x3f" + b"x" * 63) * 4 + b"\x00" + a(1)[2:],
        head(1) + QUESTION + a(1)[:-1],
        head(2) + QUESTION + a(1),
        head(1) + QUESTION + record(A, bytes(5)),
        head(1) + QUESTION + record(A, bytes(3)),
        head(1) + QUESTION + record(AAAA, bytes(4)),
        head(1) + QUESTION + record(CNAME, AT_QUESTION + b"\x00"),
        head(1) + QUESTION + record(SRV, bytes(5)),
        head(1) + QUESTION + record(SRV, bytes(6) + AT_QUESTION + b"\x00"),
        head(1) + QUESTION + record(CNAME, b"\x09w") + a(1),
    ],
    ids=[
        "two questions",
        "nothing after the head",
        "a pointer to itself",
        "a pointer to its own name",
        "a pointer ahead",
        "a part of sort 01",
        "a part of sort 10",
        "a name of 257 bytes",
        "an address cut short",
        "a record too few",
        "an address of 5 bytes",
        "an address of 3 bytes",
        "an AAAA of 4 bytes",
        "an alias with a rest",
        "a service cut short",
        "a service with a rest",
        "a name beyond its record",
    ],
)
def test_what_is_no_message_is_malformed(data: bytes) -> None:
    with pytest.raises(dns.exception.DNSException):
        read(data)


def test_a_name_of_pointers_only_is_not_followed_for_ever() -> None:
    """Each points to the one before: honest in each step, and too many of them."""
    first = len(head() + QUESTION) + 2 + 10
    chain = AT_QUESTION + b"".join(two(0xC000 | first + 2 * n) for n in range(200))
    last = two(0xC000 | first + 2 * 200)

    with pytest.raises(dns.exception.DNSException):
        receive(head(2) + QUESTION + record(NULL, chain) + a(1, name=last))

    some = two(0xC000 | first + 2 * 10)
    answer = read(head(2) + QUESTION + record(NULL, chain) + a(1, name=some))
    assert answer.addresses == ("10.0.0.1",)


@given(st.binary(max_size=300))
def test_bytes_of_any_sort_raise_nothing_but_dns_errors(data: bytes) -> None:
    for whole in (data, head(2, 1) + data, head(2, 1) + QUESTION + data):
        with suppress(dns.exception.DNSException):
            response = receive(whole)
            if response is not None:
                read_answer(response)


@given(st.data())
def test_a_good_answer_with_some_bytes_changed_raises_nothing_but_dns_errors(
    data: st.DataObject,
) -> None:
    service = record(SRV, bytes(6) + b"\x01b\xc0\x17") + record(CNAME, b"\x01x\xc0\x17")
    good = bytearray(head(2, 1) + SERVICE + two(SRV) + two(1) + service + a(3))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(2, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(dns.exception.DNSException):
        response = receive(bytes(good), "_http._tcp.w.local", "SRV")
        if response is not None:
            assert not read_answer(response).addresses
