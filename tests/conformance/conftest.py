"""Runs a protocol's cases against a gateway on a real socket with scripted models."""

import random
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.json_text import encode_ascii
from tests.conformance import cases
from tests.conformance.cases import Case, ProtocolSetup, Response
from tests.conftest import CONFORMANCE, RunningGateway, Serve

RunCase = Callable[[str, Case], Awaitable[list[Response]]]
FindGateway = Callable[[str, Case], Awaitable[tuple[RunningGateway, str]]]


@cache
def read_config() -> dict[str, Any]:
    """Decode the built-in configuration once."""
    config: dict[str, Any] = yaml.load(CONFORMANCE, Loader=yaml.CSafeLoader)
    return config


def configuration(protocol: str, case: Case) -> tuple[str, str]:
    """Return the built-in configuration with the listener for the case, and its path prefix.

    Raises LookupError: users could not run a case for which no listener exists either.
    """
    config = read_config()
    profiles = ProtocolRegistry(PROTOCOLS).get_profiles(protocol)
    for listener in config["listeners"]:
        for name, prefix, setup in mounts(listener, profiles):
            if name == protocol and not setup.missing(case):
                # ASCII, since YAML folds some of Unicode's line ends.
                return encode_ascii(config | {"listeners": [listener]}).decode(), prefix
    raise LookupError(f"no listener of the built-in configuration meets {case.id}")


def mounts(listener: Any, profiles: tuple[str, ...]) -> list[tuple[str, str, ProtocolSetup]]:
    """Return name, prefix and setup of each protocol of a listener."""
    setups = []
    for one in listener["protocols"]:
        options = dict(one) if isinstance(one, dict) else {"name": one}
        name, prefix = options.pop("name"), options.pop("prefix", "")
        setup = ProtocolSetup(
            profiles=profiles,
            profile=options.pop("profile", None),
            options=options,
            alone=len(listener["protocols"]) == 1,
        )
        setups.append((name, prefix, setup))
    return setups


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def find_gateway(serve_module: Serve) -> FindGateway:
    """Returns the gateway and the base URL for a case; no case depends on an earlier one.

    All cases of a module that need the same listener share its gateway.
    """
    gateways: dict[str, RunningGateway] = {}

    async def find(protocol: str, case: Case) -> tuple[RunningGateway, str]:
        text, prefix = configuration(protocol, case)
        if text not in gateways:
            gateways[text] = await serve_module(text)
        return gateways[text], gateways[text].url + prefix

    return find


@pytest.fixture
def run_case(find_gateway: FindGateway) -> RunCase:
    """Runs one case of a protocol. Raises Mismatch."""

    async def run(protocol: str, case: Case) -> list[Response]:
        random.seed(102)  # seeds the traffic splits
        _, url = await find_gateway(protocol, case)
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            return await cases.run_case(http, case)

    return run
