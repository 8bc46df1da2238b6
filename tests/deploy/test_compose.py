"""compose.yaml and its mounted files; without a container engine, the commands run directly."""

import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from backends.pool.settings import PoolSettings
from gateway.config.loader import load_text
from tests.deploy.processes import (
    PLACE,
    Gateway,
    ProcessLauncher,
    create_key,
    get_response_text,
    send_chat,
    wait_until,
    wait_until_ready,
)
from tests.deploy.tools import DEPLOY, find_tool, read_yaml, run_tool, run_tool_successfully
from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer

COMPOSE = DEPLOY / "compose"
FILE = COMPOSE / "compose.yaml"
SERVICES: dict[str, Any] = read_yaml(FILE)["services"]
GATEWAY_SERVICES = ("gateway", "worker-1", "worker-2")
DIGESTS = {"INTERLINGUA_KEY_SHA256": "a" * 64, "INTERLINGUA_ADMIN_SHA256": "b" * 64}


def get_config_folder(service: str) -> Path:
    """Return the folder with a service's configuration."""
    [volume] = [one for one in SERVICES[service]["volumes"] if f":{PLACE}:" in one]
    return COMPOSE / str(volume).partition(":")[0]


def test_compose_file_is_valid() -> None:
    run_tool_successfully("check-jsonschema", "--builtin-schema", "vendor.compose-spec", FILE)
    run_tool_successfully("compose-lint", "--fail-on", "high", FILE)


def test_compose_schema_check_detects_an_unknown_key(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text("utf-8").replace("cap_drop:", "capdrop:"))

    result = run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", wrong)

    assert result.returncode == 1
    assert "capdrop" in result.stdout


def test_every_mounted_folder_exists() -> None:
    mounts = [one for service in SERVICES.values() for one in service.get("volumes", ())]
    folders = [one.partition(":")[0] for one in mounts if one.startswith(".")]

    assert len(folders) == 8
    assert [one for one in folders if not any((COMPOSE / one).iterdir())] == []


def test_service_addresses_and_ports_match() -> None:
    """This checks the addresses in the files; other tests replace them by free ports."""
    config = load_text(
        (get_config_folder("gateway") / "gateway.yaml").read_text(), "gateway.yaml", env=DIGESTS
    )
    pool = config.backends["workers"]
    assert isinstance(pool, PoolSettings)

    worker = load_text(
        (get_config_folder("worker-1") / "worker.yaml").read_text(), "w", env={}, insecure=True
    )
    listens = worker.listeners[0].address.rpartition(":")[2]
    urls = [urlsplit(str(one.url)) for one in pool.workers]

    assert {url.hostname for url in urls} == {"worker-1", "worker-2"}
    assert {str(url.port) for url in urls} == {listens}
    assert all(set(SERVICES[one]["networks"]) & {"workers"} for one in GATEWAY_SERVICES)

    [health] = SERVICES["worker-1"]["environment"]
    assert health.endswith(f":{listens}/health")

    assert config.admin is not None

    scraped = read_yaml(COMPOSE / "prometheus" / "prometheus.yml")["scrape_configs"][0]
    [target] = scraped["static_configs"][0]["targets"]
    assert target == f"gateway:{config.admin.address.rpartition(':')[2]}"
    assert config.state is not None
    assert config.state.redis.reveal() == "redis://redis:6379/0"
    assert set(SERVICES["redis"]["networks"]) <= set(SERVICES["gateway"]["networks"])

    [published] = SERVICES["gateway"]["ports"]
    assert published.endswith(":" + config.listeners[0].address.rpartition(":")[2])

    [source] = read_yaml(COMPOSE / "grafana" / "datasources" / "prometheus.yaml")["datasources"]
    assert urlsplit(source["url"]).hostname in SERVICES


def test_stop_grace_period_covers_the_drain() -> None:
    for name in GATEWAY_SERVICES:
        file = next(get_config_folder(name).iterdir())
        config = load_text(file.read_text("utf-8"), file.name, env=DIGESTS, insecure=True)
        grace = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace >= config.limits.shutdown_delay + config.limits.drain_timeout + 5


def test_missing_key_variable_prevents_the_start() -> None:
    text = (get_config_folder("gateway") / "gateway.yaml").read_text("utf-8")
    with pytest.raises(Exception, match="INTERLINGUA_KEY_SHA256 is not set"):
        load_text(text, "gateway.yaml", env={})

    passed = set(SERVICES["gateway"]["environment"])
    assert passed == {"INTERLINGUA_KEY_SHA256", "INTERLINGUA_ADMIN_SHA256"}


def start_services(
    stage: ProcessLauncher, key: str, admin: str, redis: str = "redis://127.0.0.1:9"
) -> tuple[Gateway, list[Gateway]]:
    """Start compose.yaml's gateway and workers on free ports."""
    workers = [
        stage.start(SERVICES[name]["command"], get_config_folder(name))
        for name in ("worker-1", "worker-2")
    ]
    gateway = stage.start(
        SERVICES["gateway"]["command"],
        get_config_folder("gateway"),
        INTERLINGUA_KEY_SHA256=key,
        INTERLINGUA_ADMIN_SHA256=admin,
        WORKER_1=workers[0].url,
        WORKER_2=workers[1].url,
        REDIS=redis,
    )
    wait_until_ready(gateway)
    return gateway, workers


def test_service_commands_start_a_gateway_with_two_workers(stage: ProcessLauncher) -> None:
    key, admin = create_key(), create_key()
    with RedisServer(*SERVICES["redis"]["command"][1:]) as redis:
        gateway, workers = start_services(stage, key["sha256"], admin["sha256"], redis.url)

        assert send_chat(gateway, "chat").status_code == 401
        assert send_chat(gateway, "chat", admin["key"]).status_code == 401

        took: set[int] = set()
        while len(took) < 2:
            assert get_response_text(send_chat(gateway, "chat", key["key"])) == "say this back"
            outputs = [one.command.read_output() for one in workers]
            took |= {n for n, one in enumerate(outputs) if "/v1/chat/completions" in one}

        assert [one.command.stop() for one in (gateway, *workers)] == [0, 0, 0]
        assert redis.call("EXISTS", "interlingua:clients/requests/") == 1


def write_prometheus_config(tmp_path: Path, gateway: Gateway, key: str) -> Path:
    """Write compose.yaml's Prometheus configuration for this gateway and this key."""
    text = (COMPOSE / "prometheus" / "prometheus.yml").read_text("utf-8")
    (tmp_path / "admin.key").write_text(key)
    changes = {
        "/run/secrets/admin_key": str(tmp_path / "admin.key"),
        "gateway:8081": urlsplit(gateway.admin).netloc,
        "scrape_interval: 15s, scrape_timeout: 10s": "scrape_interval: 1s, scrape_timeout: 1s",
    }
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file = tmp_path / "prometheus.yml"
    file.write_text(text)
    return file


@pytest.mark.slow
def test_prometheus_scrapes_the_metrics(stage: ProcessLauncher, tmp_path: Path) -> None:
    prometheus, key, admin = find_tool("prometheus"), create_key(), create_key()
    gateway, _ = start_services(stage, key["sha256"], admin["sha256"])
    get_response_text(send_chat(gateway, "chat", key["key"]))
    file = write_prometheus_config(tmp_path, gateway, admin["key"])
    run_tool_successfully("promtool", "check", "config", file)
    place = f"127.0.0.1:{reserve_port()}"
    own = (f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/data")

    def has_metrics() -> bool:
        try:
            query = {"query": 'interlingua_requests_total{job="interlingua"}'}
            response = httpx.get(f"http://{place}/api/v1/query", params=query, timeout=30)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK and bool(response.json()["data"]["result"])

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [prometheus, *own, f"--web.listen-address={place}"], stdout=log, stderr=log
        )
        try:
            wait_until(has_metrics, (tmp_path / "log").read_text("utf-8"))
        finally:
            process.kill()
            process.wait()
