import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The client runs over both: their transports differ in when they tell what."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
