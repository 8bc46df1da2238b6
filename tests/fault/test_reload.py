"""A gateway takes another configuration while it runs: how it is told, and what stays."""

import asyncio
import shutil
import signal
import ssl
from pathlib import Path

import httpx

from tests.fault.fronts import until
from tests.fault.gateways import GatewayProcess, written
from tests.integration.test_command import Command

HERE = Path(__file__).parent
ECHO = {"backend": "echo"}
OTHER = written(models={"m": ECHO, "n": ECHO})


async def names(gateway: GatewayProcess) -> list[str]:
    listed = await gateway.http.get(f"{gateway.urls[0]}/v1/models")
    return [one["id"] for one in listed.json()["data"]]


async def test_sighup_reloads_at_once(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, written(), "--no-watch") as gateway:
        gateway.put(OTHER)
        gateway.hang_up()
        await gateway.serves(OTHER)
        assert await names(gateway) == ["m", "n"]


async def test_the_admin_path_reloads_and_says_what_is_served_then(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, written(), "--no-watch") as gateway:
        gateway.put(OTHER)
        told = await gateway.post()
        assert told.status_code == 200
        assert f'info{{hash="{told.json()["hash"]}"}}' in await gateway.counts()
        assert await names(gateway) == ["m", "n"]


async def test_a_file_that_is_replaced_or_written_in_place_is_noticed(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, written()) as gateway:
        gateway.put(OTHER)
        await gateway.serves(OTHER)
        gateway.file.write_text(written())
        await gateway.serves(written())
        assert await names(gateway) == ["m"]


async def test_without_watch_a_file_may_change_for_long(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, written(), "--no-watch") as gateway:
        gateway.put(OTHER)
        await asyncio.sleep(2.5)  # two looks, and a half
        assert await names(gateway) == ["m"]


async def test_a_volume_that_kubernetes_swaps_is_noticed(tmp_path: Path) -> None:
    """The file is a link into ``..data``, which is a link, too, and the only thing that moves."""
    volume = tmp_path / "volume"
    for name, text in (("..2026_1", written()), ("..2026_2", OTHER)):
        (volume / name).mkdir(parents=True)
        (volume / name / "gateway.yaml").write_text(text)
    (volume / "..data").symlink_to("..2026_1")
    file = volume / "gateway.yaml"
    file.symlink_to("..data/gateway.yaml")
    async with GatewayProcess(tmp_path, "", file=file) as gateway:
        (volume / "..data_tmp").symlink_to("..2026_2")
        (volume / "..data_tmp").rename(volume / "..data")
        await gateway.serves(OTHER)
        assert await names(gateway) == ["m", "n"]


async def test_a_certificate_that_is_renewed_is_noticed(tmp_path: Path) -> None:
    """The configuration itself has not changed."""
    pem = tmp_path / "tls.pem"
    shutil.copy(HERE / "loopback.pem", pem)
    tls = {"cert": "tls.pem", "key": "tls.pem"}
    listeners = [{"address": "127.0.0.1:0", "protocols": ["openai"], "tls": tls}]
    async with GatewayProcess(tmp_path, written(listeners=listeners)) as gateway:
        await asyncio.sleep(1.5)  # a look, and a half
        shutil.copy(HERE / "loopback-renewed.pem", tmp_path / "next.pem")
        (tmp_path / "next.pem").replace(pem)
        await until(lambda: "is served" in gateway.said())
        trusted = ssl.create_default_context(cafile=str(HERE / "loopback-renewed.pem"))
        async with httpx.AsyncClient(verify=trusted) as client:
            health = await client.get(f"{gateway.urls[0]}/health")
    assert health.status_code == 200


async def test_what_is_in_no_file_takes_a_hang_up_too(tmp_path: Path) -> None:
    """It is read anew, and is what it was."""
    command = Command("serve", "conformance", env={"PORT": "0", "ALONE_PORT": "0"})
    try:
        command.serving()
        command.process.send_signal(signal.SIGHUP)
        await until(lambda: "is served" in command.said())
        assert command.stop() == 0
    finally:
        command.close()
