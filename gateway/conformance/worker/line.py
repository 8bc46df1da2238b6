"""Asking a worker as a pool would: through its dialect, over HTTP, and no further than is safe."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Literal

import httpx
from msgspec import Struct, field
from msgspec.structs import replace

from gateway.conformance.cases import Mismatch
from gateway.core.aggregate import Answer, ChoiceAnswer, Fold
from gateway.core.errors import (
    ClientError,
    GatewayError,
    Overloaded,
    RateLimited,
    StreamBroken,
    Unsupported,
    WorkerFailed,
)
from gateway.core.ports import Cancelling, Decoder, WireRequest, WorkerDialect
from gateway.core.types import (
    Done,
    EmbedRequest,
    Event,
    GenerateRequest,
    Message,
    Request,
    Sampling,
    Stopping,
    TextPart,
)

_LARGEST: Final = 8 << 20
"""Bytes of an answer that are read."""
_PORT: Final = 1
"""Where the port is in an address."""


class NotOffered(Exception):
    """The dialect, or what is asked for, can't have it; the text says why."""


class Refused(Exception):
    """The worker would not take it, and says so as it should."""


class Unsure(Exception):
    """It went wrong, for a reason that need not be the one that was looked for."""


class Unreachable(Exception):
    """Nobody listens there."""


class Whom(Struct, frozen=True):
    """The worker: its base URL, the models it is asked for, and how.

    ``way``: whether it is told texts as a conversation or as a prompt.
    """

    url: str
    model: str | None = None
    embedder: str | None = None
    key: str | None = None
    way: Literal["chat", "prompt"] = "chat"


class Heard(Struct):
    """What came back. ``error`` is what the dialect reads in it, if it is no good answer."""

    status: int = 0
    headers: Mapping[str, str] = {}
    pieces: list[bytes] = field(default_factory=list[bytes])
    events: list[Event] = field(default_factory=list[Event])
    error: GatewayError | None = None
    whole: Answer | None = None
    port: int | None = None
    """Ours, by which connections are told apart."""

    @property
    def body(self) -> bytes:
        """All that was read."""
        return b"".join(self.pieces)

    @property
    def refused(self) -> bool:
        """Whether it says that the request is to blame, by its status or in its words."""
        if self.error is None or isinstance(self.error, RateLimited):
            return False
        return self.status in range(400, 500) or isinstance(self.error, ClientError)

    @property
    def answer(self) -> Answer:
        """The answer. Raises Mismatch, Refused or Unsure where there is none."""
        if isinstance(self.error, RateLimited | Overloaded):
            raise Unsure(f"the worker is busy ({self.status})")
        if self.refused:
            raise Refused(self.told)
        if self.error is not None or self.whole is None:
            raise Mismatch(self.told)
        return self.whole

    @property
    def choice(self) -> ChoiceAnswer:
        """The only choice. Raises as ``answer`` does."""
        choices = self.answer.choices
        if len(choices) != 1:
            raise Mismatch(f"wanted one choice, got {len(choices)}")
        return choices[0]

    @property
    def told(self) -> str:
        """What went wrong, in short."""
        said = str(self.error) if self.error is not None else "no answer"
        notes = "; ".join(getattr(self.error, "__notes__", ()))
        status = f"{self.status}: " if self.status not in (0, 200) else ""
        return f"{status}{said}" + (f" ({notes})" if notes else "")


class Line:
    """The way to one worker, for one probe. ``needs``: the fields that the probe is about."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        dialect: WorkerDialect,
        whom: Whom,
        *,
        needs: Sequence[str] = (),
        known: dict[str, str] | None = None,
    ) -> None:
        self.http = http
        self.dialect = dialect
        self.whom = whom
        self.quirks: list[str] = []
        self._needs = needs
        self._known = {} if known is None else known
        self._numbers = itertools.count()

    def about(self, needs: Sequence[str]) -> "Line":
        """The same way for another probe."""
        return Line(self.http, self.dialect, self.whom, needs=needs, known=self._known)

    # --- what is asked ----------------------------------------------------------------------------

    def say(self, text: str, **more: Any) -> GenerateRequest:
        """A request that tells the model ``text``, greedy and short unless ``more`` says else."""
        if self.whom.way == "prompt":
            return self.prompt(text, **more)
        return self.turns(Message("user", (TextPart(text),)), **more)

    def turns(self, *messages: Message, **more: Any) -> GenerateRequest:
        """A conversation. Raises NotOffered where the worker is asked by prompts."""
        if self.whom.way == "prompt":
            raise NotOffered("the worker is asked by prompts")
        return self._request(kind="chat", messages=messages, **more)

    def prompt(self, *prompts: str | tuple[int, ...], **more: Any) -> GenerateRequest:
        """Prompts, as they are."""
        return self._request(kind="completion", prompts=prompts, **more)

    def _request(self, **fields: Any) -> GenerateRequest:
        if self.whom.model is None:
            raise NotOffered("no model of texts was named (--model)")
        usual = {"sampling": Sampling(temperature=0.0), "stopping": Stopping(max_tokens=48)}
        return GenerateRequest(model=self.whom.model, **(usual | fields))

    def embed(self, *inputs: str, **more: Any) -> EmbedRequest:
        """A request for vectors. Raises NotOffered."""
        if self.whom.embedder is None:
            raise NotOffered("no model of embeddings was named (--embedder)")
        return EmbedRequest(model=self.whom.embedder, inputs=inputs, **more)

    # --- asking -----------------------------------------------------------------------------------

    async def ask(self, request: Request, until: Callable[[Heard], bool] | None = None) -> Heard:
        """What comes of a request, as far as ``until`` says. Raises NotOffered and Unreachable."""
        request = self._own(request)
        return await self.send(self.encoded(request), request, until)

    async def base(self, text: str) -> str:
        """What the model says to ``text`` by itself, asked once. Raises Unsure without it."""
        if text not in self._known:
            try:
                self._known[text] = (await self.ask(self.say(text))).choice.text
            except (Mismatch, Refused) as error:
                raise Unsure(f"plainly asked: {error}") from None
        return self._known[text]

    def encoded(self, request: Request) -> WireRequest:
        """The request for the worker. Raises NotOffered for what the dialect can't carry."""
        try:
            for loss in self.dialect.losses(request, {}):
                if loss.path in self._needs:
                    why = f" ({loss.detail})" if loss.detail else ""
                    raise NotOffered(f"the dialect can't carry {loss.path}: {loss.reason}{why}")
            return self.dialect.encode(request)
        except Unsupported as error:
            raise NotOffered(error.message) from None

    async def send(
        self, wire: WireRequest, request: Request, until: Callable[[Heard], bool] | None = None
    ) -> Heard:
        """What comes of these bytes, read as the answer to ``request``. Raises Unreachable."""
        heard = Heard()
        try:
            async with self._open(wire, heard) as response:
                if response.status_code == httpx.codes.OK:
                    await _listen(response, heard, self.dialect.decoder(request), until)
                else:
                    await _gather(response, heard)
                    headers = heard.headers
                    heard.error = self.dialect.read_error(heard.status, headers, heard.body)
        except GatewayError as error:
            heard.error = error
        return heard

    async def fetch(self, wire: WireRequest) -> Heard:
        """What comes of these bytes, not read any further; no error tells of a bad status."""
        heard = Heard()
        with suppress(StreamBroken):
            async with self._open(wire, heard) as response:
                await _gather(response, heard)
        return heard

    async def leave(self, request: Request) -> Heard:
        """Ask, and go away as soon as something has been said, as a pool does."""
        request = self._own(request)
        heard = await self.send(self.encoded(request), request, lambda got: bool(got.events))
        if isinstance(self.dialect, Cancelling) and heard.error is None:
            await self.fetch(self.dialect.cancel(request))
        return heard

    def _own(self, request: Request) -> Request:
        """With a name of its own, for a dialect that stops requests by their names."""
        if not isinstance(self.dialect, Cancelling):
            return request
        return replace(request, client_id=f"probe-{id(self):x}-{next(self._numbers)}")

    @asynccontextmanager
    async def _open(self, wire: WireRequest, heard: Heard) -> AsyncIterator[httpx.Response]:
        headers = [("Accept-Encoding", "identity"), *wire.headers]
        if self.whom.key is not None:
            headers.append(("Authorization", f"Bearer {self.whom.key}"))
        url = self.whom.url + wire.path
        try:
            async with self.http.stream(
                wire.method, url, content=wire.body, headers=headers
            ) as response:
                heard.status = response.status_code
                heard.headers = {k.lower(): v for k, v in response.headers.items()}
                stream = response.extensions.get("network_stream")
                address = stream.get_extra_info("client_addr") if stream is not None else None
                heard.port = address[_PORT] if address else None
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(str(error)) from None
        except httpx.TransportError as error:
            raise StreamBroken(
                f"the connection broke: {str(error) or type(error).__name__}"
            ) from None


async def _gather(response: httpx.Response, heard: Heard) -> None:
    size = 0
    async for piece in response.aiter_raw():
        heard.pieces.append(piece)
        size += len(piece)
        if size > _LARGEST:
            raise WorkerFailed(f"the answer is larger than {_LARGEST} bytes")


async def _listen(
    response: httpx.Response,
    heard: Heard,
    decoder: Decoder,
    until: Callable[[Heard], bool] | None,
) -> None:
    size = 0
    async for piece in response.aiter_raw():
        heard.pieces.append(piece)
        size += len(piece)
        if size > _LARGEST:
            raise WorkerFailed(f"the answer is larger than {_LARGEST} bytes")
        heard.events += decoder.feed(piece)
        if until is not None and until(heard):
            return
    heard.events += decoder.close()
    heard.whole = folded(heard.events)


def folded(events: Sequence[Event]) -> Answer:
    """The answer of a body's events. Raises StreamBroken."""
    fold = Fold()
    fold.add(events)
    if not any(isinstance(event, Done) for event in events):
        fold.add([Done()])
    return fold.result()


async def together(*asked: Any) -> list[Heard]:
    """All of them at a time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in asked]
    return [task.result() for task in tasks]
