"""Stages from other packages see every point of a request; their errors fail or reject it."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState, RouteStage, Stage
from gateway.pipeline.strategies import TargetAttempt
from gateway.routing.router import Model, Router
from gateway.runtime.gateway import Gateway, build_services
from protocols.core.errors import ClientError
from protocols.core.events import Event
from protocols.core.interfaces import Headers

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  up: {kind: echo, script: ["Hi", " you"]}
  down: {kind: echo, fail: {mode: unavailable}}
models:
  chat: {backend: up}
  tries: {backend: down, fallback: [chat]}
  routed: {backend: up}
  "any/*": {backend: up}
routes:
  - {name: elsewhere, when: {model: routed}, to: {model: chat}}
"""
POINTS = ("found", "read", "routed", "admitted", "attempt", "events", "headers", "data", "end")


class EveryPoint(Stage):
    """A stage that records the points in order, and raises an error at one of them."""

    observes_response = True
    observes_events = True

    def __init__(self, fails_at: str = "", error: type[Exception] = ValueError) -> None:
        self.seen: list[str] = []
        self.record: Any = None
        self._fails_at = fails_at
        self._error = error

    def build(self, router: Router, settings: HandlerSettings) -> Stage:
        del router, settings
        return self

    def _note(self, point: str) -> None:
        if point not in self.seen[-1:]:
            self.seen.append(point)
        if point == self._fails_at:
            raise self._error(f"at {point}")

    def on_found(self, request: RequestState) -> None:
        assert request.match.endpoint.path == "/v1/chat/completions"
        self._note("found")

    def on_read(self, request: RequestState) -> None:
        assert request.client_request.body
        self._note("read")

    def on_routed(self, request: RequestState) -> None:
        assert request.route.target.version == "1"
        self._note("routed")

    def on_admitted(self, request: RequestState) -> None:
        assert "RequestState" in repr(request)
        self._note("admitted")

    def on_attempt(self, request: RequestState, attempt: TargetAttempt) -> None:
        assert request.record.model in repr(attempt)
        self._note("attempt")

    def on_events(self, _: RequestState, events: Sequence[Event]) -> None:
        if events:
            self._note("events")

    def add_headers(self, _: RequestState, status: int) -> Headers:
        self._note("headers")
        return (("x-seen", str(status)),)

    def on_data(self, _: RequestState, data: bytes, *, is_whole: bool) -> None:
        assert data or not is_whole
        self._note("data")

    def on_end(self, request: RequestState) -> None:
        self.record = request.record
        self._note("end")


class RouteOfChat(EveryPoint, RouteStage):
    """A stage of requests to one model."""

    def observes_model(self, model: Model) -> bool:
        return model.info.name == "chat"


async def send_chat(*stages: EveryPoint, model: str = "chat", stream: bool = False) -> Any:
    """Send a chat request to a gateway with these stages, and return the response."""
    factories = tuple(stage.build for stage in stages)
    services = replace(build_services(), stage_factories=factories)
    gateway = Gateway(load_text(CONFIG, "gateway.yaml", env={}), services)
    [url] = await gateway.start()
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            return await client.post("/v1/chat/completions", json=body)
    finally:
        await gateway.stop()


async def test_stage_sees_every_point_of_an_unary_request_in_order() -> None:
    stage = EveryPoint()
    response = await send_chat(stage)

    assert response.status_code == 200
    assert response.headers["x-seen"] == "200"
    assert stage.seen == list(POINTS)
    assert (stage.record.status, stage.record.outcome) == (200, "ok")


async def test_stage_sees_every_point_of_a_stream() -> None:
    stage = EveryPoint()
    response = await send_chat(stage, stream=True)

    assert response.text.rstrip().endswith("data: [DONE]")
    assert list(dict.fromkeys(stage.seen)) == list(POINTS)
    assert stage.seen[-1] == "end"


async def test_stage_sees_an_attempt_at_each_target() -> None:
    stage = EveryPoint()
    response = await send_chat(stage, model="tries")

    assert response.status_code == 200
    assert stage.record.fallback_from == "tries@1"
    assert stage.seen[:4] == ["found", "read", "routed", "admitted"]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("point", POINTS)
async def test_fault_of_a_stage_fails_no_request_and_no_other_stage(
    point: str, *, stream: bool
) -> None:
    is_late = POINTS.index(point) > POINTS.index("attempt")  # the response has started
    error: type[Exception] = ClientError if is_late else ValueError
    broken, other = EveryPoint(point, error), EveryPoint()

    response = await send_chat(broken, other, stream=stream)

    assert response.status_code == 200
    assert "Hi" in response.text
    assert broken.seen[-1] == point  # a failed stage gets no further calls
    assert list(dict.fromkeys(other.seen)) == list(POINTS)


@pytest.mark.parametrize("point", ["found", "read", "routed", "admitted", "attempt"])
async def test_stage_refuses_a_request_before_its_response_in_the_callers_protocol(
    point: str,
) -> None:
    stage, other = EveryPoint(fails_at=point, error=ClientError), EveryPoint()
    response = await send_chat(stage, other)

    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"at {point}"
    assert "events" not in other.seen
    assert other.seen[-1] == "end"
    assert other.record.outcome == "client_error"


@pytest.mark.parametrize(
    ("model", "is_observed"),
    [("chat", True), ("tries", False), ("routed", True), ("any/thing", True)],
)
async def test_stage_of_a_route_gets_the_requests_of_its_models_from_the_routing_on(
    model: str, *, is_observed: bool
) -> None:
    """A request that a rule or a wildcard sends elsewhere has the stages of all models."""
    stage = RouteOfChat()
    response = await send_chat(stage, model=model)

    assert response.status_code == 200
    assert stage.seen == (list(POINTS[2:]) if is_observed else [])


async def test_stage_of_a_route_that_no_model_needs_gets_no_request() -> None:
    class Unneeded(EveryPoint, RouteStage):
        def observes_model(self, model: Model) -> bool:
            del model
            return False

    stage = Unneeded()
    assert (await send_chat(stage, model="any/thing")).status_code == 200
    assert stage.seen == []
