"""A judge's verdict counts only if both orders agree, and costs no more than the cap."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from gateway.evidence.judge import (
    FeedbackAgreement,
    JudgeError,
    JudgeReply,
    Judging,
    combine_orders,
    describe_judging,
    judge_pairs,
    measure_judging,
    read_verdict,
    select_pairs,
)
from gateway.evidence.observation import Pair, observe
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedRequest,
    RecordedToolCall,
)


def make_pair(a: str, b: str, *calls_of_b: RecordedToolCall, **fields: object) -> Pair:
    first, second = (
        observe(
            RecordedRequest(
                id=name,
                at=0.0,
                status=200,
                request={"messages": [{"role": "user", "content": "question"}], **fields},
                answer=RecordedAnswer(
                    [RecordedChoice(text=text, tool_calls=calls, finish_reason="eos")]
                ),
            )
        )
        for name, text, calls in (("a", a, []), ("b", b, [*calls_of_b]))
    )
    return first, second


def run(
    pairs: list[Pair], decide: Callable[[str, str], str], max_requests: int = 1000
) -> tuple[Judging, list[dict[str, Any]]]:
    """Judge pairs; ``decide`` gets Answer 1 and Answer 2, and returns the judge's text."""
    bodies = []

    async def complete(body: dict[str, Any]) -> JudgeReply:
        bodies.append(body)
        material = json.loads(body["messages"][1]["content"])
        return JudgeReply(decide(material["Answer 1"], material["Answer 2"]), 10, 2)

    judging = asyncio.run(
        judge_pairs(pairs, complete, model="m", rubric="RUBRIC", max_requests=max_requests)
    )
    return judging, bodies


def prefer_longer(first: str, second: str) -> str:
    return json.dumps({"better": 1 if len(first) > len(second) else 2})


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"better": 1}', 1),
        ('{"better":2}', 2),
        ('{"better": "0"}', 0),
        ('```json\n{"better": 2, "why": "x"}\n```', 2),
        ('{"better": 3}', None),
        ('{"better": 12}', None),
        ('{"better": 1} or {"better": 2}', None),
        ("Answer 1", None),
        ("", None),
    ],
)
def test_verdict_is_read_from_json_with_text_around(text: str, verdict: int | None) -> None:
    assert read_verdict(text) == verdict


@pytest.mark.parametrize(
    ("orders", "winner"),
    [
        ((1, 2), "a"),
        ((2, 1), "b"),
        ((1, 1), "tie"),
        ((2, 2), "tie"),
        ((0, 1), "tie"),
        ((0, 0), "tie"),
        ((None, 1), None),
        ((1, None), None),
    ],
)
def test_winner_is_the_answer_that_both_orders_name(
    orders: tuple[int | None, int | None], winner: str | None
) -> None:
    assert combine_orders(*orders) == winner


def test_longer_answers_of_b_win_in_both_orders() -> None:
    judging, bodies = run([make_pair("short", f"longer {n}") for n in range(40)], prefer_longer)

    assert (judging.a_better, judging.b_better, judging.ties) == (0, 40, 0)
    assert (judging.requests, judging.prompt_tokens, judging.completion_tokens) == (80, 800, 160)
    row = measure_judging(judging, 0.95)
    assert (row.a, row.b, row.verdict) == (0.0, 1.0, "better")
    assert row.difference is not None
    assert row.difference.low > 0
    body = bodies[0]
    assert body["temperature"] == 0
    assert body["response_format"]["type"] == "json_schema"
    assert "RUBRIC" in body["messages"][0]["content"]


def test_longer_answers_of_a_make_b_worse() -> None:
    judging, _ = run([make_pair(f"longer {n}", "short") for n in range(40)], prefer_longer)
    assert measure_judging(judging, 0.95).verdict == "worse"


def test_preference_for_a_position_is_only_ties() -> None:
    pairs = [make_pair("a", f"b {n}") for n in range(10)]
    judging, _ = run(pairs, lambda *_: '{"better": 1}')
    assert (judging.ties, judging.decided) == (10, 0)
    row = measure_judging(judging, 0.95)
    assert (row.difference, row.verdict) == (None, "not enough data")


def test_unreadable_verdicts_are_counted_and_decide_nothing() -> None:
    pairs = [make_pair("a", f"b {n}") for n in range(10)]
    judging, _ = run(pairs, lambda *_: "I like both")
    assert (judging.unreadable, judging.ties, judging.decided) == (10, 0, 0)


def test_cap_on_requests_is_not_exceeded() -> None:
    pairs = [make_pair("a", f"longer {n}") for n in range(10)]
    judging, bodies = run(pairs, prefer_longer, max_requests=7)
    assert len(bodies) == judging.requests == 6
    assert (judging.pairs, judging.b_better) == (10, 3)


def test_equal_texts_are_ties_without_a_request() -> None:
    judging, bodies = run([make_pair("same", "same")], prefer_longer)
    assert (judging.ties, bodies) == (1, [])


TOOLS: Final = {"tools": [{"type": "function", "function": {"name": "look"}}]}
CALL: Final = RecordedToolCall("look", "{}")


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(make_pair("a", " "), id="no text"),
        pytest.param(make_pair("a", "b" * 100_000), id="too long"),
        pytest.param(make_pair("a", "b", CALL, **TOOLS), id="tool call"),
        pytest.param(make_pair("a", "b", CALL), id="call of a tool of the worker"),
    ],
)
def test_pair_that_is_no_text_or_too_long_is_not_judged(pair: Pair) -> None:
    whole = make_pair("a", "b", **TOOLS)
    assert select_pairs([pair, whole]) == [whole]


def test_judging_that_is_cancelled_sends_no_further_request() -> None:
    bodies = []

    async def complete(body: dict[str, Any]) -> JudgeReply:
        bodies.append(body)
        await asyncio.Event().wait()
        raise AssertionError

    async def run_and_cancel() -> None:
        pairs = [make_pair("a", f"longer {n}") for n in range(20)]
        task = asyncio.create_task(
            judge_pairs(pairs, complete, model="m", rubric="RUBRIC", max_requests=1000)
        )
        while not bodies:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run_and_cancel())
    assert 0 < len(bodies) <= 4


class FailingJudge:
    """A judge that prefers the longer answer; ``errors`` are raised for its first requests."""

    def __init__(self, *errors: JudgeError) -> None:
        self._errors = [*errors]
        self.pauses: list[float] = []

    async def complete(self, body: dict[str, Any]) -> JudgeReply:
        if self._errors:
            raise self._errors.pop(0)
        material = json.loads(body["messages"][1]["content"])
        return JudgeReply(prefer_longer(material["Answer 1"], material["Answer 2"]))

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def run(self, pairs: int, max_requests: int = 1000) -> Judging:
        return asyncio.run(
            judge_pairs(
                [make_pair("a", f"longer {n}") for n in range(pairs)],
                self.complete,
                model="m",
                rubric="RUBRIC",
                max_requests=max_requests,
                pause=self.pause,
            )
        )


def busy(wait: float = 0.0) -> JudgeError:
    return JudgeError("429 too many requests", scope="try", wait=wait)


def test_request_that_fails_is_sent_again_after_the_pause_that_the_judge_wants() -> None:
    judge = FailingJudge(busy(7), busy(), busy(900))
    judging = judge.run(1)
    assert (judging.b_better, judging.failed, judging.failed_requests) == (1, 0, 3)
    assert judging.requests == 5
    assert judge.pauses == [7.0, 2.0, 60.0]
    assert "3 requests failed (429 too many requests), and with them 0 pairs" in describe_judging(
        judging
    )


def test_request_that_fails_for_its_prompt_costs_its_pair_only() -> None:
    judge = FailingJudge(JudgeError("400 too long", scope="pair"))
    judging = judge.run(10)
    assert (judging.b_better, judging.failed, judging.requests) == (9, 1, 19)
    assert judge.pauses == []


def test_judge_that_refuses_gets_no_further_requests_and_the_verdicts_so_far_are_kept() -> None:
    judge = FailingJudge(busy(), busy())
    assert judge.run(10).b_better == 10
    judging = FailingJudge(JudgeError("401 no such key")).run(10)
    assert (judging.failed, judging.decided) == (10, 0)
    assert judging.failed_requests == judging.requests <= 4


def test_judge_that_is_not_there_gets_few_requests() -> None:
    judging = FailingJudge(*(busy() for _ in range(1000))).run(50)
    assert judging.failed == 50
    assert 15 <= judging.requests <= 30


def test_tries_count_toward_the_cap() -> None:
    judging = FailingJudge(*(busy() for _ in range(3))).run(10, max_requests=8)
    assert judging.requests == 8
    assert judging.b_better + judging.failed == 4


@pytest.mark.parametrize(
    ("of_a", "of_b", "expected"),
    [
        (None, None, (0, 0)),
        (1.0, None, (1, 0)),
        (0.0, None, (1, 1)),
        (None, 1.0, (1, 1)),
        (None, 0.0, (1, 0)),
        (0.2, 0.4, (1, 1)),
        (1.0, 1.0, (0, 0)),
    ],
)
def test_agreement_with_feedback_is_counted_where_users_like_one_answer_better(
    of_a: float | None, of_b: float | None, expected: tuple[int, int]
) -> None:
    """The judge says that B is better."""
    values = {("a", 0.0): of_a, ("b", 0.0): of_b}
    judging = asyncio.run(
        judge_pairs(
            [make_pair("a", "longer")],
            FailingJudge().complete,
            model="m",
            rubric="RUBRIC",
            max_requests=10,
            feedback=("up", {key: one for key, one in values.items() if one is not None}),
        )
    )
    assert judging.agreement == FeedbackAgreement("up", *expected)
    text = f"it agrees with the feedback up in {expected[1]} of {expected[0]} pairs"
    assert text in describe_judging(judging)


def test_judge_that_finds_ties_has_no_agreement() -> None:
    async def complete(_: dict[str, Any]) -> JudgeReply:
        return JudgeReply('{"better": 0}')

    judging = asyncio.run(
        judge_pairs(
            [make_pair("a", "b")],
            complete,
            model="m",
            rubric="RUBRIC",
            max_requests=10,
            feedback=("up", {("a", 0.0): 1.0}),
        )
    )
    assert judging.agreement == FeedbackAgreement("up")
