"""Names of headers, as they are looked up."""

from gateway.core.fields import Names


def test_a_name_is_lower_case_however_it_is_sent() -> None:
    names = Names()

    assert [names[one] for one in (b"Host", b"HOST", b"host", b"Host")] == ["host"] * 4
    assert names[b"X-\xc9"] == "x-\xe9"


def test_so_many_are_remembered_and_no_long_ones() -> None:
    names = Names()

    assert names[b"A" * 65] == "a" * 65
    assert not names
    for number in range(1000):
        assert names[b"A%d" % number] == f"a{number}"
        assert len(names) <= 512
    assert names[b"A999"] is names[b"A999"]
