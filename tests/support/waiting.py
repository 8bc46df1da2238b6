"""Waiting for what a test does not cause itself. On a loaded machine anything may take seconds."""

import asyncio
from collections.abc import Callable
from typing import Final

PATIENCE: Final = 30.0
"""Seconds within which everything happens that happens at all."""


async def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
