"""The gateways that ``make clients`` starts and names in the environment."""

import os

import pytest

KEY = "sk-clients"


def _named(variable: str) -> str:
    if url := os.environ.get(variable):
        return url
    raise pytest.UsageError(f"{variable} is not set: run these tests by `make clients`")


@pytest.fixture(scope="session")
def gateway() -> str:
    """The URL of the gateway with scripted responses."""
    return _named("SCRIPTED_URL")


@pytest.fixture(scope="session")
def small() -> str:
    """The URL of the gateway with the small built-in models."""
    return _named("BUILT_IN_URL")


@pytest.fixture(scope="session")
def agents() -> str:
    """The URL of the gateway before a worker that calls tools after a script."""
    return _named("AGENTS_URL")


@pytest.fixture
def key() -> str:
    """The API key of the scripted gateway."""
    return KEY
