"""A missing tool skips its test with a reason, or fails it where every test must run."""

from pathlib import Path

import pytest

from tests.deploy import tools
from tests.deploy.tools import find_tool, require, run_tool_successfully


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_missing_tool_skips_locally_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="there is no such-a-tool here; make deploy installs"):
        find_tool("such-a-tool")
    with pytest.raises(outcome, match="why"):
        require(there=False, reason="why")


def test_installed_tools_have_precedence_over_system_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools, "_PLACES", (tmp_path,))
    monkeypatch.setenv("CI", "true")
    assert find_tool("sh") != str(tmp_path / "sh")

    (tmp_path / "sh").touch()
    assert find_tool("sh") == str(tmp_path / "sh")
    with pytest.raises(pytest.fail.Exception):
        find_tool("python")  # the system's Python lacks our packages


def test_tool_error_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="no-such-file"):
        run_tool_successfully("ls", "/no-such-file")
