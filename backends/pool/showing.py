"""What is told of one request to who looks on; nothing is, as a rule."""

from typing import Literal

from msgspec.structs import asdict

from backends.interfaces import RequestObserver, WorkerCandidate, WorkerSelection
from backends.pool.attempt import AttemptRequest
from backends.pool.errand import add_bearer
from backends.pool.member import WorkerState
from backends.pool.policy import PolicyScores
from backends.pool.roster import SelectionCriteria, WorkerPool
from backends.pool.settings import PoolSettings
from protocols.core.errors import GatewayError
from protocols.core.interfaces import UpstreamRequest

Availability = Literal["yes", "no", "full", "tried"]


class SelectionReporter:
    """Tells who looks on how an answer comes about."""

    def __init__(
        self,
        watch: RequestObserver,
        settings: PoolSettings,
        roster: WorkerPool,
        work: AttemptRequest,
    ) -> None:
        self._observer = watch
        self._settings = settings
        self._workers = roster
        self._request = work

    def observe_choice(self, wish: SelectionCriteria) -> None:
        """A worker is about to be chosen: tells of the choice, which is not made by that.

        Raises what the watch raises.
        """
        free, scores, likely = self._workers.preview_pick(wish)
        can: dict[int, Availability] = dict.fromkeys(wish.tried_keys, "tried")
        can |= {one.key: "full" for one in self._workers.select_available(wish)}
        can |= {one.key: "yes" for one in free}
        candidates = [
            _build_candidate(one, can.get(one.key, "no"), scores) for one in self._workers.workers
        ]
        self._observer.on_selection(
            self._build_choice(candidates, scores, likely), self._build_upstream_request(likely)
        )

    def observe_attempt(self, member: WorkerState) -> None:
        """It was chosen, and is asked now."""
        self._observer.on_send(member.name, self._build_upstream_request(member))

    def observe_failure(self, member: WorkerState, error: GatewayError) -> None:
        """It failed, and nothing of its answer was passed on."""
        self._observer.on_failure(member.name, error)

    def _build_upstream_request(self, member: WorkerState | None) -> UpstreamRequest:
        """The request as this worker gets it; None: without a key."""
        wire, own = self._request.upstream_request, self._request.request_headers
        told = own if member is None else add_bearer(own, member.config)
        return UpstreamRequest(wire.path, wire.body, (*wire.headers, *told), wire.method)

    def _build_choice(
        self, candidates: list[WorkerCandidate], scores: PolicyScores, likely: WorkerState | None
    ) -> WorkerSelection:
        told = self._settings
        return WorkerSelection(
            policy=told.policy,
            score_rule=scores.winner,
            candidates=candidates,
            expected_url="" if likely is None else likely.name,
            queue_length=self._workers.queue_length,
            queue_limit=told.queue.max,
            queue_timeout=told.queue.wait,
            timeouts=asdict(told.timeouts) | {"total": self._request.deadline.remaining()},
            max_retries=told.retries.max,
            retry_budget=told.retries.budget,
            retryable_failures=sorted(told.retries.on),
        )


def _build_candidate(
    member: WorkerState, can: Availability, scores: PolicyScores
) -> WorkerCandidate:
    report = member.report()
    return WorkerCandidate(
        url=report.url,
        state=report.state,
        weight=report.weight,
        in_flight=report.in_flight,
        limit=report.limit,
        latency=report.latency,
        availability=can,
        score=scores.by_worker.get(member.key),
    )
