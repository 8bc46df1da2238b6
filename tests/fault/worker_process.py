"""An OpenAI worker in a process of its own, which tests kill, freeze and limit.

    python -I -S worker_process.py --fd 5                    on an inherited listening socket
    python -I -S worker_process.py --listen 127.0.0.1:8000

A response has ``--words`` words, or ``max_tokens``, or 5: ``t0 t1 t2 ...``, the first after
``--first`` seconds, the others ``--pace`` seconds apart, each padded to ``--size`` bytes. The model
``greedy`` allocates memory from its sixth word on until it is killed. ``--log`` gets a line of JSON
when a request arrives, and one when it ends: ``completed`` or ``cancelled``.

SIGTERM drains it: it fails its probes, closes connections after their responses, and exits after
``--grace`` seconds, once no response is left. SIGINT stops it abruptly: it stops listening, closes
idle connections, and exits once no response is left.

It uses only the standard library, so it starts in 0.1 s.
"""

import argparse
import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

DEFAULT_TOKENS = 5
GREEDY_FROM = 5


def format_word(number: int, size: int = 0) -> str:
    """Return the word of this number, from 0 on."""
    return f"t{number}".ljust(size - 1, ".") + " "


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._leaving = asyncio.Event()
        self._closing = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._resting: set[asyncio.StreamWriter] = set()
        self._log = Path(options.log) if options.log else None
        self._server: asyncio.Server | None = None
        self._hoard: list[bytearray] = []

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leaving.set)
        loop.add_signal_handler(signal.SIGINT, self._stop)
        self._server = await asyncio.start_server(self._serve, sock=listener, backlog=1024)
        await self._leaving.wait()
        if not self._closing:
            await asyncio.sleep(self._options.grace)
        self._stop()
        await self._idle.wait()

    def _stop(self) -> None:
        self._closing = True
        self._leaving.set()
        if self._server is not None:
            self._server.close()
        for writer in self._resting:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self._closing:
                self._resting.add(writer)
                try:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                finally:
                    self._resting.discard(writer)
                self._active += 1
                self._idle.clear()
                try:
                    await self._exchange(head, reader, writer)
                finally:
                    self._active -= 1
                    if not self._active:
                        self._idle.set()
                if self._leaving.is_set():
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _exchange(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if first.startswith("GET"):
            status = "503 Leaving" if self._leaving.is_set() else "200 OK"
            await self._write(writer, self._format_response(status, {"object": "list", "data": []}))
            return
        request = json.loads(body)
        name = headers.get("x-request-id", "")
        self._log_event(name, "received")
        token_count = [0]
        response = asyncio.ensure_future(self._answer(first, request, writer, token_count))
        left = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((response, left), return_when=asyncio.FIRST_COMPLETED)
        is_complete = response.done() and not response.exception()
        left.cancel()
        response.cancel()
        await asyncio.gather(response, left, return_exceptions=True)
        self._log_event(name, "completed" if is_complete else "cancelled", token_count[0])
        if not is_complete:
            raise ConnectionResetError

    async def _answer(
        self,
        first: str,
        request: dict[str, Any],
        writer: asyncio.StreamWriter,
        token_count: list[int],
    ) -> None:
        chat = "/chat/" in first
        base = {"id": "c-1", "created": 1, "model": request["model"]}
        most = request.get("max_tokens") or request.get("max_completion_tokens")
        count = self._options.words or most or DEFAULT_TOKENS
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
        if not request.get("stream"):
            text = "".join([one async for one in self._words(request, count, token_count)])
            content = (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
            kind = "chat.completion" if chat else "text_completion"
            body = {**base, "object": kind, "choices": [choice], "usage": usage}
            await self._write(writer, self._format_response("200 OK", body))
            return
        base["object"] = "chat.completion.chunk" if chat else "text_completion"
        headers = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        await self._write(writer, f"HTTP/1.1 200 OK\r\n{headers}{self._ends()}".encode())
        async for one in self._words(request, count, token_count):
            await self._event(writer, {**base, "choices": [_build_choice(chat, one, None)]})
        await self._event(writer, {**base, "choices": [_build_choice(chat, "", "length")]})
        if (request.get("stream_options") or {}).get("include_usage"):
            await self._event(writer, {**base, "choices": [], "usage": usage})
        await self._write(writer, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def _words(
        self, request: dict[str, Any], count: int, token_count: list[int]
    ) -> AsyncIterator[str]:
        await asyncio.sleep(self._options.first)
        for number in range(count):
            if number:
                await asyncio.sleep(self._options.pace)
            if request["model"] == "greedy" and number >= GREEDY_FROM:
                self._hoard.append(bytearray(b"x") * (8 << 20))
            yield format_word(number, self._options.size)
            token_count[0] += 1

    async def _event(self, writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(fields).encode() + b"\n\n"
        await self._write(writer, b"%x\r\n%b\r\n" % (len(data), data))

    def _format_response(self, status: str, fields: dict[str, Any]) -> bytes:
        body = json.dumps(fields).encode()
        headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        return f"HTTP/1.1 {status}\r\n{headers}{self._ends()}".encode() + body

    def _ends(self) -> str:
        return "\r\nConnection: close\r\n\r\n" if self._leaving.is_set() else "\r\n\r\n"

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    def _log_event(self, name: str, what: str, token_count: int = 0) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"id": name, "what": what, "tokens": token_count}) + "\n")


def _build_choice(chat: bool, text: str, reason: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"text": text}
    if chat:
        content = {"delta": {"content": text} if text else {}}
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int)
    where.add_argument("--listen")
    parser.add_argument("--first", type=float, default=0.0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--grace", type=float, default=1.0)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--words", type=int, default=0)
    parser.add_argument("--log")
    options = parser.parse_args()
    if options.fd is not None:
        listener = socket.socket(fileno=options.fd)
    else:
        host, _, port = options.listen.rpartition(":")
        listener = socket.create_server((host, int(port)))
    asyncio.run(Worker(options).run(listener))


if __name__ == "__main__":
    main()
