"""A worker that serves OpenAI's chat completions and is scripted in Python.

    async with ChatWorker(answer) as worker:
        ...  # send requests to worker.url
    assert worker.bodies[0]["model"] == "m"

``answer`` receives the body of each request and returns the model's answer to it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from msgspec import Struct

from tests.support.web_server import run_web_server

Json = dict[str, Any]


class Answer(Struct, frozen=True, kw_only=True):
    """A model's answer: pieces of reasoning, of text, and of each tool call's arguments.

    A number in the text is a pause in seconds, and None closes the connection. Each of ``calls``
    has a name, an id and pieces of arguments; the pieces of several calls are interleaved.
    """

    text: tuple[str | float | None, ...] = ()
    reasoning: tuple[str, ...] = ()
    calls: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    reason: str = "stop"
    prompt_tokens: int = 1
    cached_tokens: int | None = None
    status: int = 200
    headers: Mapping[str, str] = {}
    error: str = ""

    @property
    def usage(self) -> Json:
        """Each piece counts as one token."""
        token_count = len([piece for piece in self.text if isinstance(piece, str)]) + len(
            self.reasoning
        )
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": token_count,
            "total_tokens": self.prompt_tokens + token_count,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


class ChatWorker:
    """Listens on a loopback port inside ``async with``."""

    def __init__(self, answer: Callable[[Json], Answer]) -> None:
        self._answer = answer
        self._open = AsyncExitStack()
        self.url = ""
        self.bodies: list[Json] = []
        """The bodies of the requests received."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 25)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/tokenize", self._count_tokens)
        self.url = await self._open.enter_async_context(run_web_server(app))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open.aclose()

    async def _list_models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": []})

    @staticmethod
    async def _count_tokens(request: web.Request) -> web.Response:
        """Answer vLLM's /tokenize as if each message and each tool were one token."""
        body = await request.json()
        count = len(body["messages"]) + len(body.get("tools", ()))
        return web.json_response({"count": count, "max_model_len": 99, "tokens": [0] * count})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = self._answer(body)
        if response.status != 200:
            error = {"error": {"message": response.error, "type": "x", "param": None, "code": None}}
            return web.json_response(error, status=response.status, headers=response.headers)
        if body.get("stream"):
            return await self._stream(request, body, response)
        return web.json_response(self._build_unary(body, response))

    @staticmethod
    def _build_unary(body: Json, answer: Answer) -> Json:
        message: Json = {
            "role": "assistant",
            "content": "".join(piece for piece in answer.text if isinstance(piece, str)) or None,
        }
        if answer.reasoning:
            message["reasoning_content"] = "".join(answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": identifier,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(pieces)},
                }
                for name, identifier, pieces in answer.calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": answer.reason}
        return {**_head(body, "chat.completion"), "choices": [choice], "usage": answer.usage}

    async def _stream(self, request: web.Request, body: Json, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for delta in _iterate_deltas(answer):
            if delta is None:
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(_format_chunk(body, delta, None))
        await response.write(_format_chunk(body, {}, answer.reason))
        usage = {**_head(body, "chat.completion.chunk"), "choices": [], "usage": answer.usage}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response


async def _iterate_deltas(answer: Answer) -> AsyncIterator[Json | None]:
    yield {"role": "assistant", "content": ""}
    for piece in answer.reasoning:
        yield {"reasoning_content": piece}
    for text in answer.text:
        if isinstance(text, float):
            await asyncio.sleep(text)
        else:
            yield None if text is None else {"content": text}
    for index, (name, identifier, _) in enumerate(answer.calls):
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": identifier, "type": "function", "function": function}
        yield {"tool_calls": [call]}
    for turn in range(max((len(call[2]) for call in answer.calls), default=0)):
        for index, (_, _, pieces) in enumerate(answer.calls):
            if turn < len(pieces):
                yield {"tool_calls": [{"index": index, "function": {"arguments": pieces[turn]}}]}


def _format_chunk(body: Json, delta: Json, reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    chunk = {**_head(body, "chat.completion.chunk"), "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _head(body: Json, kind: str) -> Json:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}
