"""One server for all scripted workers, each below a path prefix, with exact bytes.

A WorkerScript is one kind of worker. It reads requests by its protocol's documentation, records
everything that a real worker would reject or not know as a fault, and returns the bytes of its
response.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec
from msgspec import Struct, field

from tests.cross.script import RequestOptions
from tests.support.fakes import END, chunk, head
from tests.support.tcp_server import run_server
from tests.support.waiting import PATIENCE

PACKET_SIZE = 11
"""Bytes in a small packet; no character or event has a length that it divides."""
_PHRASES = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
            422: "Unprocessable Entity", 424: "Failed Dependency", 429: "Too Many Requests",
            500: "Internal Server Error", 503: "Service Unavailable",
            529: "Overloaded"}  # fmt: skip


class ScriptedResponse(Struct, frozen=True, kw_only=True):
    """A worker's response: a body, or a stream of events."""

    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    events: tuple[bytes, ...] | None = None
    after: Literal["end", "cut", "hang"] = "end"
    small_packets: bool = False


class ReceivedRequest(Struct, kw_only=True):
    """A request received. ``path`` is without the worker's prefix."""

    worker: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    scenario: str = ""
    faults: list[str] = field(default_factory=list)
    """What is invalid in the worker's protocol."""
    disconnected_at: float | None = None
    """The loop's time when the client disconnected before the end of the response."""

    def fields(self) -> dict[str, Any]:
        """Return the body, which must be a JSON object with the content type of JSON."""
        if self.headers.get("content-type") != "application/json":
            self.faults.append("not sent as JSON")
        decoded = msgspec.json.decode(self.body)
        assert isinstance(decoded, dict)
        return decoded

    def check_path(self, *paths: str) -> None:
        """Record a fault if the request has none of these paths."""
        if (self.method, self.path) not in {("POST", path) for path in paths}:
            self.faults.append(f"{self.method} {self.path} is none of the server's")


class StreamEvents(Struct, frozen=True):
    """The events before the tokens, one event for each token, and the events after them."""

    opening: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    closing: tuple[bytes, ...]


class WorkerScript(Protocol):
    """One kind of worker."""

    content_type: str
    """The content type of its streams."""

    @property
    def error_responses(self) -> Mapping[str, ScriptedResponse]:
        """The error response for each scenario: ``refused``, ``limited``, ``failed``, ``busy``."""

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Return the response to a health probe or a metadata request, else None."""

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a request, and set its ``scenario`` and its ``faults``."""

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """Build the events of a stream."""

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """Build the body of a unary response."""

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build the error that ends a stream."""


def create_response(script: WorkerScript, request: ReceivedRequest) -> ScriptedResponse:
    """Build the response for the request's scenario."""
    if (response := script.respond_to_probe(request)) is not None:
        return response
    options = script.parse_request(request)
    scenario = request.scenario
    if scenario in script.error_responses:
        return script.error_responses[scenario]
    if not options.stream:
        body = script.build_unary(request, options)
        ends: Mapping[str, Any] = {"cut": {"after": "cut"}, "slow": {"after": "hang"}}
        return ScriptedResponse(
            body=body, small_packets=scenario == "packets", **ends.get(scenario, {})
        )
    stream = script.build_stream(request, options)
    first_events = (*stream.opening, *stream.tokens[:2])
    match scenario:
        case "broken":
            return ScriptedResponse(
                content_type=script.content_type,
                events=(*first_events, script.build_error_event(request)),
            )
        case "short":
            return ScriptedResponse(content_type=script.content_type, events=first_events)
        case "cut":
            return ScriptedResponse(
                content_type=script.content_type, events=first_events, after="cut"
            )
        case "slow":
            return ScriptedResponse(
                content_type=script.content_type, events=first_events[:-1], after="hang"
            )
        case _:
            events = (*stream.opening, *stream.tokens, *stream.closing)
            return ScriptedResponse(
                content_type=script.content_type, events=events, small_packets=scenario == "packets"
            )


class WorkerServer:
    """Serves all scripts inside ``async with``, each at ``url`` plus its name."""

    def __init__(self, scripts: Mapping[str, WorkerScript]) -> None:
        self._scripts = scripts
        self._open = AsyncExitStack()
        self._changed = asyncio.Event()
        self.url = ""
        self.received: list[ReceivedRequest] = []
        """The requests received, without probes and metadata requests."""

    async def __aenter__(self) -> Self:
        self.url = await self._open.enter_async_context(run_server(self._serve))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open.aclose()

    async def wait_for_request(self) -> ReceivedRequest:
        """Wait for the first generating request and return it."""
        async with asyncio.timeout(PATIENCE):
            while not self.received:
                self._changed.clear()
                await self._changed.wait()
        return self.received[0]

    async def wait_for_disconnect(self, request: ReceivedRequest) -> float:
        """Wait until the client disconnects from this response and return the time."""
        async with asyncio.timeout(PATIENCE):
            while request.disconnected_at is None:
                self._changed.clear()
                await self._changed.wait()
        return request.disconnected_at

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._exchange(reader, writer):
            pass

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read_request(reader)
        script = self._scripts[request.worker]
        response = create_response(script, request)
        if request.scenario:
            self.received.append(request)
            self._changed.set()
        if response.after == "hang" and response.events is None:
            return await self._hang(request, reader)
        data = _encode_response(response)
        if response.small_packets:
            for start in range(0, len(data), PACKET_SIZE):
                writer.write(data[start : start + PACKET_SIZE])
                await asyncio.sleep(0)  # lets the client read this packet before the next
        else:
            writer.write(data)
        await writer.drain()
        if response.after == "hang":
            return await self._hang(request, reader)
        return response.after == "end"

    async def _hang(self, request: ReceivedRequest, reader: asyncio.StreamReader) -> bool:
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        request.disconnected_at = asyncio.get_running_loop().time()
        self._changed.set()
        return False


async def _read_request(reader: asyncio.StreamReader) -> ReceivedRequest:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    worker, _, path = target.removeprefix("/").partition("/")
    return ReceivedRequest(
        worker=worker, method=method, path=f"/{path}", headers=headers, body=body
    )


def _encode_response(answer: ScriptedResponse) -> bytes:
    status = f"{answer.status} {_PHRASES[answer.status]}"
    if answer.events is None:
        length = str(len(answer.body))
        top = head(
            status, content_type=answer.content_type, content_length=length, **answer.headers
        )
        half = len(answer.body) // 2 if answer.after == "cut" else len(answer.body)
        return top + answer.body[:half]
    top = head(
        status, content_type=answer.content_type, transfer_encoding="chunked", **answer.headers
    )
    ended = END if answer.after == "end" else b""
    return b"".join([top, *map(chunk, filter(None, answer.events)), ended])
