"""Serves a request up to where it would be sent: what is told is told by the very code that serves.

It meets the table, the keys and the workers as they are, and leaves all of them as they are.
"""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.auth import Principal
from gateway.core.context import Clock
from gateway.core.errors import MethodNotAllowed, PathNotFound, TooLarge
from gateway.core.ports import Headers
from gateway.paths import Found
from gateway.server import Server
from gateway.telemetry import Record
from gateway.watching.account import Answered, Explanation
from gateway.watching.kept import Kept
from gateway.watching.question import Question
from gateway.watching.watch import HEADER, Foretold, Watch

_NEVER_TRIED: Final = ("stop", "tokenize")
"""The tasks that would do something."""
_NOT_SHOWN: Final = frozenset({HEADER, "x-request-id"})


class _Http(Struct):
    """A ``gateway.seam.Request``."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    peer: str
    content: bytes
    head: None = None

    async def body(self, limit: int) -> bytes:
        if len(self.content) > limit:
            raise TooLarge(f"the body is larger than {limit} bytes", limit=limit)
        return self.content


class _Sink:
    """A ``gateway.seam.Sink`` whose answer nobody gets."""

    needs_drain = False

    def __init__(self) -> None:
        self.started = False
        self.headers: Headers = ()
        self.body = b""

    def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.write(body)

    def start(self, status: int, headers: Headers) -> None:
        del status
        self.started = True
        self.headers = headers

    def write(self, data: bytes) -> None:
        self.body += data

    def finish(self) -> None:
        """There is nobody to wait."""

    async def drain(self) -> None:
        """There is nobody to wait."""


class _Dry:
    """What is kept of a request that is served dry; called as an ``Explain``."""

    def __init__(self, clock: Clock, draw: float) -> None:
        self._clock = clock
        self._draw = draw
        self.record = Record("")
        self.recorder: Watch | None = None

    def __call__(
        self, record: Record, principal: Principal | None, *, open_to_all: bool
    ) -> Watch | None:
        del principal, open_to_all
        self.recorder = Watch(record, self._clock, lambda: self._draw, dry=True)
        return self.recorder

    def record_request(self, record: Record) -> None:
        """See ``gateway.telemetry.Observer``."""
        self.record = record


Servers = Mapping[str, Server]
"""By the address of their listener, in the order of the configuration."""


async def explain(question: Question, servers: Servers, clock: Clock) -> Explanation:
    """What would become of a request.

    Raises LookupError, with its text, for a listener or a key that there is not.
    """
    address, server, found = entrance(question, servers)
    path, _, query = question.path.partition("?")
    told = Explanation(
        id="", dry=True, listener=address, method=question.method, path=path, key=question.key or ""
    )
    if found is not None and found.endpoint.task in _NEVER_TRIED:
        told.dialect = found.mount.adapter.name
        told.endpoint, told.task = found.endpoint.path, found.endpoint.task
        return told
    headers = {name.lower(): text for name, text in question.headers.items()}
    content = question.body_bytes
    if content:
        headers.setdefault("content-type", "application/json")
    http = _Http(question.method, path, query, headers | {HEADER: "1"}, question.peer, content)
    sink, dry = _Sink(), _Dry(clock, question.draw)
    try:
        server = server.for_dry_run(question.key, dry, dry.record_request)
    except KeyError:
        raise LookupError(f"there is no key {question.key!r}") from None
    await server.handle(http, sink)
    if dry.recorder is not None:
        told = replace(dry.recorder.build_explanation(), listener=address)
    told.dialect = dry.record.dialect
    told.answer = None if dry.record.error == Foretold.__name__ else _answer(dry.record, sink)
    return told


def entrance(question: Question, servers: Servers) -> tuple[str, Server, Found | None]:
    """Where a request comes in, and the endpoint that it finds there first. Raises LookupError."""
    asked = meant(question, servers)
    path = question.path.partition("?")[0]
    for name, server in asked.items():
        try:
            return name, server, server.path_router.find_endpoint(question.method, path)
        except (PathNotFound, MethodNotAllowed):
            continue
    name, server = next(iter(asked.items()))
    return name, server, None


def meant(question: Question, servers: Servers) -> Servers:
    """Those of the listener that is named; all where none is. Raises LookupError."""
    if (address := question.listener) is None:
        return servers
    if address not in servers:
        known = ", ".join(servers)
        raise LookupError(f"there is no listener {address!r}; known: {known}")
    return {address: servers[address]}


def _answer(record: Record, sink: _Sink) -> Answered:
    headers = [(name, text) for name, text in sink.headers if name not in _NOT_SHOWN]
    body = sink.body.decode(errors="replace")
    return Answered(record.status, record.outcome, record.error, body, headers)


class Explainer:
    """Tells of requests: of the last that asked to be explained, and of any, dry.

    ``servers`` gives those that serve now.
    """

    def __init__(self, kept: Kept, servers: Callable[[], Servers], clock: Clock) -> None:
        self.find_explanation = kept.find_explanation
        self._get_servers = servers
        self._clock = clock

    async def explain_request(self, question: Question) -> Explanation:
        """What would become of a request now. Raises LookupError."""
        return await explain(question, self._get_servers(), self._clock)
