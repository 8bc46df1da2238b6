"""Where the gateways are: ``make clients`` starts them and says so in the environment."""

import os

import pytest

KEY = "sk-clients"


def _named(variable: str) -> str:
    if url := os.environ.get(variable):
        return url
    raise pytest.UsageError(f"{variable} is not set: run these tests by `make clients`")


@pytest.fixture(scope="session")
def gateway() -> str:
    """The URL of the gateway with scripted answers."""
    return _named("SCRIPTED_URL")


@pytest.fixture(scope="session")
def small() -> str:
    """The URL of the gateway with the small built-in models."""
    return _named("BUILT_IN_URL")


@pytest.fixture
def key() -> str:
    """What the scripted gateway wants to be shown."""
    return KEY
