"""Text of clients, workers and files is printed so that no terminal obeys it."""

import ast
import json
import logging
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from backends.log_format import LogFormat, build_formatter, escape_controls, format_notice
from gateway.cli import main
from gateway.observability.access_log import AccessLogWriter
from gateway.observability.record import RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from gateway.terminal import print_text

GATEWAY: Final = Path(__file__).parents[3] / "gateway"
HOSTILE: Final = "a\u202eb\x1b[2J\x9b2J\x7f\u2066c"
"""What reverses text, clears the screen, and hides what follows."""
PRINTERS: Final = {"terminal.py", "console.py"}
"""The modules that print: the latter a table, whose headings are styled."""


def has_controls(text: str) -> bool:
    bidirectional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return any(
        (unicodedata.category(one) in {"Cc", "Cs", "Zl", "Zp"} and one not in "\n\t")
        or unicodedata.bidirectional(one) in bidirectional
        for one in text
    )


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from(HOSTILE)))
def test_escaped_text_has_no_controls(text: str) -> None:
    assert not has_controls(escape_controls(text))
    if not has_controls(text):
        assert set(escape_controls(text)) <= {*text, *"\\u0123456789abcdef"}


@given(st.text() | st.lists(st.text(HOSTILE)))
def test_printed_json_is_the_same_document(value: object) -> None:
    assert json.loads(escape_controls(msgspec.json.encode(value).decode())) == value


@pytest.mark.parametrize("printed", [HOSTILE, msgspec.json.encode(HOSTILE)])
def test_printed_text_has_no_controls(
    capsys: pytest.CaptureFixture[str], printed: str | bytes
) -> None:
    print_text(printed)

    output = capsys.readouterr().out
    assert r"\u202eb\u001b[2J\u009b2J\u007f\u2066c" in output
    assert not has_controls(output)


def test_log_messages_and_notices_have_no_controls() -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "worker: %s", (HOSTILE,), None)

    assert not has_controls(build_formatter("text").format(record))
    assert not has_controls(format_notice(HOSTILE, "text"))


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_the_log_have_no_controls(form: LogFormat) -> None:
    """Names, paths and errors of clients and workers are in lines of requests and in messages."""
    reading, writing = os.pipe()
    writer = AccessLogWriter(writing, 100, form, form)
    writer.start()
    writer.write_record(RequestRecord("a", 1e9, model=HOSTILE, path=HOSTILE, error=HOSTILE))
    record = logging.LogRecord("x", logging.ERROR, "", 0, "worker: %s", (HOSTILE,), None)
    writer.write_text(build_formatter(form).format(record))
    writer.write_notice(HOSTILE)
    writer.close(10)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        lines = file.read().decode()

    assert lines.count("\n") == 3
    assert not has_controls(lines)
    assert lines.count(r"\u202e") >= 3
    if form == "json":
        access, message, notice = map(json.loads, lines.splitlines())
        assert access["model"] == notice["message"] == HOSTILE
        assert message["message"] == f"worker: {HOSTILE}"


def find_printing_calls(file: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            *("print", "click.echo", "click.secho", "click.style"),
            *("sys.stdout.write", "sys.stdout.buffer.write"),
        }:
            yield node.lineno


def test_commands_print_by_the_function_that_escapes_controls() -> None:
    calls = [
        f"{file.relative_to(GATEWAY)}:{line}"
        for file in GATEWAY.rglob("*.py")
        if file.name not in PRINTERS
        for line in find_printing_calls(file)
    ]

    assert calls == [], "use gateway.terminal"


FILES: Final = {
    "check": (f"version: {HOSTILE!a}\nx{HOSTILE!a}: 1\n", ()),
    "diff": (f"models: {{{json.dumps(HOSTILE)}: 1}}\n", ("diff.yaml",)),
    "migrate litellm": (f"{json.dumps(HOSTILE)}: 1\n", ()),
    "usage": ("", ()),
    "usage --json": ("", ()),
}


@pytest.mark.parametrize("command", FILES)
def test_commands_show_text_of_files_without_controls(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, more = FILES[command]
    file = Path(f"{command.split(' ', maxsplit=1)[0]}.yaml")
    if command.startswith("usage"):
        write_usage(file)
    else:
        file.write_text(text, "utf-8")

    result = CliRunner().invoke(main, [*command.split(" "), str(file), *more])

    assert r"\u202e" in result.output
    assert not has_controls(result.output)


def write_usage(file: Path) -> None:
    """Write the database of a gateway with one request of a model with this name."""
    recorder = SqliteUsageRecorder(str(file), 1e12, lambda: 1e9)
    recorder._write_batch([RequestRecord("a", 1e9, model=HOSTILE)])
    recorder.close(1)


def test_errors_of_commands_have_no_controls() -> None:
    result = CliRunner().invoke(main, ["check", f"missing-{HOSTILE}"])

    assert r"missing-a\u202eb" in result.output
    assert not has_controls(result.output)
