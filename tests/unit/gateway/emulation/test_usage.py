"""Missing usage is counted or estimated, and its source is reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.emulation.usage import UsageCounter
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    ReasoningDelta,
    RefusalDelta,
    StreamEnd,
    StreamStart,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    Message,
    Request,
    TextPart,
)

CHAT = GenerationRequest(
    model="m",
    kind="chat",
    messages=(Message("system", (TextPart("12345"),)), Message("user", (TextPart("1"),))),
)
PROMPTS = GenerationRequest(model="m", kind="completion", prompts=("12345", (7, 8, 9)))
IDS = GenerationRequest(model="m", kind="completion", prompts=((7, 8, 9),))
EMBED = EmbeddingRequest(model="m", inputs=("1234", (1, 2)), instruction="56")


def add_usage_to_events(request: Request, *events: Event) -> list[Event]:
    return list(UsageCounter(request).apply(events))


def test_completion_tokens_are_counted_from_text_deltas() -> None:
    events: list[Event] = [
        StreamStart(7),
        TextDelta("a"),
        TextDelta("bc", 1, tokens=3),
        ChoiceEnd("eos"),
        ChoiceEnd("eos", 1),
    ]

    assert add_usage_to_events(CHAT, *events, StreamEnd()) == [
        *events,
        Usage(7, 4, source="counted"),
        StreamEnd(),
    ]


def test_worker_usage_takes_precedence_at_any_position() -> None:
    events: list[Event] = [Usage(1, 2), TextDelta("a"), StreamEnd()]

    assert add_usage_to_events(CHAT, *events) == events


def test_worker_usage_replaces_an_earlier_count() -> None:
    count = UsageCounter(CHAT)
    batches: list[list[Event]] = [
        [TextDelta("a")],
        [Usage(1, 2), TextDelta("b")],
        [TextDelta("c"), StreamEnd()],
    ]

    assert [count.apply(batch) for batch in batches] == batches
    assert count.build_missing_usage() == ()


def test_worker_usage_is_accepted_in_any_batch() -> None:
    count = UsageCounter(CHAT)
    usage_batch, done = [Usage(1, 2)], [StreamEnd()]

    assert count.apply(usage_batch) is usage_batch
    assert count.apply(done) is done
    assert count.build_missing_usage() == ()


@pytest.mark.parametrize(
    ("request_", "prompt", "source"),
    [
        (CHAT, 2 + 1, "estimated"),
        (PROMPTS, 2 + 3, "estimated"),
        (IDS, 3, "counted"),
        (EMBED, 2 + 2, "estimated"),
    ],
)
def test_prompt_tokens_are_estimated_unless_the_prompt_is_token_ids(
    request_: Request, prompt: int, source: str
) -> None:
    [*_, usage, done] = add_usage_to_events(
        request_, StreamStart(), Embedding(0, (1.0,)), StreamEnd()
    )

    assert done == StreamEnd()
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 0)
    assert usage.source == source


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([TextDelta("a"), ReasoningDelta("12345")], 1 + 2),
        ([RefusalDelta("1234"), ToolCallDelta(0, 0, "12")], 2),
        ([TextDelta("x" * 17)], 5),
        ([TextDelta("x" * 17), ReasoningDelta("1")], 5 + 1),
    ],
)
def test_completion_tokens_are_estimated_without_a_token_count(
    events: list[Event], tokens: int
) -> None:
    [*_, usage, _] = add_usage_to_events(CHAT, StreamStart(1), *events, StreamEnd())

    assert usage == Usage(1, tokens, source="estimated")


def test_text_delta_of_16_characters_counts_as_one_token() -> None:
    [*_, usage, _] = add_usage_to_events(CHAT, StreamStart(1), TextDelta("x" * 16), StreamEnd())

    assert usage == Usage(1, 1, source="counted")


TEXT_EVENTS: list[Event] = [
    StreamStart(3),
    TextDelta("a"),
    ReasoningDelta("b"),
    ChoiceEnd("eos"),
    Usage(3, 1),
]
BATCHES = st.lists(st.lists(st.sampled_from(TEXT_EVENTS), max_size=4), max_size=4)


@given(
    batches=BATCHES,
    end=st.sampled_from([[], [StreamEnd()], [Usage(3, 1), StreamEnd()]]),
    request_=st.sampled_from([CHAT, IDS, EMBED]),
)
def test_usage_of_joined_batches_equals_usage_per_batch(
    batches: list[list[Event]], end: list[Event], request_: Request
) -> None:
    batches = [*batches, end]
    count = UsageCounter(request_)

    events = UsageCounter(request_).apply([event for batch in batches for event in batch])

    assert list(events) == [event for batch in batches for event in count.apply(batch)]
