"""``interlingua check --connect`` on hosts that differ from this one."""

import importlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.config.loader import load_text
from gateway.tools.connect_check import (
    Finding,
    check_kernel,
    check_local_models,
    check_open_files,
    check_versions,
)

GOOD = """\
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends: {e: {kind: echo}}
models: {m: {backend: e}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD)
    return path


def run_connect_check(*arguments: str | Path, color: bool = False) -> Result:
    return CliRunner().invoke(main, ["check", "--connect", *map(str, arguments)], color=color)


def test_installed_versions_are_printed_after_the_static_check(file: Path) -> None:
    result = run_connect_check(file)
    assert result.exit_code == 0

    first, *rest = result.stdout.splitlines()
    assert first == f"{file}: good: 1 listener, 1 backend, 1 model, 0 keys"

    versions = dict(line[9:].split(": ", 1) for line in rest)
    assert {"interlingua", "python", "aiohttp", "httptools", "msgspec", "httpx"} <= versions.keys()


def test_folder_of_recordings_is_reported_if_it_cannot_be_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder is reported once; a missing one is created in its parent."""
    to = tmp_path / "recordings"
    file.write_text(GOOD + f"defaults: {{record: {{to: {to}}}}}\n")
    assert f"recordings {to}: it can be written to" in run_connect_check(file).stdout
    assert not to.exists()

    monkeypatch.setattr("os.access", lambda _, mode: not mode & os.W_OK)
    result = run_connect_check(file)
    assert result.exit_code == 1
    assert result.stdout.count(f"the gateway may not write to {tmp_path}") == 1


def test_invalid_configuration_is_reported_without_connecting(file: Path, tmp_path: Path) -> None:
    file.write_text("backends: {e: {kind: echo}}\nmodels: {m: {backend: f}}\n")
    result = run_connect_check(file)

    assert result.exit_code == 1
    assert f"{file}:2:23: there is no backend 'f'; known: e" in result.stderr
    assert result.stdout == ""
    assert "findings" not in msgspec.json.decode(run_connect_check(file, "--json").stdout)
    assert run_connect_check(tmp_path / "none.yaml").exit_code == 2


def test_json_output_contains_the_findings(file: Path) -> None:
    result = run_connect_check(file, "--json")
    assert result.exit_code == 0

    report = msgspec.json.decode(result.stdout)
    assert (report["file"], report["issues"]) == (str(file), [])

    messages = {one["subject"]: one["message"] for one in report["findings"]}
    assert messages["listener 127.0.0.1:0"] == "the address is free"


def test_low_open_file_limit_is_a_warning() -> None:
    [few], [many] = check_open_files(1), check_open_files(10**9)
    assert (few.state, many.state) == ("ok", "warning")
    assert many.hint.startswith("raise the limit (ulimit -Hn 2000000064)")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_variable_disables_colors(
    no_color: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    result = run_connect_check(file, color=True)
    assert ("\x1b[" in result.stdout) == (not no_color)


def test_outdated_and_missing_packages_are_warnings() -> None:
    def version(name: str) -> str:
        if name == "uvloop":
            raise metadata.PackageNotFoundError(name)
        return "3.13.9" if name == "aiohttp" else "9.0.0rc1"

    messages = {one.subject: one for one in check_versions(version)}
    assert messages["aiohttp"] == Finding(
        "warning", "aiohttp", "3.13.9 is older than 3.14", "pip install 'aiohttp>=3.14'"
    )
    assert messages["uvloop"].state == "warning"
    assert messages["httpx"].state == "ok"


@pytest.mark.parametrize(
    ("backlog", "ports", "states"),
    [("4096", "32768\t60999", ["ok", "ok"]), ("128", "50000 60999", ["warning", "warning"])],
)
def test_low_kernel_limits_are_warnings(
    backlog: str, ports: str, states: list[str], tmp_path: Path
) -> None:
    for name, text in (("core/somaxconn", backlog), ("ipv4/ip_local_port_range", ports)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(f"{text}\n")
    assert [one.state for one in check_kernel(tmp_path)] == states


def test_missing_kernel_settings_are_ignored(tmp_path: Path) -> None:
    assert [*check_kernel(tmp_path)] == []


# --- local models ---------------------------------------------------------------------------------


class FakeTorch(SimpleNamespace):
    """Stands for torch: whether ``cuda`` is available, and its free memory."""

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


def check_torch_backend(device: str, torch: Any, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    text = f"""
backends: {{t: {{kind: torch, path: "package:m", device: "{device}", kv_cache_memory: 8GiB}}}}
models: {{m: {{backend: t}}}}
"""
    config = load_text(text, "gateway.yaml", env={})
    monkeypatch.setattr(importlib, "import_module", lambda name: torch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if torch is None else name)
    return [*check_local_models(config)]


@pytest.mark.parametrize(
    ("device", "free", "expected"),
    [
        ("auto", None, Finding("ok", "backend t", "torch 2.9 on cpu, 4 threads")),
        ("cpu", 40 << 30, Finding("ok", "backend t", "torch 2.9 on cpu, 4 threads")),
        (
            "auto",
            40 << 30,
            Finding("ok", "backend t", "torch 2.9 on NVIDIA H200: 40,960 of 81,920 MiB free"),
        ),
        (
            "cuda:1",
            1 << 30,
            Finding(
                "warning",
                "backend t",
                "torch 2.9 on NVIDIA H200: 1,024 of 81,920 MiB free, less than `memory`",
                "stop other processes on the device, or lower `memory`",
            ),
        ),
        (
            "cuda",
            None,
            Finding(
                "error",
                "backend t",
                "the device cuda is not available: Found no NVIDIA driver on your system.",
                "set another device, or repair the driver",
            ),
        ),
    ],
)
def test_device_of_a_local_model_is_checked(
    device: str, free: int | None, expected: Finding, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_torch_backend(device, FakeTorch(free), monkeypatch) == [expected]


def test_local_model_without_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    [finding] = check_torch_backend("auto", None, monkeypatch)
    assert finding.message == "torch and transformers are not installed"
    assert finding.hint == "pip install 'interlingua[torch]'"
