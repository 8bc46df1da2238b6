"""The backend and its process: a tiny model in a real process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from backends.interfaces import Deadline, PreparedRequest, RequestContext, StreamItems, Timeouts
from backends.torch.backend import TorchBackend
from protocols.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Overloaded,
    StreamBroken,
    UnsupportedFeature,
    WorkerFailed,
    WorkerUnreachable,
)
from protocols.core.events import (
    Event,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    Tool,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def context(seconds: float = 60.0, **timeouts: float) -> RequestContext:
    clock = time.monotonic
    return RequestContext("x", Deadline(clock, seconds), clock, Timeouts(**timeouts))


def request(**fields: Any) -> GenerationRequest:
    given: dict[str, Any] = {
        "model": "m",
        "kind": "completion",
        "prompts": ("Hello",),
        "sampling": SamplingParams(temperature=1, seed=3),
        "stopping": StopConditions(max_tokens=16, ignore_eos=True),
        **fields,
    }
    return GenerationRequest(**given)


async def events(backend: TorchBackend, asked: Request) -> list[Event]:
    return [e async for _, batch in backend.send(PreparedRequest(asked), context()) for e in batch]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(tiny_folder: Path) -> AsyncIterator[TorchBackend]:
    one = TorchBackend(path=str(tiny_folder), threads=1, queue=8)
    await one.start()
    yield one
    process = one.process
    await one.aclose()
    assert process is not None
    assert process.exit_code is not None


async def test_the_gateway_imports_no_torch() -> None:
    code = (
        "import sys, backends.torch.backend\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)  # noqa: ASYNC221
    assert done.returncode == 0


async def test_settings_are_checked() -> None:
    with pytest.raises(msgspec.ValidationError, match="pth"):
        TorchBackend(path="x", pth="y")


async def test_an_answer_waits_for_the_model_and_is_whole(backend: TorchBackend) -> None:
    got = await events(backend, request())
    assert backend.ready
    assert got[0] == StreamStart(5)
    assert got[-1] == StreamEnd()
    assert Usage(5, 16) in got
    assert sum(isinstance(e, Timing) for e in got) == 1
    assert sum(e.tokens for e in got if isinstance(e, TextDelta)) == 16
    again = await events(backend, request())
    assert [e for e in again if isinstance(e, TextDelta)] == [
        e for e in got if isinstance(e, TextDelta)
    ]


async def test_many_at_once(backend: TorchBackend) -> None:
    alone = await events(backend, request(n=3))
    together = await asyncio.gather(*(events(backend, request(n=3)) for _ in range(6)))

    def texts(found: list[Event]) -> list[str]:
        return [
            "".join(e.text for e in found if isinstance(e, TextDelta) and e.index == i)
            for i in range(3)
        ]

    assert all(texts(one) == texts(alone) for one in together)


async def test_figures_come_with_the_heartbeat(backend: TorchBackend) -> None:
    long = "a prompt of more than one block of tokens"
    asked = request(prompts=(long,), stopping=StopConditions(max_tokens=4, ignore_eos=True))
    process = backend.process
    assert process is not None
    process.active = -1
    await until(lambda: process.active == 0)
    before = backend.read_stats()
    await events(backend, asked)
    again = await events(backend, asked)
    assert Usage(len(long), 4, cached_tokens=32) in again
    read = before["prompt_tokens"] + 2 * len(long) - 32
    await until(lambda: backend.read_stats()["prompt_tokens"] == read)
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


async def test_running_usage(backend: TorchBackend) -> None:
    got = await events(backend, request(response_options=ResponseOptions(usage="each")))
    counts = [e.completion_tokens for e in got if isinstance(e, Usage)]
    assert counts == sorted(counts)
    assert len(counts) > 2
    assert counts[-1] == 16


async def test_more_tokens_than_the_credit(backend: TorchBackend) -> None:
    got = await events(
        backend, request(n=16, stopping=StopConditions(max_tokens=100, ignore_eos=True))
    )
    assert Usage(5, 1600) in got


async def test_calls_are_counted_and_credited_like_text(backend: TorchBackend) -> None:
    asked = request(
        n=16,
        tools=(Tool("f"),),
        tool_choice="required",
        parallel_tools=True,
        stopping=StopConditions(max_tokens=100),
        response_options=ResponseOptions(usage="each"),
    )
    got = await events(backend, asked)
    counts = [e.completion_tokens for e in got if isinstance(e, Usage)]
    assert counts == sorted(counts)
    assert 512 < counts[-2] < counts[-1] <= 1600
    assert {e.name for e in got if isinstance(e, ToolCallStart)} == {"f"}
    assert {e.text for e in got if isinstance(e, ToolCallDelta)} == {"{", "}"}
    assert not any(isinstance(e, TextDelta) and e.text for e in got)


async def test_errors_come_in_the_gateways_words(backend: TorchBackend) -> None:
    with pytest.raises(ContextTooLong):
        await events(backend, request(prompts=("x" * 500,)))
    with pytest.raises(UnsupportedFeature):
        await events(backend, EmbeddingRequest(model="m", inputs=("a",)))
    with pytest.raises(DeadlineExceeded):
        await anext(backend.send(PreparedRequest(request()), context(0.0)))


async def test_more_than_the_queue_takes_is_overload(backend: TorchBackend) -> None:
    many = (events(backend, request(prompts=("a",) * 8)) for _ in range(9))
    found = await asyncio.gather(*many, return_exceptions=True)
    assert any(isinstance(one, Overloaded) for one in found)
    assert all(isinstance(one, Overloaded | list) for one in found)


async def drained(stream: StreamItems) -> None:
    async for _ in stream:
        pass


LONG = request(n=64, stopping=StopConditions(max_tokens=120, ignore_eos=True))


async def test_leaving_frees_the_rows(backend: TorchBackend) -> None:
    async with aclosing(backend.send(PreparedRequest(LONG), context())) as stream:
        await anext(stream)
    process = backend.process
    assert process is not None
    assert not process._queues
    process.active = -1
    await until(lambda: process.active == 0)
    assert process.waiting == 0


async def test_the_tokens_of_a_text(backend: TorchBackend) -> None:
    """A token for each byte; a character stands with its last."""
    got = await backend.tokenize("né<eos>", context())

    assert got == [(ord("n"), "n"), (0xC3, ""), (0xA9, "é"), (257, "")]


async def test_a_process_that_dies_while_it_cuts_a_text(tiny_folder: Path) -> None:
    own = TorchBackend(path=str(tiny_folder), threads=1)
    await own.start()
    await own.tokenize("", context())
    process = own.process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    asking = asyncio.ensure_future(own.tokenize("a", context()))
    await asyncio.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(WorkerFailed):
        await asking
    await own.aclose()


async def test_a_process_that_dies_is_started_anew(backend: TorchBackend) -> None:
    before = backend.process
    assert before is not None
    assert before.pid is not None
    async with aclosing(backend.send(PreparedRequest(LONG), context())) as stream:
        await anext(stream)
        os.kill(before.pid, signal.SIGKILL)
        with pytest.raises(StreamBroken):
            await drained(stream)
    assert not backend.ready
    got = await events(backend, request())
    assert got[-1] == StreamEnd()
    assert backend.process is not before


async def test_a_model_that_is_not_there_is_told_and_not_tried_again() -> None:
    broken = TorchBackend(path="package:there_is_no_such_package")
    await broken.start()
    with pytest.raises(
        WorkerUnreachable, match="package there_is_no_such_package is not installed"
    ):
        await anext(broken.send(PreparedRequest(request()), context()))
    assert not broken.ready
    await broken.aclose()


async def test_a_model_that_is_slow_to_load_is_overload(tiny_folder: Path) -> None:
    slow = TorchBackend(path=str(tiny_folder))
    await slow.start()
    with pytest.raises(Overloaded):
        await anext(slow.send(PreparedRequest(request()), context(first_token=0.001)))
    await slow.aclose()
    with pytest.raises(WorkerUnreachable, match="shut down"):
        await anext(slow.send(PreparedRequest(request()), context()))


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


async def test_the_process_dies_with_the_gateway(tiny_folder: Path) -> None:
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
    assert alive(pid)
    gateway.kill()
    await gateway.wait()
    await until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class Orders:
    """A process that notes what it is ordered, and does none of it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def open_request(self) -> tuple[int, object]:
        return 1, None

    def send(self, order: Any) -> None:
        self.sent.append(order)
        raise Overloaded("not now")

    def close_request(self, job: int, *, cancel: bool) -> None:
        del job, cancel


async def test_what_nobody_waits_for_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, orders = TorchBackend(path="package:nothing"), Orders()

    async def available(context: RequestContext) -> Orders:
        del context
        return orders

    monkeypatch.setattr(backend, "_get_process", available)
    for one in (context(), msgspec.structs.replace(context(), preempt=lambda: None)):
        with pytest.raises(Overloaded):
            await anext(backend.send(PreparedRequest(request(priority=3)), one))

    assert [order.priority for order in orders.sent] == [3, 255]


async def test_it_is_warm_when_the_model_is_loaded(backend: TorchBackend) -> None:
    await backend.warm_up()
    assert backend.ready


async def test_it_never_gets_warm_when_the_model_cannot_be_loaded() -> None:
    broken = TorchBackend(path="package:there_is_no_such_package")
    await broken.start()
    with pytest.raises(WorkerUnreachable, match="there_is_no_such_package"):
        await broken.warm_up()
    await broken.aclose()
