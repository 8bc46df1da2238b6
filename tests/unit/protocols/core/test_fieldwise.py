"""Values of another type are taken out of a response, and the rest is kept."""

from typing import Any

import msgspec
import pytest
from msgspec import Struct, field

from protocols.core.events import Event, ResponseExtra
from protocols.core.extra import write_extra_fields
from protocols.core.fieldwise import convert_by_field, decode_fields, report_lost_fields

EXTRA = "(extra)"


class Item(Struct):
    name: str
    count: int | None = None


class Answer(Struct):
    items: list[Item] = []
    scores: dict[str, float] = {}
    text: str = ""


@pytest.mark.parametrize(
    ("body", "text", "names", "lost"),
    [
        (b'{"text": "a"}', "a", [], ()),
        (b'{"text": 5}', "", [], ((("text",), 5),)),
        (
            b'{"text": "a", "items": [{"name": "x", "count": "odd"}]}',
            "a",
            ["x"],
            ((("items[0]", "count"), "odd"),),
        ),
        (b'{"items": [{"name": 1}, {"name": "y"}]}', "", ["y"], None),
        (b'{"items": [7, {"name": "y"}]}', "", ["y"], ((("items[0]",), 7),)),
        (b'{"text": "a", "scores": {"k": "odd"}}', "a", [], ((("scores",), {"k": "odd"}),)),
    ],
)
def test_what_does_not_fit_is_lost_by_its_path(
    body: bytes, text: str, names: list[str], lost: Any
) -> None:
    answer, removed = decode_fields(body, Answer)

    assert answer.text == text
    assert [one.name for one in answer.items] == names
    assert lost is None or removed == lost


def test_an_odd_element_of_the_whole_body_is_lost_by_its_index() -> None:
    items, lost = convert_by_field([7, {"name": "y"}], list[Item])

    assert [one.name for one in items] == ["y"]
    assert lost == ((("[0]",), 7),)


def test_a_body_of_another_type_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_fields(b"[]", Answer)


def test_a_body_with_too_many_odd_values_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_fields(msgspec.json.encode({"items": [{"name": 7}] * 40}), Answer)


@pytest.mark.parametrize(
    ("key", "sent"),
    [
        ("vector", [0.1, None, 0.3]),
        ("vector", ["odd"]),
        ("rows", [[], ["odd"]]),
        ("rows", [7] * 40),
    ],
    ids=["an element", "the only element", "an inner list", "many elements"],
)
def test_a_list_of_plain_values_is_lost_whole(key: str, sent: list[Any]) -> None:
    """Without one of them, the others would have other positions."""

    class Vectors(Struct):
        vector: list[float] | str = ""
        rows: list[list[Item]] = []

    body, lost = decode_fields(msgspec.json.encode({key: sent}), Vectors)

    assert (body, lost) == (Vectors(), (((key,), sent),))


class StrictItem(Struct, forbid_unknown_fields=True):
    name: str = field(default="", name="title")


class StrictAnswer(Struct, forbid_unknown_fields=True):
    item: StrictItem | None = None
    rows: list[list[StrictItem]] | None = None
    free: Item | None = None
    vector: list[float] = []


class StrictAnswers(Struct, array_like=True):
    first: StrictAnswer | None = None


def test_unknown_keys_of_types_that_forbid_them_are_lost_by_their_path() -> None:
    """However many objects have them."""
    rows = [[{"title": "a", "x": i} for i in range(50)]]
    sent = {"item": {"x": 1, "y": None}, "rows": rows, "free": {"name": "n", "x": 1}, "later": [2]}

    answer, lost = decode_fields(msgspec.json.encode(sent), StrictAnswer)

    assert [one.name for one in answer.rows[0]] == ["a"] * 50  # type: ignore[index]
    assert lost[:3] == (
        (("item", "x"), 1),
        (("rows[0][0]", "x"), 0),
        (("rows[0][1]", "x"), 1),
    )
    assert lost[-1] == (("later",), [2])


def test_unknown_keys_of_a_body_that_is_a_list_are_lost_by_their_path() -> None:
    array, lost = decode_fields(b'[{"x": 1}, 5]', StrictAnswers)
    items, removed = convert_by_field([{"x": 2}], list[StrictItem])

    assert (array.first, lost) == (StrictAnswer(), ((("[0]", "x"), 1),))
    assert (items, removed) == ([StrictItem()], ((("[0]", "x"), 2),))


def test_a_body_that_is_a_list_of_odd_values_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        convert_by_field([7, 8], list[Item])


def test_an_object_with_unknown_keys_has_the_odd_ones_among_them() -> None:
    value: dict[str, Any] = {"text": "a", "items": [{"name": "x", "count": "odd"}], EXTRA: ()}

    answer, lost = convert_by_field(value, Answer, EXTRA)

    assert (answer.text, answer.items, lost) == ("a", [], ())
    assert value[EXTRA] == ((("items",), [{"name": "x", "count": "odd"}]),)


def test_an_odd_key_of_an_inner_object_is_an_unknown_key_by_its_path() -> None:
    class Outer(Struct):
        item: Item

    value: dict[str, Any] = {"item": {"name": "x", "count": "odd"}, EXTRA: ()}

    answer, _ = convert_by_field(value, Outer, EXTRA)

    assert answer.item.name == "x"
    assert value[EXTRA] == ((("item", "count"), "odd"),)


def test_an_odd_element_of_a_list_of_such_an_object_is_lost() -> None:
    value: dict[str, Any] = {"items": [7, {"name": "y"}], EXTRA: ()}

    answer, lost = convert_by_field(value, Answer, EXTRA)

    assert [one.name for one in answer.items] == ["y"]
    assert (value[EXTRA], lost) == ((), ((("items[0]",), 7),))


def test_lost_fields_are_an_event_that_no_encoder_writes() -> None:
    events: list[Event] = []

    report_lost_fields((), events)
    report_lost_fields(((("text",), 5),), events)

    assert events == [ResponseExtra("", "response", ((("text",), 5),))]


def test_an_odd_value_replaces_what_an_encoder_wrote_only_if_that_is_null() -> None:
    written: dict[str, Any] = {"a": None, "b": 1, "c": None}

    write_extra_fields(written, {("a",): 5, ("b",): 6, ("c", "d"): 7})

    assert written == {"a": 5, "b": 1, "c": {"d": 7}}


def test_a_field_whose_name_is_no_path_makes_the_body_an_error() -> None:
    class Dotted(Struct):
        inner: int = field(default=0, name="a.b")

    with pytest.raises(msgspec.ValidationError):
        decode_fields(b'{"a.b": "odd"}', Dotted)
