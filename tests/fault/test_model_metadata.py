"""A protocol that needs metadata of a model requests it from the workers."""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from backends.http.interfaces import WorkerConfig, make_bearer_credentials
from backends.interfaces import Timeouts
from backends.pool.settings import HealthCheckSettings
from protocols.core.errors import DeadlineExceeded
from protocols.core.interfaces import UpstreamRequest
from protocols.core.request import Request
from tests.fault.line_protocol import (
    STREAMED,
    LineProtocol,
    collect_events,
    join_text,
    reply_text,
    run_pool,
)
from tests.support.fakes import CLOSE, HANG, Reply, ScriptedWorker, make_reply
from tests.support.waiting import wait_until

METADATA_REPLY = make_reply(b'{"takes": 3}')
WELL = make_reply(b"ok")
SILENT: Reply = [b"220 mail ready\r\n", CLOSE]
OFTEN = HealthCheckSettings(interval=0.02, timeout=30.0)


class MetadataProtocol(LineProtocol):
    """The line protocol with two metadata requests per model; requests carry the results."""

    def __init__(self) -> None:
        self.metadata_by_model: dict[str, Sequence[bytes | None]] = {}

    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        return [UpstreamRequest(f"/{model}/{what}", b"", method="GET") for what in ("size", "kind")]

    def load_metadata(self, model: str, answers: Sequence[bytes | None]) -> int | None:
        self.metadata_by_model[model] = answers
        size, _ = answers
        size_limit: int | None = msgspec.json.decode(size)["takes"] if size else None
        return size_limit

    def encode_request(self, request: Request) -> UpstreamRequest:
        path = "known" if request.model in self.metadata_by_model else "unknown"
        return UpstreamRequest(f"/say/{path}", b"{}")


def list_paths(worker: ScriptedWorker) -> list[str]:
    return [request.path for request in worker.requests]


async def test_first_request_waits_for_the_model_metadata() -> None:
    adapter = MetadataProtocol()
    async with (
        ScriptedWorker(
            [METADATA_REPLY], [make_reply(b"", "404 No")], [reply_text("Hello")], probed=None
        ) as worker,
        run_pool(
            WorkerConfig(worker.url, credentials=make_bearer_credentials("s3cret")), adapter=adapter
        ) as backend,
    ):
        for _ in range(2):
            assert join_text(await collect_events(backend)) == "Hello"
        assert backend.report_workers()[0].limit == 3

    assert list_paths(worker) == ["/m/size", "/m/kind", "/say/known", "/say/known"]
    assert worker.requests[0].headers["authorization"] == "Bearer s3cret"
    assert adapter.metadata_by_model == {"m": [b'{"takes": 3}', None]}


async def test_concurrent_requests_share_one_metadata_query() -> None:
    async with (
        ScriptedWorker(
            [0.05, METADATA_REPLY], [METADATA_REPLY], [reply_text("Hello")], probed=None
        ) as worker,
        run_pool(worker.url, adapter=MetadataProtocol()) as backend,
    ):
        tasks = [asyncio.get_running_loop().create_task(collect_events(backend)) for _ in range(3)]
        await worker.wait_for_request()
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks[1:])

    assert [join_text(events) for events in answers] == ["Hello", "Hello"]
    assert sorted(list_paths(worker)) == ["/m/kind", "/m/size", "/say/known", "/say/known"]


async def test_metadata_query_is_retried_on_another_worker() -> None:
    async with (
        ScriptedWorker(SILENT, SILENT, [reply_text("Hello")], probed=None) as silent,
        ScriptedWorker(
            [METADATA_REPLY], [METADATA_REPLY], [reply_text("Hello")], probed=None
        ) as other,
        run_pool(silent.url, other.url, adapter=MetadataProtocol()) as backend,
    ):
        await collect_events(backend)

    assert list_paths(other)[:2] == ["/m/size", "/m/kind"]


async def test_missing_metadata_is_no_error_and_not_queried_per_request() -> None:
    async with (
        ScriptedWorker(SILENT, SILENT, [reply_text("Hello")], probed=None) as worker,
        run_pool(worker.url, adapter=MetadataProtocol()) as backend,
    ):
        for _ in range(3):
            assert join_text(await collect_events(backend)) == "Hello"
        assert backend.report_workers()[0].limit is None

    assert list_paths(worker) == ["/m/size", "/m/kind", *["/say/unknown"] * 3]


async def test_metadata_404_counts_as_a_result() -> None:
    adapter = MetadataProtocol()
    no: Reply = [make_reply(b"", "404 No")]

    async with (
        ScriptedWorker(no, no, [reply_text("Hello")], probed=None) as worker,
        run_pool(worker.url, adapter=adapter) as backend,
    ):
        await collect_events(backend)

    assert adapter.metadata_by_model == {"m": [None, None]}


async def test_metadata_query_is_bounded_by_the_request_timeout() -> None:
    limits = Timeouts(connect=1.0, first_token=0.3, idle=5.0, total=0.3)
    async with (
        ScriptedWorker([HANG], probed=None) as worker,
        run_pool(worker.url, adapter=MetadataProtocol(), timeouts=limits) as backend,
    ):
        with pytest.raises(DeadlineExceeded):
            await collect_events(backend)

    assert list_paths(worker) == ["/m/size"]


async def test_metadata_cache_is_bounded() -> None:
    adapter = MetadataProtocol()
    async with (
        ScriptedWorker([METADATA_REPLY], probed=None) as worker,
        run_pool(worker.url, adapter=adapter) as backend,
    ):
        learner = backend._metadata_cache
        assert learner is not None

        for number in range(1100):
            learner._store_expiry(f"m{number}", 0.0)

        assert len(learner._valid_until) == 1024


async def test_successful_health_check_loads_metadata_before_any_request() -> None:
    adapter = MetadataProtocol()
    async with (
        ScriptedWorker([WELL], [METADATA_REPLY], [METADATA_REPLY], [WELL], probed=None) as worker,
        run_pool(worker.url, adapter=adapter, health=OFTEN, models=("m",)) as backend,
    ):
        await worker.wait_for_request(6)
        assert backend.report_workers()[0].limit == 3

    assert adapter.metadata_by_model.keys() == {"m"}
    assert list_paths(worker)[:3] == ["/health", "/m/size", "/m/kind"]
    assert set(list_paths(worker)[3:]) == {"/health"}


async def test_recovered_worker_gets_a_new_metadata_query() -> None:
    again: list[Reply] = [
        [make_reply(b"", "503 No")],
        [WELL],
        [make_reply(b'{"takes": 7}')],
        [METADATA_REPLY],
        [WELL],
    ]
    health = replace(OFTEN, fall=5)
    async with (
        ScriptedWorker([WELL], [METADATA_REPLY], [METADATA_REPLY], *again, probed=None) as worker,
        run_pool(worker.url, adapter=MetadataProtocol(), models=("m",), health=health) as backend,
    ):
        await worker.wait_for_request(9)
        await wait_until(lambda: backend.report_workers()[0].limit == 7)


class FailingMetadataProtocol(MetadataProtocol):
    def metadata_requests(self, model: str) -> Sequence[UpstreamRequest]:
        raise ZeroDivisionError


async def test_protocol_adapter_error_does_not_stop_health_checks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "interlingua")
    async with (
        ScriptedWorker([WELL], probed=None) as worker,
        run_pool(worker.url, adapter=FailingMetadataProtocol(), health=OFTEN, models=("m",)),
    ):
        await worker.wait_for_request(3)

    assert "ZeroDivisionError" in caplog.text


async def test_closed_pool_cancels_metadata_queries() -> None:
    async with ScriptedWorker([HANG], probed=None) as worker:
        async with run_pool(worker.url, adapter=MetadataProtocol()) as backend:
            task = asyncio.get_running_loop().create_task(collect_events(backend, STREAMED))
            await worker.wait_for_request()
        await worker.wait_for_disconnect()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
