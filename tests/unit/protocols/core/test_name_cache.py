"""A cache of names computes each usual name once, and holds neither many nor long ones."""

import pytest

from protocols.core.name_cache import MAX_NAME_SIZE, MAX_NAMES, NameCache


def test_a_name_is_computed_once() -> None:
    computed: list[str] = []

    def lower(name: str) -> str:
        computed.append(name)
        return name.lower()

    names = NameCache(lower)

    assert [names["Accept"], names["Accept"], names["ACCEPT"]] == ["accept"] * 3
    assert computed == ["Accept", "ACCEPT"]


def test_names_of_clients_take_little_memory() -> None:
    """A client may send any names: the cache is cleared when it is full, and keeps no long one."""
    names = NameCache[str, str](str.upper)
    longest, longer = "x" * MAX_NAME_SIZE, "x" * (MAX_NAME_SIZE + 1)

    assert (names[longest], names[longer]) == (longest.upper(), longer.upper())
    assert [*names] == [longest]
    for number in range(3 * MAX_NAMES):
        assert names[f"x-{number}"] == f"X-{number}"
        assert len(names) <= MAX_NAMES


def test_an_invalid_name_is_invalid_each_time() -> None:
    def refuse(name: bytes) -> bytes:
        raise ValueError(name)

    names = NameCache(refuse)

    for _ in range(2):
        with pytest.raises(ValueError, match="a"):
            names[b"a"]
    assert not names
