"""An estimated number of tokens reports each key that the gateway does not know, or is refused."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conftest import RunningGateway, Serve
from tests.property.test_unknown_keys import (
    MESSAGES,
    RESPONSES,
    add_key,
    is_reported,
    list_places,
)
from tests.support.fakes import ScriptedWorker

ENDPOINTS = [
    ("/v1/messages/count_tokens", {k: one for k, one in MESSAGES.items() if k != "max_tokens"}),
    ("/v1/responses/input_tokens", RESPONSES),
]
LOSS = "x-interlingua-loss"
FREE_OBJECTS = {("tools", "input_schema"), ("tools", "parameters"), ("messages", "input")}
"""Objects that have any keys: all of them are counted."""


def is_free(place: tuple[Any, ...]) -> bool:
    return any((place[0], step) in FREE_OBJECTS for step in place[1:])


@pytest.fixture
async def gateway(serve: Serve) -> AsyncIterator[RunningGateway]:
    """A gateway whose worker counts no tokens; the models differ by ``on_loss``."""
    async with ScriptedWorker([]) as worker:
        config = {
            "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai", "anthropic"]}],
            "backends": {"w": {"protocol": "openai", "profile": "openai", "workers": [worker.url]}},
            "models": {
                rule: {"backend": "w", "on_loss": rule} for rule in ("report", "reject", "ignore")
            },
            "limits": {"shutdown_delay": "0s", "drain_timeout": "1s"},
        }
        yield await serve(json.dumps(config))


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_an_estimate_reports_an_unknown_key_at_any_level(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    lost = []

    for place in list_places(body):
        if is_free(place):
            continue
        changed = {**add_key(body, place), "model": "report"}
        response = await gateway.http.post(path, json=changed)
        if response.status_code != 200:
            assert response.status_code == 400
            continue
        fields = [one.partition("=")[0] for one in response.headers[LOSS].split(",")]
        assert fields[0] == "input_tokens"
        if not is_reported(place, fields):
            lost.append(place)

    assert lost == []


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("headers", [{}, {"x-interlingua-strict": "1"}])
async def test_a_model_that_rejects_losses_gets_no_estimate(
    gateway: RunningGateway, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    model = "report" if headers else "reject"
    response = await gateway.http.post(path, json={**body, "model": model}, headers=headers)

    assert response.status_code in (400, 404)
    assert "token" in response.json()["error"]["message"].lower()


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_model_that_ignores_losses_reports_none(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    response = await gateway.http.post(path, json={**body, "model": "ignore"})

    assert response.status_code == 200
    assert LOSS not in response.headers
