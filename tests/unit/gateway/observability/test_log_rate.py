"""Repeated log messages are limited and counted."""

import logging

import pytest

from gateway.observability import log_rate
from gateway.observability.log_rate import LogRateFilter


def make_record(text: str, *args: object, name: str = "a") -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "", 0, text, args, None)


def log_message(one: LogRateFilter, text: str, *args: object, name: str = "a") -> str | None:
    record = make_record(text, *args, name=name)
    return record.getMessage() if one.filter(record) else None


def test_repeated_message_is_limited_to_two_per_second_and_counted() -> None:
    now = [0.0]
    one = LogRateFilter(lambda: now[0])
    assert [log_message(one, "no %s", "luck") for _ in range(5)] == ["no luck"] * 2 + [None] * 3

    now[0] = 0.9
    assert log_message(one, "no %s", "luck") is None

    now[0] = 1.0
    assert log_message(one, "no %s", "luck") == "no luck (4 more of these were left out)"
    assert [log_message(one, "no %s", "luck") for _ in range(2)] == ["no luck", None]


def test_messages_are_limited_per_text_and_logger() -> None:
    one = LogRateFilter(lambda: 0.0)
    assert [log_message(one, "x") for _ in range(3)] == ["x"] * 2 + [None]
    assert log_message(one, "y") == "y"
    assert log_message(one, "x", name="b") == "x"


def test_traceback_is_logged_once_per_error_type() -> None:
    one, shown = LogRateFilter(lambda: 0.0), []
    for error in (ValueError("a"), ValueError("b"), KeyError("c"), ValueError("d")):
        record = make_record("it failed")
        record.exc_info = (type(error), error, None)
        shown.append(one.filter(record) and record.exc_info is not None)
    assert shown == [True, False, True, False]


def test_tracked_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rate, "_MAX_TRACKED_MESSAGES", 2)
    one = LogRateFilter(lambda: 0.0)

    assert [log_message(one, "x") for _ in range(3)] == ["x"] * 2 + [None]
    assert [log_message(one, text) for text in ("y", "x", "z", "x")] == ["y", None, "z", "x"]
