"""A request as several, and their answers as one."""

from typing import Any

import pytest

from gateway.emulation.fan_out import FanIn, FanOut, RequestPart
from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    Usage,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    SamplingParams,
    TextPart,
)


def completion(*prompts: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=prompts, **fields)


def chat(**fields: Any) -> GenerationRequest:
    said = (Message("user", (TextPart("x"),)),)
    return GenerationRequest(model="m", kind="chat", messages=said, **fields)


# --- the requests ---------------------------------------------------------------------------------

ASKED = completion("a", "b", n=2)


def test_choices_and_prompts_one_at_a_time() -> None:
    spread = FanOut(ASKED, {"n", "prompts"})

    assert list(spread) == [
        RequestPart(completion("a"), 0, 0, (0,)),
        RequestPart(completion("a"), 1, 0, (1,)),
        RequestPart(completion("b"), 2, 1, (2,)),
        RequestPart(completion("b"), 3, 1, (3,)),
    ]
    assert (len(spread), spread.group_count) == (4, 2)


def test_prompts_one_at_a_time_with_all_their_choices() -> None:
    spread = FanOut(ASKED, {"prompts"})

    assert list(spread) == [
        RequestPart(completion("a", n=2), 0, 0, (0, 1)),
        RequestPart(completion("b", n=2), 1, 1, (2, 3)),
    ]
    assert (len(spread), spread.group_count) == (2, 2)


def test_choices_one_at_a_time_with_all_their_prompts() -> None:
    spread = FanOut(ASKED, {"n"})

    assert list(spread) == [
        RequestPart(completion("a", "b"), 0, 0, (0, 2)),
        RequestPart(completion("a", "b"), 1, 0, (1, 3)),
    ]
    assert (len(spread), spread.group_count) == (2, 1)


@pytest.mark.parametrize("does", [{"n"}, {"n", "prompts"}])
def test_the_choices_of_a_conversation(does: set[str]) -> None:
    assert list(FanOut(chat(n=2), does)) == [
        RequestPart(chat(), 0, 0, (0,)),
        RequestPart(chat(), 1, 0, (1,)),
    ]


def test_one_of_everything_is_one_request() -> None:
    spread = FanOut(completion("a", n=1), {"n", "prompts"})

    assert list(spread) == [RequestPart(completion("a"), 0, 0, (0,))]
    assert len(spread) == 1


def test_inputs_one_at_a_time() -> None:
    def embed(*inputs: str) -> EmbeddingRequest:
        return EmbeddingRequest(model="m", inputs=inputs)

    assert list(FanOut(embed("a", "b"), {"inputs"})) == [
        RequestPart(embed("a"), 0, 0, (0,)),
        RequestPart(embed("b"), 1, 1, (1,)),
    ]


def test_copies_have_seeds_of_their_own_and_a_prompt_s_first_has_the_client_s() -> None:
    request = completion("a", "b", n=2, sampling=SamplingParams(seed=2**64 - 1, top_k=5))

    parts = list(FanOut(request, {"n", "prompts"}))

    seeds = [part.request.sampling.seed for part in parts]  # type: ignore[union-attr]
    assert seeds == [2**64 - 1, 0, 2**64 - 1, 0]
    assert parts[1].request.sampling.top_k == 5  # type: ignore[union-attr]


def test_a_seed_stays_where_there_are_no_copies() -> None:
    request = completion("a", "b", n=2, sampling=SamplingParams(seed=7))

    assert all(
        part.request.sampling.seed == 7  # type: ignore[union-attr]
        for part in FanOut(request, {"prompts"})
    )


@pytest.mark.parametrize(("best_of", "left"), [(2, None), (3, 3), (None, None)])
def test_as_many_as_are_returned_need_no_best(best_of: int | None, left: int | None) -> None:
    parts = list(FanOut(completion("a", n=2, best_of=best_of), {"n"}))

    assert [part.request.best_of for part in parts] == [left, left]  # type: ignore[union-attr]


# --- the answers ----------------------------------------------------------------------------------


def merge(spread: FanOut, *answers: list[Event], running: bool = False) -> list[Event]:
    """The parts' answers, one after the other, as one."""
    merged = FanIn(spread, running=running)
    out: list[Event] = []
    for part, events in zip(spread, answers, strict=False):
        out += merged.apply(part, events)
    return out + merged.finish()


def said(text: str, prompt: int, completion_: int, **more: Any) -> list[Event]:
    usage = Usage(prompt, completion_, **more)
    return [StreamStart(prompt), TextDelta(text), ChoiceEnd("eos"), usage, StreamEnd()]


def test_copies_are_one_answer_and_their_prompt_counts_once() -> None:
    out = merge(FanOut(chat(n=2), {"n"}), said("a", 5, 1), said("b", 5, 2))

    assert out == [
        StreamStart(5),
        TextDelta("a", 0),
        ChoiceEnd("eos", 0),
        TextDelta("b", 1),
        ChoiceEnd("eos", 1),
        Usage(5, 3),
        StreamEnd(),
    ]


def test_different_prompts_count_each_and_their_sum_is_not_known_at_the_start() -> None:
    out = merge(
        FanOut(ASKED, {"n", "prompts"}),
        said("a", 5, 1, cached_tokens=4),
        said("b", 5, 2, cached_tokens=5),
        said("c", 7, 3, reasoning_tokens=2),
        said("d", 7, 4, reasoning_tokens=1, source="counted"),
    )

    assert out[0] == StreamStart()
    assert [one.index for one in out if isinstance(one, TextDelta)] == [0, 1, 2, 3]
    assert out[-2:] == [Usage(12, 10, 4, 3, source="counted"), StreamEnd()]


def test_all_choices_of_a_part_find_their_places() -> None:
    spread = FanOut(ASKED, {"n"})
    answer: list[Event] = [TextDelta("x", 1), TextDelta("y", 0), Usage(9, 2), StreamEnd()]

    out = merge(spread, answer, answer)

    assert [(one.text, one.index) for one in out if isinstance(one, TextDelta)] == [
        ("x", 2),
        ("y", 0),
        ("x", 3),
        ("y", 1),
    ]
    assert out[-2] == Usage(9, 4)


def test_vectors_find_their_places() -> None:
    spread = FanOut(EmbeddingRequest(model="m", inputs=("a", "b")), {"inputs"})

    out = merge(
        spread,
        [Embedding(0, (1.0,)), Usage(1), StreamEnd()],
        [Embedding(0, (2.0,)), Usage(2, source="estimated"), StreamEnd()],
    )

    assert out == [
        Embedding(0, (1.0,)),
        Embedding(1, (2.0,)),
        Usage(3, source="estimated"),
        StreamEnd(),
    ]


def test_running_usage_runs_over_all_parts() -> None:
    one: list[Event] = [Usage(5, 1), Usage(5, 2, reasoning_tokens=1), StreamEnd()]
    two: list[Event] = [Usage(5, 3), StreamEnd()]

    out = merge(FanOut(chat(n=2), {"n"}), one, two, running=True)

    assert out == [Usage(5, 1), Usage(5, 2, None, 1), Usage(5, 5, None, 1), StreamEnd()]


def test_a_start_that_is_late_is_none() -> None:
    out = merge(
        FanOut(chat(n=2), {"n"}), [TextDelta("a"), StreamEnd()], [StreamStart(5), StreamEnd()]
    )

    assert out == [TextDelta("a"), Usage(0), StreamEnd()]


def test_what_is_told_of_an_answer_is_told_by_one() -> None:
    timing, other = Timing(queue=1.0), Timing(queue=2.0)
    one: list[Event] = [ResponseMetadata("m1"), timing, timing, StreamEnd()]
    two: list[Event] = [ResponseMetadata("m2"), other, StreamEnd()]

    assert merge(FanOut(chat(n=2), {"n"}), one, two)[:-2] == [
        ResponseMetadata("m1"),
        timing,
        timing,
    ]


def test_who_answers_may_come_late() -> None:
    out = merge(FanOut(chat(n=2), {"n"}), [StreamEnd()], [ResponseMetadata("m2"), StreamEnd()])

    assert out[0] == ResponseMetadata("m2")


def test_a_part_without_its_end_is_no_answer() -> None:
    with pytest.raises(StreamBroken, match="ended early"):
        merge(FanOut(chat(n=2), {"n"}), said("a", 1, 1), said("b", 1, 1)[:-1])


def test_a_choice_that_was_not_asked_for_is_the_worker_s_fault() -> None:
    with pytest.raises(WorkerFailed, match="not requested"):
        merge(FanOut(chat(n=2), {"n"}), [TextDelta("a", 1)])
