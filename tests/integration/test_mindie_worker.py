"""MindIE workers, played by gateways: stopping a request, and reporting limits."""

import pytest

from tests.conftest import RunningGateway, Serve
from tests.integration.test_end_to_end import (
    CLIENT_PROTOCOLS,
    ClientProtocol,
    disconnect_early,
)
from tests.support.waiting import wait_until

FRONT = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, {{name: mindie, prefix: /mindie}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: mindie, workers: ["{url}/mindie"], health: {{interval: 1h}}}}
models:
  "*": {{backend: pool}}
  mock-slow: {{backend: pool}}
"""
LISTENER = """
listeners: [{{address: "127.0.0.1:0", protocols: [{{name: mindie, keep_alive: {keep_alive}}}]}}]
backends: {{echo: {{kind: echo}}}}
models: {{mock: {{backend: echo}}}}
"""


@pytest.mark.parametrize("protocol", CLIENT_PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_client_disconnect_sends_stop_infer_to_the_worker(
    serve: Serve, mock: RunningGateway, protocol: ClientProtocol
) -> None:
    gateway = await serve(FRONT.format(url=mock.url))
    gateway.app.backends["mock-slow"] = mock.app.backends["mock-slow"]

    await disconnect_early(gateway, protocol, stream=True)

    await wait_until(lambda: "cancelled" in {record.outcome for record in mock.records})
    await wait_until(lambda: any(one.path.endswith("/stopInfer") for one in mock.records))


async def test_worker_concurrency_limit_follows_its_slot_count(
    serve: Serve, mock: RunningGateway
) -> None:
    gateway = await serve(FRONT.format(url=mock.url))
    slots = (await mock.http.get("/mindie/v2/models/mock-slow/getSlotCount")).json()

    pool = gateway.app.backends["pool"]
    await wait_until(lambda: pool.report_workers()[0].limit == slots["total_slots"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("keep_alive", [False, True])
async def test_listener_keeps_connections_only_if_configured(
    serve: Serve, *, keep_alive: bool
) -> None:
    """A real MindIE server closes the connection after each unary response."""
    gateway = await serve(LISTENER.format(keep_alive=str(keep_alive).lower()))
    chat: dict[str, object] = {"model": "mock", "messages": [{"role": "user", "content": "Hi"}]}
    responses = [
        await gateway.http.post("/v1/chat/completions", json=chat),
        await gateway.http.post("/v1/chat/completions", json={"model": "none"}),
        await gateway.http.get("/v2/health/ready"),
    ]

    assert [one.status_code for one in responses][::2] == [200, 200]

    closed = [one.headers.get("connection") == "close" for one in responses]
    assert closed == [not keep_alive] * 3

    chat["stream"] = True
    streamed = await gateway.http.post("/v1/chat/completions", json=chat)
    assert streamed.headers.get("connection") is None
