"""Load balancing policies. Pure: no clock, no I/O; randomness is a parameter.

round_robin  each worker in turn, by weight
least_load   the worker with the fewest requests for its weight
two_choices  of two random workers, the one with the lower expected wait (requests x latency)
prefix       consistent hashing by the beginning of the prompt, with bounded load
session      consistent hashing by the session, with bounded load
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Literal, Protocol, TypeVar

from msgspec import Struct

from backends.interfaces import RequestContext
from protocols.core.request import (
    AnyRequest,
    ClassifyRequest,
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Prompt,
    RerankRequest,
)

PolicyName = Literal["round_robin", "least_load", "two_choices", "prefix", "session"]
RandomDraw = Callable[[], float]
"""Returns a random number in [0, 1)."""

_PREFIX_CHARACTERS: Final = 1024
_PREFIX_TOKENS: Final = 256
_MAX_CACHED_KEYS: Final = 64
_SESSION_LABELS: Final = ("prompt_cache_key", "user", "safety_identifier")


class WorkerLoad(Protocol):
    """What a policy reads of a worker."""

    @property
    def key(self) -> int:
        """The worker's key, unique within the pool's lifetime."""

    @property
    def name(self) -> str:
        """The worker's stable name on every machine and after every start: its URL."""

    @property
    def weight(self) -> float:
        """The relative weight, greater than 0."""

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""

    @property
    def latency(self) -> float | None:
        """The smoothed time to the first token in seconds; None if unknown."""


WorkerLoadT = TypeVar("WorkerLoadT", bound=WorkerLoad)


class RoutingKey(Struct, frozen=True):
    """What a policy reads of a request: ``hash_prefix`` and the session."""

    prefix: int | None = None
    session: str | None = None


NO_ROUTING_KEY: Final = RoutingKey()


class PolicyScores(Struct, frozen=True):
    """The workers' scores by key, and which score wins; ``drawn``: the least of two random ones.

    A worker that is not compared has no score.
    """

    winner: Literal["least", "most", "drawn"]
    by_worker: Mapping[int, float]


class LoadBalancingPolicy(Protocol):
    """Picks one of the available workers, of which there is at least one."""

    def pick_worker(
        self, loads: Sequence[WorkerLoadT], routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> WorkerLoadT:
        """The chosen worker."""

    def score_workers(
        self, loads: Sequence[WorkerLoad], routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> PolicyScores:
        """The scores that the next pick would compare. It has no side effects."""


class RoundRobin:
    """Smooth weighted round robin (as in nginx): a a b a, not a a a b.

    At each pick every worker's credit grows by its weight; the worker with the most credit is
    picked and pays the sum of the weights. Unavailable workers neither gain nor pay.
    """

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}

    def pick_worker(
        self, loads: Sequence[WorkerLoadT], _routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> WorkerLoadT:
        """The worker with the most credit; the first of equals."""
        if len(loads) == 1:
            return loads[0]  # gains and pays the same
        credit = self._credit
        credit.update(self._add_credit(loads))
        richest = max(loads, key=lambda load: credit[load.key])
        credit[richest.key] -= sum(load.weight for load in loads)
        if len(credit) > _MAX_CACHED_KEYS + 2 * len(loads):  # drop workers that were removed
            self._credit = {load.key: credit[load.key] for load in loads}
        return richest

    def score_workers(
        self, loads: Sequence[WorkerLoad], _routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> PolicyScores:
        """The credit that each would have."""
        return PolicyScores("most", self._add_credit(loads))

    def _add_credit(self, loads: Sequence[WorkerLoad]) -> dict[int, float]:
        return {load.key: self._credit.get(load.key, 0.0) + load.weight for load in loads}


class LeastLoad:
    """The worker with the fewest requests for its weight; equals take turns."""

    def __init__(self) -> None:
        self._round_robin = RoundRobin()

    def pick_worker(
        self, loads: Sequence[WorkerLoadT], _routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> WorkerLoadT:
        """The least loaded worker."""
        if len(loads) == 1:
            return loads[0]
        loads_after = [_compute_load_after(load) for load in loads]
        lowest = min(loads_after)
        return self._round_robin.pick_worker(
            [load for load, n in zip(loads, loads_after, strict=True) if n == lowest]
        )

    def score_workers(
        self, loads: Sequence[WorkerLoad], _routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> PolicyScores:
        """The load (requests by weight) that each would have."""
        return PolicyScores("least", {load.key: _compute_load_after(load) for load in loads})


class PowerOfTwoChoices:
    """Power of two choices: of two random workers, the one with the shorter expected wait.

    Comparing all workers would make every gateway send to the same one at once. Workers are drawn
    by weight. If the latency of one of the two is unknown, only their loads are compared.
    """

    def __init__(self, draw: RandomDraw) -> None:
        self._draw = draw

    def pick_worker(
        self, loads: Sequence[WorkerLoadT], _routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> WorkerLoadT:
        """The better of two random workers."""
        one = self._draw_two(loads)
        others = [load for load in loads if load is not one]
        if not others:
            return one
        other = self._draw_two(others)
        cost, other_cost = _compute_load_after(one), _compute_load_after(other)
        if one.latency is not None and other.latency is not None:
            cost, other_cost = cost * one.latency, other_cost * other.latency
        return one if cost <= other_cost else other

    def score_workers(
        self, loads: Sequence[WorkerLoad], _routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> PolicyScores:
        """The expected waits in seconds, or the loads if a latency is unknown."""
        known = all(load.latency is not None for load in loads)
        return PolicyScores(
            "drawn",
            {
                load.key: _compute_load_after(load) * ((load.latency or 0.0) if known else 1.0)
                for load in loads
            },
        )

    def _draw_two(self, loads: Sequence[WorkerLoadT]) -> WorkerLoadT:
        cumulative = list(accumulate(load.weight for load in loads))
        return loads[min(bisect(cumulative, self._draw() * cumulative[-1]), len(loads) - 1)]


class RendezvousHash:
    """Weighted rendezvous hashing with bounded load: the same worker for the same key.

    Each worker has a score for the key from its name and weight alone, and the highest wins, so
    that adding or removing a worker moves only its own keys. A worker that would have more than
    ``bound`` times its share of all requests is skipped; ``min_in_flight`` requests are never too
    many. Without a key the least loaded worker is picked.
    """

    def __init__(
        self, key: Callable[[RoutingKey], int | None], bound: float, min_in_flight: int = 2
    ) -> None:
        self._key = key
        self._overload_factor = bound
        self._min_in_flight = min_in_flight
        self._fallback_policy = LeastLoad()

    def pick_worker(
        self, loads: Sequence[WorkerLoadT], routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> WorkerLoadT:
        """The key's worker, or the next one that is not overloaded."""
        key = self._key(routing_key)
        if key is None:
            return self._fallback_policy.pick_worker(loads)
        return max(
            self._filter_overloaded(loads), key=lambda load: _compute_rendezvous_score(key, load)
        )

    def score_workers(
        self, loads: Sequence[WorkerLoad], routing_key: RoutingKey = NO_ROUTING_KEY, /
    ) -> PolicyScores:
        """The key's scores of the workers that are not overloaded."""
        key = self._key(routing_key)
        if key is None:
            return self._fallback_policy.score_workers(loads)
        return PolicyScores(
            "most",
            {
                load.key: _compute_rendezvous_score(key, load)
                for load in self._filter_overloaded(loads)
            },
        )

    def _filter_overloaded(self, loads: Sequence[WorkerLoadT]) -> list[WorkerLoadT]:
        requests = 1 + sum(load.in_flight for load in loads)
        allowed = self._overload_factor * requests / (sum(load.weight for load in loads) or 1.0)
        return [
            load
            for load in loads
            if load.in_flight < max(math.ceil(allowed * load.weight), self._min_in_flight)
        ]


def _compute_load_after(load: WorkerLoad) -> float:
    """The load (requests by weight) with one more request."""
    return (load.in_flight + 1) / load.weight


def _compute_rendezvous_score(key: int, load: WorkerLoad) -> float:
    fraction = (_hash_bytes(load.name.encode(), key) >> 12) + 0.5
    return -load.weight / math.log(fraction / 2.0**52)


def _hash_bytes(data: bytes, key: int = 0) -> int:
    """A 64-bit hash, the same on every machine (Python's own differs after each start)."""
    digest = blake2b(data, digest_size=8, key=key.to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big")


def _hash_session(routing_key: RoutingKey) -> int | None:
    return (
        None
        if routing_key.session is None
        else _hash_bytes(routing_key.session.encode(errors="replace"))
    )


def _get_prefix(routing_key: RoutingKey) -> int | None:
    return routing_key.prefix


_POLICY_FACTORIES: Final[Mapping[PolicyName, Callable[[RandomDraw], LoadBalancingPolicy]]] = {
    "round_robin": lambda _draw: RoundRobin(),
    "least_load": lambda _draw: LeastLoad(),
    "two_choices": PowerOfTwoChoices,
    "prefix": lambda _draw: RendezvousHash(_get_prefix, bound=1.25),
    "session": lambda _draw: RendezvousHash(_hash_session, bound=1.5),
}


def make_policy(name: PolicyName, draw: RandomDraw) -> LoadBalancingPolicy:
    """The policy of this name."""
    return _POLICY_FACTORIES[name](draw)


def _make_prefix_key(request: AnyRequest, _context: RequestContext) -> RoutingKey:
    return RoutingKey(prefix=hash_prefix(request))


def _make_session_key(request: AnyRequest, context: RequestContext) -> RoutingKey:
    candidates = (request.labels.get(label) for label in _SESSION_LABELS)
    return RoutingKey(session=next(filter(None, candidates), context.principal))


ROUTING_KEY_FACTORIES: Final[Mapping[str, Callable[[AnyRequest, RequestContext], RoutingKey]]] = {
    "prefix": _make_prefix_key,
    "session": _make_session_key,
}
"""Builders of the routing key, for the policies that need one."""


def hash_prefix(request: AnyRequest) -> int:
    """A 64-bit hash of the beginning of the prompt, the same on every machine.

    For a conversation it covers the messages up to the first user message, so that all turns have
    the same hash; otherwise the first prompt. At most about 1,024 characters are hashed.
    """
    parts: list[str] = []
    left = _PREFIX_CHARACTERS
    for part in _iterate_prefix(request):
        parts.append(part[:left])
        left -= len(parts[-1])
        if not left:
            break
    text = "\0".join([request.model, *parts])
    return _hash_bytes(text.encode(errors="replace"))


def _iterate_prefix(request: AnyRequest) -> Iterator[str]:
    """The beginning of the prompt, in parts."""
    if isinstance(request, EmbeddingRequest):
        yield request.instruction or ""
        yield _get_prompt_prefix(request.inputs)
        return
    if isinstance(request, RerankRequest):
        yield request.queries[0]
        return
    if isinstance(request, ClassifyRequest):
        yield _get_prompt_prefix(request.inputs)
        return
    if not isinstance(request, GenerationRequest):
        return
    yield request.adapter or ""
    yield from (tool.name for tool in request.tools)
    yield _get_prompt_prefix(request.prompts)
    yield from _iterate_opening_messages(request.messages)


def _iterate_opening_messages(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield message.role
        for part in message.parts:
            yield from (value for value in part.list_values() if isinstance(value, str))
        if message.role == "user":
            return


def _get_prompt_prefix(prompts: Sequence[Prompt]) -> str:
    """The beginning of the first prompt."""
    match prompts:
        case [str() as text, *_]:
            return text
        case [ids, *_]:
            return " ".join(map(str, ids[:_PREFIX_TOKENS]))
        case _:
            return ""
