"""A client of one endpoint, and a response as it reads it."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import httpx
from msgspec import Struct, field
from msgspec.structs import replace

from tests.cross.script import Json, RequestOptions
from tests.cross.workers.worker import MODES, Losses, Worker

Kind = Literal["chat", "text"]
_JSON: Final = {"Content-Type": "application/json"}


class DecodedResponse(Struct):
    """A response as a client reads it.

    ``usage`` has the prompt tokens, None where the protocol omits them, and the completion tokens.
    """

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: tuple[int | None, int] | None = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """The name and the arguments of each tool call."""
    error: str = ""
    """The text of an error in a stream."""
    done: bool = False
    """Whether the protocol's own end mark was received, if it has one."""

    def add_text(self, index: int, text: str | None) -> None:
        """Append text to a choice."""
        self.texts[index] = self.texts.get(index, "") + (text or "")


class Client(Struct, frozen=True, kw_only=True):
    """A client of one endpoint. ``path`` has MODEL in place of the model's name."""

    name: str
    kind: Kind
    path: str
    stream_path: str = ""
    fields: Callable[[str, RequestOptions], Json]
    read: Callable[[DecodedResponse, Any], None]
    """Adds a unary response or an event to a decoded response."""
    finish_reasons: Mapping[str, str]
    """The protocol's word for each finish reason."""
    statuses: Mapping[str, int]
    """The client's status for each scenario in which the worker answers with an error."""
    read_error: Callable[[Any], str]
    """Returns the message of an error response."""
    can: frozenset[str] = frozenset({"stop", "n", "logprobs", "tools"})
    can_stream: frozenset[str] = can
    keeps_stop_in_stream: bool = False
    """By contract, a stop string stays in the text of a stream."""
    keeps_stop_in_unary: bool = False
    """By contract, a stop string stays in the text of a unary response."""
    always_logprobs: bool = False
    """Its details have each token's probability, so it always requests them."""
    lists_alternatives: bool = True
    """``logprobs: 1`` asks for an alternative to each token."""
    infers_length: bool = False
    """By contract, a response of max_tokens tokens has the finish reason ``length``."""
    always_limited: bool = False
    """Its requests always have max_tokens, or its protocol has a default."""
    end: bytes = b"data: [DONE]\n\n"
    """The last bytes of a complete stream."""
    prefix: bytes = b"data: "
    separator: bytes = b"\n\n"
    content_type: str = "text/event-stream"
    """The content type of a stream."""
    shows_fingerprint: bool = False
    """Its responses have a ``system_fingerprint``."""
    names_stop: bool = False
    """Its responses name the stop string that matched."""

    def mode(self, options: RequestOptions) -> str:
        """Return the request's mode, the key of the mappings in a worker's row."""
        return f"{self.kind} stream" if options.stream else self.kind

    def adapt_worker(self, row: Worker) -> Worker:
        """Return a worker's row with what changes for a client that always requests logprobs."""
        if self.always_logprobs and row.has_completions:
            return replace(row, stop={}, without_usage=(), include_stop_modes=MODES)
        return row

    def list_expected_losses(
        self, row: Worker, *, stream: bool, limited: bool | None = None
    ) -> Losses:
        """Return the losses of each of its requests with this worker."""
        mode = self.mode(RequestOptions(stream=stream))
        lost = row.logprobs.get(mode) if self.always_logprobs else None
        losses = row.list_expected_losses(
            self.kind, limited=self.always_limited if limited is None else limited
        )
        if self.kind in row.fingerprint_kinds and not self.shows_fingerprint:
            losses |= {("response.system_fingerprint", "dropped")}
        return losses | row.loss("logprobs.top", lost)

    def build_request(self, model: str, options: RequestOptions) -> httpx.Request:
        """Build the request; the host is ignored."""
        path = (options.stream and self.stream_path) or self.path
        body = json.dumps(self.fields(model, options), ensure_ascii=False).encode()
        url = f"http://localhost{path.replace('MODEL', model)}"
        return httpx.Request("POST", url, content=body, headers=_JSON)

    def read_response(self, answer: httpx.Response, options: RequestOptions) -> DecodedResponse:
        """Decode a complete response."""
        response = DecodedResponse()
        if not options.stream:
            self.read(response, answer.json())
            response.done = True
            return response
        assert answer.headers["content-type"].startswith(self.content_type)
        body = answer.content
        response.done = body.endswith(self.end)
        for block in body.removesuffix(self.end if self.end in body else b"").split(self.separator):
            part = block.partition(b"\n")[2] if block.startswith(b"event: ") else block
            if not part:
                continue
            if not part.startswith(self.prefix):
                response.error += part.decode()
                continue
            received = json.loads(part.removeprefix(self.prefix))
            if "error" in received:
                response.error += str(received["error"])
            else:
                self.read(response, received)
        return response
