"""Unknown keys of objects in a request become extra fields with complete paths."""

from msgspec import Raw

from protocols.core.extra import add_unknown_keys

CALL_KEYS = {"role": None, "function": {"name": None}}


def test_unknown_keys_with_a_value_are_added_by_their_paths() -> None:
    extra: dict[str, Raw] = {}
    call = {"role": Raw(b'"x"'), "later": Raw(b"[1]"), "function": {"name": "f", "deep": {"a": 1}}}

    add_unknown_keys(extra, call, "calls[0]", CALL_KEYS)

    assert extra == {"calls[0].later": Raw(b"[1]"), "calls[0].function.deep": Raw(b'{"a":1}')}


def test_unknown_keys_that_are_null_are_not_added() -> None:
    extra: dict[str, Raw] = {}

    add_unknown_keys(extra, {"later": Raw(b"null"), "other": None}, "calls[0]", CALL_KEYS)

    assert extra == {}
