"""Tables on the command line are aligned and fit the terminal."""

import io
import sys

import pytest

from gateway.cli.console import print_table

HEADINGS = ("model", "requests", "note")
ROWS = [["[b]x[/b] :smile:", "1,000", "n" * 300], ["y", "2", ""]]


def test_table_is_plain_text_that_ignores_the_terminal_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(HEADINGS, ROWS, left_aligned=(0, 2))

    assert capsys.readouterr().out.splitlines() == [
        "model             requests  note",
        f"[b]x[/b] :smile:     1,000  {'n' * 300}",
        "y                        2",
    ]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_table_headings_are_bold_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", out)
    print_table(HEADINGS, ROWS, left_aligned=(0, 2))

    first, second, third = out.getvalue().splitlines()

    assert "\x1b[1m" in first
    assert "\x1b" not in second + third
    assert second.endswith("n" * 300)
