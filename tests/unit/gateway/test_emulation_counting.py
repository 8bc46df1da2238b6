"""Usage where the backend told none, and what is said of its source."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ports import Piece
from gateway.core.types import (
    CallArguments,
    Done,
    EmbedRequest,
    End,
    Event,
    GenerateRequest,
    Message,
    Refusal,
    Request,
    Start,
    Text,
    TextPart,
    Thought,
    Usage,
    Vector,
)
from gateway.emulation.counting import Count, counted

CHAT = GenerateRequest(
    model="m",
    kind="chat",
    messages=(Message("system", (TextPart("12345"),)), Message("user", (TextPart("1"),))),
)
PROMPTS = GenerateRequest(model="m", kind="completion", prompts=("12345", (7, 8, 9)))
IDS = GenerateRequest(model="m", kind="completion", prompts=((7, 8, 9),))
EMBED = EmbedRequest(model="m", inputs=("1234", (1, 2)), instruction="56")


def after(request: Request, *events: Event) -> list[Event]:
    return list(Count(request).apply(events))


def test_tokens_are_those_of_the_texts() -> None:
    events: list[Event] = [Start(7), Text("a"), Text("bc", 1, tokens=3), End("eos"), End("eos", 1)]

    assert after(CHAT, *events, Done()) == [*events, Usage(7, 4, source="counted"), Done()]


def test_what_the_worker_says_wins_wherever_it_says_it() -> None:
    events: list[Event] = [Usage(1, 2), Text("a"), Done()]

    assert after(CHAT, *events) == events


def test_what_the_worker_says_wins_over_what_was_counted_before() -> None:
    count = Count(CHAT)
    batches: list[list[Event]] = [[Text("a")], [Usage(1, 2), Text("b")], [Text("c"), Done()]]

    assert [count.apply(batch) for batch in batches] == batches
    assert count.build_missing_usage() == ()


def test_usage_may_come_in_any_batch() -> None:
    count = Count(CHAT)
    told, done = [Usage(1, 2)], [Done()]

    assert count.apply(told) is told
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
def test_a_prompt_of_which_nothing_was_said_is_a_guess_unless_it_is_ids(
    request_: Request, prompt: int, source: str
) -> None:
    [*_, usage, done] = after(request_, Start(), Vector(0, (1.0,)), Done())

    assert done == Done()
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 0)
    assert usage.source == source


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([Text("a"), Thought("12345")], 1 + 2),
        ([Refusal("1234"), CallArguments(0, 0, "12")], 2),
        ([Text("x" * 17)], 5),
        ([Text("x" * 17), Thought("1")], 5 + 1),
    ],
)
def test_what_has_no_tokens_of_its_own_is_a_guess(events: list[Event], tokens: int) -> None:
    [*_, usage, _] = after(CHAT, Start(1), *events, Done())

    assert usage == Usage(1, tokens, source="estimated")


def test_a_long_token_is_a_token() -> None:
    [*_, usage, _] = after(CHAT, Start(1), Text("x" * 16), Done())

    assert usage == Usage(1, 1, source="counted")


SAID: list[Event] = [Start(3), Text("a"), Thought("b"), End("eos"), Usage(3, 1), Done()]
PIECES = st.lists(
    st.tuples(
        st.sampled_from([None, b"", b"a", b"b"]), st.lists(st.sampled_from(SAID), max_size=4)
    ),
    max_size=4,
)


@given(pieces=PIECES, request_=st.sampled_from([CHAT, IDS, EMBED]))
def test_all_of_an_answer_is_counted_as_its_pieces_are(
    pieces: list[Piece], request_: Request
) -> None:
    count = Count(request_)

    body, events = counted(request_, pieces)

    assert list(events) == [one for _, said in pieces for one in count.apply(said)]
    assert body == next((data for data, _ in reversed(pieces) if data), None)
