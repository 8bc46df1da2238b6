"""What a family does with the tables."""

from collections.abc import Callable

import pytest

from protocols.openai.tables import CHAT, changed, row, without


def test_a_row_is_changed_and_the_others_are_not() -> None:
    table = changed(CHAT, temperature={"high": 1.0}, top_p={"above_low": True})
    assert [param.wire for param in table] == [param.wire for param in CHAT]
    assert (row(table, "temperature").high, row(CHAT, "temperature").high) == (1.0, 2)
    assert row(table, "top_p").above_low
    assert row(table, "seed") is not None
    assert row(table, "n") == row(CHAT, "n")


def test_rows_are_left_out() -> None:
    wires = {param.wire for param in without(CHAT, "seed", "n")}
    assert wires == {param.wire for param in CHAT} - {"seed", "n"}


@pytest.mark.parametrize("use", [row, without, lambda table, name: changed(table, **{name: {}})])
def test_a_name_that_is_not_there_is_an_error(use: Callable[..., object]) -> None:
    with pytest.raises(KeyError):
        use(CHAT, "tempreature")
