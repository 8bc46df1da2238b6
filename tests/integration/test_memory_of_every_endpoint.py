"""The memory budget is free again after every request, however it ends.

The endpoints are those of the registry, so that a new one is tested here without further code. The
workers of each protocol never answer, or close the connection within their response.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal

import httpx
import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from protocols.core.interfaces import Endpoint
from tests.integration.test_every_endpoint import (
    CLIENTS,
    MOUNTS,
    REGISTRY,
    build_body,
    build_configuration,
    build_path,
)
from tests.support.fakes import WELL
from tests.support.fakes import head as build_head
from tests.support.tcp_server import run_server
from tests.support.waiting import PATIENCE, wait_until

Ending = Literal["response", "client", "worker", "deadline", "rate", "size"]
POOLS: Final[Mapping[Ending, tuple[str, Mapping[str, Any]]]] = {
    "client": ("", {}),
    "rate": ("", {}),
    "worker": ("/cut", {}),
    "deadline": ("", {"timeouts": {"total": "50ms"}}),
}
"""The path of a worker's URL and the settings of its pool, by what ends the requests."""
ERRORS: Final[Mapping[Ending, str]] = {
    "response": "ok",
    "client": "cancelled",
    "worker": "StreamBroken",
    "deadline": "DeadlineExceeded",
    "rate": "RateLimitExceeded",
    "size": "RequestTooLarge",
}
"""The errors or outcomes in the records, by what ends the requests."""
LARGE: Final = "x" * (100 << 10)


class UnansweredRequests:
    """A worker that answers no request; below ``/cut`` it closes the connection early."""

    def __init__(self) -> None:
        self.waiting = 0
        """The requests that wait for an answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET"):
            writer.write(WELL)
        elif request.startswith(b"POST /cut"):
            writer.write(build_head(content_length="1000") + b'{"id":')
        else:
            self.waiting += 1
            try:
                while await reader.read(1 << 16):
                    pass
            finally:
                self.waiting -= 1


class RunningGateway:
    """A gateway, its admin listener, and the requests that its workers do not answer."""

    def __init__(
        self, urls: list[str], unanswered: UnansweredRequests, records: list[RequestRecord]
    ) -> None:
        self.url, self.records = urls[0], records
        self._admin = httpx.AsyncClient(base_url=urls[-1], timeout=PATIENCE)
        self.unanswered = unanswered

    async def read_uses(self) -> dict[str, int]:
        """Read what memory is used for, without the connection that reads it."""
        uses: dict[str, int] = (await self._admin.get("/-/status")).json()["memory"]["uses"]
        return uses

    async def send_request(self, request: bytes) -> None:
        """Send a request on a connection of its own, and read until its end."""
        address = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        try:
            with suppress(ConnectionError):  # a body that is too large is not read
                await reader.read()
        finally:
            writer.transport.abort()

    async def aclose(self) -> None:
        await self._admin.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tested(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    unanswered = UnansweredRequests()
    async with run_server(unanswered.serve) as url:
        names = {MOUNTS[mount][0] for mount in CLIENTS}
        pools = {
            f"{ending}-{name}": {
                "protocol": name if REGISTRY.serves_workers(name) else "openai",
                "workers": [f"{url}{path}"],
                "retries": {"max": 0},
                "health": {"interval": "1h"},
                "breaker": {"consecutive_failures": 10_000, "min_requests": 10_000},
                **settings,
            }
            for name in names
            for ending, (path, settings) in POOLS.items()
        }
        models = {
            f"{ending}-{name}": {"backend": f"{ending}-{name}" if ending in POOLS else "script"}
            for name in names
            for ending in ERRORS
        }
        text = build_configuration(CLIENTS, {"script": {"kind": "echo"}, **pools}, models)
        configuration = msgspec.json.decode(text)
        configuration["admin"] = {"address": "127.0.0.1:0"}
        configuration["limits"]["body"] = "64KiB"
        limits = {name: {"requests": "1/h"} for name in models if name.startswith("rate-")}
        configuration["defaults"] = {
            "limits": {"models": limits},
            "record": {"to": str(tmp_path_factory.mktemp("recordings")), "bodies": "full"},
        }
        text = msgspec.json.encode(configuration).decode()
        records = list[RequestRecord]()
        services = replace(build_services(), observe_request=records.append)
        gateway = Gateway(load_text(text, "test.json", env={}), services)
        tested = RunningGateway(await gateway.start(), unanswered, records)
        yield tested
        await tested.aclose()
        await gateway.stop()


def list_requests(mount: str, ending: Ending) -> list[bytes]:
    """List requests of all endpoints that end so, once unary and once as a stream."""
    return [
        build_request(mount, endpoint, ending, is_stream=is_stream)
        for endpoint in REGISTRY.create_adapter(*MOUNTS[mount], {}).endpoints
        for is_stream in (False, True)
    ]


def build_request(mount: str, endpoint: Endpoint, ending: Ending, *, is_stream: bool) -> bytes:
    model = f"{ending}-{MOUNTS[mount][0]}"
    fields = dict(build_body(mount, endpoint, model))
    if is_stream:
        fields["stream"] = True
    if ending == "size":
        fields["metadata"] = LARGE
    body = msgspec.json.encode(fields)
    head = (
        f"{endpoint.method} {build_path(mount, endpoint, model)} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "anthropic-version: 2023-06-01\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mount", CLIENTS)
async def test_memory_is_free_after_requests_that_end_in_every_way(
    tested: RunningGateway, mount: str
) -> None:
    # Given a budget of which nothing but the connection that reads it is used
    before = await tested.read_uses()
    assert {before[use] for use in ("bodies", "responses", "recordings")} == {0}
    tested.records.clear()

    # When every endpoint gets requests at once that end in every way
    async with asyncio.TaskGroup() as tasks:
        sent = {
            ending: [
                tasks.create_task(tested.send_request(request))
                for request in list_requests(mount, ending)
            ]
            for ending in ERRORS
        }
        await asyncio.wait([*sent["deadline"], *sent["worker"], *sent["response"], *sent["size"]])
        rest = sent["client"] + sent["rate"]
        await wait_until(
            lambda: sum(one.done() for one in rest) + tested.unanswered.waiting >= len(rest)
        )
        assert (await tested.read_uses())["bodies"] > 0
        for one in rest:
            one.cancel()
    await wait_until(lambda: not tested.unanswered.waiting)

    # Then nothing of the budget is held for them any more
    async with asyncio.timeout(PATIENCE):
        while await tested.read_uses() != before:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.005)
    assert {*ERRORS.values()} <= {one.error or one.outcome for one in tested.records}
