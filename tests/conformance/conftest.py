"""Plays a protocol's cases against a gateway on a real socket, over the scripted echo."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import yaml

from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.json_body import encode_ascii
from tests.conformance import cases
from tests.conformance.cases import Case, ProtocolSetup, Response
from tests.conftest import CONFORMANCE, Serve

Play = Callable[[str, Case], Awaitable[list[Response]]]


def configuration(protocol: str, case: Case) -> tuple[str, str]:
    """The built-in configuration, with the listener that meets the case, and the mount's prefix.

    Raises LookupError: a case that nothing there meets would never be played by a user either.
    """
    config: dict[str, Any] = yaml.safe_load(CONFORMANCE)
    profiles = ProtocolRegistry(PROTOCOLS).get_profiles(protocol)
    for listener in config["listeners"]:
        for name, prefix, setup in mounts(listener, profiles):
            if name == protocol and not setup.missing(case):
                config["listeners"] = [listener]
                # In ASCII, since YAML folds some of Unicode's line ends.
                return encode_ascii(config).decode(), prefix
    raise LookupError(f"no listener of the built-in configuration meets {case.id}")


def mounts(listener: Any, profiles: tuple[str, ...]) -> list[tuple[str, str, ProtocolSetup]]:
    """Name, prefix and setup of each protocol of a listener."""
    found = []
    for one in listener["protocols"]:
        options = dict(one) if isinstance(one, dict) else {"name": one}
        name, prefix = options.pop("name"), options.pop("prefix", "")
        setup = ProtocolSetup(
            profiles=profiles,
            profile=options.pop("profile", None),
            options=options,
            alone=len(listener["protocols"]) == 1,
        )
        found.append((name, prefix, setup))
    return found


@pytest.fixture
def play(serve: Serve) -> Play:
    """Plays one case of a protocol against a fresh gateway. Raises Mismatch."""

    async def run(protocol: str, case: Case) -> list[Response]:
        random.seed(102)  # splits draw from here
        text, prefix = configuration(protocol, case)
        gateway = await serve(text)
        async with httpx.AsyncClient(base_url=gateway.url + prefix, timeout=30) as http:
            return await cases.play(http, case)

    return run
