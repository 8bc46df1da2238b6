"""A model that judges answers: its verdicts are feedback, and roll a version back."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import RunningGateway, Serve
from tests.integration.test_feedback import judge, read_feedback, wait_for_rows
from tests.integration.test_rollout import CHAT, CONFIG, GOOD, send, send_until, show_status
from tests.integration.test_rollout_faults import make_stream, say
from tests.support.commands import run_command
from tests.support.fakes import HANG, Reply, ScriptedWorker
from tests.support.waiting import wait_until

JUDGE: Final = """
    judge: {{model: grader, rubric: "{rubric}", timeout: 20s, requests: 100000/min, tokens: 1G/day}}
  grader: {{backend: grader}}
"""
RUBRIC: Final = "It names the time of day"


class JudgingWorker(ScriptedWorker):
    """Finds every answer good that has the word "dawn" in it."""

    def select_reply(self, body: bytes) -> Reply:
        answer = json.loads(json.loads(body)["messages"][1]["content"])["answer"]
        return [say(json.dumps({"good": "dawn" in answer}))]


def configure(old: str, new: str, grader: str, file: Path, guardrails: str) -> str:
    text = CONFIG.format(old=old, new=new, file=file, more="").replace(
        "{errors: {max_increase: 5%}}", guardrails
    )
    text = text.replace("[20, 50, 100]", "[50, 100]").replace("requests: 30", "requests: 9999")
    text = text.replace(
        "models:", f'  grader: {{protocol: openai, workers: ["{grader}"]}}\nmodels:'
    )
    text = text.replace("defaults:", f"{JUDGE.format(rubric=RUBRIC)}defaults:")
    return text.replace(f"{{usage: {file}}}", f"{{usage: {file}, feedback: {{}}}}")


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["unary", "stream"])
async def test_version_whose_answers_the_judge_finds_worse_is_rolled_back_with_the_reason(
    serve: Serve, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Version 1 says "It is dawn" and version 2 "Who knows": both answer with status 200."""
    guardrails = "{errors: {max_increase: 5%}, feedback: {judge: {max_decrease: 5%}}}"
    answers: list[Reply] = [[say("It is dawn")], [say("Who knows")]]
    if fields:
        answers = [make_stream("It is dawn"), make_stream("Who knows")]
    async with (
        ScriptedWorker(answers[0]) as old,
        ScriptedWorker(answers[1]) as new,
        JudgingWorker([]) as grader,
    ):
        text = configure(old.url, new.url, grader.url, tmp_path / "u.sqlite", guardrails)
        gateway = await serve(text)
        await send_until(gateway, lambda versions: not versions["2"], fields)
        code, printed = await show_status(tmp_path, text)
        sent = json.loads(grader.requests[0].body)

    assert code == 0
    assert printed.startswith("chat@2: rolled back\n  feedback judge: 100.0% → 0.0%: at least")
    assert sent["messages"][0]["content"].endswith(f"Rubric:\n{RUBRIC}")
    material = json.loads(sent["messages"][1]["content"])
    assert material["prompt"] == "Hi"
    assert material["answer"] in ("It is dawn", "Who knows")


async def test_verdicts_are_no_guardrail_unless_the_rollout_names_them_and_are_compared(
    serve: Serve, tmp_path: Path
) -> None:
    """The judge finds every answer of version 2 bad, and a user likes the first ten answers."""
    file = tmp_path / "u.sqlite"
    async with (
        ScriptedWorker(GOOD) as old,
        ScriptedWorker([say("Who knows")]) as new,
        JudgingWorker([]) as grader,
    ):
        text = configure(old.url, new.url, grader.url, file, "{errors: {max_increase: 5%}}")
        gateway = await serve(text)
        versions = await send(gateway, 200)
        await wait_for_rows(file, 200)
        first = gateway.records[:10]
        for record in first:
            await judge(gateway.http, request_id=record.id)
        await wait_for_rows(file, 210)
        code, printed = await show_status(tmp_path, text)
        again = await send(gateway)
    compared = await run_command("ab", file, "--model", "chat", "--outcome", "judge")

    agreeing = sum(record.version == "1" for record in first)
    sentence = f"The judge agrees with the feedback thumbs_up on {agreeing} of 10 requests"
    assert sentence in compared[1]
    assert "judge: version 2 is 100 percentage points lower" in compared[1]
    assert versions["2"] > 0
    assert again["2"] > 0
    assert (code, printed.startswith("chat@2: running, 50 %")) == (0, True)


LIMITED: Final = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
admin: {{address: "127.0.0.1:0"}}
backends:
  answers: {{protocol: openai, workers: ["{worker}"]}}
  grader: {{protocol: openai, workers: ["{grader}"]}}
models:
  chat:
    backend: answers
    judge: {{model: grader, rubric: Good, {limits}}}
  grader: {{backend: grader}}
defaults: {{retries: {{max: 0}}}}
observe: {{usage: {file}, feedback: {{}}}}
"""


async def ask(gateway: RunningGateway, count: int) -> None:
    for _ in range(count):
        response = await gateway.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 200


async def read_results(gateway: RunningGateway) -> dict[str, int]:
    page = (await gateway.http.get(f"{gateway.admin}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("interlingua_feedback_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}


@pytest.mark.parametrize(
    ("limits", "judged"),
    [
        pytest.param("requests: 2/day", 2, id="requests"),
        pytest.param("tokens: 3000/day", 1, id="tokens"),
        pytest.param("tokens: 100/day", 0, id="fewer tokens than one verdict may take"),
        pytest.param("share: 0%", 0, id="share"),
    ],
)
async def test_judge_gets_no_more_requests_than_its_limits_allow(
    serve: Serve, tmp_path: Path, limits: str, judged: int
) -> None:
    """Each verdict may take about 2,100 tokens, and takes 1,500: 4 for the prompt among them."""
    async with (
        ScriptedWorker([say("It is dawn")]) as worker,
        ScriptedWorker([say('{"good": true}', tokens=1496)]) as grader,
    ):
        text = LIMITED.format(
            worker=worker.url, grader=grader.url, file=tmp_path / "u.sqlite", limits=limits
        )
        gateway = await serve(text)
        await ask(gateway, 5)
        skipped = 0 if limits.startswith("share") else 5 - judged
        expected = {"judged": judged, "judge_skipped": skipped}
        wanted = {name: count for name, count in expected.items() if count}
        await wait_until_results(gateway, wanted)

    assert grader.request_count == judged


async def wait_until_results(gateway: RunningGateway, wanted: dict[str, int]) -> None:
    results: dict[str, int] = {}
    for _ in range(600):
        results = await read_results(gateway)
        if results == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not reached: {results}")


@pytest.mark.parametrize(
    ("reply", "result", "outcome"),
    [
        pytest.param(
            [b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}"], "failed", "worker_error", id="500"
        ),
        pytest.param([HANG], "failed", "gateway_error", id="hangs"),
        pytest.param([say("I like it")], "unreadable", "ok", id="no verdict"),
        pytest.param(
            [say('{"good": true} or {"good": false}')], "unreadable", "ok", id="two verdicts"
        ),
    ],
)
async def test_judge_that_gives_no_verdict_costs_no_client_anything(
    serve: Serve, tmp_path: Path, reply: Reply, result: str, outcome: str
) -> None:
    file = tmp_path / "u.sqlite"
    async with ScriptedWorker([say("It is dawn")]) as worker, ScriptedWorker(reply) as grader:
        text = LIMITED.format(
            worker=worker.url, grader=grader.url, file=file, limits="timeout: 200ms"
        )
        gateway = await serve(text)
        await ask(gateway, 1)
        await wait_until_results(gateway, {f"judge_{result}": 1})
        health = await gateway.http.get(f"{gateway.admin}/-/status")

    def read_usage() -> list[tuple[Any, ...]]:
        return read_feedback(file, "model, outcome", "usage")

    await wait_until(lambda: len(read_usage()) == 2)
    assert read_usage() == [("chat", "ok"), ("grader", outcome)]
    assert read_feedback(file) == []
    assert health.json()["memory"]["uses"].get("recordings", 0) == 0


async def test_judge_with_a_limit_of_tokens_is_sent_no_more(serve: Serve, tmp_path: Path) -> None:
    async with ScriptedWorker([say("It is dawn")]) as worker, JudgingWorker([]) as grader:
        text = LIMITED.format(
            worker=worker.url, grader=grader.url, file=tmp_path / "u.sqlite", limits=""
        ).replace("{backend: grader}", "{backend: grader, limits: {max_tokens: 100}}")
        gateway = await serve(text)
        await ask(gateway, 1)
        await wait_until_results(gateway, {"judged": 1})
        sent = json.loads(grader.requests[0].body)

    assert sent["max_completion_tokens"] == 100


async def test_clients_can_not_send_the_feedback_of_the_judge(serve: Serve, tmp_path: Path) -> None:
    async with ScriptedWorker([say("It is dawn")]) as worker, JudgingWorker([]) as grader:
        text = LIMITED.format(
            worker=worker.url, grader=grader.url, file=tmp_path / "u.sqlite", limits="share: 0%"
        )
        gateway = await serve(text)
        sent = await judge(gateway.http, request_id="r1", name="judge")

    assert sent.status_code == 400
    assert "this one is of the model's judge" in sent.json()["error"]["message"]
