"""Every documented metric gets a value on the metrics page once its event happens."""

import asyncio
import hashlib
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families as families

from gateway.observability.metrics.catalog import METRIC_GROUPS, METRICS_BY_NAME
from tests.deploy.watched import list_expressions, list_samples
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.fakes import CHUNKED, END, chunk, make_reply
from tests.support.otlp_collector import Collector
from tests.support.ports import reserve_port
from tests.support.tcp_server import run_server
from tests.support.waiting import wait_until

MOST: Final = 50
"""The connection limit of one address."""
KEY: Final = "il-of-this-test"
ELSEWHERE: Final = {
    one.sample_name
    for name in ("Local engines", "Serving processes", "Rollouts")
    for one in METRIC_GROUPS[name]
}
"""Metrics that need torch, other processes or usage rows; their own tests check them."""
DOCUMENTED: Final = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "served",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    },
}


def build_chunk(text: str, finish: str | None = None) -> bytes:
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [delta]}
    return chunk(b"data: " + msgspec.json.encode(body) + b"\n\n")


async def serve_worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A worker whose behaviour is named by the requested model."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        lines = head.decode().lower().splitlines()
        [size] = [one.partition(":")[2] for one in lines if one.startswith("content-length")] or [
            "0"
        ]
        body = await reader.readexactly(int(size))
        if b'"cut"' in body:
            writer.write(CHUNKED + build_chunk("Hi"))
            return
        if b'"slow"' in body:
            writer.write(CHUNKED + build_chunk("Hi"))
            await asyncio.sleep(0.05)
            writer.write(build_chunk("there", "stop") + chunk(b"data: [DONE]\n\n") + END)
        elif b'"hangs"' in body:
            await reader.read()  # until the gateway disconnects
            return
        else:
            writer.write(make_reply(msgspec.json.encode(DOCUMENTED)))


def build_metrics_config(worker: str, collector: str, folder: Path) -> str:
    nobody = f"http://127.0.0.1:{reserve_port()}"
    pool = {"protocol": "openai", "max_concurrency": 1, "queue": {"max": 1, "wait": "200ms"}}
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return build_config(
        backends={
            "gpu": {**pool, "workers": [worker, nobody], "retries": {"max": 1, "budget": 0}},
            "dead": {"protocol": "openai", "workers": [nobody]},
            "echo": {"kind": "echo", "script": ["Hi"]},
            "broken": {"kind": "echo", "fail": {"mode": "error"}},
        },
        models={
            "m": {"backend": "gpu", "shadow": {"to": "e", "share": 1}},
            **{name: {"backend": "gpu"} for name in ("cut", "slow", "hangs")},
            "fall": {"backend": "dead", "fallback": ["e"]},
            "e": {"backend": "echo"},
            "b": {"backend": "broken"},
            "copied": {"backend": "echo", "shadow": {"to": "b", "share": 1}},
        },
        keys=[
            {"name": "app", "sha256": digest, "limits": {"requests": "600/min", "budget": "5M/day"}}
        ],
        state={"redis": nobody.replace("http", "redis")},
        limits={"connections_per_address": MOST},
        observe={
            "usage": str(folder / "usage.sqlite"),
            "feedback": {},
            "traces": {"otlp": collector, "sample": 1},
            "metrics": {"vllm_compat": True},
        },
    )


async def test_every_documented_metric_is_exported_with_its_type_help_and_labels(
    tmp_path: Path,
) -> None:
    with Collector() as collector:
        async with run_server(serve_worker) as worker:
            text = build_metrics_config(worker, collector.url, tmp_path)
            async with GatewayProcess(tmp_path, text) as gateway:
                before = await trigger_all_metrics(gateway)
                page = (await gateway.http.get(f"{gateway.urls[-1]}/metrics")).text
    shown: dict[str, set[str]] = {}
    for family in (*families(before), *families(page)):
        for sample in family.samples:
            definition = METRICS_BY_NAME[family.name if family.type == "histogram" else sample.name]
            assert definition.kind == family.type
            assert definition.help == family.documentation
            assert set(sample.labels) - {"le"} == set(definition.label_names)
            shown.setdefault(definition.sample_name, set()).add(sample.name)

    assert set(METRICS_BY_NAME) - set(shown) == ELSEWHERE

    samples = {name for names in shown.values() for name in names}
    for who, expr in list_expressions().items():
        assert list_samples(expr) <= samples, who


async def trigger_all_metrics(gateway: GatewayProcess) -> str:
    """Trigger every event that has a metric; return the metrics page while requests run."""
    http, url = gateway.http, gateway.urls[0]
    http.headers["authorization"] = f"Bearer {KEY}"

    async def ask(model: str, *, stream: bool = False, **fields: object) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await http.post(f"{url}/v1/chat/completions", json=body | {"stream": stream})

    for _ in range(4):  # either worker may get the first request
        await ask("m", top_k=1, temperature=0)
    await ask("slow", stream=True)
    await ask("cut", stream=True)
    await ask("fall")
    await ask("copied")
    await ask("nobody")
    await http.post(f"{url}/v1/feedback", json={})
    _, port = url.removeprefix("http://").split(":")
    with socket.create_connection(("127.0.0.1", int(port))) as raw:
        raw.sendall(b"no request\r\n\r\n")
        assert await asyncio.to_thread(raw.recv, 100)
    crowd = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(MOST + 1)]
    with suppress(ConnectionError):
        assert await asyncio.to_thread(crowd[-1].recv, 1) == b""
    for raw in crowd:
        raw.close()
    hanging = asyncio.create_task(ask("hangs"))
    hangs = 'interlingua_requests_in_flight{model="hangs",phase="waiting"} 1.0'
    metrics_url = f"{gateway.urls[-1]}/metrics"
    while hangs not in (page := await http.get(metrics_url)).text:  # noqa: ASYNC110 - as others ask
        await asyncio.sleep(0.01)
    late, full = asyncio.create_task(ask("m")), asyncio.create_task(ask("m"))
    await asyncio.gather(late, full)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    await wait_until(lambda: any(one.outcome == "cancelled" for one in gateway.read_records()))
    return page.text
