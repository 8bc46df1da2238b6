"""DNS queries and responses, byte by byte."""

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
"""A compression pointer to the question's name."""
SERVICE = b"\x05_http\x04_tcp\x01w\x05local\x00"


def encode_uint16(number: int) -> bytes:
    return number.to_bytes(2)


def make_header(
    answers: int = 0,
    additional: int = 0,
    *,
    number: int = 7,
    flags: int = 0x8180,
    questions: int = 1,
) -> bytes:
    return b"".join(map(encode_uint16, (number, flags, questions, answers, 0, additional)))


def make_record(kind: int, data: bytes, *, name: bytes = AT_QUESTION, ttl: int = 30) -> bytes:
    return (
        name
        + encode_uint16(kind)
        + encode_uint16(1)
        + ttl.to_bytes(4)
        + encode_uint16(len(data))
        + data
    )


def make_a_record(last: int, **fields: Any) -> bytes:
    return make_record(A, bytes((10, 0, 0, last)), **fields)


def decode_response(
    data: bytes, name: str = "w.local", record_type: RecordType = "A"
) -> dns.message.QueryMessage | None:
    return decode_datagram(data, dns.message.make_query(name, record_type, id=7))


def decode_answer(data: bytes, name: str = "w.local", record_type: RecordType = "A") -> DnsAnswer:
    response = decode_response(data, name, record_type)
    assert response is not None
    return read_answer(response)


# --- answers -------------------------------------------------------------------------------------


def test_a_records_give_addresses_and_the_lowest_ttl() -> None:
    response = decode_answer(
        make_header(3) + QUESTION + make_a_record(1) + make_a_record(2, ttl=5) + make_a_record(1)
    )

    assert response == DnsAnswer(addresses=("10.0.0.1", "10.0.0.2"), ttl=5)


def test_aaaa_record_has_an_ipv6_address() -> None:
    question = NAME + encode_uint16(AAAA) + encode_uint16(1)

    response = decode_answer(
        make_header(1) + question + make_record(AAAA, bytes(15) + b"\x01"), record_type="AAAA"
    )

    assert response.addresses == ("::1",)


def test_srv_record_with_additional_addresses() -> None:
    target = b"\x01b\xc0\x17"  # b.w.local: w.local is at byte 24, in the question
    service = make_record(SRV, encode_uint16(1) + encode_uint16(60) + encode_uint16(8000) + target)
    additional = make_a_record(4, name=b"\x01B\x01w\x05LOCAL\x00") + make_record(
        AAAA, bytes(16), name=target
    )
    unused = make_record(TXT, b"\x00", name=target)

    response = decode_answer(
        make_header(1, 3)
        + SERVICE
        + encode_uint16(SRV)
        + encode_uint16(1)
        + service
        + additional
        + unused,
        "_http._tcp.w.local",
        "SRV",
    )

    assert response.targets == (ServiceTarget(1, 60, 8000, "b.w.local"),)
    assert response.additional == (
        HostAddresses("b.w.local", ("10.0.0.4",), 30),
        HostAddresses("b.w.local", ("::",), 30),
    )


def test_srv_record_with_root_target_has_no_host() -> None:
    service = make_record(SRV, bytes(6) + b"\x00")

    response = decode_answer(
        make_header(1) + SERVICE + encode_uint16(SRV) + encode_uint16(1) + service,
        "_HTTP._tcp.w.local.",
        "SRV",
    )

    assert response.targets == (ServiceTarget(0, 0, 0, ""),)


def test_cname_is_followed_and_its_ttl_counts() -> None:
    other = b"\x01x\x05local\x00"
    aliases = make_record(CNAME, other, ttl=3)

    response = decode_answer(
        make_header(3)
        + QUESTION
        + make_a_record(1, name=other)
        + aliases
        + make_a_record(2, name=EVIL)
    )

    assert response == DnsAnswer(addresses=("10.0.0.1",), ttl=3)


def test_cname_loop_is_malformed() -> None:
    other = b"\x01x\x05local\x00"
    circle = make_record(CNAME, other) + make_record(CNAME, AT_QUESTION, name=other)

    with pytest.raises(dns.exception.DNSException):
        decode_answer(make_header(2) + QUESTION + circle)


def test_records_of_another_name_type_or_class_are_ignored() -> None:
    chaos = (
        AT_QUESTION + encode_uint16(A) + encode_uint16(3) + bytes(4) + encode_uint16(3) + bytes(3)
    )
    records = make_a_record(1, name=EVIL) + make_record(TXT, b"\x03abc") + chaos + make_a_record(2)

    assert decode_answer(make_header(4) + QUESTION + records).addresses == ("10.0.0.2",)


def test_ttl_with_the_high_bit_set_is_zero() -> None:
    assert decode_answer(make_header(1) + QUESTION + make_a_record(1, ttl=1 << 31)).ttl == 0
    assert (
        decode_answer(make_header(1) + QUESTION + make_a_record(1, ttl=(1 << 31) - 1)).ttl
        == (1 << 31) - 1
    )


@pytest.mark.parametrize("questions", [0, 1])
@pytest.mark.parametrize("code", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
def test_dns_error_code_is_decoded(code: dns.rcode.Rcode, questions: int) -> None:
    response = decode_response(
        make_header(flags=0x8180 | code, questions=questions) + QUESTION * questions
    )

    assert response is not None
    assert response.rcode() == code


def test_nxdomain_response_is_decoded() -> None:
    assert decode_answer(make_header(flags=0x8183) + QUESTION) == DnsAnswer(name_exists=False)


def test_truncated_response_keeps_the_tc_flag() -> None:
    response = decode_response(make_header(9, flags=0x8380) + QUESTION + make_a_record(1)[:5])

    assert response is not None
    assert response.flags & dns.flags.TC


def test_special_bytes_in_a_name_are_escaped() -> None:
    target = b"\x03a.b\x02\xffC\x00"

    response = decode_answer(
        make_header(1)
        + SERVICE
        + encode_uint16(SRV)
        + encode_uint16(1)
        + make_record(SRV, bytes(6) + target),
        "_http._tcp.w.local",
        "SRV",
    )

    assert response.targets == (ServiceTarget(0, 0, 0, "a\\.b.\\255c"),)


# --- invalid responses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        make_header()[:11],
        make_header(number=8) + QUESTION,
        make_header(flags=0x0100) + QUESTION,
        make_header(flags=0x9180) + QUESTION,
        make_header() + b"\x01x\x05local\x00" + QUESTION[-4:],
        make_header() + NAME + encode_uint16(AAAA) + encode_uint16(1),
        make_header() + NAME + encode_uint16(A) + encode_uint16(3),
        make_header(questions=0) + QUESTION,
        make_header(number=8) + b"\xff",
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
def test_response_to_another_query_is_ignored(data: bytes) -> None:
    assert decode_response(data) is None


@pytest.mark.parametrize(
    "data",
    [
        make_header(questions=2) + QUESTION * 2,
        make_header(),
        make_header() + b"\xc0\x0c" + QUESTION[-4:],
        make_header() + b"\x01x\xc0\x0c" + QUESTION[-4:],
        make_header(1) + QUESTION + b"\xc0\xff" + make_a_record(1)[2:],
        make_header(1) + QUESTION + b"\x40x" + make_a_record(1)[2:],
        make_header(1) + QUESTION + b"\x80x" + make_a_record(1)[2:],
        make_header(1) + QUESTION + (b"\x3f" + b"x" * 63) * 4 + b"\x00" + make_a_record(1)[2:],
        make_header(1) + QUESTION + make_a_record(1)[:-1],
        make_header(2) + QUESTION + make_a_record(1),
        make_header(1) + QUESTION + make_record(A, bytes(5)),
        make_header(1) + QUESTION + make_record(A, bytes(3)),
        make_header(1) + QUESTION + make_record(AAAA, bytes(4)),
        make_header(1) + QUESTION + make_record(CNAME, AT_QUESTION + b"\x00"),
        make_header(1) + QUESTION + make_record(SRV, bytes(5)),
        make_header(1) + QUESTION + make_record(SRV, bytes(6) + AT_QUESTION + b"\x00"),
        make_header(1) + QUESTION + make_record(CNAME, b"\x09w") + make_a_record(1),
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
def test_malformed_dns_message_is_rejected(data: bytes) -> None:
    with pytest.raises(dns.exception.DNSException):
        decode_answer(data)


def test_compression_pointer_chain_is_limited() -> None:
    """Each pointer is valid on its own, but there are too many."""
    first = len(make_header() + QUESTION) + 2 + 10
    chain = AT_QUESTION + b"".join(encode_uint16(0xC000 | first + 2 * n) for n in range(200))
    last = encode_uint16(0xC000 | first + 2 * 200)

    with pytest.raises(dns.exception.DNSException):
        decode_response(
            make_header(2) + QUESTION + make_record(NULL, chain) + make_a_record(1, name=last)
        )

    some = encode_uint16(0xC000 | first + 2 * 10)
    response = decode_answer(
        make_header(2) + QUESTION + make_record(NULL, chain) + make_a_record(1, name=some)
    )
    assert response.addresses == ("10.0.0.1",)


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_dns_errors(data: bytes) -> None:
    for whole in (data, make_header(2, 1) + data, make_header(2, 1) + QUESTION + data):
        with suppress(dns.exception.DNSException):
            response = decode_response(whole)
            if response is not None:
                read_answer(response)


@given(st.data())
def test_mutated_dns_response_raises_only_dns_errors(
    data: st.DataObject,
) -> None:
    service = make_record(SRV, bytes(6) + b"\x01b\xc0\x17") + make_record(CNAME, b"\x01x\xc0\x17")
    good = bytearray(
        make_header(2, 1)
        + SERVICE
        + encode_uint16(SRV)
        + encode_uint16(1)
        + service
        + make_a_record(3)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(2, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(dns.exception.DNSException):
        response = decode_response(bytes(good), "_http._tcp.w.local", "SRV")
        if response is not None:
            assert not read_answer(response).addresses
