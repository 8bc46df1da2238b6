"""The load: requests over HTTP, all at once, read as they come, and tokens counted by usage."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_TOKENS = re.compile(rb'"(?:completion_tokens|tokens)": ?(\d+)')
PATIENCE = 300.0
"""Seconds for one answer."""


async def post(port: int, path: str, body: Mapping[str, Any]) -> bytes:
    """The whole answer, framing and all. Raises RuntimeError for any status but 200."""
    data = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(head.encode() + data)
        pieces = []
        async with asyncio.timeout(PATIENCE):
            while piece := await reader.read(1 << 16):
                pieces.append(piece)
    finally:
        writer.close()
    answer = b"".join(pieces)
    if b" 200 " not in answer[:20]:
        raise RuntimeError(f"port {port}: {answer[:600].decode(errors='replace')}")
    return answer


async def complete_prompts(port: int, bodies: Sequence[Mapping[str, Any]]) -> int:
    """All of these at once; how many tokens were made."""
    answers = await asyncio.gather(*(post(port, "/v1/completions", body) for body in bodies))
    return sum(map(count_tokens, answers))


def count_tokens(answer: bytes) -> int:
    """The tokens of one answer, by the last usage in it."""
    matches = _TOKENS.findall(answer)
    if not matches:
        raise RuntimeError(f"no usage in {answer[-300:].decode(errors='replace')}")
    return int(matches[-1])


async def is_listening(port: int) -> bool:
    """Whether something answers there at all."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
