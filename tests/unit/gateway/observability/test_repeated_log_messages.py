"""What is logged again and again."""

import logging

import pytest

from gateway.observability import access_log
from gateway.observability.access_log import LogRateFilter


def record(text: str, *args: object, name: str = "a") -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "", 0, text, args, None)


def said(one: LogRateFilter, text: str, *args: object, name: str = "a") -> str | None:
    made = record(text, *args, name=name)
    return made.getMessage() if one.filter(made) else None


def test_the_same_is_said_twice_a_second_and_then_how_often_it_was_not() -> None:
    now = [0.0]
    one = LogRateFilter(lambda: now[0])
    assert [said(one, "no %s", "luck") for _ in range(5)] == ["no luck"] * 2 + [None] * 3
    now[0] = 0.9
    assert said(one, "no %s", "luck") is None
    now[0] = 1.0
    assert said(one, "no %s", "luck") == "no luck (4 more of these were left out)"
    assert [said(one, "no %s", "luck") for _ in range(2)] == ["no luck", None]


def test_another_message_or_logger_has_a_count_of_its_own() -> None:
    one = LogRateFilter(lambda: 0.0)
    assert [said(one, "x") for _ in range(3)] == ["x"] * 2 + [None]
    assert said(one, "y") == "y"
    assert said(one, "x", name="b") == "x"


def test_a_traceback_is_shown_once_for_each_kind_of_error() -> None:
    one, shown = LogRateFilter(lambda: 0.0), []
    for error in (ValueError("a"), ValueError("b"), KeyError("c"), ValueError("d")):
        made = record("it failed")
        made.exc_info = (type(error), error, None)
        shown.append(one.filter(made) and made.exc_info is not None)
    assert shown == [True, False, True, False]


def test_so_many_are_told_apart_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_MAX_TRACKED_MESSAGES", 2)
    one = LogRateFilter(lambda: 0.0)
    assert [said(one, "x") for _ in range(3)] == ["x"] * 2 + [None]
    assert [said(one, text) for text in ("y", "x", "z", "x")] == ["y", None, "z", "x"]
