"""The systemd unit; systemd is not process 1 here, so its parts are checked one by one."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.config.schema import ServerLimitsConfig
from tests.deploy.processes import (
    ProcessLauncher,
    get_response_text,
    send_chat,
    wait_until,
    wait_until_ready,
)
from tests.deploy.sandbox import parse_settings
from tests.deploy.tools import DEPLOY, find_tool, require, run_tool, run_tool_successfully

UNIT = DEPLOY / "systemd" / "interlingua.service"
SANDBOX = Path(__file__).with_name("sandbox.py")
ECHO = """
listeners: [{address: "${LISTEN}", protocols: [openai]}]
admin: {address: "${ADMIN}"}
backends: {e: {kind: echo}}
models: {m: {backend: e}}
"""
POOL = ECHO.replace("{kind: echo}", '{protocol: openai, workers: [{dns: "localhost:${WORKER}"}]}')


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with this environment's programs."""
    text = UNIT.read_text("utf-8")
    assert text.count("/opt/interlingua/bin/") == 2
    file = tmp_path / UNIT.name
    file.write_text(text.replace("/opt/interlingua/bin", str(Path(sys.executable).parent)))
    return file


def test_systemd_unit_is_valid(unit: Path) -> None:
    result = run_tool("systemd-analyze", "verify", "--man=no", unit)
    assert (result.returncode, result.stderr) == (0, "")


def test_systemd_verify_detects_an_unknown_setting(unit: Path) -> None:
    unit.write_text(unit.read_text("utf-8").replace("ProtectClock=", "ProtectClocks="))
    assert "ProtectClocks" in run_tool("systemd-analyze", "verify", "--man=no", unit).stderr


def test_systemd_unit_has_a_low_exposure_level(unit: Path) -> None:
    """The threshold is ten times the exposure level."""
    measure = ("security", "--offline=yes", "--no-pager")
    run_tool_successfully("systemd-analyze", *measure, "--threshold=20", unit)
    assert run_tool("systemd-analyze", *measure, "--threshold=5", unit).returncode == 1


def test_stop_timeout_covers_the_drain() -> None:
    limits = ServerLimitsConfig()
    assert (
        float(parse_settings(UNIT)["TimeoutStopSec"][0])
        >= limits.shutdown_delay + limits.drain_timeout + 5
    )


def test_reload_checks_the_configuration_first(unit: Path, tmp_path: Path) -> None:
    check, hup = parse_settings(unit)["ExecReload"]
    assert hup == "/bin/kill -HUP $MAINPID"

    file = tmp_path / "gateway.yaml"
    command = check.replace("/etc/interlingua", str(tmp_path)).split()
    env = os.environ | {"LISTEN": "127.0.0.1:0", "ADMIN": "127.0.0.1:0"}
    ended = []
    for text in (ECHO, "backends: {}"):
        file.write_text(text)
        ended.append(subprocess.run(command, check=False, capture_output=True, env=env).returncode)

    assert ended == [0, 1]


def test_service_user_can_read_but_not_write_the_configuration(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "only root may make users")
    (tmp_path / "etc").mkdir()
    run_tool_successfully("systemd-sysusers", f"--root={tmp_path}", UNIT.with_name("sysusers.conf"))
    run_tool_successfully(
        "systemd-tmpfiles", "--create", f"--root={tmp_path}", UNIT.with_name("tmpfiles.conf")
    )
    user, _, number, group, *_ = (tmp_path / "etc" / "passwd").read_text("utf-8").split(":")

    assert (parse_settings(UNIT)["User"], parse_settings(UNIT)["Group"]) == ([user], [user])

    place = (tmp_path / "etc" / "interlingua").stat()
    assert (place.st_uid, place.st_gid, place.st_mode & 0o777) == (0, int(group), 0o750)
    assert int(number) > 0


def build_sandbox_command(unit: Path, *command: str) -> list[str]:
    """Build a command with the unit's limits that work without systemd."""
    require(os.geteuid() == 0, "only root may make a file system read-only")
    release = tuple(map(int, platform.release().split(".")[:2]))
    require(release >= (6, 3), "this kernel can't keep memory from becoming code")
    without = [f"--{which}=-all" for which in ("bounding-set", "inh-caps", "ambient-caps")]
    return [
        *(find_tool("unshare"), "--mount", "--ipc"),
        *("/bin/sh", "-ec", 'mount --make-rprivate /; mount -o remount,bind,ro /; exec "$@"', "sh"),
        *(find_tool("setpriv"), *without),
        *(sys.executable, str(SANDBOX), str(unit), *command),
    ]


@pytest.mark.parametrize(
    "tried",
    [
        "open('/etc/interlingua-was-here', 'w')",
        "import socket; socket.socket(socket.AF_NETLINK)",
        "import os; os.setpriority(os.PRIO_PROCESS, 0, 1)",
        "import os; os.chroot('/')",
        "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)",
    ],
)
def test_sandbox_denies_forbidden_operations(tried: str, unit: Path) -> None:
    done = "import sys; sys.exit(0)"
    assert (
        subprocess.run(
            build_sandbox_command(unit, sys.executable, "-c", done), check=False
        ).returncode
        == 0
    )

    result = subprocess.run(
        build_sandbox_command(unit, sys.executable, "-c", tried),
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Error" in result.stderr


def test_gateway_works_inside_the_systemd_sandbox(
    unit: Path, stage: ProcessLauncher, tmp_path: Path
) -> None:
    """The gateway serves, resolves a worker by DNS, reloads and stops."""
    program = build_sandbox_command(unit, sys.executable, "-m", "gateway")
    command = ("serve", "/etc/interlingua/gateway.yaml")
    files = [tmp_path / name / "gateway.yaml" for name in ("worker", "gateway")]
    for file, text in zip(files, (ECHO, POOL), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    worker = stage.start(command, files[0].parent, program)
    port = worker.url.rpartition(":")[2]
    gateway = stage.start(command, files[1].parent, program, WORKER=port)
    wait_until_ready(gateway)

    assert get_response_text(send_chat(gateway, "m")) == "say this back"

    files[1].write_text(POOL.replace("models: {m: {", "models: {n: {model: m, "))
    gateway.command.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: send_chat(gateway, "n").status_code == httpx.codes.OK, gateway.command.read_output()
    )

    assert [gateway.command.stop(), worker.command.stop()] == [0, 0]
