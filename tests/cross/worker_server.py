"""Where the scripted workers stand: one server, a path prefix for each, every byte its own.

A desk is one kind of worker. It reads what it is asked after its protocol's documents, notes all
that a real one would refuse or not know, and tells which bytes it would answer with.
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

SPLINTER = 11
"""Bytes; no character and no event has a length that it divides."""
_PHRASES = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
            422: "Unprocessable Entity", 424: "Failed Dependency", 429: "Too Many Requests",
            500: "Internal Server Error", 503: "Service Unavailable",
            529: "Overloaded"}  # fmt: skip


class ScriptedResponse(Struct, frozen=True, kw_only=True):
    """What a worker answers: a body, or a stream of events."""

    status: int = 200
    kind: str = "application/json"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    events: tuple[bytes, ...] | None = None
    then: Literal["end", "cut", "hang"] = "end"
    splinters: bool = False


class ReceivedRequest(Struct, kw_only=True):
    """One request, and what became of it. ``path`` is without the worker's prefix."""

    worker: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    scenario: str = ""
    faults: list[str] = field(default_factory=list)
    """What is wrong with it, in its protocol."""
    disconnected_at: float | None = None
    """When the other side left the unfinished answer, on the loop's clock."""

    def fields(self) -> dict[str, Any]:
        """The body, which must be a JSON object sent as such."""
        if self.headers.get("content-type") != "application/json":
            self.faults.append("not sent as JSON")
        got = msgspec.json.decode(self.body)
        assert isinstance(got, dict)
        return got

    def at(self, *paths: str) -> None:
        """Note any other path."""
        if (self.method, self.path) not in {("POST", path) for path in paths}:
            self.faults.append(f"{self.method} {self.path} is none of the server's")


class StreamEvents(Struct, frozen=True):
    """A stream's events: before the tokens, one for each of them, and after."""

    opening: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    closing: tuple[bytes, ...]


class WorkerScript(Protocol):
    """One kind of worker."""

    kind: str
    """The content type of its streams."""

    @property
    def refusals(self) -> Mapping[str, ScriptedResponse]:
        """By play: ``refused``, ``limited``, ``failed``, ``busy``."""

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """The answer to what asks for no text: probes and questions."""

    def read(self, request: ReceivedRequest) -> RequestOptions:
        """What is asked; its play, and all its faults, are noted in ``request``."""

    def lines(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """The events of a stream."""

    def whole(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """The answer in one piece."""

    def failure(self, request: ReceivedRequest) -> bytes:
        """What an error looks like in a stream that has begun."""


def create_response(script: WorkerScript, request: ReceivedRequest) -> ScriptedResponse:
    """What the desk answers, after the play that was asked for."""
    if (response := script.respond_to_probe(request)) is not None:
        return response
    options = script.read(request)
    scenario = request.scenario
    if scenario in script.refusals:
        return script.refusals[scenario]
    if not options.stream:
        body = script.whole(request, options)
        ends: Mapping[str, Any] = {"cut": {"then": "cut"}, "slow": {"then": "hang"}}
        return ScriptedResponse(
            body=body, splinters=scenario == "packets", **ends.get(scenario, {})
        )
    stream = script.lines(request, options)
    begun = (*stream.opening, *stream.tokens[:2])
    match scenario:
        case "broken":
            return ScriptedResponse(kind=script.kind, events=(*begun, script.failure(request)))
        case "short":
            return ScriptedResponse(kind=script.kind, events=begun)
        case "cut":
            return ScriptedResponse(kind=script.kind, events=begun, then="cut")
        case "slow":
            return ScriptedResponse(kind=script.kind, events=begun[:-1], then="hang")
        case _:
            events = (*stream.opening, *stream.tokens, *stream.closing)
            return ScriptedResponse(
                kind=script.kind, events=events, splinters=scenario == "packets"
            )


class WorkerServer:
    """Serves all desks from ``async with`` on; ``url`` and a desk's name are that worker's URL."""

    def __init__(self, desks: Mapping[str, WorkerScript]) -> None:
        self._scripts = desks
        self._open = AsyncExitStack()
        self._changed = asyncio.Event()
        self.url = ""
        self.received: list[ReceivedRequest] = []
        """What was asked, probes and questions left out."""

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
        """The first request for text."""
        async with asyncio.timeout(10):
            while not self.received:
                self._changed.clear()
                await self._changed.wait()
        return self.received[0]

    async def wait_for_disconnect(self, request: ReceivedRequest) -> float:
        """When the other side left this one unfinished."""
        async with asyncio.timeout(10):
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
        answer = create_response(script, request)
        if request.scenario:
            self.received.append(request)
            self._changed.set()
        if answer.then == "hang" and answer.events is None:
            return await self._hang(request, reader)
        data = _encode_response(answer)
        if answer.splinters:
            for start in range(0, len(data), SPLINTER):
                writer.write(data[start : start + SPLINTER])
                await asyncio.sleep(0)  # so that the other side reads it before the next
        else:
            writer.write(data)
        await writer.drain()
        if answer.then == "hang":
            return await self._hang(request, reader)
        return answer.then == "end"

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
        top = head(status, content_type=answer.kind, content_length=length, **answer.headers)
        half = len(answer.body) // 2 if answer.then == "cut" else len(answer.body)
        return top + answer.body[:half]
    top = head(status, content_type=answer.kind, transfer_encoding="chunked", **answer.headers)
    ended = END if answer.then == "end" else b""
    return b"".join([top, *map(chunk, filter(None, answer.events)), ended])
