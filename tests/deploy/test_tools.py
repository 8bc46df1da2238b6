"""A tool that is missing is said to be, and is no success where every test must be run."""

from pathlib import Path

import pytest

from tests.deploy import tools
from tests.deploy.tools import good, need, tool


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_without_a_tool(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="there is no such-a-tool here; make deploy installs"):
        tool("such-a-tool")
    with pytest.raises(outcome, match="why"):
        need(there=False, reason="why")


def test_our_own_come_before_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools, "_PLACES", (tmp_path,))
    monkeypatch.setenv("CI", "true")
    assert tool("sh") != str(tmp_path / "sh")
    (tmp_path / "sh").touch()
    assert tool("sh") == str(tmp_path / "sh")
    with pytest.raises(pytest.fail.Exception):
        tool("python")  # the system's would lack what ours has


def test_a_tool_that_complains_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="no-such-file"):
        good("ls", "/no-such-file")
