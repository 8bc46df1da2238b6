"""The tools that check the files under deploy/, and what happens without one."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
HOME: Final = ROOT / ".venv-deploy"
LIBRARIES: Final = HOME / "debian" / "usr" / "lib" / "x86_64-linux-gnu"
"""Shared libraries of the downloaded servers."""
_PLACES: Final = (HOME / "bin", HOME / "debian" / "usr" / "bin", HOME / "debian" / "usr" / "sbin")


def require(there: object, reason: str) -> None:
    """Skip the test unless it is ``there``; fail it where every test must run."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def find_tool(name: str) -> str:
    """Return the path of a tool: the downloaded one, else the system's."""
    own = next((place / name for place in _PLACES if (place / name).exists()), None)
    path = str(own) if own else None if name == "python" else shutil.which(name)
    require(path, f"there is no {name} here; make deploy installs what can be had")
    assert path is not None
    return path


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a tool; return its output and its exit code."""
    command = [find_tool(name), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


def run_tool_successfully(name: str, *arguments: object) -> str:
    """Run a tool that must succeed; return its output."""
    result = run_tool(name, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def read_yaml(path: Path) -> Any:
    """Read a YAML file."""
    return yaml.safe_load(path.read_text("utf-8"))


def parse_manifests(text: str) -> Iterator[dict[str, Any]]:
    """Parse the rendered manifests."""
    return (one for one in yaml.safe_load_all(text) if one)
