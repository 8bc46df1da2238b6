"""Posts the moves of rollouts to the webhook of their configuration.

What is posted is the move alone: no request, no key, nothing else of the configuration. Redirects
are not followed, proxies of the environment are not used, and the URL, which may be secret, is in
no log line.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger("interlingua.rollout")
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs the URL of each request
_DELAYS: Final = (0.0, 1.0, 5.0)
"""Seconds before each attempt."""
_TIMEOUT: Final = 5.0
"""Seconds for one attempt."""
_MAX_WAITING: Final = 100
"""Moves that are being posted; a further one is dropped."""
_SUCCESS: Final = range(200, 300)


class RolloutWebhook:
    """Posts in the background, each move at most three times."""

    def __init__(self) -> None:
        self._tasks = set[asyncio.Task[None]]()

    def post(self, url: str, move: dict[str, Any]) -> None:
        """Post a move soon."""
        if len(self._tasks) >= _MAX_WAITING:
            _log.warning("rollout of %s: the webhook is too slow; a move is dropped", move["model"])
            return
        task = asyncio.get_running_loop().create_task(self._post(url, move))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Give up what is not posted yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _post(self, url: str, move: dict[str, Any]) -> None:
        import httpx  # noqa: PLC0415 - only with a webhook

        problem = ""
        async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False) as client:
            for delay in _DELAYS:
                await asyncio.sleep(delay)
                problem = await _send(client, url, msgspec.json.encode(move))
                if not problem:
                    return
        host = urlsplit(url).hostname
        _log.warning("rollout of %s: the webhook at %s failed: %s", move["model"], host, problem)


async def _send(client: "httpx.AsyncClient", url: str, body: bytes) -> str:
    """Post once; returns what went wrong, or ""."""
    import httpx  # noqa: PLC0415 - only with a webhook

    headers = {"content-type": "application/json"}
    try:
        async with asyncio.timeout(_TIMEOUT):
            async with client.stream("POST", url, content=body, headers=headers) as response:
                status = response.status_code  # the body is not read
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return type(error).__name__
    return "" if status in _SUCCESS else f"status {status}"
