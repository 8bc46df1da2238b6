"""A head that came before is known again, and only that."""

import pytest

from gateway.core.glance import Glance


def message(length: str, body: bytes, *, name: str = "Content-Length", more: str = "") -> bytes:
    return f"POST / HTTP/1.1\r\nHost: a\r\n{name}: {length}\r\n{more}\r\n".encode() + body


def headers(count: int) -> dict[str, str]:
    """What a parser finds, of so many."""
    every = {"content-length": "2", **{str(number): "" for number in range(1, count)}}
    return every if count else {}


def learnt(data: bytes, count: int = 2) -> Glance[str]:
    glance = Glance[str]()
    for _ in range(2):
        glance.learn(data, headers(count), "told")
    return glance


def test_the_first_head_is_not_learnt() -> None:
    glance = Glance[str]()
    glance.learn(KNOWN, headers(2), "told")
    assert glance.body(KNOWN) == 0


@pytest.mark.parametrize("name", ["Content-Length", "content-length", "CONTENT-LENGTH"])
@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 1000, b"\r\n\r\n"])
def test_the_same_head_is_known_with_a_body_of_any_length(name: str, body: bytes) -> None:
    glance = learnt(message("2", b"{}", name=name))
    data = message(str(len(body)), body, name=name)
    start = glance.body(data)
    assert start == len(data) - len(body)
    assert (glance.told, glance.size) == ("told", len(body))


@pytest.mark.parametrize("follows", [b"", b"{", b"{}{}", b"\r\n"])
def test_it_is_known_whatever_has_come_of_the_body(follows: bytes) -> None:
    glance = learnt(message("2", b""))
    assert glance.body(message("12", b"") + follows) == len(message("12", b""))
    assert glance.size == 12


KNOWN = message("2", b"{}")


@pytest.mark.parametrize(
    "data",
    [
        message("2", b"{}", name="content-length"),
        message("2", b"{}", more="a: b\r\n"),
        message("2 ", b"{}"),
        message("02", b"{}"),
        message("+2", b"{}"),
        message("", b""),
        KNOWN[:10],
        KNOWN.replace(b"Host: a", b"Host: b"),
        KNOWN.replace(b"2\r\n\r\n", b"2\r\n\n\r"),
        KNOWN.replace(b"\r\n\r\n", b"\n\n"),
        KNOWN.replace(b"2\r\n", b"2\r\na: b\r\n"),
        KNOWN.replace(b"2\r\n", b"0\r\nContent-Length: 2\r\n"),
        b"\r\n" + KNOWN,
        b"",
    ],
)
def test_whatever_differs_is_not_known(data: bytes) -> None:
    assert learnt(KNOWN).body(data) == 0


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (message("2", b"{}"), 1),  # a line that is no header of its own
        (message("2", b"{}", more=" folded\r\n"), 2),
        (message("2", b"{}", more="a: b\n"), 2),
        (message("02", b"{}"), 2),
        (b"\r\n" + message("2", b"{}"), 2),
        (message("2", b"{}", more=f"a: {'x' * 5000}\r\n"), 3),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 2),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 1),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 0),
        (b"", 0),
    ],
)
def test_what_says_its_length_otherwise_is_not_learnt(data: bytes, count: int) -> None:
    glance = learnt(data, count)
    assert glance.told is None
    assert glance.body(data) == 0


def test_a_head_that_is_never_the_same_is_not_learnt_each_time() -> None:
    glance = Glance[int]()
    learnt = []
    for number in range(100):
        data = message("0", b"", more=f"x-request-id: {number}\r\n")
        assert glance.body(data) == 0
        glance.learn(data, headers(3), number)
        learnt.append(glance.told == number)
    assert sum(learnt) == 3
    assert learnt[1]


def test_another_is_learnt_in_the_place_of_one_that_was_of_use() -> None:
    glance = learnt(KNOWN)
    assert glance.body(KNOWN)
    other = message("2", b"{}", more="a: b\r\n")
    assert not glance.body(other)
    glance.learn(other, headers(3), "other")
    assert glance.body(other)
    assert glance.told == "other"
    assert not glance.body(KNOWN)


def test_its_headers_tell_the_length_of_the_body_that_came() -> None:
    glance = learnt(KNOWN)
    glance.body(KNOWN)
    first = glance.headers
    glance.body(message("10", b""))
    assert (first["content-length"], first["1"]) == ("2", "")
    assert (glance.headers["content-length"], glance.headers["1"]) == ("10", "")


@pytest.mark.parametrize("after", ["", "a: b\r\n"])
def test_a_head_of_another_length_is_known_in_its_turn(after: str) -> None:
    glance = learnt(message("2", b"", more=after), 2 + bool(after))
    for size in (2, 30, 30, 2, 0, 123456789):
        data = message(str(size), b"", more=after)
        assert glance.body(data) == len(data)
        assert glance.size == size
