"""The gateway's record of each request: outcome, usage, times and errors."""

from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.observability.access_log import AccessLogWriter
from gateway.observability.record import RequestRecord
from gateway.observability.usage import query_sqlite_usage
from gateway.runtime.gateway import Gateway, build_services

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  says: {kind: echo, script: [one, two, three]}
  fails: {kind: echo, fail: {mode: unavailable}}
  cut: {kind: echo, script: [one, two, three], fail: {mode: disconnect, after_chunks: 2}}
  slow: {kind: echo, script: [one, two, three], delay: 50ms}
  stuck: {kind: echo, script: [one], delay: 60s}
models:
  says: {versions: {"1": {backend: says}, "2": {backend: slow}}, shadow: {to: "1", share: 100%}}
  falls: {backend: fails, fallback: [slow]}
  cut: {backend: cut}
  slow: {backend: slow}
  stuck: {backend: stuck}
"""


def build_chat_body(model: str, stream: bool = False) -> dict[str, object]:
    return {"model": model, "stream": stream, "messages": [{"role": "user", "content": "a"}]}


async def test_request_record_does_not_change_after_being_observed() -> None:
    """A writer may read the record long afterwards."""
    observed: list[tuple[RequestRecord, bytes]] = []
    services = build_services()
    services = replace(
        services, observe_request=lambda one: observed.append((one, msgspec.json.encode(one)))
    )
    app = Gateway(load_text(CONFIG, "test.yaml", env={}), services)
    [url] = await app.start()
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for model in ("says", "falls", "cut", "slow", "none"):
            for stream in (False, True):
                await http.post("/v1/chat/completions", json=build_chat_body(model, stream))
        async with http.stream(
            "POST", "/v1/chat/completions", json=build_chat_body("slow", stream=True)
        ):
            pass

        leave_early = httpx.Timeout(30, read=0.03)
        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                "/v1/chat/completions", json=build_chat_body("stuck"), timeout=leave_early
            )

    await app.stop()

    assert len(observed) == 12
    assert {"ok", "client_error", "worker_error", "truncated", "cancelled"} == {
        one.outcome for one, _ in observed
    }
    assert [msgspec.json.encode(one) for one, _ in observed] == [then for _, then in observed]


async def test_gateway_writes_usage_to_sqlite(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    config = load_text(f"{CONFIG}observe: {{usage: {file}}}\n", "test.yaml", env={})
    records: list[RequestRecord] = []
    app = Gateway(config, replace(build_services(), observe_request=records.append))
    [url] = await app.start()
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        await http.post("/v1/chat/completions", json=build_chat_body("slow"))
        await http.post("/v1/chat/completions", json=build_chat_body("none"))
    await app.stop()
    [record, _] = records

    assert record.usage is not None

    [row] = query_sqlite_usage(str(file), ["model"], record.started_at)
    assert (row.requests, row.completion_tokens) == (1, record.usage.completion_tokens)


async def test_gateway_that_never_started_creates_no_usage_file(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite"
    await Gateway(
        load_text(f"{CONFIG}observe: {{usage: {file}}}\n", "x.yaml", env={}), build_services()
    ).stop()
    assert not file.exists()


def test_dropped_access_log_lines_are_counted() -> None:
    lines = AccessLogWriter(2, 1)
    services = build_services(lines)
    services.observe_request(RequestRecord("a"))

    services.observe_request(RequestRecord("b"))

    assert {name: count() for name, count in services.dropped_counts.items()} == {"log_lines": 1}
