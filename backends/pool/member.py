"""A worker of a pool, and what is known of it now."""

import logging
from typing import Final, Protocol

from msgspec import Struct, field

from backends.pool.health import Health, State
from backends.pool.smooth import Smoothed
from backends.upstream import Worker
from gateway.core.context import Clock
from gateway.core.errors import (
    ClientError,
    DeadlineExceeded,
    GatewayError,
    Overloaded,
    RateLimited,
    StreamBroken,
    WorkerError,
    WorkerFailed,
    WorkerUnreachable,
)

log = logging.getLogger("interlingua")

_SERVER_ERROR: Final = 500
_CLIENT_ERRORS: Final = range(400, _SERVER_ERROR)


class WorkerReport(Struct, frozen=True):
    """How a worker is, for people and for other programs.

    ``state`` is ``up``, ``trial`` (one request at a time) or ``out``, and then for ``back_in``
    seconds more, where that is known. ``latency`` is in seconds to the first token. ``error`` is
    the kind of its last failure: ``connect``, ``first_token``, ``idle``, ``cut``, ``garbage``, or a
    status. ``weight`` is what counts now.
    """

    url: str
    state: str
    in_flight: int
    limit: int | None
    latency: float | None
    back_in: float | None
    error: str
    weight: float


class Waiting(Protocol):
    """Whoever waits for a worker."""

    def give_up(self) -> None:
        """Wait no longer."""


class Member(Struct, eq=False):
    """A worker, and what is known of it now. ``gone``: no longer of the pool."""

    key: int
    worker: Worker
    health: Health
    clock: Clock
    smoothed: Smoothed = field(default_factory=Smoothed)
    in_flight: int = 0
    gone: bool = False
    learned: set[str] = field(default_factory=set[str])
    """The models that it was asked about since it was last out."""
    told: dict[str, int] = field(default_factory=dict[str, int])
    """How many requests it said that it takes, by model."""
    error: str = ""
    """The kind of its last failure."""
    was: State = "up"
    """Its state when something last happened to it."""
    waiting: set[Waiting] = field(default_factory=set[Waiting])
    """The requests that have heard nothing from it yet."""

    @property
    def name(self) -> str:
        """What it is to policies that place by name: the same whenever it comes back."""
        return self.worker.url

    @property
    def weight(self) -> float:
        """As configured, and less while it warms up."""
        return self.worker.weight * self.health.share(self.clock())

    @property
    def latency(self) -> float | None:
        """Seconds to the first token, of late."""
        return self.smoothed.value(self.clock())

    @property
    def limit(self) -> int | None:
        """The most requests that it is given now."""
        most = self.worker.max_concurrency
        if self.told:
            told = max(self.told.values())
            most = told if most is None else min(most, told)
        return self.health.limit(most, self.in_flight)

    def has_room(self) -> bool:
        """Whether it has a place left: no property, which would cost twice as much."""
        most = self.limit if self.told or not self.health.well else self.worker.max_concurrency
        return most is None or self.in_flight < most

    # --- what happened ----------------------------------------------------------------------------

    def reached(self) -> None:
        """It began to answer, whatever that will be."""
        self.health.reached(self.clock())
        self._look()

    def succeeded(self) -> None:
        """It answered a request to the end."""
        self.health.succeeded(self.clock())
        if not self.health.well or self.was != "up":
            self._look()

    def failed(self, error: GatewayError, *, pushed_back: bool = False) -> None:
        """It answered a request with ``error``; ``pushed_back``: and said that it has too much.

        What a client did wrong is an answer, and no failure; that its time ran out is neither.
        """
        now = self.clock()
        pushed_back = pushed_back or isinstance(error, RateLimited)
        match error:
            case WorkerUnreachable():
                self.health.unreachable(now)
            case RateLimited() | Overloaded() if pushed_back:
                self.health.limit(None, self.in_flight)  # it shrinks from what it has
                self.health.pressed(now, error.retry_after)
            case WorkerFailed(status=int() as status) if status in _CLIENT_ERRORS:
                pass  # it is well, and was not asked rightly
            case Overloaded() | WorkerError() | DeadlineExceeded(which="first_token" | "idle"):
                self.health.failed(now)
            case ClientError():
                self.health.succeeded(now)
            case _:
                return
        if not isinstance(error, ClientError) or isinstance(error, RateLimited):
            self.error = kind(error)
        self._look(error.__cause__ or error)

    def probed(self, *, ok: bool) -> None:
        """It answered a probe as it should, or did not."""
        self.health.probed(self.clock(), ok)
        if not ok:
            self.learned.clear()
        self._look("its probes fail")

    def forsake(self) -> None:
        """Let those who have heard nothing from it yet wait no longer."""
        for one in tuple(self.waiting):
            one.give_up()

    def report(self) -> WorkerReport:
        """How it is now."""
        now = self.clock()
        until = self.health.until(now)
        return WorkerReport(
            self.worker.url,
            self.health.state(now),
            self.in_flight,
            self.limit,
            self.latency,
            None if until is None else until - now,
            self.error,
            self.weight,
        )

    def _look(self, why: object = None) -> None:
        """Tell of a change: whether it is in or out."""
        now = self.clock()
        state = self.health.state(now)
        if state == "out" != self.was:
            self.learned.clear()
            until = self.health.until(now)
            long = "a while" if until is None else f"{until - now:.3g} s"
            log.warning("worker %s is left alone for %s: %s", self.worker.url, long, why)
        elif state == "up" != self.was:
            log.warning("worker %s is back", self.worker.url)
        self.was = state


def kind(error: GatewayError) -> str:
    """What a worker failed with, in a word: see ``WorkerReport.error``."""
    match error:
        case WorkerUnreachable():
            return "connect"
        case DeadlineExceeded(which=which):
            return which
        case StreamBroken():
            return "cut"
        case RateLimited():
            return "429"
        case WorkerFailed(status=int() as status):
            return str(status)
        case Overloaded():
            return "503"
        case _:
            return "garbage"
