"""A test beyond its time limit is ended, and child processes do not ignore SIGINT."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ENDLESS: Final = """
import time

def test_that_swallows_its_limit():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""
CHILD: Final = """
import signal
import subprocess
import sys

def test_children_do_not_ignore_sigint():
    said = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.check_output([sys.executable, "-c", said]) == b"True\\n"
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
"""


def run_pytest(folder: Path, text: str, *before: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_it.py").write_text(text)
    options = ("-p", "tests.time_limits", "-o", "timeout=1", "--rootdir", str(folder))
    return subprocess.run(
        [*before, sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=ROOT,
        env=os.environ | {"TIME_LIMIT_GRACE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_test_that_ignores_its_timeout_is_killed(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, ENDLESS)
    assert ran.returncode == 1
    assert "test_it.py" in ran.stderr
    assert "Timeout" in ran.stderr


def test_sigint_ignored_by_a_shell_is_not_inherited(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, CHILD, "/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    assert ran.returncode == 0, ran.stdout
