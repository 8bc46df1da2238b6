"""Reports the selection of a worker to the observer of a request: explain, and dry runs."""

from typing import Literal

from msgspec.structs import asdict

from backends.interfaces import RequestObserver, Timeouts, WorkerCandidate, WorkerSelection
from backends.pool.attempt_request import AttemptRequest
from backends.pool.load_balancing import PolicyScores
from backends.pool.settings import PoolSettings, RetrySettings
from backends.pool.worker_state import WorkerState
from backends.pool.workers import SelectionCriteria, WorkerPool
from protocols.core.interfaces import UpstreamRequest

Availability = Literal["yes", "no", "full", "tried"]


class SelectionReporter:
    """Reports selections and attempts of one request to its observer."""

    def __init__(
        self,
        observer: RequestObserver,
        settings: PoolSettings,
        workers: WorkerPool,
        request: AttemptRequest,
    ) -> None:
        self._observer = observer
        self._settings = settings
        self._workers = workers
        self._request = request

    def observe_selection(self, criteria: SelectionCriteria) -> None:
        """Report the selection that is about to be made, without making it.

        Raises what the observer raises.
        """
        available, scores, expected = self._workers.preview_pick(criteria)
        availability: dict[int, Availability] = dict.fromkeys(criteria.tried_keys, "tried")
        availability |= {one.key: "full" for one in self._workers.select_available(criteria)}
        availability |= {one.key: "yes" for one in available}
        candidates = [
            _build_candidate(one, availability.get(one.key, "no"), scores)
            for one in self._workers.workers
        ]
        self._observer.on_selection(
            self._build_selection(candidates, scores, expected),
            self._build_upstream_request(expected),
        )

    def observe_attempt(self, worker: WorkerState) -> None:
        """Report that the request is sent to this worker."""
        self._observer.on_send(worker.name, self._build_upstream_request(worker))

    def _build_upstream_request(self, worker: WorkerState | None) -> UpstreamRequest:
        """The request as sent to this worker, with secrets as ``***``; None: without them."""
        wire, headers = self._request.upstream_request, self._request.request_headers
        if worker is not None and worker.config.credentials is not None:
            wire, headers = worker.config.credentials.hide_secrets().authorize(wire, headers)
        return UpstreamRequest(wire.path, wire.body, (*wire.headers, *headers), wire.method)

    def _build_selection(
        self, candidates: list[WorkerCandidate], scores: PolicyScores, expected: WorkerState | None
    ) -> WorkerSelection:
        settings = self._settings
        timeouts, retries = settings.timeouts or Timeouts(), settings.retries or RetrySettings()
        return WorkerSelection(
            policy=settings.policy,
            score_rule=scores.winner,
            candidates=candidates,
            expected_url="" if expected is None else expected.name,
            queue_length=self._workers.queue_length,
            queue_limit=settings.queue.max,
            queue_timeout=settings.queue.wait,
            timeouts=asdict(timeouts) | {"total": self._request.deadline.remaining()},
            max_retries=retries.max,
            retry_budget=retries.budget,
            retryable_failures=sorted(retries.on),
        )


def _build_candidate(
    worker: WorkerState, availability: Availability, scores: PolicyScores
) -> WorkerCandidate:
    report = worker.report()
    return WorkerCandidate(
        url=report.url,
        state=report.state,
        weight=report.weight,
        in_flight=report.in_flight,
        limit=report.limit,
        latency=report.latency,
        availability=availability,
        score=scores.by_worker.get(worker.key),
    )
