"""A whole answer is the fold of a stream; what is not a whole stream is not an answer."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.aggregate import Answer, Fold, folded
from gateway.core.errors import StreamBroken
from gateway.core.types import (
    CallArguments,
    CallStart,
    Done,
    End,
    Event,
    PromptEcho,
    Refusal,
    Served,
    Start,
    Text,
    Thought,
    Timing,
    TokenLogprob,
    ToolCall,
    Usage,
    Vector,
)


def fold(*events: Event) -> Answer:
    return folded(events)


def test_text_and_all_that_belongs_to_it() -> None:
    logprob = TokenLogprob("a", -0.5)
    answer = fold(
        Start(3),
        Served("m", "fp"),
        PromptEcho(0, "say ", (TokenLogprob("say ", None),)),
        Thought("hm", signature="s"),
        Thought("m"),
        Text("a", token_ids=(7,), logprobs=(logprob,)),
        Text("b", tokens=2, token_ids=(8, 9)),
        Refusal("no"),
        End("stop", matched_stop="x"),
        Timing(queue=0.1),
        Usage(3, 2),
        Done(),
    )

    [choice] = answer.choices
    assert (choice.text, choice.echo_length, choice.tokens) == ("say ab", 4, 3)
    assert (choice.reasoning, choice.reasoning_signature, choice.refusal) == ("hmm", "s", "no")
    assert choice.token_ids == [7, 8, 9]
    assert [one.token for one in choice.logprobs] == ["say ", "a"]
    assert (choice.finish_reason, choice.matched_stop) == ("stop", "x")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    assert answer.timings == [Timing(queue=0.1)]
    assert answer.metadata.fingerprint == "fp"


def test_choices_come_in_the_order_of_their_index() -> None:
    answer = fold(Text("b", 1), Text("a", 0), End("eos", 1), End("length", 0), Done())

    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "a", "length"),
        (1, "b", "eos"),
    ]


def test_tool_calls_are_put_together() -> None:
    answer = fold(
        CallStart(0, 0, "c1", "f"),
        CallArguments(0, 0, '{"x"'),
        CallStart(0, 1, "c2", "g"),
        CallArguments(0, 0, ":1}"),
        End("tool_calls"),
        Done(),
    )

    assert answer.choices[0].tool_calls == [ToolCall("c1", "f", '{"x":1}'), ToolCall("c2", "g", "")]


def test_vectors_come_in_the_order_of_their_index() -> None:
    assert fold(Vector(1, (2.0,)), Vector(0, (1.0,)), Done()).embeddings == [(1.0,), (2.0,)]


@pytest.mark.parametrize(
    "events",
    [
        (),
        (Text("a"), End("eos")),
        (Text("a"), Done()),
        (Text("a"), Text("b", 1), End("eos"), Done()),
        (Text("a"), End("eos"), Text("b"), Done()),
        (Text("a"), End("eos"), End("eos"), Done()),
        (CallArguments(0, 0, "{}"), End("tool_calls"), Done()),
    ],
)
def test_what_stopped_before_its_end_is_no_answer(events: tuple[Event, ...]) -> None:
    with pytest.raises(StreamBroken):
        fold(*events)


LOGPROBS = st.sampled_from([(), (TokenLogprob("a", -0.5),)])
INDEXES = st.sampled_from([0, 0, 0, 1])
FEW: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        Text, st.sampled_from(["", "a"]), INDEXES, token_ids=st.just((7,)), logprobs=LOGPROBS
    ),
    st.builds(End, st.sampled_from(["eos", "stop"]), INDEXES, st.sampled_from([None, "x", 7])),
    st.builds(PromptEcho, INDEXES, st.just("say "), LOGPROBS),
    st.sampled_from([Served("m"), Usage(3, 2), Done(), Start(3)]),
)
ORDER = (Served, PromptEcho, Text, End, Usage, Done)


def as_told(events: list[Event]) -> list[Event]:
    """In the order in which an answer tells them."""
    return sorted(events, key=lambda one: (*ORDER, type(one)).index(type(one)))


@given(st.lists(FEW, max_size=7) | st.lists(FEW, max_size=7, unique_by=type).map(as_told))
def test_one_choice_in_one_text_is_what_its_fold_is(events: list[Event]) -> None:
    def plainly() -> Answer:
        whole = Fold()
        whole.add(events)
        return whole.result()

    assert result(plainly) == result(lambda: folded(events))


def result(make: Callable[[], Answer]) -> Answer | str:
    try:
        return make()
    except StreamBroken as error:
        return str(error)


@pytest.mark.parametrize("echo", [(), (PromptEcho(0, "say ", (TokenLogprob("say ", None),)),)])
def test_one_choice_in_one_text_is_whole(echo: tuple[Event, ...]) -> None:
    [choice] = fold(*echo, Text("a"), End("eos"), Done()).choices

    assert choice.text == ("say a" if echo else "a")
    assert choice.echo_length == (4 if echo else 0)
    assert len(choice.logprobs) == len(echo)


@pytest.mark.parametrize("events", [(Text("a"), End("eos", 1)), (PromptEcho(1, "a"), Text("a"))])
def test_a_lone_text_of_another_choice_is_no_answer(events: tuple[Event, ...]) -> None:
    rest = () if type(events[-1]) is End else (End("eos"),)
    with pytest.raises(StreamBroken):
        fold(*events, *rest, Done())
