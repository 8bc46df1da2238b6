"""What ``interlingua doctor`` finds of a machine that is not as this one is."""

import importlib
import importlib.util
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.config import load
from gateway.tools.doctor import local, machine
from gateway.tools.doctor.finding import Finding


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_without_a_file_it_looks_at_what_is_installed() -> None:
    result = doctor()
    assert result.exit_code == 0
    said = dict(line[6:].split(": ", 1) for line in result.stdout.splitlines())
    assert {"interlingua", "python", "aiohttp", "httptools", "msgspec", "httpx"} <= said.keys()


def test_a_wrong_file_is_told_with_its_places(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: {e: {kind: echo}}\nmodels: {m: {backend: f}}\n")
    result = doctor(str(file))
    assert result.exit_code == 1
    assert f"bad   {file}:2:23: there is no backend 'f'; known: e" in result.stdout
    assert doctor(str(tmp_path / "none.yaml")).exit_code == 2


def test_a_good_file_is_told_as_json(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    listeners = 'listeners: [{address: "127.0.0.1:0", dialects: [openai]}]'
    file.write_text(
        f"{listeners}\nbackends: {{e: {{kind: echo}}}}\nmodels: {{m: {{backend: e}}}}\n"
    )
    result = doctor(str(file), "--json")
    assert result.exit_code == 0
    said = {one["what"]: one["said"] for one in msgspec.json.decode(result.stdout)}
    assert said[str(file)] == "is good"
    assert said["listener 127.0.0.1:0"] == "is free"


def test_files_that_may_be_open() -> None:
    [few], [many] = machine.descriptors(1), machine.descriptors(10**9)
    assert (few.state, many.state) == ("ok", "warn")
    assert many.mend.startswith("raise the limit (ulimit -Hn 2000000064)")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_are_for_terminals_that_want_them(
    no_color: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    result = CliRunner().invoke(main, ["doctor"], color=True)
    assert ("\x1b[" in result.stdout) == (not no_color)


def test_what_is_old_and_what_is_not_there() -> None:
    def version(name: str) -> str:
        if name == "uvloop":
            raise metadata.PackageNotFoundError(name)
        return "3.13.9" if name == "aiohttp" else "9.0.0rc1"

    said = {one.what: one for one in machine.versions(version)}
    assert said["aiohttp"] == Finding(
        "warn", "aiohttp", "3.13.9 is older than 3.14", "pip install 'aiohttp>=3.14'"
    )
    assert said["uvloop"].state == "warn"
    assert said["httpx"].state == "ok"


@pytest.mark.parametrize(
    ("backlog", "ports", "states"),
    [("4096", "32768\t60999", ["ok", "ok"]), ("128", "50000 60999", ["warn", "warn"])],
)
def test_the_kernel(backlog: str, ports: str, states: list[str], tmp_path: Path) -> None:
    for name, text in (("core/somaxconn", backlog), ("ipv4/ip_local_port_range", ports)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(f"{text}\n")
    assert [one.state for one in machine.kernel(tmp_path)] == states


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    assert [*machine.kernel(tmp_path)] == []


# --- local models ---------------------------------------------------------------------------------


class Torch(SimpleNamespace):
    """Stands for the library: what there is of it is ``cuda``, and what is free there."""

    def __init__(self, free: int | None) -> None:
        super().__init__(__version__="2.9", get_num_threads=lambda: 4)
        self.cuda = SimpleNamespace(
            is_available=lambda: free is not None,
            mem_get_info=lambda device: (free, 80 << 30),
            get_device_name=lambda device: "NVIDIA H200",
        )
        self.device = str
        self._free = free

    def zeros(self, size: int, *, device: str) -> None:
        if device.startswith("cuda") and self._free is None:
            raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check it.")


def told(device: str, torch: Any, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    text = f"""
backends: {{t: {{kind: torch, path: "package:m", device: "{device}", memory: 8GiB}}}}
models: {{m: {{backend: t}}}}
"""
    config = load(text, "gateway.yaml", env={})
    monkeypatch.setattr(importlib, "import_module", lambda name: torch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if torch is None else name)
    return [*local.examine(config)]


@pytest.mark.parametrize(
    ("device", "free", "expected"),
    [
        ("auto", None, Finding("ok", "t", "torch 2.9 on cpu, 4 threads")),
        ("cpu", 40 << 30, Finding("ok", "t", "torch 2.9 on cpu, 4 threads")),
        (
            "auto",
            40 << 30,
            Finding("ok", "t", "torch 2.9 on NVIDIA H200: 40,960 of 81,920 MiB free"),
        ),
        (
            "cuda:1",
            1 << 30,
            Finding(
                "warn",
                "t",
                "torch 2.9 on NVIDIA H200: 1,024 of 81,920 MiB free, less than its `memory`",
                "stop what else runs there, or lower its `memory`",
            ),
        ),
        (
            "cuda",
            None,
            Finding(
                "bad",
                "t",
                "the device cuda can't be had: Found no NVIDIA driver on your system.",
                "write another device, or mend the driver",
            ),
        ),
    ],
)
def test_a_local_models_device(
    device: str, free: int | None, expected: Finding, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(device, Torch(free), monkeypatch) == [expected]


def test_a_local_model_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    [finding] = told("auto", None, monkeypatch)
    assert finding.said == "torch and transformers are not installed"
    assert finding.mend == "pip install 'interlingua[torch]'"
