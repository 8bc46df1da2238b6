"""Requests with emulation: usage, stop strings, several choices, and cancellation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from backends.interfaces import (
    Backend,
    BackendRequest,
    Deadline,
    EventSink,
    PreparedRequest,
    RequestContext,
    StreamItems,
    ignore_memory,
)
from gateway.emulation.execute import MAX_CONCURRENT_PARTS, send_emulated
from gateway.emulation.planner import EmulationPlan
from protocols.core.aggregate import ResponseAccumulator, UnaryResponse
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    StreamEnd,
    StreamStart,
    TextDelta,
    Usage,
)
from protocols.core.request import (
    AnyRequest,
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Message,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
)

CONTEXT = RequestContext("r", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)

Script = Callable[[AnyRequest], Sequence[Sequence[Event]]]


class ScriptedBackend(Backend):
    """Sends its script. At an empty batch it waits until ``go`` is set."""

    ready = True

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[tuple[AnyRequest, str]] = []
        self.event_count = 0
        """Number of batches consumed."""
        self.running = 0
        self.most = 0
        self.began = asyncio.Semaphore(0)
        """Released once for each request."""
        self.go = asyncio.Event()

    def prepare(self, request: BackendRequest) -> PreparedRequest:
        decoded, _ = request.decode()
        return PreparedRequest(decoded)

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def send(
        self, prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
    ) -> StreamItems:
        request = prepared.request
        self.requests.append((request, context.id))
        self.running += 1
        self.began.release()
        self.most = max(self.most, self.running)
        try:
            for batch in self._script(request):
                if not batch:
                    await self.go.wait()
                for event in batch:
                    if event == TextDelta("fail"):
                        raise WorkerFailed("it failed")
                self.event_count += 1
                yield None, batch
        finally:
            self.running -= 1


def make_backend(*batches: Sequence[Event]) -> ScriptedBackend:
    return ScriptedBackend(lambda _: batches)


def make_chat(**fields: Any) -> GenerationRequest:
    messages = (Message("user", (TextPart("12345"),)),)
    return GenerationRequest(model="m", kind="chat", messages=messages, **fields)


def make_completion(*prompts: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=prompts, **fields)


def make_plan(*paths: str) -> EmulationPlan:
    return EmulationPlan(emulated_fields=frozenset(paths))


async def stream_batches(
    backend: ScriptedBackend, request: AnyRequest, plan: EmulationPlan
) -> AsyncGenerator[Sequence[Event], None]:
    """The batches in the form in which the request's sender reports them."""
    items, process_events = send_emulated(backend, PreparedRequest(request), CONTEXT, plan)
    async with aclosing(items):
        async for _, batch in items:
            yield process_events(batch)


async def collect_events(
    backend: ScriptedBackend, request: AnyRequest, plan: EmulationPlan
) -> list[Event]:
    events: list[Event] = []
    async with aclosing(stream_batches(backend, request, plan)) as batches:
        async for batch in batches:
            assert batch, "an empty batch has no text"
            events += batch
    return events


async def collect_response(
    backend: ScriptedBackend, request: AnyRequest, plan: EmulationPlan
) -> UnaryResponse:
    fold = ResponseAccumulator()
    fold.add(await collect_events(backend, request, plan))
    return fold.result()


# --- no emulation, and usage ----------------------------------------------------------------------


async def test_complete_response_passes_unchanged() -> None:
    batches: list[list[Event]] = [
        [StreamStart(3)],
        [TextDelta("a"), ChoiceEnd("eos")],
        [Usage(3, 1), StreamEnd()],
    ]
    backend = make_backend(*batches)
    request = make_chat(stopping=StopConditions(stop=("a",)), n=1)
    passed: list[Sequence[Event]] = []

    async with aclosing(stream_batches(backend, request, make_plan())) as answers:
        async for batch in answers:
            passed.append(batch)

    assert all(one is other for one, other in zip(passed, batches, strict=True))
    assert backend.requests == [(request, "r")]


@pytest.mark.parametrize("usage", ["none", "final", "each"])
async def test_missing_usage_is_counted(usage: Any) -> None:
    backend = make_backend(
        [StreamStart(3)], [TextDelta("a")], [TextDelta("b"), ChoiceEnd("eos"), StreamEnd()]
    )

    events = await collect_events(
        backend, make_chat(response_options=ResponseOptions(usage=usage)), make_plan()
    )

    assert events[-2:] == [Usage(3, 2, source="counted"), StreamEnd()]


async def test_truncated_stream_gets_no_end_event() -> None:
    assert await collect_events(
        make_backend([TextDelta("a"), ChoiceEnd("eos")]), make_chat(), make_plan()
    ) == [
        TextDelta("a"),
        ChoiceEnd("eos"),
    ]


# --- stop strings ---------------------------------------------------------------------------------

ENDED = make_plan("stopping.stop")


async def test_upstream_stream_is_closed_when_the_last_choice_ends() -> None:
    backend = make_backend(
        [StreamStart(3)],
        [TextDelta("a<")],
        [TextDelta("/s>b")],
        [TextDelta("c")],
        [ChoiceEnd("length"), StreamEnd()],
    )
    request = make_chat(stopping=StopConditions(stop=("</s>",)))
    events: list[Event] = []

    async with aclosing(stream_batches(backend, request, ENDED)) as batches:
        async for batch in batches:
            events += batch
            if any(isinstance(one, ChoiceEnd) for one in batch):
                assert backend.running == 0, "the worker is stopped before the client gets the end"

    assert events == [
        StreamStart(3),
        TextDelta("a"),
        ChoiceEnd("stop", 0, "</s>"),
        Usage(3, 2, source="counted"),
        StreamEnd(),
    ]
    assert backend.event_count == 3
    assert backend.requests == [(request, "r")], "the worker gets the stop strings that it supports"


async def test_worker_usage_takes_precedence_over_the_count() -> None:
    backend = make_backend([TextDelta("a.b", tokens=3), ChoiceEnd("eos"), Usage(2, 3), StreamEnd()])

    events = await collect_events(backend, make_chat(stopping=StopConditions(stop=(".",))), ENDED)

    assert events == [TextDelta("a", tokens=1), ChoiceEnd("stop", 0, "."), Usage(2, 3), StreamEnd()]


async def test_running_worker_usage_is_reported_at_a_stop() -> None:
    backend = make_backend(
        [TextDelta("a"), Usage(2, 1)], [TextDelta("."), Usage(2, 2)], [TextDelta("b")]
    )
    request = make_chat(
        stopping=StopConditions(stop=(".",)), response_options=ResponseOptions(usage="each")
    )

    assert (await collect_events(backend, request, ENDED))[-3:] == [
        ChoiceEnd("stop", 0, "."),
        Usage(2, 2),
        StreamEnd(),
    ]


async def test_stop_string_ends_only_its_own_choice() -> None:
    backend = make_backend(
        [TextDelta("a."), TextDelta("b", 1)],
        [TextDelta("c"), TextDelta("d", 1)],
        [ChoiceEnd("eos", 1)],
        [StreamEnd()],
    )

    response = await collect_response(
        backend, make_chat(n=2, stopping=StopConditions(stop=(".",))), ENDED
    )

    assert [(one.text, one.finish_reason) for one in response.choices] == [
        ("a", "stop"),
        ("bd", "eos"),
    ]
    assert backend.event_count == 3


async def test_included_stop_string_is_not_sent_to_the_worker() -> None:
    backend = make_backend([TextDelta("a.b")])
    request = make_chat(stopping=StopConditions(stop=(".",), include_stop=True))

    response = await collect_response(backend, request, make_plan("stopping.include_stop"))

    assert (response.choices[0].text, response.choices[0].matched_stop) == ("a.", ".")
    assert backend.requests[0][0] == make_chat()


async def test_request_without_stop_strings_passes_unchanged() -> None:
    backend = make_backend([TextDelta("a"), ChoiceEnd("eos"), Usage(1, 1), StreamEnd()])

    events = await collect_events(
        backend, make_chat(stopping=StopConditions(include_stop=True)), ENDED
    )

    assert events == [TextDelta("a"), ChoiceEnd("eos"), Usage(1, 1), StreamEnd()]


async def test_echoed_prompt_and_suffix_are_not_searched_for_stop_strings() -> None:
    backend = make_backend([TextDelta("a"), TextDelta(".b")])
    request = make_completion("x.", echo=True, suffix=".y", stopping=StopConditions(stop=(".",)))

    events = await collect_events(backend, request, ENDED)

    assert events[:-2] == [
        PromptEcho(0, "x."),
        TextDelta("a"),
        TextDelta(".y", tokens=0),
        ChoiceEnd("stop", 0, "."),
    ]
    assert backend.requests[0][0] == make_completion("x.", stopping=StopConditions(stop=(".",)))


# --- several choices ------------------------------------------------------------------------------


def echo_prompt_and_seed(request: AnyRequest) -> Sequence[Sequence[Event]]:
    """Answers with the prompt and the seed."""
    assert isinstance(request, GenerationRequest)
    [prompt] = request.prompts
    return [
        [StreamStart(len(prompt))],
        [TextDelta(f"{prompt}{request.sampling.seed}")],
        [ChoiceEnd("eos")],
        [Usage(len(prompt), 1), StreamEnd()],
    ]


async def test_choices_and_prompts_are_fanned_out() -> None:
    backend = ScriptedBackend(echo_prompt_and_seed)
    request = make_completion("ab", "c", n=2, sampling=SamplingParams(seed=5))

    response = await collect_response(backend, request, make_plan("n", "prompts"))

    assert [one.text for one in response.choices] == ["ab5", "ab6", "c5", "c6"]
    assert response.usage == Usage(3, 4)
    assert sorted(id_ for _, id_ in backend.requests) == ["r-0", "r-1", "r-2", "r-3"]
    assert CONTEXT.id == "r"


async def test_one_choice_is_sent_as_one_unchanged_request() -> None:
    backend = make_backend([TextDelta("a"), ChoiceEnd("eos"), StreamEnd()])

    await collect_events(backend, make_chat(n=1), make_plan("n"))

    assert backend.requests == [(make_chat(), "r")]


async def test_concurrent_parts_are_limited() -> None:
    backend = ScriptedBackend(lambda _: [[], [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]])
    task = asyncio.create_task(
        collect_response(backend, make_chat(n=3 * MAX_CONCURRENT_PARTS), make_plan("n"))
    )
    for _ in range(MAX_CONCURRENT_PARTS):
        await backend.began.acquire()
    backend.go.set()

    response = await task

    assert [one.text for one in response.choices] == ["a"] * 3 * MAX_CONCURRENT_PARTS
    assert (backend.most, backend.running) == (MAX_CONCURRENT_PARTS, 0)
    assert len(backend.requests) == 3 * MAX_CONCURRENT_PARTS


async def test_events_are_forwarded_while_other_parts_are_running() -> None:
    backend = ScriptedBackend(lambda _: [[TextDelta("a")], [], [ChoiceEnd("eos"), StreamEnd()]])

    async with aclosing(stream_batches(backend, make_chat(n=2), make_plan("n"))) as batches:
        pieces = [await anext(batches), await anext(batches)]
        assert pieces == [[TextDelta("a", 0)], [TextDelta("a", 1)]]
        assert backend.running == 2


async def test_running_usage_is_summed_over_the_parts() -> None:
    backend = make_backend(
        [TextDelta("a"), Usage(2, 1)], [ChoiceEnd("eos"), Usage(2, 1), StreamEnd()]
    )

    events = await collect_events(
        backend, make_chat(n=2, response_options=ResponseOptions(usage="each")), make_plan("n")
    )

    assert [one for one in events if isinstance(one, Usage)][-1] == Usage(2, 2)
    assert events[-1] == StreamEnd()


async def test_stop_string_closes_only_its_own_part() -> None:
    def script(request: AnyRequest) -> Sequence[Sequence[Event]]:
        prompt = request.prompts[0]  # type: ignore[union-attr]
        return [[TextDelta(f"{prompt}.")], [], [TextDelta("more")], [ChoiceEnd("eos"), StreamEnd()]]

    backend = ScriptedBackend(script)
    request = make_completion("a", "b", stopping=StopConditions(stop=("a.",)))
    events: list[Event] = []

    async with aclosing(
        stream_batches(backend, request, make_plan("stopping.stop", "prompts"))
    ) as batches:
        async for batch in batches:
            events += batch
            if (
                ChoiceEnd("stop", 0, "a.") in events
                and TextDelta("b.", 1) in events
                and not backend.go.is_set()
            ):
                assert backend.running == 1
                backend.go.set()

    assert [one for one in events if isinstance(one, TextDelta)] == [
        TextDelta("b.", 1),
        TextDelta("more", 1),
    ]
    assert events[-2:] == [Usage(2, 3, source="estimated"), StreamEnd()]


async def test_embedding_inputs_are_fanned_out() -> None:
    def script(request: AnyRequest) -> Sequence[Sequence[Event]]:
        assert isinstance(request, EmbeddingRequest)
        [text] = request.inputs
        return [[Embedding(0, (float(len(text)),)), StreamEnd()]]

    request = EmbeddingRequest(model="m", inputs=("a", "bcdef"))

    response = await collect_response(ScriptedBackend(script), request, make_plan("inputs"))

    assert response.embeddings == [(1.0,), (5.0,)]
    assert response.usage == Usage(1 + 2, source="estimated")


async def test_scored_prompt_echo_is_assigned_to_its_choice() -> None:
    def script(request: AnyRequest) -> Sequence[Sequence[Event]]:
        assert isinstance(request, GenerationRequest)
        assert request.echo
        return [[PromptEcho(0, str(request.prompts[0])), ChoiceEnd("eos"), StreamEnd()]]

    request = make_completion("a", "b", echo=True, logprobs=LogprobsOptions())

    response = await collect_response(ScriptedBackend(script), request, make_plan("prompts"))

    assert [one.text for one in response.choices] == ["a", "b"]


# --- early ends -----------------------------------------------------------------------------------


async def test_error_of_one_part_cancels_all_parts() -> None:
    def script(request: AnyRequest) -> Sequence[Sequence[Event]]:
        assert isinstance(request, GenerationRequest)
        return (
            [[TextDelta("fail")]]
            if request.sampling.seed == 1
            else [[TextDelta("a")], [], [StreamEnd()]]
        )

    backend = ScriptedBackend(script)

    with pytest.raises(WorkerFailed, match="it failed"):
        await collect_events(
            backend, make_chat(n=30, sampling=SamplingParams(seed=0)), make_plan("n")
        )

    assert backend.running == 0
    assert len(backend.requests) < 30


async def test_truncated_part_raises_stream_broken() -> None:
    with pytest.raises(StreamBroken):
        await collect_events(
            make_backend([TextDelta("a"), ChoiceEnd("eos")]), make_chat(n=2), make_plan("n")
        )


@pytest.mark.parametrize("plan", [make_plan(), make_plan("n"), make_plan("stopping.stop")])
async def test_closing_the_stream_closes_all_upstream_streams(plan: EmulationPlan) -> None:
    backend = ScriptedBackend(lambda _: [[TextDelta("a")], [], [StreamEnd()]])
    request = make_completion("p", n=3, suffix="!", stopping=StopConditions(stop=("x",)))
    batches = stream_batches(backend, request, plan)
    await anext(batches)

    assert backend.running == (3 if "n" in plan.emulated_fields else 1)

    await batches.aclose()

    assert backend.running == 0


@pytest.mark.parametrize("plan", [make_plan(), make_plan("n"), make_plan("stopping.stop")])
async def test_cancelling_the_task_closes_all_upstream_streams(plan: EmulationPlan) -> None:
    backend = ScriptedBackend(lambda _: [[]])
    task = asyncio.create_task(collect_events(backend, make_chat(n=3), plan))
    await backend.began.acquire()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert backend.running == 0
