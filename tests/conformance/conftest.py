"""Plays a dialect's cases against a gateway on a real socket, over the scripted echo."""

import hashlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from gateway.conformance import cases
from gateway.conformance.cases import KEY, Answer, Case
from tests.conftest import HERE, MOCK, Serve

Play = Callable[[str, Case], Awaitable[list[Answer]]]


def configuration(dialect: str, case: Case) -> tuple[str, str]:
    """The configuration that a case is played against, and the prefix of the dialect's paths."""
    own = HERE / f"{dialect}.yaml"
    config: dict[str, Any] = yaml.safe_load(own.read_text("utf-8") if own.is_file() else MOCK)
    config["keys"] = [{"name": "conformance", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
    mounts: list[Any] = config["listeners"][0]["dialects"]
    mount = next(one for one in map(as_mount, mounts) if one["name"] == dialect)
    if case.alone or case.needs or case.profile:
        mount = {"name": dialect, **case.needs}
        if case.profile:
            mount["profile"] = case.profile
        mounts[:] = [mount]
    return msgspec.json.encode(config).decode(), mount.get("prefix", "")


def as_mount(one: Any) -> dict[str, Any]:
    """A listener's dialect in its long form."""
    return one if isinstance(one, dict) else {"name": one}


@pytest.fixture
def play(serve: Serve) -> Play:
    """Plays one case of a dialect against a fresh gateway. Raises Mismatch."""

    async def run(dialect: str, case: Case) -> list[Answer]:
        random.seed(102)  # splits draw from here
        text, prefix = configuration(dialect, case)
        gateway = await serve(text)
        async with httpx.AsyncClient(base_url=gateway.url + prefix, timeout=30) as http:
            return await cases.play(http, case)

    return run
