"""A minimal HTTP server in Python: the lower bound of a gateway's CPU time.

``bare_server.py PORT``. It parses only the length, has no worker, and does not stream.
"""

import asyncio
import sys
import time
from typing import cast

import uvloop

_BODY = '{"choices":[{"message":{"content":"%s @000%014d"}}]}'
_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class BareServer(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if separator and len(body) >= length and self._transport is not None:
            self._data = b""
            response = _BODY % ("brown fox" * 100, time.monotonic_ns() // 1000)
            self._transport.write((_HEAD % len(response) + response).encode())


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(
        BareServer, "127.0.0.1", int(sys.argv[1])
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
