"""A running gateway reloads its configuration: what triggers it, and what stays."""

import asyncio
import shutil
import signal
import ssl
from pathlib import Path

import httpx

from tests.fault.gateway_process import GatewayProcess, build_config
from tests.integration.test_command import Command
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
ECHO = {"backend": "echo"}
OTHER = build_config(models={"m": ECHO, "n": ECHO})


async def list_models(gateway: GatewayProcess) -> list[str]:
    listed = await gateway.http.get(f"{gateway.urls[0]}/v1/models")
    return [one["id"] for one in listed.json()["data"]]


async def test_sighup_reloads_at_once(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, build_config(), "--no-watch") as gateway:
        gateway.write_config(OTHER)
        gateway.send_sighup()

        await gateway.wait_until_serving(OTHER)

        assert await list_models(gateway) == ["m", "n"]


async def test_admin_reload_endpoint_reloads_and_returns_the_new_hash(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, build_config(), "--no-watch") as gateway:
        gateway.write_config(OTHER)
        response = await gateway.request_reload()

        assert response.status_code == 200
        assert f'info{{hash="{response.json()["hash"]}"}}' in await gateway.read_reload_metrics()
        assert await list_models(gateway) == ["m", "n"]


async def test_watcher_detects_a_replaced_or_rewritten_file(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, build_config()) as gateway:
        gateway.write_config(OTHER)
        await gateway.wait_until_serving(OTHER)
        gateway.file.write_text(build_config())

        await gateway.wait_until_serving(build_config())

        assert await list_models(gateway) == ["m"]


async def test_no_watch_option_disables_the_file_watcher(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, build_config(), "--no-watch") as gateway:
        gateway.write_config(OTHER)
        await asyncio.sleep(2.5)  # two and a half watch intervals
        assert await list_models(gateway) == ["m"]


async def test_watcher_detects_a_kubernetes_configmap_update(tmp_path: Path) -> None:
    """The file is a link into ``..data``, which is a link, too; only the latter changes."""
    volume = tmp_path / "volume"
    for name, text in (("..2026_1", build_config()), ("..2026_2", OTHER)):
        (volume / name).mkdir(parents=True)
        (volume / name / "gateway.yaml").write_text(text)
    (volume / "..data").symlink_to("..2026_1")
    file = volume / "gateway.yaml"
    file.symlink_to("..data/gateway.yaml")
    async with GatewayProcess(tmp_path, "", file=file) as gateway:
        (volume / "..data_tmp").symlink_to("..2026_2")
        (volume / "..data_tmp").rename(volume / "..data")

        await gateway.wait_until_serving(OTHER)

        assert await list_models(gateway) == ["m", "n"]


async def test_watcher_detects_a_renewed_certificate(tmp_path: Path) -> None:
    """The configuration file does not change."""
    pem = tmp_path / "tls.pem"
    shutil.copy(HERE / "loopback.pem", pem)
    tls = {"cert": "tls.pem", "key": "tls.pem"}
    listeners = [{"address": "127.0.0.1:0", "protocols": ["openai"], "tls": tls}]

    async with GatewayProcess(tmp_path, build_config(listeners=listeners)) as gateway:
        await asyncio.sleep(1.5)  # one and a half watch intervals
        shutil.copy(HERE / "loopback-renewed.pem", tmp_path / "next.pem")
        (tmp_path / "next.pem").replace(pem)
        await wait_until(lambda: "is served" in gateway.read_output())
        trusted = ssl.create_default_context(cafile=str(HERE / "loopback-renewed.pem"))
        async with httpx.AsyncClient(verify=trusted, timeout=30) as client:
            health = await client.get(f"{gateway.urls[0]}/health")

    assert health.status_code == 200


async def test_sighup_reloads_a_built_in_configuration(tmp_path: Path) -> None:
    """It is read again and is unchanged."""
    command = Command("serve", "conformance", env={"PORT": "0", "ALONE_PORT": "0"})
    try:
        command.serving()
        command.process.send_signal(signal.SIGHUP)
        await wait_until(lambda: "is served" in command.read_output())
        assert command.stop() == 0
    finally:
        command.close()
