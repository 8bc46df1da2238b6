"""Reloads under load: an invalid configuration, a hundred valid ones, a removed model."""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import pytest

from tests.fault.gateway_process import GatewayProcess, build_config
from tests.fault.history import ClientObservation, History, read_logs
from tests.fault.load_generator import LoadGenerator
from tests.fault.processes import WorkerProcess
from tests.fault.protocol_clients import CLIENTS, POOL, PROTOCOLS, TIMEOUTS, Client
from tests.integration.test_end_to_end import JSON
from tests.support.waiting import wait_until

RATE = 50.0
WORDS = 20
PACE = 0.1
"""Each response takes two seconds, and half of the requests are streams."""
RELOADS = 100
WARM = 20
"""Reloads until the gateway has all the memory that it needs."""
BETWEEN = 0.15
"""Seconds between two reloads."""
MEMORY, DESCRIPTORS = 8 << 20, 40
"""Allowed growth from the first ``WARM`` reloads to the last ones.

The number of running responses varies, and an allocator returns little memory.
"""
UNKNOWN_MODEL_ERRORS: Mapping[str, tuple[int, bytes]] = {
    "openai chat": (404, b'"code":"model_not_found"'),
    "openai completions": (404, b'"code":"model_not_found"'),
    "databricks": (404, b'"error_code":"RESOURCE_DOES_NOT_EXIST"'),
    "triton": (404, b"Request for unknown model: 'm' is not found"),
    "mindie": (404, b"Model m not found."),
    "mindie chat": (422, b"Got model m, but not found in server"),
    "ovms": (404, b"Mediapipe graph definition with requested name is not found"),
}
"""The error of each protocol for an unknown model."""
LISTENER = {"address": "127.0.0.1:0", "protocols": PROTOCOLS}


def build_pool_config(worker: str, **parts: Any) -> str:
    """Build a configuration with every protocol and this worker."""
    pool = POOL | {"workers": [worker], "timeouts": TIMEOUTS, "policy": "least_load"}
    response = {
        "listeners": [LISTENER],
        "limits": {"drain_timeout": "30s"},
        "defaults": {"timeouts": TIMEOUTS},
        "backends": {"pool": pool},
        "models": {"m": {"backend": "pool"}},
    }
    return build_config(**(response | parts))


@contextlib.asynccontextmanager
async def run_under_load(
    gateway: GatewayProcess, observations: list[ClientObservation], rate: float = RATE
) -> AsyncIterator[None]:
    """Run clients of every protocol; their observations are complete at the end."""
    async with LoadGenerator(gateway.port) as load:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(rate, over))
            try:
                yield
            finally:
                over.set()
        observations += load.observations


# ── 44 ──────────────────────────────────────────────────────────────────────────────────────────


def find_line_number(text: str, part: str) -> int:
    """Return the line number of a text."""
    return text[: text.rindex(part)].count("\n") + 1


GOOD = build_config(listeners=[LISTENER])
HALF = GOOD[: GOOD.index('"backends"') + 5]
INVALID = GOOD.replace('"backend": "echo"', '"backend": "nobody"')
BROKEN: Mapping[str, tuple[bytes | None, int, str]] = {
    "invalid": (
        INVALID.encode(),
        find_line_number(INVALID, "nobody"),
        "there is no backend 'nobody'",
    ),
    "half-written": (
        HALF.encode(),
        find_line_number(HALF, '"back'),
        "found unexpected end of stream",
    ),
    "no text": (b"\xff\xfe" + GOOD.encode(), 1, "the byte 0xff is not UTF-8"),
    "empty": (b"", 1, "the configuration is empty"),
    "missing": (None, 1, "the file can't be read: No such file or directory"),
}
NEXT = build_config(
    listeners=[LISTENER], models={"m": {"backend": "echo"}, "n": {"backend": "echo"}}
)
SUCCEEDED = "last_reload_success_timestamp_seconds"


@pytest.mark.fault(44)
@pytest.mark.parametrize("case", BROKEN)
async def test_invalid_configuration_is_rejected_with_its_reason(tmp_path: Path, case: str) -> None:
    """Each trigger of a reload rejects it under load; the next valid file is loaded."""
    bad, line, why = BROKEN[case]
    observations: list[ClientObservation] = []

    async with GatewayProcess(tmp_path, GOOD) as gateway:
        await gateway.wait_until_serving(GOOD)
        was = await gateway.read_reload_metrics()
        async with run_under_load(gateway, observations, 20.0):
            if bad is None:
                gateway.file.unlink()
            else:
                gateway.file.write_bytes(bad)
            log_line = re.compile(rf"gateway\.yaml:{line}:\d+: {re.escape(why)}")
            await wait_until(lambda: log_line.search(gateway.read_output()))
            now = await gateway.read_reload_metrics()
            response = await gateway.request_reload()
        gateway.write_config(NEXT)
        await gateway.wait_until_serving(NEXT)
        then = await gateway.read_reload_metrics()

    assert {one.seen for one in observations} == {"complete"}
    assert was["last_reload_successful"] == 1
    assert now["last_reload_successful"] == 0
    assert now['reloads_total{result="failure"}'] == 1
    assert now[SUCCEEDED] == was[SUCCEEDED]
    assert response.status_code == 422
    assert [one["line"] for one in response.json()["issues"]] == [line]
    assert then["last_reload_successful"] == 1
    assert then['reloads_total{result="success"}'] == 1
    assert then[SUCCEEDED] > was[SUCCEEDED]


# ── 45 ──────────────────────────────────────────────────────────────────────────────────────────


def build_config_variant(worker: str, number: int) -> str:
    """Build variant ``number``, with different models, backends, keys and listeners."""
    text = msgspec.json.decode(build_pool_config(worker))
    text["models"][f"m{number}"] = {"backend": "pool"}
    text["backends"]["pool"]["queue"] = {"max": 200 + number // 3}
    if number % 4 == 0:
        text["listeners"].append(LISTENER)
    if number % 5 == 0:
        text["backends"]["more"] = {"kind": "echo", "delay": f"{number}ms"}
    return msgspec.json.encode(text).decode()


async def reload_config(gateway: GatewayProcess, text: str, number: int) -> None:
    """Reload by one of three triggers in turn, and wait until the configuration is served."""
    gateway.write_config(text)
    match number % 10:
        case 0:
            pass  # the file watcher notices it
        case 1 | 3 | 5 | 7 | 9:
            gateway.send_sighup()
        case _:
            assert (await gateway.request_reload()).status_code == 200
    await gateway.wait_until_serving(text)


@pytest.mark.fault(45)
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_reloads_under_load_lose_no_request_and_leak_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """At 50 requests per second and 50 open streams, descriptors and memory stay flat."""
    observations: list[ClientObservation] = []
    log = tmp_path / "worker.log"
    async with (
        WorkerProcess(words=WORDS, pace=PACE, log=log) as worker,
        GatewayProcess(tmp_path, build_pool_config(worker.url)) as gateway,
    ):
        async with run_under_load(gateway, observations):
            memory, descriptors = [], []
            for number in range(RELOADS):
                await reload_config(gateway, build_config_variant(worker.url, number), number)
                memory.append(gateway.get_resident_memory())
                descriptors.append(gateway.count_descriptors())
                await asyncio.sleep(BETWEEN)
        await wait_until(lambda: len(gateway.read_records()) >= len(observations))
        worker.process.send_signal(signal.SIGINT)
        await worker.ended()
        counts = await gateway.read_reload_metrics()
        records = gateway.read_records()

    history = History(observations, records, read_logs([log]))
    record_property("requests", len(observations))
    record_property("memory", memory)

    record_property("descriptors", descriptors)

    assert history.violations() == []
    assert history.ends()["complete"] == len(observations) > 20 * RATE
    assert counts['reloads_total{result="failure"}'] == 0
    assert counts['reloads_total{result="success"}'] >= RELOADS
    assert compute_growth(memory) < MEMORY
    assert compute_growth(descriptors) < DESCRIPTORS


def compute_growth(sizes: Sequence[int]) -> float:
    """Return the growth from the first counted reloads to the last."""
    return median(sizes[-WARM:]) - median(sizes[WARM : 2 * WARM])


# ── 46 ──────────────────────────────────────────────────────────────────────────────────────────


class StreamedRequest:
    """A started stream of a model that is then removed."""

    def __init__(self, client: Client, gateway: GatewayProcess) -> None:
        self.client = client
        self.began = asyncio.Event()
        self.received = b""
        path, body = client.protocol.call("m", stream=True)
        self.request = gateway.http.build_request(
            "POST", f"{gateway.urls[0]}{path}", content=body, headers=JSON
        )
        self._http = gateway.http

    async def read_all(self) -> None:
        """Read to the end."""
        response = await self._http.send(self.request, stream=True)
        async for piece in response.aiter_bytes():
            self.received += piece
            if b"t0 " in self.received:
                self.began.set()

    async def send_again(self) -> httpx.Response:
        """Send the same request again."""
        return await self._http.send(self.request)


@pytest.mark.fault(46)
async def test_removed_model_finishes_its_streams_and_returns_404(
    tmp_path: Path,
) -> None:
    """This holds in every protocol. The model's pool is removed, too."""
    async with (
        WorkerProcess(words=WORDS, pace=PACE) as worker,
        GatewayProcess(tmp_path, build_pool_config(worker.url), "--no-watch") as gateway,
    ):
        without = build_pool_config(
            worker.url,
            backends={"echo": {"kind": "echo"}},
            models={"other": {"backend": "echo"}},
        )
        streams = [StreamedRequest(client, gateway) for client in CLIENTS]
        async with asyncio.TaskGroup() as tasks:
            for one in streams:
                tasks.create_task(one.read_all())
            for one in streams:
                await one.began.wait()

            gateway.write_config(without)

            assert (await gateway.request_reload()).status_code == 200

            refused = {one.client.name: await one.send_again() for one in streams}
            under_way = [one for one in streams if f"t{WORDS - 1} ".encode() not in one.received]

    assert under_way == streams, "the streams ended before the model was removed"
    for one in streams:
        assert f"t{WORDS - 1} ".encode() in one.received
        assert one.client.ends in one.received
        assert one.client.error_text not in one.received

    for name, response in refused.items():
        status, words = UNKNOWN_MODEL_ERRORS[name]
        assert response.status_code == status
        assert words in response.content
