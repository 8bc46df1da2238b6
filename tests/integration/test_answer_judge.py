"""A model that judges answers: its verdicts are feedback, and roll a version back."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import RunningGateway, Serve, run_gateways
from tests.integration.test_feedback import judge, read_feedback, wait_for_rows
from tests.integration.test_rollout import (
    CHAT,
    CONFIG,
    GOOD,
    SHADOW,
    send,
    send_until,
    show_status,
)
from tests.integration.test_rollout_faults import make_answer, make_call, make_stream, say
from tests.support.commands import run_command
from tests.support.fakes import CHUNKED, END, HANG, Reply, ScriptedWorker, chunk
from tests.support.postgres_server import PostgresServer
from tests.support.waiting import wait_until

JUDGE: Final = """
    judge: {{model: grader, rubric: "{rubric}", timeout: 20s, requests: 100000/min, tokens: 1G/day}}
  grader: {{backend: grader}}
"""
RUBRIC: Final = "It names the time of day"
VERDICT: Final = say('{"good": true}').partition(b"\r\n\r\n")[2]


class JudgingWorker(ScriptedWorker):
    """Finds every answer good that has the word "dawn" in it."""

    def select_reply(self, body: bytes) -> Reply:
        answer = json.loads(json.loads(body)["messages"][1]["content"])["answer"]
        return [say(json.dumps({"good": "dawn" in answer}))]


def configure(old: str, new: str, grader: str, file: Path | str, guardrails: str) -> str:
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


@pytest.fixture(params=["sqlite", "postgres"])
def usage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where the usage rows are."""
    if request.param == "sqlite":
        yield str(tmp_path / "u.sqlite")
        return
    with PostgresServer() as server:
        yield server.url


@pytest.mark.parametrize("start_with", ["split", "shadow"])
async def test_verdicts_in_the_usage_store_roll_a_version_back(
    serve: Serve, tmp_path: Path, usage: str, start_with: str
) -> None:
    """Version 1 says "It is dawn", version 2 "Who knows"; with ``shadow`` no user ever gets it."""
    async with (
        ScriptedWorker([say("It is dawn")]) as old,
        ScriptedWorker([say("Who knows")]) as new,
        JudgingWorker([]) as grader,
    ):
        guardrails = (
            "{errors: {max_increase: 5%}, "
            "feedback: {judge: {max_decrease: 5%}, thumbs_up: {max_decrease: 5%}}}"
        )
        text = configure(old.url, new.url, grader.url, f'"{usage}"', guardrails)
        if start_with == "shadow":
            text = text.replace("[50, 100]", "[50, 100]\n      start_with: shadow")
            text = text.replace("    rollout:", f"    {SHADOW}\n    rollout:")
        gateway = await serve(f'admin: {{address: "127.0.0.1:0"}}\n{text}')
        await send(gateway, 5)
        await judge(gateway.http, request_id=gateway.records[0].id)
        async with asyncio.timeout(60):
            while "rolled back" not in (printed := (await show_status(tmp_path, text))[1]):
                await send(gateway)
        health = await gateway.http.get(f"{gateway.admin}/-/status")
    compared = await run_command("ab", usage, "--model", "chat", "--outcome", "judge")

    is_shadow = start_with == "shadow"
    assert "feedback judge: 100.0% → 0.0%: at least" in printed
    assert ("thumbs_up" in printed) == (not is_shadow)
    versions = {record.version for record in gateway.records if record.model == "chat"}
    assert versions == ({"1"} if is_shadow else {"1", "2"})
    assert ("judge: version 2 is" in compared[1]) == (not is_shadow)
    assert health.json()["memory"]["uses"].get("recordings", 0) == 0


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


SAY_AND_CALL: Final = {"message": {**make_call("{}")["message"], "content": "Let me look"}}


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        pytest.param(make_answer(make_call("{}")), "Hi", id="tool call"),
        pytest.param(make_answer(SAY_AND_CALL), "Hi", id="text and tool call"),
        pytest.param(say("a" * 100_001), "Hi", id="long answer"),
        pytest.param(say("a"), "b" * 100_000, id="long prompt"),
        pytest.param(say(" "), "Hi", id="no text"),
    ],
)  # fmt: skip
async def test_answer_that_is_no_text_or_too_long_is_not_judged_but_the_next_one_is(
    serve: Serve, tmp_path: Path, answer: bytes, prompt: str
) -> None:
    async with (
        ScriptedWorker([answer], [say("It is dawn")]) as worker,
        JudgingWorker([]) as grader,
    ):
        text = LIMITED.format(
            worker=worker.url, grader=grader.url, file=tmp_path / "u.sqlite", limits=""
        )
        gateway = await serve(text)
        body = {"model": "chat", "messages": [{"role": "user", "content": prompt}]}
        first = await gateway.http.post("/v1/chat/completions", json=body)
        await ask(gateway, 1)
        await wait_until_results(gateway, {"judged": 1})
        health = await gateway.http.get(f"{gateway.admin}/-/status")

    assert first.status_code == 200
    assert grader.request_count == 1
    assert health.json()["memory"]["uses"].get("recordings", 0) == 0


async def test_answer_that_its_client_leaves_is_not_judged(serve: Serve, tmp_path: Path) -> None:
    cut = make_stream("It is dawn")[:2]
    async with ScriptedWorker([*cut, HANG]) as worker, JudgingWorker([]) as grader:
        text = LIMITED.format(
            worker=worker.url, grader=grader.url, file=tmp_path / "u.sqlite", limits=""
        )
        gateway = await serve(text)
        body = {**CHAT, "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if "dawn" in line:
                    break
        while not gateway.records:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.02)
        health = await gateway.http.get(f"{gateway.admin}/-/status")
        results = await read_results(gateway)

    assert [record.outcome for record in gateway.records] == ["cancelled"]
    assert (results, grader.request_count) == ({}, 0)
    assert health.json()["memory"]["uses"].get("recordings", 0) == 0


async def test_gateway_that_stops_cancels_the_requests_to_the_judge(tmp_path: Path) -> None:
    file = tmp_path / "u.sqlite"
    async with ScriptedWorker([say("It is dawn")]) as worker, ScriptedWorker([HANG]) as grader:
        text = LIMITED.format(worker=worker.url, grader=grader.url, file=file, limits="")
        async with run_gateways() as serve:
            gateway = await serve(text)
            await ask(gateway, 1)
            while not grader.request_count:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)

    assert read_feedback(file, "model, outcome", "usage") == [
        ("chat", "ok"),
        ("grader", "cancelled"),
    ]
    assert read_feedback(file) == []


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


async def test_reply_of_a_judge_takes_memory_until_it_is_read(serve: Serve, tmp_path: Path) -> None:
    reply, go_on = b" " * 600_000 + VERDICT, asyncio.Event()
    async with (
        ScriptedWorker(GOOD) as old,
        ScriptedWorker(GOOD) as new,
        ScriptedWorker([CHUNKED + chunk(reply[:500_000]), go_on, chunk(reply[500_000:]) + END]) as (
            grader
        ),
    ):
        text = configure(old.url, new.url, grader.url, tmp_path / "u.sqlite", "{}")
        gateway = await serve(text)
        await send(gateway, 1)
        await wait_until(lambda: gateway.app.memory.get_use("responses") >= 500_000)
        go_on.set()
        await wait_until(lambda: not gateway.app.memory.get_use("responses"))
