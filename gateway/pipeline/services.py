"""What the pipeline is given: the services that all requests share, and a listener's settings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from backends.interfaces import Timeouts
from gateway.auth.api_keys import Principal
from gateway.auth.failed_keys import FailedKeyThrottle
from gateway.observability.record import RecordObserver
from gateway.observability.recording_writer import RequestRecorder
from gateway.pipeline.answer_judge import AnswerJudge
from gateway.pipeline.http import HttpRequest
from gateway.pipeline.shadow import ShadowManager
from gateway.pipeline.state import Stage
from gateway.ratelimit.counters import CounterRegistry
from gateway.routing.router import Router
from gateway.store.references import ReferenceLoader
from protocols.core.errors import GatewayError
from protocols.core.interfaces import Clock, HttpResponse
from protocols.core.json_counts import BodyCounts


class HandlerSettings(Struct, frozen=True):
    """The settings of a listener's requests. ``max_body_size`` is in bytes."""

    max_body_size: int = 8 << 20
    body_counts: BodyCounts = BodyCounts()
    timeouts: Timeouts = Timeouts()
    allow_protocol_header: bool = False
    """Whether a request header may select the protocol of a path that several have."""
    explain_without_key: bool = False
    """Whether requests without a key may request an explanation."""
    config_hash: str = ""
    """The configuration's hash, for the access log."""
    default_model: str = ""
    """The model of forwarded requests that name none; "" if they are refused."""


StageFactory = Callable[[Router, HandlerSettings], Stage]
"""Makes a stage of a listener when its configuration is built."""


class BackgroundRequests(Protocol):
    """Requests of the gateway's own, such as shadow traffic."""

    async def wait_idle(self) -> None:
        """Wait for those that are running now."""


class OwnEndpoint(Protocol):
    """An endpoint of the gateway that belongs to no protocol: the same on every listener."""

    async def answer(self, http: HttpRequest, principal: Principal | None) -> HttpResponse:
        """The response. Raises GatewayError."""

    def build_error(self, error: GatewayError) -> HttpResponse:
        """The response for an error."""


class GatewayServices(Struct, frozen=True):
    """The services that all requests share; a test passes in its own."""

    clock: Clock
    wall_clock: Callable[[], float]
    """Unix seconds."""
    new_id: Callable[[], str]
    draw: Callable[[], float]
    """A random number in [0, 1), for traffic splits."""
    observe_request: RecordObserver
    shadow_manager: ShadowManager
    counter_registry: CounterRegistry
    """The usage of the keys' limits."""
    stage_factories: tuple[StageFactory, ...] = ()
    """The features beside the path, in the order in which they observe a request."""
    own_endpoints: Mapping[str, OwnEndpoint] = {}
    """By path; a protocol that has the path comes first."""
    failed_keys: FailedKeyThrottle | None = None
    """Throttles requests with wrong API keys; None if they are answered all alike."""
    dropped_counts: Mapping[str, Callable[[], int]] = {}
    """Counts dropped log lines, usage rows and traces; see ``observability.metrics.system``."""
    request_recorder: RequestRecorder | None = None
    """Writes what is recorded of requests."""
    answer_judge: AnswerJudge | None = None
    """Has answers judged, if feedback is stored."""
    reference_loader: ReferenceLoader | None = None
    """Loads what requests to stateful endpoints refer to, if responses are stored at all."""

    def list_background(self) -> Sequence[BackgroundRequests]:
        """What sends requests of the gateway's own."""
        return [self.shadow_manager, *([] if self.answer_judge is None else [self.answer_judge])]
