"""``interlingua compare --judge`` with judges over sockets: which verdicts count."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedRequest,
    encode_recorded_request,
)
from gateway.observability.usage import SqliteUsageRecorder
from gateway.tools.compare.judge_client import read_reply
from tests.support.chat_worker import Answer, ChatWorker, Json
from tests.support.commands import run_command

PAIRS = 30


def prefer_longer(body: Json) -> Answer:
    material = json.loads(body["messages"][-1]["content"])
    better = 1 if len(material["Answer 1"]) > len(material["Answer 2"]) else 2
    return Answer(text=(json.dumps({"better": better}),))


def always_prefer_the_first(_: Json) -> Answer:
    return Answer(text=('{"better": 1}',))


def answer_garbage(_: Json) -> Answer:
    return Answer(text=("Both are nice.",))


def write_side(folder: Path, name: str, text: str) -> Path:
    """Write a recording of answers; B replays the requests of A."""
    file = folder / f"{name}.jsonl"
    lines = [
        encode_recorded_request(
            RecordedRequest(
                id=f"r{number}",
                at=number + 1000.0 * (name == "b"),
                model="chat",
                status=200,
                request={"messages": [{"role": "user", "content": f"question {number}"}]},
                answer=RecordedAnswer([RecordedChoice(text=f"{text} {number}")]),
            )
        )
        for number in range(PAIRS)
    ]
    file.write_bytes(b"\n".join(line.rstrip() for line in lines) + b"\n")
    return file


async def compare_with(
    judge: Callable[[Json], Answer], folder: Path, *arguments: str, texts: tuple[str, str]
) -> tuple[int, str, list[Json]]:
    a, b = (write_side(folder, name, text) for name, text in zip("ab", texts, strict=True))
    rubric = folder / "rubric.txt"
    rubric.write_text("More detail is better.")
    async with ChatWorker(judge) as worker:
        code, printed = await run_command(
            "compare", a, b, "--judge", "large", "--judge-url", worker.url,
            "--rubric", rubric, "--judge-at-most", "60", *arguments,
        )  # fmt: skip
        return code, printed, worker.bodies


def read_row(printed: str) -> tuple[Any, Any]:
    report = json.loads(printed)
    [row] = [one for one in report["measures"] if one["measure"] == "judged better"]
    return row, report["judging"]


async def test_judge_that_prefers_longer_answers_finds_the_side_with_them(tmp_path: Path) -> None:
    code, printed, bodies = await compare_with(
        prefer_longer, tmp_path, "--json", texts=("short", "a longer answer")
    )
    row, judging = read_row(printed)
    assert code == 0
    assert (judging["b_better"], judging["requests"], len(bodies)) == (PAIRS, 60, 60)
    assert (row["verdict"], row["b"]) == ("better", 1.0)
    assert "More detail is better." in bodies[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("fail_on", "expected"), [("worse", 0), ("different", 0), ("judged-worse", 1)]
)
async def test_judge_changes_the_exit_code_only_if_named(
    tmp_path: Path, fail_on: str, expected: int
) -> None:
    code, printed, _ = await compare_with(
        prefer_longer, tmp_path, "--fail-on", fail_on, texts=("a longer answer", "short")
    )
    assert "judged better" in printed
    assert code == expected, printed


async def test_judge_that_always_prefers_the_first_decides_nothing(tmp_path: Path) -> None:
    _, printed, _ = await compare_with(
        always_prefer_the_first, tmp_path, "--json", texts=("short", "a longer answer")
    )
    row, judging = read_row(printed)
    assert (judging["ties"], judging["a_better"], judging["b_better"]) == (PAIRS, 0, 0)
    assert row["verdict"] == "not enough data"


async def test_judge_that_answers_garbage_has_only_unreadable_verdicts(tmp_path: Path) -> None:
    code, printed, _ = await compare_with(
        answer_garbage, tmp_path, "--fail-on", "judged-worse", texts=("short", "longer")
    )
    assert code == 1
    assert "the judge gave no verdict that can be read" in printed
    assert f"unreadable verdicts {PAIRS}" in printed
    assert "60 requests" in printed


async def test_judge_that_refuses_is_an_error_with_its_status(tmp_path: Path) -> None:
    code, printed, _ = await compare_with(
        lambda _: Answer(status=401, error="no such key"), tmp_path, texts=("short", "longer")
    )
    assert code == 2
    assert "401" in printed
    assert "no such key" in printed


JUDGE = ("--judge", "m", "--judge-at-most", "9", "--rubric", __file__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--embeddings", "."), "--embeddings: <embeddings>:1:"),
        (("--embeddings", "package:nothing"), "--embeddings: package nothing is not installed"),
        (
            (*JUDGE, "--judge-url", "http://a:99999"),
            "--judge-url: http://a:99999 is not a URL",
        ),
    ],
)
async def test_model_that_cannot_be_used_is_wrong_usage(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    a, b = write_side(tmp_path, "a", "x"), write_side(tmp_path, "b", "y")
    code, printed = await run_command("compare", a, b, *arguments)
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed


async def test_judge_without_rubric_is_wrong_usage(tmp_path: Path) -> None:
    a, b = write_side(tmp_path, "a", "x"), write_side(tmp_path, "b", "y")
    code, printed = await run_command("compare", a, b, "--judge", "large")
    assert code == 2
    assert "--rubric" in printed


async def test_judge_that_is_busy_at_times_loses_no_work(tmp_path: Path) -> None:
    """It answers 429 once, and 400 to one prompt."""
    errors = [
        Answer(status=429, error="slow down", headers={"retry-after": "1"}),
        Answer(status=400, error="a bad prompt"),
    ]
    code, printed, bodies = await compare_with(
        lambda body: errors.pop(0) if errors else prefer_longer(body),
        tmp_path,
        "--json",
        texts=("short", "longer"),
    )
    assert code == 0
    _, judging = read_row(printed)
    assert (judging["b_better"], judging["failed"]) == (PAIRS - 1, 1)
    assert (judging["failed_requests"], judging["requests"]) == (2, len(bodies))


async def test_agreement_with_the_feedback_of_users_is_shown(tmp_path: Path) -> None:
    """Users dislike 10 of A's answers, and like 2; the judge prefers those of B."""
    file = tmp_path / "u.sqlite"
    recorder = SqliteUsageRecorder(str(file), 1e12, lambda: 0.0, feedback=True)
    for number in range(12):
        recorder.record_usage(RequestRecord(f"r{number}", float(number), model="chat"))
        value = float(number < 2)
        recorder.record_feedback(
            Feedback(100.0, "", False, "id", f"r{number}", "thumbs_up", "boolean", value)
        )
    recorder.start()
    recorder.close(30)
    _, printed, _ = await compare_with(
        prefer_longer, tmp_path, "--feedback", str(file), texts=("short", "longer")
    )
    assert "it agrees with the feedback thumbs_up in 10 of 12 pairs" in " ".join(printed.split())


async def test_feedback_that_is_no_database_is_wrong_usage(tmp_path: Path) -> None:
    code, printed, _ = await compare_with(
        prefer_longer, tmp_path, "--feedback", str(tmp_path / "a.jsonl"), texts=("short", "longer")
    )
    assert code == 2
    assert "a.jsonl is not a usage database" in printed


@pytest.mark.parametrize(
    ("usage", "tokens"), [('{"prompt_tokens": 3, "completion_tokens": 2}', 3), ('"none"', 0)]
)
@pytest.mark.parametrize("content", ['"Yes."', '[{"type": "text", "text": "Yes."}]'])
def test_verdict_is_read_whatever_the_usage_and_the_form_of_the_text(
    content: str, usage: str, tokens: int
) -> None:
    text = f'{{"choices": [{{"message": {{"content": {content}}}}}], "usage": {usage}}}'
    reply = read_reply(text.encode())
    assert (reply.text, reply.prompt_tokens) == ("Yes.", tokens)
