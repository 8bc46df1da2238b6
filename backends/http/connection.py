"""One connection to a worker: its requests, and their answers, one after the other."""

import asyncio
from collections.abc import Callable
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from backends.aio import WriteBatcher
from backends.http.answer import NOT_HTTP, RESPONSE_CUT_OFF, Http1Response

_MAX_BUFFERED_BYTES: Final = 64 << 10
"""Bytes of an answer held before the worker is made to wait; one read more at most."""
_MAX_HEADER_BYTES: Final = 8190
"""Bytes of a header's name and value."""
_MAX_HEADERS: Final = 128
_MAX_BYTES_WITHOUT_BODY: Final = 64 << 10
"""Bytes that may come without one of a body among them: heads, chunk extensions, trailers."""
_STATUS_SWITCHING_PROTOCOLS: Final = 101
_FIRST_FINAL_STATUS: Final = 200


class HttpConnection(asyncio.Protocol):
    """A connection that serves one request after the other.

    ``rested`` is called with it when it may serve again, ``ended`` when it never will.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        outbox: WriteBatcher,
        rested: Callable[["HttpConnection"], None],
        ended: Callable[["HttpConnection"], None],
    ) -> None:
        self.idle_since = 0.0
        """When it began to rest, by the loop's clock."""
        self.loop = loop
        self._write_batcher = outbox
        self._on_idle = rested
        self._on_closed = ended
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        """Of the body of the answer that comes."""
        self.on_body: Callable[[bytes], None] = self._parts.append
        """A piece of the body, of which a stream has thousands: see ``httptools``."""
        self._body_end = 0
        """How many such pieces a whole answer had."""
        self._response = Http1Response(self, self._parts)
        """To the last request; there was none yet, and what nobody asked for is no part of it."""
        self._response.complete = True
        self._parser = HttpResponseParser(self)
        self._feed_parser: Callable[[bytes], None] = self._parser.feed_data
        self._was_reused = False
        """It was at rest before the last request."""
        self._keep_alive = True
        """Whether it may serve again, as far as is known."""
        self._aborted = False
        self.paused = False
        """The worker is made to wait."""
        self._bytes_without_body = 0
        """Bytes of an answer that came without one of a body among them."""
        self._header_count = 0
        """Headers of an answer, and what looks like one."""
        self._malformed = False

    @property
    def is_connected(self) -> bool:
        """Whether it is not at its end."""
        return self._transport is not None

    @property
    def is_stale(self) -> bool:
        """See ``Carrier``."""
        return self._was_reused and not self._response.held_bytes and not self._aborted

    def send(self, data: bytes) -> Http1Response:
        """Send a whole request. Nothing has come of its answer yet."""
        self._parts.clear()
        answer = self._response = Http1Response(self, self._parts)
        if self._transport is None:
            answer.fail()
        else:
            self._write_batcher.send(self._transport, data)
        return answer

    def resume_reading(self) -> None:
        """See ``Carrier``."""
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """See ``Carrier``."""
        self._keep_alive = False
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def release(self) -> None:
        """See ``Carrier``."""
        transport = self._transport
        done = self._keep_alive and self._response.complete  # what was wrong has been cut
        if not done or transport is None or transport.get_write_buffer_size():
            self.abort()
            return
        self._was_reused = True
        if self.paused:
            self.resume_reading()
        self._on_idle(self)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The one who reads is woken once for all that came together."""
        answer = self._response
        if answer.complete:
            self.abort()  # nobody asked for this: what follows it could be taken for an answer
            return
        answer.held_bytes += len(data)
        parts = self._parts
        before = len(parts)
        try:
            self._feed_parser(data)
        except HttpParserUpgrade:
            self._keep_alive = False
        except HttpParserError:
            self._malformed = True
        self._bytes_without_body = (
            0 if len(parts) > before else self._bytes_without_body + len(data)
        )
        if self._response.complete:
            del parts[self._body_end :]  # nobody asked for more
        if self._malformed or self._bytes_without_body > _MAX_BYTES_WITHOUT_BODY:
            self._fail_malformed(answer)
        if answer.held_bytes > _MAX_BUFFERED_BYTES:
            self._pause_if_full()
        answer.on_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._keep_alive = False
        answer = self._response
        if exc is None and answer.status and not self._aborted and not _has_explicit_end(answer):
            answer.complete = True  # its length is not told: it ends with the connection
        answer.fail()
        self._on_closed(self)

    # --- httptools ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or what looks like one after the body."""
        answer = self._response
        self._header_count += 1
        if len(name) + len(value) > _MAX_HEADER_BYTES or self._header_count > _MAX_HEADERS:
            self._malformed = True
        elif not answer.status:
            answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head has come; one that only announces another is passed over."""
        answer, status = self._response, self._parser.get_status_code()
        if answer.complete or self._malformed:
            return
        if status >= _FIRST_FINAL_STATUS or status == _STATUS_SWITCHING_PROTOCOLS:
            answer.status = status
            if not self._parser.should_keep_alive():
                self._keep_alive = False

    def on_message_complete(self) -> None:
        """The end of an answer, or of what came before one."""
        answer = self._response
        if answer.status and not answer.complete:
            answer.complete = True
            self._body_end = len(self._parts)
            self._header_count = self._bytes_without_body = 0

    def on_message_begin(self) -> None:
        """A head begins: the awaited one, or one that nobody asked for."""
        if self._response.complete:
            self._keep_alive = False
        else:
            self._response.headers = {}

    # --- within ---------------------------------------------------------------------------------

    def _pause_if_full(self) -> None:
        """More has come than is to be held: make the worker wait."""
        if not self.paused and not self._aborted and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def _fail_malformed(self, answer: Http1Response) -> None:
        """What came is not HTTP, or more of it than there can be sense in."""
        midway = answer.status and not answer.complete
        answer.complete = False  # if it told an end, that was not its end
        answer.fail(RESPONSE_CUT_OFF if midway else NOT_HTTP)
        self.abort()


def _has_explicit_end(answer: Http1Response) -> bool:
    """Whether it tells by itself where its body ends."""
    coding = answer.headers.get("transfer-encoding", "").lower()
    return coding.endswith("chunked") if coding else "content-length" in answer.headers
