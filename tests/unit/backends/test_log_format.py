"""Log messages as text and as JSON."""

import json
import logging
import subprocess
import sys

import pytest

from backends.log_format import (
    build_formatter,
    choose_log_format,
    format_notice,
    inherit_log_format,
)

PROGRAM = r"""
import logging, sys, warnings
from backends.log_format import configure_logging
configure_logging("INFO", sys.argv[1])
warnings.warn("a warning")
logging.getLogger("library").info("two\nlines")
raise ValueError("the end")
"""


def run_program(log_format: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()


def test_warnings_libraries_and_fatal_errors_are_json_objects() -> None:
    warned, logged, failed = map(json.loads, run_program("json"))
    assert warned["level"] == "warning"
    assert "UserWarning: a warning" in warned["message"]
    assert (logged["level"], logged["logger"], logged["message"]) == (
        "info",
        "library",
        "two\nlines",
    )
    assert failed["level"] == "critical"
    assert failed["exception"].endswith("ValueError: the end")


def test_text_keeps_the_traceback_below_its_message() -> None:
    lines = run_program("text")
    assert lines[-1] == "ValueError: the end"
    assert any(line.endswith("CRITICAL interlingua: the process fails") for line in lines)


def test_time_of_a_json_message_is_utc() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "b", None, None)
    record.created = 1_800_000_000.5
    line = json.loads(build_formatter("json").format(record))

    assert line["time"] == "2027-01-15T08:00:00.500Z"


def test_notice_is_unchanged_in_text_and_one_object_a_line_in_json() -> None:
    assert format_notice("a\nb", "text") == "a\nb"

    lines = format_notice("a\nb", "json", logging.ERROR).splitlines()
    assert [json.loads(one)["message"] for one in lines] == ["a", "b"]
    assert {json.loads(one)["level"] for one in lines} == {"error"}


def test_format_is_inherited_and_else_that_for_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert inherit_log_format({"INTERLINGUA_LOG_FORMAT": "text"}) == "text"

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert inherit_log_format({}) == choose_log_format("auto") == "json"

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert inherit_log_format({}) == "text"
