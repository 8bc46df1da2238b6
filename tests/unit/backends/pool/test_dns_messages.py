"""DNS messages, made here byte by byte."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.pool import dns_discovery
from backends.pool.dns_discovery import (
    DnsError,
    MalformedMessage,
    MismatchedResponse,
    ServiceTarget,
)

A, CNAME, TXT, AAAA, SRV, OPT = 1, 5, 16, 28, 33, 41
NAME = b"\x01w\x05local\x00"
QUESTION = NAME + b"\x00\x01\x00\x01"
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


def read(
    data: bytes, name: str = "w.local", kind: dns_discovery.RecordType = "A"
) -> dns_discovery.DnsAnswer:
    return dns_discovery.decode_answer(data, 7, name, kind)


def values(answer: dns_discovery.DnsAnswer) -> list[str | ServiceTarget]:
    return [one.value for one in answer.records]


# --- questions -----------------------------------------------------------------------------------


def test_a_question_is_as_rfc_1035_has_it() -> None:
    plain = dns_discovery.encode_query(0x1234, "W.local.", "A", extended=False)

    assert plain == bytes.fromhex("1234 0100 0001 0000 0000 0000") + b"\x01W\x05local\x00" + (
        bytes.fromhex("0001 0001")
    )


def test_a_question_may_say_how_long_an_answer_may_be() -> None:
    extended = dns_discovery.encode_query(1, "w.local", "SRV")

    assert extended[10:12] == two(1)
    assert extended.endswith(two(SRV) + two(1) + b"\x00" + two(OPT) + two(1232) + bytes(6))


@pytest.mark.parametrize(
    "name", ["", ".", "a..b", ".a", "a b", "a/b", "ü", "a" * 64, ".".join(["a" * 63] * 4), "a\n"]
)
def test_what_is_no_name_is_not_asked_about(name: str) -> None:
    assert not dns_discovery.is_dns_name(name)
    with pytest.raises(ValueError, match="not a name"):
        dns_discovery.encode_query(1, name, "A")


def test_the_longest_name_can_be_asked_about() -> None:
    name = ".".join(["a" * 63, "b" * 63, "c" * 63, "d" * 61])

    question = dns_discovery.encode_query(1, name, "A", extended=False)

    assert len(question) == 12 + 255 + 4
    answer = two(1) + two(0x8180) + two(1) + two(1) + bytes(4) + question[12:] + a(9)
    assert values(dns_discovery.decode_answer(answer, 1, name, "A")) == ["10.0.0.9"]


# --- answers -------------------------------------------------------------------------------------


def test_addresses_and_for_how_long_they_hold() -> None:
    answer = read(head(3) + QUESTION + a(1) + a(2, ttl=5) + a(1))

    assert values(answer) == ["10.0.0.1", "10.0.0.2"]
    assert (answer.code, answer.ttl, answer.error_text) == (0, 5, "")


def test_an_address_of_sixteen_bytes() -> None:
    question = NAME + two(AAAA) + two(1)

    answer = read(head(1) + question + record(AAAA, bytes(15) + b"\x01"), kind="AAAA")

    assert values(answer) == ["::1"]


def test_a_service_and_what_is_told_along_with_it() -> None:
    target = b"\x01b\xc0\x17"  # b.w.local: the question has w.local from its 24th byte on
    told = record(SRV, two(1) + two(60) + two(8000) + target)
    along = a(4, name=b"\x01B\x01w\x05LOCAL\x00") + record(AAAA, bytes(16), name=target)
    unused = record(TXT, b"\x00", name=target)

    answer = read(
        head(1, 3) + SERVICE + two(SRV) + two(1) + told + along + unused,
        "_http._tcp.w.local",
        "SRV",
    )

    assert values(answer) == [ServiceTarget(1, 60, 8000, "b.w.local")]
    assert [(one.name, one.value) for one in answer.additional_addresses] == [
        ("b.w.local", "10.0.0.4"),
        ("b.w.local", "::"),
    ]


def test_a_service_that_is_nowhere_has_no_target() -> None:
    told = record(SRV, bytes(6) + b"\x00")

    answer = read(head(1) + SERVICE + two(SRV) + two(1) + told, "_HTTP._tcp.w.local.", "SRV")

    assert values(answer) == [ServiceTarget(0, 0, 0, "")]


def test_an_alias_is_followed_and_its_time_counts() -> None:
    other = b"\x01x\x05local\x00"
    aliases = record(CNAME, other, ttl=3)

    answer = read(head(3) + QUESTION + a(1, name=other) + aliases + a(2))

    assert values(answer) == ["10.0.0.1"]
    assert answer.ttl == 3


def test_aliases_in_a_circle_lead_nowhere() -> None:
    other = b"\x01x\x05local\x00"
    circle = record(CNAME, other) + record(CNAME, AT_QUESTION, name=other)

    answer = read(head(2) + QUESTION + circle)

    assert values(answer) == []
    assert answer.ttl is None


def test_what_is_told_of_another_name_or_kind_or_world_does_not_count() -> None:
    chaos = AT_QUESTION + two(A) + two(3) + bytes(4) + two(4) + bytes(4)
    told = a(1, name=b"\x04evil\x00") + record(TXT, b"\x03abc") + chaos + a(2)

    assert values(read(head(4) + QUESTION + told)) == ["10.0.0.2"]


def test_a_time_that_would_be_negative_is_none() -> None:
    assert read(head(1) + QUESTION + a(1, ttl=1 << 31)).ttl == 0
    assert read(head(1) + QUESTION + a(1, ttl=(1 << 31) - 1)).ttl == (1 << 31) - 1


@pytest.mark.parametrize(
    ("code", "said"), [(2, "failed"), (3, "no such name"), (5, "refuses"), (9, "code 9")]
)
@pytest.mark.parametrize("questions", [0, 1])
def test_an_answer_may_say_that_there_is_none(code: int, said: str, questions: int) -> None:
    answer = read(head(flags=0x8180 | code, questions=questions) + QUESTION * questions)

    assert answer.code == code
    assert said in answer.error_text
    assert answer.records == ()


def test_an_answer_that_is_cut_off_says_so_wherever_it_was_cut() -> None:
    answer = read(head(9, flags=0x8380) + QUESTION + a(1)[:5])

    assert answer.truncated
    assert answer.records == ()


def test_odd_bytes_in_a_name_stay_apart_from_plain_ones() -> None:
    target = b"\x03a.b\x02\xffC\x00"

    answer = read(
        head(1) + SERVICE + two(SRV) + two(1) + record(SRV, bytes(6) + target),
        "_http._tcp.w.local",
        "SRV",
    )

    assert values(answer) == [ServiceTarget(0, 0, 0, "a\\046b.\\255c")]


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
    ],
    ids=["empty", "short", "number", "question", "opcode", "name", "kind", "class"],
)
def test_what_answers_another_question_is_a_stray(data: bytes) -> None:
    with pytest.raises(MismatchedResponse):
        read(data)


@pytest.mark.parametrize(
    "data",
    [
        head(questions=0) + QUESTION,
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
        "no question",
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
    with pytest.raises(MalformedMessage):
        read(data)


def test_a_name_of_pointers_only_is_not_followed_for_ever() -> None:
    """Each points to the one before: honest in each step, and too many of them."""
    first = len(head() + QUESTION) + 2 + 10
    chain = AT_QUESTION + b"".join(two(0xC000 | first + 2 * n) for n in range(40))
    last = two(0xC000 | first + 2 * 40)

    with pytest.raises(MalformedMessage, match="circles"):
        read(head(2) + QUESTION + record(TXT, chain) + a(1, name=last))

    some = two(0xC000 | first + 2 * 20)
    assert values(read(head(2) + QUESTION + record(TXT, chain) + a(1, name=some))) == ["10.0.0.1"]


@given(st.binary(max_size=300))
def test_bytes_of_any_sort_raise_nothing_but_its_own_error(data: bytes) -> None:
    for whole in (data, head(2, 1) + data, head(2, 1) + QUESTION + data):
        with suppress(DnsError):
            read(whole)


@given(st.data())
def test_a_good_answer_with_some_bytes_changed_raises_nothing_but_its_own_error(
    data: st.DataObject,
) -> None:
    told = record(SRV, bytes(6) + b"\x01b\xc0\x17") + record(CNAME, b"\x01x\xc0\x17")
    good = bytearray(head(2, 1) + SERVICE + two(SRV) + two(1) + told + a(3))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(2, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        answer = read(bytes(good), "_http._tcp.w.local", "SRV")
    except DnsError:
        return
    assert all(isinstance(value, ServiceTarget) for value in values(answer))
