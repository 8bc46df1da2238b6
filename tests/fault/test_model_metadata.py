"""A dialect that has to know something of a model has its workers asked about it."""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig
from backends.interfaces import Timeouts
from backends.pool.settings import HealthCheckSettings
from protocols.core.errors import DeadlineExceeded
from protocols.core.interfaces import UpstreamRequest
from protocols.core.request import Request
from tests.fakes import CLOSE, HANG, Reply, ScriptedWorker, chunked, whole
from tests.fault.lines import STREAMED, Lines, heard, pool, say, text, until

GOOD = chunked(say("Hello"), b"end\n")
TOLD = whole(b'{"takes": 3}')
WELL = whole(b"ok")
SILENT: Reply = [b"220 mail ready\r\n", CLOSE]
OFTEN = HealthCheckSettings(interval=0.02, timeout=0.2)


class Curious(Lines):
    """Lines, which asks two things of each model, and sends what it knows with each request."""

    def __init__(self) -> None:
        self.known: dict[str, Sequence[bytes | None]] = {}

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        return [UpstreamRequest(f"/{model}/{what}", b"", method="GET") for what in ("size", "kind")]

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        self.known[model] = answers
        size, _ = answers
        takes: int | None = msgspec.json.decode(size)["takes"] if size else None
        return takes

    def encode_request(self, request: Request) -> UpstreamRequest:
        known = "known" if request.model in self.known else "unknown"
        return UpstreamRequest(f"/say/{known}", b"{}")


def paths(worker: ScriptedWorker) -> list[str]:
    return [request.path for request in worker.requests]


async def test_the_first_request_waits_until_its_model_is_known() -> None:
    dialect = Curious()
    async with (
        ScriptedWorker([TOLD], [whole(b"", "404 No")], [GOOD]) as worker,
        pool(WorkerConfig(worker.url, bearer="s3cret"), dialect=dialect) as backend,
    ):
        for _ in range(2):
            assert text(await heard(backend)) == "Hello"
        assert backend.report_workers()[0].limit == 3

    assert paths(worker) == ["/m/size", "/m/kind", "/say/known", "/say/known"]
    assert worker.requests[0].headers["authorization"] == "Bearer s3cret"
    assert dialect.known == {"m": [b'{"takes": 3}', None]}


async def test_requests_that_come_together_ask_once() -> None:
    async with (
        ScriptedWorker([0.05, TOLD], [TOLD], [GOOD]) as worker,
        pool(worker.url, dialect=Curious()) as backend,
    ):
        tasks = [asyncio.get_running_loop().create_task(heard(backend)) for _ in range(3)]
        await worker.until_asked()
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks[1:])

    assert [text(events) for events in answers] == ["Hello", "Hello"]
    assert sorted(paths(worker)) == ["/m/kind", "/m/size", "/say/known", "/say/known"]


async def test_another_worker_is_asked_where_one_does_not_answer() -> None:
    async with (
        ScriptedWorker(SILENT, SILENT, [GOOD]) as silent,
        ScriptedWorker([TOLD], [TOLD], [GOOD]) as other,
        pool(silent.url, other.url, dialect=Curious()) as backend,
    ):
        await heard(backend)

    assert paths(other)[:2] == ["/m/size", "/m/kind"]


async def test_that_nobody_tells_is_no_error_and_not_asked_at_every_request() -> None:
    async with (
        ScriptedWorker(SILENT, SILENT, [GOOD]) as worker,
        pool(worker.url, dialect=Curious()) as backend,
    ):
        for _ in range(3):
            assert text(await heard(backend)) == "Hello"
        assert backend.report_workers()[0].limit is None

    assert paths(worker) == ["/m/size", "/m/kind", *["/say/unknown"] * 3]


async def test_a_refusal_is_an_answer() -> None:
    dialect = Curious()
    no: Reply = [whole(b"", "404 No")]
    async with (
        ScriptedWorker(no, no, [GOOD]) as worker,
        pool(worker.url, dialect=dialect) as backend,
    ):
        await heard(backend)

    assert dialect.known == {"m": [None, None]}


async def test_asking_does_not_outlast_the_requests_time() -> None:
    limits = Timeouts(connect=1.0, first_token=0.3, idle=5.0, total=0.3)
    async with (
        ScriptedWorker([HANG]) as worker,
        pool(worker.url, dialect=Curious(), timeouts=limits) as backend,
    ):
        with pytest.raises(DeadlineExceeded):
            await heard(backend)

    assert paths(worker) == ["/m/size"]


async def test_made_up_names_do_not_fill_the_memory() -> None:
    dialect = Curious()
    async with (
        ScriptedWorker([TOLD]) as worker,
        pool(worker.url, dialect=dialect) as backend,
    ):
        learner = backend._metadata_cache
        assert learner is not None
        for number in range(1100):
            learner._store_expiry(f"m{number}", 0.0)

        assert len(learner._valid_until) == 1024


async def test_a_probe_that_is_good_asks_before_any_request() -> None:
    dialect = Curious()
    async with (
        ScriptedWorker([WELL], [TOLD], [TOLD], [WELL]) as worker,
        pool(worker.url, dialect=dialect, health=OFTEN, models=("m",)) as backend,
    ):
        await worker.until_asked(6)
        assert backend.report_workers()[0].limit == 3

    assert dialect.known.keys() == {"m"}
    assert paths(worker)[:3] == ["/health", "/m/size", "/m/kind"]
    assert set(paths(worker)[3:]) == {"/health"}


async def test_a_worker_that_was_down_is_asked_again() -> None:
    again: list[Reply] = [[whole(b"", "503 No")], [WELL], [whole(b'{"takes": 7}')], [TOLD], [WELL]]
    health = replace(OFTEN, fall=5)
    async with (
        ScriptedWorker([WELL], [TOLD], [TOLD], *again) as worker,
        pool(worker.url, dialect=Curious(), models=("m",), health=health) as backend,
    ):
        await worker.until_asked(9)
        await until(lambda: backend.report_workers()[0].limit == 7)


class Failing(Curious):
    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        raise ZeroDivisionError


async def test_a_fault_of_the_dialect_does_not_end_the_probes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "interlingua")
    async with (
        ScriptedWorker([WELL]) as worker,
        pool(worker.url, dialect=Failing(), health=OFTEN, models=("m",)),
    ):
        await worker.until_asked(3)

    assert "ZeroDivisionError" in caplog.text


async def test_a_pool_that_closes_asks_no_more() -> None:
    async with ScriptedWorker([HANG]) as worker:
        async with pool(worker.url, dialect=Curious()) as backend:
            task = asyncio.get_running_loop().create_task(heard(backend, STREAMED))
            await worker.until_asked()
        await worker.until_left()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
