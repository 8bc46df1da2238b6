"""openai-python, unmodified, with a gateway in a process of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.gateway_process import SCRIPTED, run_built_in_models, run_gateway

KEY = "sk-clients"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def gateway() -> Iterator[str]:
    """The URL of the gateway with scripted responses."""
    with run_gateway(SCRIPTED) as url:
        yield url


@pytest.fixture
def client(gateway: str) -> Iterator[OpenAI]:
    """A client without retries, so that a test sees the gateway's response."""
    with OpenAI(base_url=f"{gateway}/v1", api_key=KEY, max_retries=0) as one:
        yield one


@pytest.fixture
async def later(gateway: str) -> AsyncIterator[AsyncOpenAI]:
    """The same client, asynchronous."""
    async with AsyncOpenAI(base_url=f"{gateway}/v1", api_key=KEY, max_retries=0) as one:
        yield one


@pytest.fixture(scope="session")
def small() -> Iterator[OpenAI]:
    """A client of the small built-in models."""
    with run_built_in_models() as url, OpenAI(base_url=f"{url}/v1", api_key="none") as one:
        yield one
