"""Codex CLI completes a task through the gateway: it reads a file, edits it, and runs a command."""

import os
import re
import subprocess
from pathlib import Path

import pytest

CODEX = Path(os.environ.get("NODE_CLIENTS", "")) / "node_modules" / ".bin" / "codex"
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "codex.md"
"""The page with Codex's configuration."""


def read_config(url: str) -> str:
    """Return the page's configuration for a gateway with this URL."""
    match = re.search(
        r'^```toml title="config.toml"\n(.*?)^```$',
        PAGE.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert match is not None
    assert "http://127.0.0.1:8000" in match[1]
    return match[1].replace("http://127.0.0.1:8000", url)


@pytest.mark.skipif(not CODEX.is_file(), reason="Codex can't be installed here: it needs npm")
def test_codex_exec_edits_a_file(tmp_path: Path, key: str) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (home / "config.toml").write_text(read_config(os.environ["AGENTS_URL"]))
    (project / "notes.txt").write_text("the old text\n")
    command = [CODEX, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]

    ended = subprocess.run(
        [*map(str, command), "Replace old with new in notes.txt"],
        cwd=project,
        env=os.environ | {"CODEX_HOME": str(home), "INTERLINGUA_KEY": key},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "The file has new text."
    assert (project / "notes.txt").read_text() == "the new text\n"
    assert ended.stderr.count("succeeded in") == 3, ended.stderr
    assert "ERROR" not in ended.stderr
