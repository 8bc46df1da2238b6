"""No test exceeds its time limit, and no child process ignores SIGINT.

pytest-timeout raises an exception in the main thread. A test may swallow it (in a task that nobody
awaits, in a ``finally`` that waits), and code that holds the interpreter's lock never gets it.
Then, ``GRACE`` seconds after the limit, a thread of ``faulthandler`` prints every stack and ends
the process; pytest-xdist reports the test as failed and continues in a new process.

A shell starts background commands with SIGINT ignored (``nohup make test &``), and a process
inherits that. Tests send SIGINT to child processes, so these start with its default action.
"""

import faulthandler
import os
import signal
from collections.abc import Generator
from typing import Final

import pytest

GRACE: Final = float(os.environ.get("TIME_LIMIT_GRACE", "30"))
"""Seconds that a test has, after its limit, to end by itself."""

_stderr: Final[list[int]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr before tests' output is captured."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        _stderr.append(os.dup(2))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _ignore)  # unlike SIG_IGN, a handler is reset by exec


def pytest_unconfigure() -> None:
    os.close(_stderr.pop())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The limit includes set-up, test and tear-down, as in pytest-timeout."""
    limit = time_limit(item)
    if limit > 0:
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=_stderr[-1])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def time_limit(item: pytest.Item) -> float:
    """Return the limit in seconds, 0 for none, from the nearest marker or pyproject.toml."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return float(item.config.getini("timeout"))
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])


def _ignore(number: int, frame: object) -> None:
    pass
