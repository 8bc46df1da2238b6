"""A unary response is the aggregated stream; an incomplete stream is an error."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocols.core.aggregate import ResponseAccumulator, UnaryResponse, aggregate
from protocols.core.errors import StreamBroken
from protocols.core.events import (
    ChoiceEnd,
    Embedding,
    Event,
    PromptEcho,
    ReasoningDelta,
    RefusalDelta,
    ResponseMetadata,
    StreamEnd,
    StreamStart,
    TextDelta,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from protocols.core.request import ToolCall


def aggregate_events(*events: Event) -> UnaryResponse:
    return aggregate(events)


def test_text_logprobs_usage_and_metadata_are_aggregated() -> None:
    logprob = TokenLogprob("a", -0.5)
    response = aggregate_events(
        StreamStart(3),
        ResponseMetadata("m", "fp"),
        PromptEcho(0, "say ", (TokenLogprob("say ", None),)),
        ReasoningDelta("hm", signature="s"),
        ReasoningDelta("m"),
        TextDelta("a", token_ids=(7,), logprobs=(logprob,)),
        TextDelta("b", tokens=2, token_ids=(8, 9)),
        RefusalDelta("no"),
        ChoiceEnd("stop", matched_stop="x"),
        Timing(queue=0.1),
        Usage(3, 2),
        StreamEnd(),
    )

    [choice] = response.choices
    assert (choice.text, choice.echo_length, choice.tokens) == ("say ab", 4, 3)
    assert (choice.reasoning, choice.reasoning_signature, choice.refusal) == ("hmm", "s", "no")
    assert choice.token_ids == [7, 8, 9]
    assert [one.token for one in choice.logprobs] == ["say ", "a"]
    assert (choice.finish_reason, choice.matched_stop) == ("stop", "x")
    assert response.usage is not None
    assert response.usage.total_tokens == 5
    assert response.timings == [Timing(queue=0.1)]
    assert response.metadata.fingerprint == "fp"


def test_choices_are_sorted_by_index() -> None:
    response = aggregate_events(
        TextDelta("b", 1),
        TextDelta("a", 0),
        ChoiceEnd("eos", 1),
        ChoiceEnd("length", 0),
        StreamEnd(),
    )

    assert [(c.index, c.text, c.finish_reason) for c in response.choices] == [
        (0, "a", "length"),
        (1, "b", "eos"),
    ]


def test_tool_call_deltas_are_joined() -> None:
    response = aggregate_events(
        ToolCallStart(0, 0, "c1", "f"),
        ToolCallDelta(0, 0, '{"x"'),
        ToolCallStart(0, 1, "c2", "g"),
        ToolCallDelta(0, 0, ":1}"),
        ChoiceEnd("tool_calls"),
        StreamEnd(),
    )

    assert response.choices[0].tool_calls == [
        ToolCall("c1", "f", '{"x":1}'),
        ToolCall("c2", "g", ""),
    ]


def test_embeddings_are_sorted_by_index() -> None:
    assert aggregate_events(Embedding(1, (2.0,)), Embedding(0, (1.0,)), StreamEnd()).embeddings == [
        (1.0,),
        (2.0,),
    ]


@pytest.mark.parametrize(
    "events",
    [
        (),
        (TextDelta("a"), ChoiceEnd("eos")),
        (TextDelta("a"), StreamEnd()),
        (TextDelta("a"), TextDelta("b", 1), ChoiceEnd("eos"), StreamEnd()),
        (TextDelta("a"), ChoiceEnd("eos"), TextDelta("b"), StreamEnd()),
        (TextDelta("a"), ChoiceEnd("eos"), ChoiceEnd("eos"), StreamEnd()),
        (ToolCallDelta(0, 0, "{}"), ChoiceEnd("tool_calls"), StreamEnd()),
    ],
)
def test_incomplete_events_raise_stream_broken(events: tuple[Event, ...]) -> None:
    with pytest.raises(StreamBroken):
        aggregate_events(*events)


LOGPROBS = st.sampled_from([(), (TokenLogprob("a", -0.5),)])
INDEXES = st.sampled_from([0, 0, 0, 1])
FEW: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        TextDelta, st.sampled_from(["", "a"]), INDEXES, token_ids=st.just((7,)), logprobs=LOGPROBS
    ),
    st.builds(
        ChoiceEnd, st.sampled_from(["eos", "stop"]), INDEXES, st.sampled_from([None, "x", 7])
    ),
    st.builds(PromptEcho, INDEXES, st.just("say "), LOGPROBS),
    st.sampled_from([ResponseMetadata("m"), Usage(3, 2), StreamEnd(), StreamStart(3)]),
)
ORDER = (ResponseMetadata, PromptEcho, TextDelta, ChoiceEnd, Usage, StreamEnd)


def sort_events(events: list[Event]) -> list[Event]:
    """Sort events as a response lists them."""
    return sorted(events, key=lambda one: (*ORDER, type(one)).index(type(one)))


@given(st.lists(FEW, max_size=7) | st.lists(FEW, max_size=7, unique_by=type).map(sort_events))
def test_single_choice_fast_path_equals_the_accumulator(events: list[Event]) -> None:
    def plainly() -> UnaryResponse:
        whole = ResponseAccumulator()
        whole.add(events)
        return whole.result()

    assert run_or_return_error(plainly) == run_or_return_error(
        lambda: replace(aggregate(events), events=())
    )


def run_or_return_error(make: Callable[[], UnaryResponse]) -> UnaryResponse | str:
    try:
        return make()
    except StreamBroken as error:
        return str(error)


@pytest.mark.parametrize("echo", [(), (PromptEcho(0, "say ", (TokenLogprob("say ", None),)),)])
def test_single_choice_with_and_without_prompt_echo_is_aggregated(echo: tuple[Event, ...]) -> None:
    [choice] = aggregate_events(*echo, TextDelta("a"), ChoiceEnd("eos"), StreamEnd()).choices

    assert choice.text == ("say a" if echo else "a")
    assert choice.echo_length == (4 if echo else 0)
    assert len(choice.logprobs) == len(echo)


@pytest.mark.parametrize(
    "events", [(TextDelta("a"), ChoiceEnd("eos", 1)), (PromptEcho(1, "a"), TextDelta("a"))]
)
def test_events_of_mismatched_choices_raise_stream_broken(events: tuple[Event, ...]) -> None:
    rest = () if type(events[-1]) is ChoiceEnd else (ChoiceEnd("eos"),)
    with pytest.raises(StreamBroken):
        aggregate_events(*events, *rest, StreamEnd())
