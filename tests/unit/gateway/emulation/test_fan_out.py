"""A request for several choices is sent as several requests, and their responses are merged."""

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


def make_completion(*prompts: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", kind="completion", prompts=prompts, **fields)


def make_chat(**fields: Any) -> GenerationRequest:
    messages = (Message("user", (TextPart("x"),)),)
    return GenerationRequest(model="m", kind="chat", messages=messages, **fields)


# --- requests -------------------------------------------------------------------------------------

REQUEST = make_completion("a", "b", n=2)


def test_choices_and_prompts_are_split_into_single_requests() -> None:
    spread = FanOut(REQUEST, {"n", "prompts"})

    assert list(spread) == [
        RequestPart(make_completion("a"), 0, 0, (0,)),
        RequestPart(make_completion("a"), 1, 0, (1,)),
        RequestPart(make_completion("b"), 2, 1, (2,)),
        RequestPart(make_completion("b"), 3, 1, (3,)),
    ]
    assert (len(spread), spread.group_count) == (4, 2)


def test_prompts_are_split_with_all_their_choices() -> None:
    spread = FanOut(REQUEST, {"prompts"})

    assert list(spread) == [
        RequestPart(make_completion("a", n=2), 0, 0, (0, 1)),
        RequestPart(make_completion("b", n=2), 1, 1, (2, 3)),
    ]
    assert (len(spread), spread.group_count) == (2, 2)


def test_choices_are_split_with_all_their_prompts() -> None:
    spread = FanOut(REQUEST, {"n"})

    assert list(spread) == [
        RequestPart(make_completion("a", "b"), 0, 0, (0, 2)),
        RequestPart(make_completion("a", "b"), 1, 0, (1, 3)),
    ]
    assert (len(spread), spread.group_count) == (2, 1)


@pytest.mark.parametrize("does", [{"n"}, {"n", "prompts"}])
def test_chat_choices_are_split_into_single_requests(does: set[str]) -> None:
    assert list(FanOut(make_chat(n=2), does)) == [
        RequestPart(make_chat(), 0, 0, (0,)),
        RequestPart(make_chat(), 1, 0, (1,)),
    ]


def test_one_choice_of_one_prompt_is_one_request() -> None:
    spread = FanOut(make_completion("a", n=1), {"n", "prompts"})

    assert list(spread) == [RequestPart(make_completion("a"), 0, 0, (0,))]
    assert len(spread) == 1


def test_embedding_inputs_are_split_into_single_requests() -> None:
    def embed(*inputs: str) -> EmbeddingRequest:
        return EmbeddingRequest(model="m", inputs=inputs)

    assert list(FanOut(embed("a", "b"), {"inputs"})) == [
        RequestPart(embed("a"), 0, 0, (0,)),
        RequestPart(embed("b"), 1, 1, (1,)),
    ]


def test_copies_have_increasing_seeds_from_the_client_seed() -> None:
    request = make_completion("a", "b", n=2, sampling=SamplingParams(seed=2**64 - 1, top_k=5))

    parts = list(FanOut(request, {"n", "prompts"}))

    seeds = [part.request.sampling.seed for part in parts]  # type: ignore[union-attr]
    assert seeds == [2**64 - 1, 0, 2**64 - 1, 0]
    assert parts[1].request.sampling.top_k == 5  # type: ignore[union-attr]


def test_seed_is_unchanged_without_copies() -> None:
    request = make_completion("a", "b", n=2, sampling=SamplingParams(seed=7))

    assert all(
        part.request.sampling.seed == 7  # type: ignore[union-attr]
        for part in FanOut(request, {"prompts"})
    )


@pytest.mark.parametrize(("best_of", "left"), [(2, None), (3, 3), (None, None)])
def test_best_of_equal_to_the_choice_count_is_dropped(
    best_of: int | None, left: int | None
) -> None:
    parts = list(FanOut(make_completion("a", n=2, best_of=best_of), {"n"}))

    assert [part.request.best_of for part in parts] == [left, left]  # type: ignore[union-attr]


# --- responses ------------------------------------------------------------------------------------


def merge_responses(spread: FanOut, *answers: list[Event], running: bool = False) -> list[Event]:
    """Merge the responses of the parts."""
    merged = FanIn(spread, running=running)
    out: list[Event] = []
    for part, events in zip(spread, answers, strict=False):
        out += merged.apply(part, events)
    return out + merged.finish()


def make_response(text: str, prompt: int, completion_: int, **fields: Any) -> list[Event]:
    usage = Usage(prompt, completion_, **fields)
    return [StreamStart(prompt), TextDelta(text), ChoiceEnd("eos"), usage, StreamEnd()]


def test_copies_are_merged_and_their_prompt_counts_once() -> None:
    out = merge_responses(
        FanOut(make_chat(n=2), {"n"}), make_response("a", 5, 1), make_response("b", 5, 2)
    )

    assert out == [
        StreamStart(5),
        TextDelta("a", 0),
        ChoiceEnd("eos", 0),
        TextDelta("b", 1),
        ChoiceEnd("eos", 1),
        Usage(5, 3),
        StreamEnd(),
    ]


def test_prompt_tokens_of_different_prompts_are_summed_at_the_end() -> None:
    out = merge_responses(
        FanOut(REQUEST, {"n", "prompts"}),
        make_response("a", 5, 1, cached_tokens=4),
        make_response("b", 5, 2, cached_tokens=5),
        make_response("c", 7, 3, reasoning_tokens=2),
        make_response("d", 7, 4, reasoning_tokens=1, source="counted"),
    )

    assert out[0] == StreamStart()
    assert [one.index for one in out if isinstance(one, TextDelta)] == [0, 1, 2, 3]
    assert out[-2:] == [Usage(12, 10, 4, 3, source="counted"), StreamEnd()]


def test_choices_of_a_part_get_their_global_index() -> None:
    spread = FanOut(REQUEST, {"n"})
    response: list[Event] = [TextDelta("x", 1), TextDelta("y", 0), Usage(9, 2), StreamEnd()]

    out = merge_responses(spread, response, response)

    assert [(one.text, one.index) for one in out if isinstance(one, TextDelta)] == [
        ("x", 2),
        ("y", 0),
        ("x", 3),
        ("y", 1),
    ]
    assert out[-2] == Usage(9, 4)


def test_embeddings_get_their_global_index() -> None:
    spread = FanOut(EmbeddingRequest(model="m", inputs=("a", "b")), {"inputs"})

    out = merge_responses(
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


def test_running_usage_is_summed_over_all_parts() -> None:
    one: list[Event] = [Usage(5, 1), Usage(5, 2, reasoning_tokens=1), StreamEnd()]
    two: list[Event] = [Usage(5, 3), StreamEnd()]

    out = merge_responses(FanOut(make_chat(n=2), {"n"}), one, two, running=True)

    assert out == [Usage(5, 1), Usage(5, 2, None, 1), Usage(5, 5, None, 1), StreamEnd()]


def test_late_stream_start_is_dropped() -> None:
    out = merge_responses(
        FanOut(make_chat(n=2), {"n"}), [TextDelta("a"), StreamEnd()], [StreamStart(5), StreamEnd()]
    )

    assert out == [TextDelta("a"), Usage(0), StreamEnd()]


def test_metadata_and_timing_are_taken_from_one_part() -> None:
    timing, other = Timing(queue=1.0), Timing(queue=2.0)
    one: list[Event] = [ResponseMetadata("m1"), timing, timing, StreamEnd()]
    two: list[Event] = [ResponseMetadata("m2"), other, StreamEnd()]

    assert merge_responses(FanOut(make_chat(n=2), {"n"}), one, two)[:-2] == [
        ResponseMetadata("m1"),
        timing,
        timing,
    ]


def test_late_response_metadata_is_forwarded() -> None:
    out = merge_responses(
        FanOut(make_chat(n=2), {"n"}), [StreamEnd()], [ResponseMetadata("m2"), StreamEnd()]
    )

    assert out[0] == ResponseMetadata("m2")


def test_part_without_stream_end_raises_stream_broken() -> None:
    with pytest.raises(StreamBroken, match="ended early"):
        merge_responses(
            FanOut(make_chat(n=2), {"n"}), make_response("a", 1, 1), make_response("b", 1, 1)[:-1]
        )


def test_unrequested_choice_raises_worker_failed() -> None:
    with pytest.raises(WorkerFailed, match="not requested"):
        merge_responses(FanOut(make_chat(n=2), {"n"}), [TextDelta("a", 1)])
