"""The Containerfile; without a container engine, its commands run in a folder."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, json

from tests.deploy.processes import ProcessLauncher
from tests.deploy.tools import DEPLOY, ROOT, run_tool, run_tool_successfully

FILE = DEPLOY / "Containerfile"
ECHO = """
listeners: [{address: "${LISTEN}", protocols: [openai]}]
backends: {e: {kind: echo}}
models: {m: {backend: e}}
"""


class BuildStage(Struct):
    """A build stage: its base, and its instructions in order."""

    base: str
    steps: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        return [text for instruction, text in self.steps if instruction == name]


def parse_stages(text: str) -> dict[str, BuildStage]:
    """Return the stages by name."""
    stages: dict[str, BuildStage] = {}
    last = BuildStage("", [])
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, called = rest.partition(" AS ")
            last = stages[called] = BuildStage(base, [])
        elif name:
            last.steps.append((name, rest.strip()))
    return stages


STAGES = parse_stages(FILE.read_text("utf-8"))


def test_containerfile_passes_hadolint() -> None:
    assert run_tool_successfully("hadolint", FILE) == ""


def test_hadolint_detects_a_wrong_instruction(tmp_path: Path) -> None:
    file = tmp_path / "Containerfile"
    file.write_text(FILE.read_text("utf-8").replace("COPY gateway", "ADD gateway"))
    assert "DL3020" in run_tool("hadolint", file).stdout


def test_image_runs_unprivileged_and_contains_no_secret() -> None:
    assert [*STAGES][-1] == "gateway", "the last stage is built by default"
    for name in ("gateway", "torch"):
        assert STAGES[name].base == "runtime"
        assert {instruction for instruction, _ in STAGES[name].steps} <= {"COPY", "ENV"}

    runtime = STAGES["runtime"]
    assert runtime.all("USER") == ["65532:65532"]
    assert runtime.all("STOPSIGNAL") == ["SIGTERM"]
    assert runtime.all("COPY") + runtime.all("RUN") == []
    assert re.findall(r"(?i)password|secret|token", FILE.read_text("utf-8")) == []


def list_copied_paths() -> set[str]:
    """Return the paths that stages copy from the build context."""
    lines = [line for stage in STAGES.values() for line in stage.all("COPY")]
    return {
        one for line in lines if not line.startswith("--from") for one in shlex.split(line)[:-1]
    }


def test_image_requirements_match_constraints_and_have_hashes() -> None:
    pins = (DEPLOY / "requirements.txt").read_text("utf-8")
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", pins, re.MULTILINE))
    tested = (ROOT / "constraints.txt").read_text("utf-8").lower()

    constraints = dict(re.findall(r"^([\w.-]+)==([\w.]+)", tested, re.MULTILINE))

    assert versions.items() <= constraints.items()
    assert len(re.findall(r"==\S+ \\\n    --hash=sha256:", pins)) == len(versions) > 20


def test_dockerignore_allows_only_copied_paths() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]

    assert rules[0] == "*"
    assert {one.removeprefix("!") for one in rules if one.startswith("!")} == list_copied_paths()
    assert [one for one in list_copied_paths() if not (ROOT / one).exists()] == []
    assert any(fnmatch("gateway/__pycache__", one) for one in rules[1:])


def parse_environment(stage: BuildStage) -> Mapping[str, str]:
    return dict(part.split("=", 1) for line in stage.all("ENV") for part in shlex.split(line))


def build_stage(place: Path, name: str) -> None:
    """Execute a stage and its bases below ``place``."""
    stage = STAGES[name]
    if stage.base in STAGES:
        build_stage(place, stage.base)
    env = {**os.environ, **parse_environment(STAGES["empty"])}
    env = {key: value.replace("/src", f"{place}/src") for key, value in env.items()}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    source = place / "src"
    source.mkdir(exist_ok=True)
    for instruction, text in stage.steps:
        if instruction == "COPY":
            *sources, target = shlex.split(text)
            for one in sources:
                to = source / (target if (ROOT / one).is_dir() else Path(one).name)
                copy = shutil.copytree if (ROOT / one).is_dir() else shutil.copy
                copy(ROOT / one, to)
        elif instruction == "RUN":
            command = text.replace("/opt/", f"{place}/opt/")
            subprocess.run(["/bin/sh", "-ec", command], check=True, cwd=source, env=env)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_installed_image_serves_and_reports_health(stage: ProcessLauncher, tmp_path: Path) -> None:
    build_stage(tmp_path, "build")
    own = tmp_path / "opt" / "interlingua" / "bin"
    assert not (own / "pip").exists()

    result = subprocess.run(
        [own / "python", "-c", "import jinja2, importlib.util as u; print(u.find_spec('torch'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "None\n"

    (tmp_path / "gateway.yaml").write_text(ECHO)
    runtime: Any = STAGES["runtime"]
    [entry], [command] = runtime.all("ENTRYPOINT"), runtime.all("CMD")

    assert json.decode(entry) == ["interlingua"]

    running = stage.start(json.decode(command), tmp_path, [str(own / json.decode(entry)[0])])
    assert run_health_check(f"{running.url}/health", own) == 0
    assert running.command.stop() == 0
    assert run_health_check(f"{running.url}/health", own) != 0


def run_health_check(url: str, own: Path) -> int:
    """Run the image's health check and return its exit code."""
    [line] = STAGES["runtime"].all("HEALTHCHECK")
    command = json.decode(line.partition("CMD ")[2], type=list[str])
    env = {"PATH": str(own), "INTERLINGUA_HEALTH": url}
    return subprocess.run(command, check=False, capture_output=True, env=env).returncode
