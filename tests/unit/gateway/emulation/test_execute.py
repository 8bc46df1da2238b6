"""A backend's answer with what the gateway does in its stead, and how it is left."""

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
    EmbeddingRequest,
    GenerationRequest,
    LogprobsOptions,
    Message,
    Request,
    ResponseOptions,
    SamplingParams,
    StopConditions,
    TextPart,
)

CONTEXT = RequestContext("r", Deadline(lambda: 0.0, 60.0), lambda: 0.0)

Script = Callable[[Request], Sequence[Sequence[Event]]]


class Scripted(Backend):
    """Answers with its script. A batch that is empty is where it waits until ``go`` is set."""

    ready = True

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[tuple[Request, str]] = []
        self.said = 0
        """Batches that were taken."""
        self.running = 0
        self.most = 0
        self.began = asyncio.Semaphore(0)
        """Given once for each request."""
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
        self.asked.append((request, context.id))
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
                self.said += 1
                yield None, batch
        finally:
            self.running -= 1


def says(*batches: Sequence[Event]) -> Scripted:
    return Scripted(lambda _: batches)


def chat(**fields: Any) -> GenerationRequest:
    said = (Message("user", (TextPart("12345"),)),)
    return GenerationRequest(model="m", kind="chat", messages=said, **fields)


def completion(*prompts: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=prompts, **fields)


def doing(*paths: str) -> EmulationPlan:
    return EmulationPlan(emulated_fields=frozenset(paths))


async def stream(
    backend: Scripted, request: Request, plan: EmulationPlan
) -> AsyncGenerator[Sequence[Event], None]:
    """The batches, as whoever sends the request reports them."""
    items, process_events = send_emulated(backend, PreparedRequest(request), CONTEXT, plan)
    async with aclosing(items):
        async for _, batch in items:
            yield process_events(batch)


async def events(backend: Scripted, request: Request, plan: EmulationPlan) -> list[Event]:
    found: list[Event] = []
    async with aclosing(stream(backend, request, plan)) as batches:
        async for batch in batches:
            assert batch, "a batch with nothing in it says nothing"
            found += batch
    return found


async def whole(backend: Scripted, request: Request, plan: EmulationPlan) -> UnaryResponse:
    fold = ResponseAccumulator()
    fold.add(await events(backend, request, plan))
    return fold.result()


# --- nothing to do, and usage ---------------------------------------------------------------------


async def test_an_answer_that_lacks_nothing_passes_as_it_is() -> None:
    batches: list[list[Event]] = [
        [StreamStart(3)],
        [TextDelta("a"), ChoiceEnd("eos")],
        [Usage(3, 1), StreamEnd()],
    ]
    backend = says(*batches)
    request = chat(stopping=StopConditions(stop=("a",)), n=1)
    passed: list[Sequence[Event]] = []

    async with aclosing(stream(backend, request, doing())) as answers:
        async for batch in answers:
            passed.append(batch)

    assert all(one is other for one, other in zip(passed, batches, strict=True))
    assert backend.asked == [(request, "r")]


@pytest.mark.parametrize("usage", ["none", "final", "each"])
async def test_usage_is_counted_where_none_was_told(usage: Any) -> None:
    backend = says(
        [StreamStart(3)], [TextDelta("a")], [TextDelta("b"), ChoiceEnd("eos"), StreamEnd()]
    )

    found = await events(backend, chat(response_options=ResponseOptions(usage=usage)), doing())

    assert found[-2:] == [Usage(3, 2, source="counted"), StreamEnd()]


async def test_an_answer_that_is_cut_is_not_ended() -> None:
    assert await events(says([TextDelta("a"), ChoiceEnd("eos")]), chat(), doing()) == [
        TextDelta("a"),
        ChoiceEnd("eos"),
    ]


# --- stop strings ---------------------------------------------------------------------------------

ENDED = doing("stopping.stop")


async def test_the_backend_is_left_as_soon_as_the_last_choice_has_ended() -> None:
    backend = says(
        [StreamStart(3)],
        [TextDelta("a<")],
        [TextDelta("/s>b")],
        [TextDelta("c")],
        [ChoiceEnd("length"), StreamEnd()],
    )
    request = chat(stopping=StopConditions(stop=("</s>",)))
    found: list[Event] = []

    async with aclosing(stream(backend, request, ENDED)) as batches:
        async for batch in batches:
            found += batch
            if any(isinstance(one, ChoiceEnd) for one in batch):
                assert backend.running == 0, "the worker stops before the client is told"

    assert found == [
        StreamStart(3),
        TextDelta("a"),
        ChoiceEnd("stop", 0, "</s>"),
        Usage(3, 2, source="counted"),
        StreamEnd(),
    ]
    assert backend.said == 3
    assert backend.asked == [(request, "r")], "the worker is told of the stops that it takes"


async def test_the_worker_s_usage_wins_where_it_came_in_time() -> None:
    backend = says([TextDelta("a.b", tokens=3), ChoiceEnd("eos"), Usage(2, 3), StreamEnd()])

    found = await events(backend, chat(stopping=StopConditions(stop=(".",))), ENDED)

    assert found == [TextDelta("a", tokens=1), ChoiceEnd("stop", 0, "."), Usage(2, 3), StreamEnd()]


async def test_running_usage_needs_no_count_at_a_cut() -> None:
    backend = says([TextDelta("a"), Usage(2, 1)], [TextDelta("."), Usage(2, 2)], [TextDelta("b")])
    request = chat(
        stopping=StopConditions(stop=(".",)), response_options=ResponseOptions(usage="each")
    )

    assert (await events(backend, request, ENDED))[-3:] == [
        ChoiceEnd("stop", 0, "."),
        Usage(2, 2),
        StreamEnd(),
    ]


async def test_one_choice_s_stop_leaves_the_others_alone() -> None:
    backend = says(
        [TextDelta("a."), TextDelta("b", 1)],
        [TextDelta("c"), TextDelta("d", 1)],
        [ChoiceEnd("eos", 1)],
        [StreamEnd()],
    )

    found = await whole(backend, chat(n=2, stopping=StopConditions(stop=(".",))), ENDED)

    assert [(one.text, one.finish_reason) for one in found.choices] == [
        ("a", "stop"),
        ("bd", "eos"),
    ]
    assert backend.said == 3


async def test_a_stop_that_stays_is_the_gateway_s_alone() -> None:
    backend = says([TextDelta("a.b")])
    request = chat(stopping=StopConditions(stop=(".",), include_stop=True))

    found = await whole(backend, request, doing("stopping.include_stop"))

    assert (found.choices[0].text, found.choices[0].matched_stop) == ("a.", ".")
    assert backend.asked[0][0] == chat()


async def test_no_stop_string_is_nothing_to_look_for() -> None:
    backend = says([TextDelta("a"), ChoiceEnd("eos"), Usage(1, 1), StreamEnd()])

    found = await events(backend, chat(stopping=StopConditions(include_stop=True)), ENDED)

    assert found == [TextDelta("a"), ChoiceEnd("eos"), Usage(1, 1), StreamEnd()]


async def test_the_prompt_and_the_suffix_are_no_part_of_what_is_searched() -> None:
    backend = says([TextDelta("a"), TextDelta(".b")])
    request = completion("x.", echo=True, suffix=".y", stopping=StopConditions(stop=(".",)))

    found = await events(backend, request, ENDED)

    assert found[:-2] == [
        PromptEcho(0, "x."),
        TextDelta("a"),
        TextDelta(".y", tokens=0),
        ChoiceEnd("stop", 0, "."),
    ]
    assert backend.asked[0][0] == completion("x.", stopping=StopConditions(stop=(".",)))


# --- several at a time ----------------------------------------------------------------------------


def repeat(request: Request) -> Sequence[Sequence[Event]]:
    """Says the prompt back, with the seed."""
    assert isinstance(request, GenerationRequest)
    [prompt] = request.prompts
    return [
        [StreamStart(len(prompt))],
        [TextDelta(f"{prompt}{request.sampling.seed}")],
        [ChoiceEnd("eos")],
        [Usage(len(prompt), 1), StreamEnd()],
    ]


async def test_choices_and_prompts_by_a_request_each() -> None:
    backend = Scripted(repeat)
    request = completion("ab", "c", n=2, sampling=SamplingParams(seed=5))

    found = await whole(backend, request, doing("n", "prompts"))

    assert [one.text for one in found.choices] == ["ab5", "ab6", "c5", "c6"]
    assert found.usage == Usage(3, 4)
    assert sorted(id_ for _, id_ in backend.asked) == ["r-0", "r-1", "r-2", "r-3"]
    assert CONTEXT.id == "r"


async def test_one_choice_needs_no_other_request() -> None:
    backend = says([TextDelta("a"), ChoiceEnd("eos"), StreamEnd()])

    await events(backend, chat(n=1), doing("n"))

    assert backend.asked == [(chat(), "r")]


async def test_only_so_many_are_asked_for_at_a_time() -> None:
    backend = Scripted(lambda _: [[], [TextDelta("a"), ChoiceEnd("eos"), StreamEnd()]])
    asking = asyncio.create_task(whole(backend, chat(n=3 * MAX_CONCURRENT_PARTS), doing("n")))
    for _ in range(MAX_CONCURRENT_PARTS):
        await backend.began.acquire()
    backend.go.set()

    found = await asking

    assert [one.text for one in found.choices] == ["a"] * 3 * MAX_CONCURRENT_PARTS
    assert (backend.most, backend.running) == (MAX_CONCURRENT_PARTS, 0)
    assert len(backend.asked) == 3 * MAX_CONCURRENT_PARTS


async def test_pieces_pass_while_other_parts_are_at_work() -> None:
    backend = Scripted(lambda _: [[TextDelta("a")], [], [ChoiceEnd("eos"), StreamEnd()]])

    async with aclosing(stream(backend, chat(n=2), doing("n"))) as batches:
        pieces = [await anext(batches), await anext(batches)]
        assert pieces == [[TextDelta("a", 0)], [TextDelta("a", 1)]]
        assert backend.running == 2


async def test_the_usage_of_parts_runs() -> None:
    backend = says([TextDelta("a"), Usage(2, 1)], [ChoiceEnd("eos"), Usage(2, 1), StreamEnd()])

    found = await events(
        backend, chat(n=2, response_options=ResponseOptions(usage="each")), doing("n")
    )

    assert [one for one in found if isinstance(one, Usage)][-1] == Usage(2, 2)
    assert found[-1] == StreamEnd()


async def test_a_stop_ends_its_own_part_at_once() -> None:
    def script(request: Request) -> Sequence[Sequence[Event]]:
        prompt = request.prompts[0]  # type: ignore[union-attr]
        return [[TextDelta(f"{prompt}.")], [], [TextDelta("more")], [ChoiceEnd("eos"), StreamEnd()]]

    backend = Scripted(script)
    request = completion("a", "b", stopping=StopConditions(stop=("a.",)))
    found: list[Event] = []

    async with aclosing(stream(backend, request, doing("stopping.stop", "prompts"))) as batches:
        async for batch in batches:
            found += batch
            if (
                ChoiceEnd("stop", 0, "a.") in found
                and TextDelta("b.", 1) in found
                and not backend.go.is_set()
            ):
                assert backend.running == 1
                backend.go.set()

    assert [one for one in found if isinstance(one, TextDelta)] == [
        TextDelta("b.", 1),
        TextDelta("more", 1),
    ]
    assert found[-2:] == [Usage(2, 3, source="estimated"), StreamEnd()]


async def test_inputs_by_a_request_each() -> None:
    def script(request: Request) -> Sequence[Sequence[Event]]:
        assert isinstance(request, EmbeddingRequest)
        [text] = request.inputs
        return [[Embedding(0, (float(len(text)),)), StreamEnd()]]

    request = EmbeddingRequest(model="m", inputs=("a", "bcdef"))

    found = await whole(Scripted(script), request, doing("inputs"))

    assert found.embeddings == [(1.0,), (5.0,)]
    assert found.usage == Usage(1 + 2, source="estimated")


async def test_a_prompt_that_the_model_scores_comes_back_at_its_place() -> None:
    def script(request: Request) -> Sequence[Sequence[Event]]:
        assert isinstance(request, GenerationRequest)
        assert request.echo
        return [[PromptEcho(0, str(request.prompts[0])), ChoiceEnd("eos"), StreamEnd()]]

    request = completion("a", "b", echo=True, logprobs=LogprobsOptions())

    found = await whole(Scripted(script), request, doing("prompts"))

    assert [one.text for one in found.choices] == ["a", "b"]


# --- how it ends before its end -------------------------------------------------------------------


async def test_an_error_of_one_part_ends_all() -> None:
    def script(request: Request) -> Sequence[Sequence[Event]]:
        assert isinstance(request, GenerationRequest)
        return (
            [[TextDelta("fail")]]
            if request.sampling.seed == 1
            else [[TextDelta("a")], [], [StreamEnd()]]
        )

    backend = Scripted(script)

    with pytest.raises(WorkerFailed, match="it failed"):
        await events(backend, chat(n=30, sampling=SamplingParams(seed=0)), doing("n"))

    assert backend.running == 0
    assert len(backend.asked) < 30


async def test_a_part_that_stops_before_its_end_breaks_the_whole() -> None:
    with pytest.raises(StreamBroken):
        await events(says([TextDelta("a"), ChoiceEnd("eos")]), chat(n=2), doing("n"))


@pytest.mark.parametrize("plan", [doing(), doing("n"), doing("stopping.stop")])
async def test_closing_it_closes_everything_at_once(plan: EmulationPlan) -> None:
    backend = Scripted(lambda _: [[TextDelta("a")], [], [StreamEnd()]])
    request = completion("p", n=3, suffix="!", stopping=StopConditions(stop=("x",)))
    batches = stream(backend, request, plan)
    await anext(batches)
    assert backend.running == (3 if "n" in plan.emulated_fields else 1)

    await batches.aclose()

    assert backend.running == 0


@pytest.mark.parametrize("plan", [doing(), doing("n"), doing("stopping.stop")])
async def test_cancelling_its_task_closes_everything_at_once(plan: EmulationPlan) -> None:
    backend = Scripted(lambda _: [[]])
    task = asyncio.create_task(events(backend, chat(n=3), plan))
    await backend.began.acquire()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert backend.running == 0
