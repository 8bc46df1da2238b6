"""The load: concurrent HTTP requests, with tokens counted by usage."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_TOKENS = re.compile(rb'"(?:completion_tokens|tokens)": ?(\d+)')
PATIENCE = 300.0
"""Timeout of a response in seconds."""


async def post(port: int, path: str, body: Mapping[str, Any]) -> bytes:
    """Return the raw response. Raises RuntimeError for any status but 200."""
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
    response = b"".join(pieces)
    if b" 200 " not in response[:20]:
        raise RuntimeError(f"port {port}: {response[:600].decode(errors='replace')}")
    return response


async def complete_prompts(port: int, bodies: Sequence[Mapping[str, Any]]) -> int:
    """Send all prompts at once; return the number of generated tokens."""
    answers = await asyncio.gather(*(post(port, "/v1/completions", body) for body in bodies))
    return sum(map(count_tokens, answers))


def count_tokens(answer: bytes) -> int:
    """Return the tokens of one response, by its last usage."""
    matches = _TOKENS.findall(answer)
    if not matches:
        raise RuntimeError(f"no usage in {answer[-300:].decode(errors='replace')}")
    return int(matches[-1])


async def accepts_connections(port: int) -> bool:
    """Return whether a server accepts connections there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
