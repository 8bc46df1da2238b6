"""An explained selection is the one that would be made, and explaining changes nothing."""

from collections.abc import Sequence
from typing import NoReturn

import pytest
from msgspec import Struct, field

from backends.http.interfaces import WorkerConfig, make_bearer_credentials
from backends.interfaces import Deadline, WorkerFailure, WorkerSelection, ignore_memory
from backends.pool.attempt_request import AttemptRequest
from backends.pool.load_balancing import PolicyName, make_policy
from backends.pool.selection_report import SelectionReporter
from backends.pool.settings import PoolSettings
from backends.pool.workers import PoolLimits, SelectionCriteria, WorkerPool
from protocols.core.errors import WorkerUnreachable
from protocols.core.interfaces import UpstreamRequest
from protocols.core.request import GenerationRequest
from tests.fault.line_protocol import pool_settings

URLS = ["http://a:1", "http://b:1", "http://c:1"]


class RecordingObserver(Struct):
    """Records what it is notified of."""

    dry_run: bool = False
    choices: list[tuple[WorkerSelection, UpstreamRequest]] = field(default_factory=list)
    sent: list[tuple[str, UpstreamRequest]] = field(default_factory=list)
    failures: list[WorkerFailure] = field(default_factory=list)

    def on_selection(self, choice: WorkerSelection, wire: UpstreamRequest) -> None:
        self.choices.append((choice, wire))

    def on_send(self, url: str, wire: UpstreamRequest) -> None:
        self.sent.append((url, wire))

    def on_failure(self, failure: WorkerFailure) -> None:
        self.failures.append(failure)


def make_reporter(
    pool: WorkerPool, settings: PoolSettings | None = None
) -> tuple[RecordingObserver, SelectionReporter]:
    observer = RecordingObserver()
    request = GenerationRequest(kind="chat", model="m")
    wire = UpstreamRequest("/v1", b"{}")
    deadline = Deadline(lambda: 0.0, 30.0)
    work = AttemptRequest(
        request, wire, (), _fail_if_called, _fail_if_called, deadline, ignore_memory
    )
    return observer, SelectionReporter(observer, settings or pool_settings(), pool, work)


def _fail_if_called(*_: object) -> NoReturn:
    raise AssertionError("no response is expected")


def make_pool(policy: PolicyName = "round_robin", most: int | None = None) -> WorkerPool:
    workers = [
        WorkerConfig(url, 1, 1, credentials=make_bearer_credentials(f"key-of-{url[7]}"))
        for url in URLS
    ]
    draws = iter([0.9, 0.1] * 100)
    return WorkerPool(workers, make_policy(policy, draws.__next__), PoolLimits(most), lambda: 0.0)


def get_availability(choice: WorkerSelection) -> Sequence[str]:
    return [one.availability for one in choice.candidates]


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "two_choices", "prefix"])
async def test_explained_worker_is_the_selected_worker(policy: PolicyName) -> None:
    pool = make_pool(policy)
    for _ in URLS:
        observer, show = make_reporter(pool)
        if policy != "two_choices":  # it draws new random numbers
            show.observe_selection(SelectionCriteria(set()))
        show.observe_selection(SelectionCriteria(set()))
        place = await pool.acquire(SelectionCriteria(set()), Deadline(lambda: 0.0, 1.0))
        if policy != "two_choices":
            assert {choice.expected_url for choice, _ in observer.choices} == {place.worker.name}
        [wire] = {wire for _, wire in observer.choices}
        assert wire.headers[0][0] == "Authorization"


async def test_explanation_shows_busy_tried_and_ejected_workers() -> None:
    pool = make_pool()
    first = await pool.acquire(SelectionCriteria(set()), Deadline(lambda: 0.0, 1.0))
    second = pool.workers[1]
    pool.workers[2].record_failure(WorkerUnreachable("it is gone"))
    observer, show = make_reporter(pool, pool_settings(policy="round_robin"))

    show.observe_selection(SelectionCriteria({second.key}))

    [(choice, wire)] = observer.choices
    assert first.worker is pool.workers[0]
    assert get_availability(choice) == ["full", "tried", "no"]
    assert [one.score for one in choice.candidates] == [None, None, None]
    assert [one.state for one in choice.candidates] == ["up", "up", "out"]
    assert (choice.expected_url, choice.queue_length, choice.policy) == ("", 0, "round_robin")
    assert wire.headers == ()
    assert choice.timeouts == {
        "connect": 2.0,
        "first_token": 600.0,
        "idle": 300.0,
        "idle_max": 600.0,
        "total": 30.0,
    }


async def test_explanation_shows_all_workers_full_in_a_full_pool() -> None:
    pool = make_pool(most=1)
    await pool.acquire(SelectionCriteria(set()), Deadline(lambda: 0.0, 1.0))
    observer, show = make_reporter(pool)

    show.observe_selection(SelectionCriteria(set()))

    assert get_availability(observer.choices[0][0]) == ["full", "full", "full"]


def test_explanation_shows_the_worker_and_its_request_without_its_key() -> None:
    pool = make_pool()
    member = pool.workers[1]
    observer, show = make_reporter(pool)

    show.observe_attempt(member)

    [(url, wire)] = observer.sent
    assert (url, wire.headers) == (URLS[1], (("Authorization", "***"),))
