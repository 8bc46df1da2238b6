"""The torch backend with a tiny model in a real engine process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from backends.interfaces import (
    Deadline,
    PreparedRequest,
    RequestContext,
    StreamItems,
    Timeouts,
    ignore_memory,
)
from backends.torch.backend import TorchBackend
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidParameter,
    Overloaded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.events import (
    Classification,
    DetokenizedText,
    Event,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    TokenList,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.request import (
    AnyRequest,
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    Message,
    RerankRequest,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
    TokenizeRequest,
    Tool,
)
from tests.support.waiting import wait_until
from tests.unit.backends.torch.test_rerank import save_model as save_classifier

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def make_context(seconds: float = 60.0, **timeouts: float) -> RequestContext:
    clock = time.monotonic
    return RequestContext("x", Deadline(clock, seconds), clock, ignore_memory, Timeouts(**timeouts))


def make_request(**fields: Any) -> GenerationRequest:
    options: dict[str, Any] = {
        "model": "m",
        "kind": "completion",
        "prompts": ("Hello",),
        "sampling": SamplingParams(temperature=1, seed=3),
        "stopping": StopConditions(max_tokens=16, ignore_eos=True),
        **fields,
    }
    return GenerationRequest(**options)


async def collect_events(
    backend: TorchBackend, request: AnyRequest, seconds: float = 60.0
) -> list[Event]:
    return [
        e
        async for _, batch in backend.send(PreparedRequest(request), make_context(seconds))
        for e in batch
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(tiny_folder: Path) -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path=str(tiny_folder), threads=1, queue=8)
    await one.start()
    await one.warm_up()
    yield one
    process = one.process
    await one.aclose()
    assert process is not None
    assert process.exit_code is not None


async def test_torch_backend_module_does_not_import_torch() -> None:
    code = (
        "import sys, backends.torch.backend\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]

    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)  # noqa: ASYNC221

    assert done.returncode == 0


async def test_unknown_backend_setting_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="pth"):
        TorchBackend(path="x", pth="y")


async def test_request_gets_all_events_and_the_same_again(backend: TorchBackend) -> None:
    events = await collect_events(backend, make_request())
    assert backend.ready
    assert events[0] == StreamStart(5)
    assert events[-1] == StreamEnd()
    assert Usage(5, 16) in events
    assert sum(isinstance(e, Timing) for e in events) == 1
    assert sum(e.tokens for e in events if isinstance(e, TextDelta)) == 16

    again = await collect_events(backend, make_request())
    assert [e for e in again if isinstance(e, TextDelta)] == [
        e for e in events if isinstance(e, TextDelta)
    ]


async def test_concurrent_requests_get_the_same_text_as_one_alone(backend: TorchBackend) -> None:
    alone = await collect_events(backend, make_request(n=3))
    together = await asyncio.gather(*(collect_events(backend, make_request(n=3)) for _ in range(6)))

    def texts(events: list[Event]) -> list[str]:
        return [
            "".join(e.text for e in events if isinstance(e, TextDelta) and e.index == i)
            for i in range(3)
        ]

    assert all(texts(one) == texts(alone) for one in together)


async def test_heartbeat_updates_token_and_kv_cache_stats(backend: TorchBackend) -> None:
    long = "a prompt of more than one block of tokens"
    request = make_request(prompts=(long,), stopping=StopConditions(max_tokens=4, ignore_eos=True))
    process = backend.process

    assert process is not None

    process.active = -1
    await wait_until(lambda: process.active == 0)
    before = backend.read_stats()
    await collect_events(backend, request)
    again = await collect_events(backend, request)

    assert Usage(len(long), 4, cached_tokens=32) in again

    read = before["prompt_tokens"] + 2 * len(long) - 32
    await wait_until(lambda: backend.read_stats()["prompt_tokens"] == read)
    after = backend.read_stats()

    assert after["completion_tokens"] == before["completion_tokens"] + 8
    assert after["prefix_cache_hit_tokens"] == before["prefix_cache_hit_tokens"] + 32
    assert after["kv_cache_blocks"] == 16 * 4
    assert (after["running"], after["waiting"], after["kv_cache_usage"], after["batch_size"]) == (
        0,
        0,
        0,
        0,
    )
    assert after["step_seconds"] > before["step_seconds"]


async def test_usage_each_reports_increasing_token_counts(backend: TorchBackend) -> None:
    events = await collect_events(
        backend, make_request(response_options=ResponseOptions(usage="each"))
    )
    counts = [e.completion_tokens for e in events if isinstance(e, Usage)]

    assert counts == sorted(counts)
    assert len(counts) > 2
    assert counts[-1] == 16


async def test_responses_longer_than_the_initial_credit_complete(backend: TorchBackend) -> None:
    events = await collect_events(
        backend, make_request(n=16, stopping=StopConditions(max_tokens=100, ignore_eos=True))
    )
    assert Usage(5, 1600) in events


async def test_tool_call_tokens_count_in_usage_and_credit(backend: TorchBackend) -> None:
    request = make_request(
        n=16,
        tools=(Tool("f"),),
        tool_choice="required",
        parallel_tools=True,
        stopping=StopConditions(max_tokens=100),
        response_options=ResponseOptions(usage="each"),
    )
    events = await collect_events(backend, request)

    counts = [e.completion_tokens for e in events if isinstance(e, Usage)]

    assert counts == sorted(counts)
    assert 512 < counts[-2] < counts[-1] <= 1600
    assert {e.name for e in events if isinstance(e, ToolCallStart)} == {"f"}
    assert {e.text for e in events if isinstance(e, ToolCallDelta)} == {"{", "}"}
    assert not any(isinstance(e, TextDelta) and e.text for e in events)


async def test_engine_errors_map_to_gateway_errors(backend: TorchBackend) -> None:
    with pytest.raises(ContextTooLong):
        await collect_events(backend, make_request(prompts=("x" * 500,)))
    with pytest.raises(UnsupportedFeature):
        await collect_events(backend, EmbeddingRequest(model="m", inputs=("a",)))
    with pytest.raises(DeadlineExceeded):
        await anext(backend.send(PreparedRequest(make_request()), make_context(0.0)))


async def test_requests_above_the_queue_limit_are_overloaded(backend: TorchBackend) -> None:
    many = (collect_events(backend, make_request(prompts=("a",) * 8)) for _ in range(9))
    outcomes = await asyncio.gather(*many, return_exceptions=True)

    assert any(isinstance(one, Overloaded) for one in outcomes)
    assert all(isinstance(one, Overloaded | list) for one in outcomes)


async def drain(stream: StreamItems) -> None:
    async for _ in stream:
        pass


LONG = make_request(n=64, stopping=StopConditions(max_tokens=120, ignore_eos=True))


async def test_closing_the_stream_frees_its_batch_slots(backend: TorchBackend) -> None:
    async with aclosing(backend.send(PreparedRequest(LONG), make_context())) as stream:
        await anext(stream)
    process = backend.process
    assert process is not None
    assert not process._queues

    process.active = -1
    await wait_until(lambda: process.active == 0)
    assert process.waiting == 0


async def test_tokenize_returns_token_ids_and_texts(backend: TorchBackend) -> None:
    """Each byte is a token; a character belongs to the token of its last byte."""
    events = await collect_events(backend, TokenizeRequest(model="m", prompt="né<eos>"))

    assert events == [
        TokenList((ord("n"), 0xC3, 0xA9, 257), ("n", "", "é", ""), 128),
        StreamEnd(),
    ]


async def test_conversation_is_tokenized_with_the_chat_template(backend: TorchBackend) -> None:
    turn = Message("user", (TextPart("hi"),))
    request = TokenizeRequest(model="m", messages=(turn,))

    [tokens, _] = await collect_events(backend, request)

    assert tokens == TokenList(tuple(b"<user>hi<assistant>"), tuple("<user>hi<assistant>"), 128)


async def test_tokens_are_detokenized(backend: TorchBackend) -> None:
    events = await collect_events(
        backend, DetokenizeRequest(model="m", token_ids=(0x68, 0xC3, 0xA9))
    )

    assert events == [DetokenizedText("hé"), StreamEnd()]


async def test_token_id_outside_of_the_vocabulary_is_rejected(backend: TorchBackend) -> None:
    with pytest.raises(InvalidParameter, match=r"tokens\[1\] is 259; .* between 0 and 258"):
        await collect_events(backend, DetokenizeRequest(model="m", token_ids=(1, 259)))


async def test_generating_model_rejects_reranking_by_name(backend: TorchBackend) -> None:
    request = RerankRequest(model="m", queries=("q",), documents=("d",))

    with pytest.raises(UnsupportedFeature, match=r"Rerank \(Score\) API.*generates text only"):
        await collect_events(backend, request)


async def test_generating_model_rejects_classification_by_name(backend: TorchBackend) -> None:
    request = ClassifyRequest(model="m", inputs=("a",))

    with pytest.raises(UnsupportedFeature, match=r"Classify API.*generates text only"):
        await collect_events(backend, request)


async def test_local_classifier_answers_with_labels_and_probabilities(tmp_path: Path) -> None:
    save_classifier(tmp_path, labels=3, id2label={0: "bad", 1: "neutral", 2: "good"})
    own = TorchBackend(path=str(tmp_path), threads=1)
    await own.start()
    await own.warm_up()
    events = await collect_events(own, ClassifyRequest(model="m", inputs=("a", "b")))
    await own.aclose()

    classifications = [one for one in events if isinstance(one, Classification)]
    assert [one.index for one in classifications] == [0, 1]

    for one in classifications:
        assert sum(one.probabilities) == pytest.approx(1)
        largest = one.probabilities.index(max(one.probabilities))
        assert one.label == ("bad", "neutral", "good")[largest]
    assert [one.prompt_tokens for one in events if isinstance(one, Usage)] == [4]


async def test_engine_crash_during_tokenize_raises_worker_failed(tiny_folder: Path) -> None:
    own = TorchBackend(path=str(tiny_folder), threads=1)
    await own.start()
    await own.warm_up()
    await collect_events(own, TokenizeRequest(model="m", prompt=""))
    process = own.process

    assert process is not None
    assert process.pid is not None

    os.kill(process.pid, signal.SIGSTOP)
    task = asyncio.ensure_future(collect_events(own, TokenizeRequest(model="m", prompt="a")))
    await asyncio.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed):
        await task

    await own.aclose()


async def test_crashed_engine_process_is_restarted(backend: TorchBackend) -> None:
    before = backend.process
    assert before is not None
    assert before.pid is not None

    async with aclosing(backend.send(PreparedRequest(LONG), make_context())) as stream:
        await anext(stream)
        os.kill(before.pid, signal.SIGKILL)
        with pytest.raises(StreamBroken):
            await drain(stream)
    assert not backend.ready

    events = await collect_events(backend, make_request())
    assert events[-1] == StreamEnd()
    assert backend.process is not before


async def test_missing_model_is_an_error_and_not_retried() -> None:
    broken = TorchBackend(path="package:there_is_no_such_package")
    await broken.start()

    with pytest.raises(WorkerUnreachable):
        await broken.warm_up()
    with pytest.raises(
        WorkerUnreachable, match="package there_is_no_such_package is not installed"
    ):
        await anext(broken.send(PreparedRequest(make_request()), make_context()))
    assert not broken.ready

    await broken.aclose()


async def test_request_is_overloaded_until_the_model_is_loaded(tiny_folder: Path) -> None:
    slow = TorchBackend(path=str(tiny_folder), threads=1)
    assert [slow.loading] == ["waiting to be started"]
    await slow.start()
    with pytest.raises(Overloaded, match="still loading") as failure:
        await anext(slow.send(PreparedRequest(make_request()), make_context()))

    assert failure.value.retry_after == 5
    progress = [slow.loading]

    await slow.warm_up()

    progress.append(slow.loading)
    assert progress[0]
    assert progress[1] is None
    assert (await collect_events(slow, make_request()))[-1] == StreamEnd()

    await slow.aclose()
    assert slow.loading is None
    with pytest.raises(WorkerUnreachable, match="shut down"):
        await anext(slow.send(PreparedRequest(make_request()), make_context()))


STARTS = """
import asyncio, sys
from backends.torch.backend import TorchBackend

async def main():
    backend = TorchBackend(path=sys.argv[1])
    await backend.start()
    while not backend.ready:
        await asyncio.sleep(0.05)
    print(backend.process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_engine_process_ends_with_the_gateway(tiny_folder: Path) -> None:
    gateway = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STARTS,
        str(tiny_folder),
        cwd=Path(__file__).parents[3],
        stdout=asyncio.subprocess.PIPE,
    )
    assert gateway.stdout is not None

    pid = int(await gateway.stdout.readline())
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)

    assert is_alive(pid)

    gateway.kill()
    await gateway.wait()
    await wait_until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class RecordingProcess:
    """An engine process that records commands and executes none."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def open_request(self) -> tuple[int, object]:
        return 1, None

    def send(self, order: Any) -> None:
        self.sent.append(order)
        raise Overloaded("not now")

    def close_request(self, job: int, *, cancel: bool) -> None:
        del job, cancel


async def test_preemptible_request_gets_the_lowest_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, orders = TorchBackend(path="package:nothing"), RecordingProcess()

    async def available(context: RequestContext) -> RecordingProcess:
        del context
        return orders

    monkeypatch.setattr(backend, "_get_process", available)
    for one in (make_context(), msgspec.structs.replace(make_context(), preempt=lambda: None)):
        with pytest.raises(Overloaded):
            await anext(backend.send(PreparedRequest(make_request(priority=3)), one))

    assert [order.priority for order in orders.sent] == [3, 255]


async def test_warm_up_returns_after_the_model_is_loaded(backend: TorchBackend) -> None:
    await backend.warm_up()
    assert backend.ready


async def test_warm_up_raises_when_the_model_cannot_be_loaded() -> None:
    broken = TorchBackend(path="package:there_is_no_such_package")
    await broken.start()

    with pytest.raises(WorkerUnreachable, match="there_is_no_such_package"):
        await broken.warm_up()

    await broken.aclose()
