"""``pipx install .`` and ``uv tool install .`` of README install a command that works.

With it alone, the paths that README names work from an empty folder, each in minutes.
"""

import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests.deploy.tools import ROOT, require
from tests.docs.pages import check_page
from tests.docs.stands_in import STANDS_IN

SECONDS: Final = 300
"""Limit of one command: a package index may be slow."""
pytestmark = pytest.mark.timeout(900)
VERSIONS: Final = {"pipx": "1.18.4", "uv": "0.13.9"}
PATHS: Final = (
    "README.md",
    "docs/howto/vllm.md",
    "docs/howto/ollama.md",
    "docs/howto/load-balancing.md",
    "docs/howto/migrate-litellm.md",
)
"""Pages that README links for a first use, which need nothing but the command and curl."""
INSTALLERS: Final = {
    "pipx": ["pipx", "install", "--python", sys.executable],
    "uv": ["uv", "tool", "install", "--python", sys.executable],
}


def run(
    command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=SECONDS,
    )


class Installation(Struct, frozen=True):
    """The folder of the installed command, and the environment in which it was installed."""

    programs: Path
    environment: dict[str, str]
    seconds: float


@pytest.fixture(scope="module", params=INSTALLERS)
def installation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """Given an empty home folder, and the installer from the package index."""
    name, folder = str(request.param), tmp_path_factory.mktemp("home")
    venv.create(folder / "installer", with_pip=True)
    programs = folder / "installer" / "bin"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "HOME": str(folder / "home"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PIPX_HOME": str(folder / "pipx"),
        "PIPX_BIN_DIR": str(folder / "bin"),
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "UV_CACHE_DIR": str(folder / "cache"),
    }
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", f"{name}=={VERSIONS[name]}"]
    had = run(pip, environment, folder)
    require(had.returncode == 0, f"{name} can't be had from the package index: {had.stderr[-300:]}")
    start = time.monotonic()
    installed = run([*INSTALLERS[name], str(ROOT)], environment, folder)
    assert installed.returncode == 0, installed.stderr[-2000:]
    return Installation(folder / "bin", environment, time.monotonic() - start)


def test_installed_command_makes_and_checks_a_configuration(
    installation: Installation, tmp_path: Path
) -> None:
    command = str(installation.programs / "interlingua")

    written = run([command, "init"], installation.environment, tmp_path)
    checked = run([command, "check", "gateway.yaml"], installation.environment, tmp_path)

    assert written.returncode == 0, written.stderr
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "gateway.yaml: good: 1 listener" in checked.stdout


@pytest.mark.parametrize("installation", ["uv"], indirect=True)
def test_paths_of_the_readme_work_with_the_installed_command(
    installation: Installation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given scripted workers in place of the reader's. Their seconds are printed, not judged."""
    seconds = {"install": installation.seconds}
    for name in PATHS:
        folder = tmp_path / Path(name).stem
        folder.mkdir()
        start = time.monotonic()
        check_page(
            (ROOT / name).read_text("utf-8"), folder, STANDS_IN.get(name, ""), installation.programs
        )
        seconds[name] = time.monotonic() - start

    with capsys.disabled():
        for name, duration in seconds.items():
            print(f"\n{duration:6.1f} s  {name}", end="")  # noqa: T201 - it is for readers
        print()  # noqa: T201 - as above
