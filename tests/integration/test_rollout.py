"""Guarded rollouts over real sockets: a version moves up step by step, or back at once."""

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from gateway.config.loader import load_bytes, load_text
from gateway.evidence import live_measures
from gateway.runtime import rollout_webhook
from tests.conftest import RunningGateway, Serve
from tests.integration.test_replay import DAWN
from tests.support.commands import run_command
from tests.support.fakes import CHUNKED, END, HANG, ScriptedWorker, chunk, make_reply
from tests.support.waiting import PATIENCE

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
  old: {{protocol: openai, workers: ["{old}"]}}
  new: {{protocol: openai, workers: ["{new}"]}}
models:
  chat:
    versions: {{"1": {{backend: old}}, "2": {{backend: new}}}}
    split: {{weights: {{"1": 100, "2": 0}}, sticky: [header:x-user-id]}}
    rollout:
      to: "2"
      steps: [20, 50, 100]
      step_at_least: {{requests: 30, time: 10ms}}
      check_every: 1s
      guardrails: {{errors: {{max_increase: 5%}}}}
      {more}
defaults: {{retries: {{max: 0}}}}
observe: {{usage: {file}}}
"""
GOOD = [make_reply(json.dumps(DAWN).encode())]
BROKEN = [make_reply(b"{}", status="500 Internal Server Error")]
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}


async def send(
    gateway: RunningGateway, count: int = 40, fields: Mapping[str, object] = MappingProxyType({})
) -> Counter[str]:
    """Send requests of as many users; returns how many each version got."""
    for n in range(count):
        body, headers = {**CHAT, **fields}, {"x-user-id": f"u{n}"}
        await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    return Counter(record.version for record in gateway.records[-count:])


async def send_until(
    gateway: RunningGateway,
    is_done: Callable[[Counter[str]], bool],
    fields: Mapping[str, object] = MappingProxyType({}),
    rounds: int = 60,
) -> Counter[str]:
    versions = Counter[str]()
    for _ in range(rounds):
        versions = await send(gateway, fields=fields)
        if is_done(versions):
            return versions
        await asyncio.sleep(0.1)
    raise AssertionError(f"not reached: {versions}")


async def show_status(folder: Path, text: str, command: str = "status") -> tuple[int, str]:
    file = folder / "gateway.yaml"
    file.write_text(text)
    return await run_command("rollout", command, file)


async def test_version_that_fails_is_rolled_back_with_a_reason_in_the_log(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker of version 2 answers each request with 500."""
    caplog.set_level(logging.INFO, "interlingua.rollout")
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more="")
        gateway = await serve(text)
        assert (await send(gateway))["2"] > 0
        await send_until(gateway, lambda versions: not versions["2"])
        status = await show_status(tmp_path, text)

    assert status[0] == 0
    assert "chat@2: rolled back" in status[1]
    assert "errors: 0.0% → 100.0%: at least" in status[1]
    [warning] = [
        one
        for one in caplog.records
        if one.levelname == "WARNING" and one.name == "interlingua.rollout"
    ]
    assert "rollout of chat@2: rolled back at 0 %: errors: 0.0% → 100.0%" in warning.getMessage()


async def test_failures_that_a_fallback_answers_count_for_the_version_that_failed(
    serve: Serve, tmp_path: Path
) -> None:
    """The worker of version 2 answers 500 and that of the model "spare" 200: no client sees it."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more="")
        text = text.replace("    split:", "    fallback: [spare]\n    split:")
        text = text.replace("models:", "models:\n  spare: {backend: old}")
        assert await show_status(tmp_path, text) == (0, "chat@2: not begun\n")
        gateway = await serve(text)
        code, printed = await show_status(tmp_path, text)
        assert (code, "0 of 30 requests in this step" in printed) == (0, True)
        await send_until(
            gateway, lambda _: {one.model for one in gateway.records[-40:]} == {"chat"}
        )
        status = await show_status(tmp_path, text)

    assert "spare" in {record.model for record in gateway.records}
    assert {record.status for record in gateway.records} == {200}
    assert "chat@2: rolled back" in status[1]
    assert "errors: 0.0% → 100.0%: at least" in status[1]


async def test_promote_refuses_a_version_with_a_breach_that_no_gateway_has_seen_yet(
    serve: Serve, tmp_path: Path
) -> None:
    """The gateway looks at the requests once an hour, and the worker of version 2 answers 500."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(BROKEN) as new:
        settings = "step_at_most: 2h"
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more=settings)
        text = text.replace("check_every: 1s", "check_every: 1h")
        gateway = await serve(text)
        async with asyncio.timeout(60):
            while "errors: breached" not in (await show_status(tmp_path, text))[1]:
                await send(gateway)
        code, printed = await show_status(tmp_path, text, "promote")
        status = await show_status(tmp_path, text)

    assert code == 1
    assert "the rollout of chat is rolled back now: errors: 0.0% → 100.0%" in printed
    assert status[1].startswith("chat@2: rolled back\n  errors: 0.0% → 100.0%")


SHADOW = 'shadow: {to: "2", share: 100%, max_concurrency: 100}'


async def test_copies_of_requests_roll_a_version_back_before_any_user_gets_it(
    serve: Serve, tmp_path: Path
) -> None:
    """Version 1 answers with JSON, as the request requires; version 2 with the text "Hello"."""
    async with (
        ScriptedWorker(make_json_reply('{"a": 1}', stream=False)) as old,
        ScriptedWorker(make_json_reply("Hello", stream=False)) as new,
    ):
        settings = "start_with: shadow"
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more=settings)
        rails = "compare: {json_valid: {max_decrease: 2%}}"
        text = text.replace("errors: {max_increase: 5%}", rails)
        text = text.replace("    rollout:", f"    {SHADOW}\n    rollout:")
        gateway = await serve(text)
        required = {"response_format": {"type": "json_object"}}
        async with asyncio.timeout(60):
            while "rolled back" not in (await show_status(tmp_path, text))[1]:
                await send(gateway, fields=required)
        status = await show_status(tmp_path, text)
        totals = await run_command("usage", tmp_path / "u.sqlite", "--json", "--by", "version")
    assert {record.version for record in gateway.records} == {"1"}
    assert "json_valid: 100.0% → 0.0%: at least" in status[1]
    assert "copies of requests (shadow traffic) in this step" in status[1]
    assert [json.loads(line)["by"]["version"] for line in totals[1].splitlines()] == ["1"]


async def test_first_step_follows_when_the_copies_of_requests_are_as_good(
    serve: Serve, tmp_path: Path
) -> None:
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(GOOD) as new:
        settings = "start_with: shadow"
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more=settings)
        gateway = await serve(text.replace("    rollout:", f"    {SHADOW}\n    rollout:"))
        assert (await send(gateway)) == {"1": 40}
        await send_until(gateway, lambda versions: versions["2"] > 0)
        assert new.request_count >= 30


@pytest.mark.parametrize("stream", [False, True])
async def test_version_that_breaks_json_is_rolled_back(
    serve: Serve, tmp_path: Path, stream: bool
) -> None:
    """Version 1 answers with JSON, as the request requires; version 2 with the text "Hello"."""
    async with (
        ScriptedWorker(make_json_reply('{"a": 1}', stream=stream)) as old,
        ScriptedWorker(make_json_reply("Hello", stream=stream)) as new,
    ):
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more="")
        rails = "compare: {json_valid: {max_decrease: 2%}, tool_calls: {max_decrease: 2%}}"
        text = text.replace("errors: {max_increase: 5%}", rails)
        gateway = await serve(text)
        required = {"response_format": {"type": "json_object"}, "stream": stream}
        await send_until(gateway, lambda versions: not versions["2"], required)
        status = await show_status(tmp_path, text)
    assert "chat@2: rolled back" in status[1]
    assert "json_valid: 100.0% → 0.0%: at least" in status[1]
    assert "tool_calls: holds: no values yet" in status[1]
    json_valid = {record.version: record.measures["json_valid"] for record in gateway.records}
    assert json_valid == {"1": True, "2": False}


async def test_response_that_is_too_large_is_not_measured_and_holds_no_memory(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_measures, "_MAX_SIZE", 400)
    async with ScriptedWorker(make_json_reply("Hello", stream=True)) as worker:
        text = CONFIG.format(old=worker.url, new=worker.url, file=tmp_path / "u.sqlite", more="")
        rails = "compare: {not_empty: {max_decrease: 2%}}"
        gateway = await serve(text.replace("errors: {max_increase: 5%}", rails))
        await send(gateway, 2, {"stream": True})
        assert gateway.app.memory.get_use("recordings") == 0
    assert [record.measures for record in gateway.records] == [{}, {}]


def make_json_reply(content: str, *, stream: bool) -> list[bytes]:
    """A worker's response with this text."""
    if not stream:
        answer = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": answer, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]}
        return [make_reply(json.dumps(body).encode())]
    choices = [
        {"index": 0, "delta": {"content": content}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ]
    chunks = [{"id": "x", "object": "chat.completion.chunk", "choices": [one]} for one in choices]
    lines = [f"data: {json.dumps(one)}\n\n".encode() for one in chunks]
    return [CHUNKED, *map(chunk, lines), chunk(b"data: [DONE]\n\n"), END]


async def test_version_that_is_as_good_gets_all_traffic_and_users_move_only_forward(
    serve: Serve, tmp_path: Path
) -> None:
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(GOOD) as new:
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more="")
        gateway = await serve(text)
        snapshot, backends = gateway.app._current, {**gateway.app.backends}
        moved = set[int]()
        for _ in range(80):
            for n in range(40):
                reply = await gateway.http.post(
                    "/v1/chat/completions", json=CHAT, headers={"x-user-id": f"u{n}"}
                )
                if reply.headers["x-served-model"] == "2":
                    moved.add(n)
                else:
                    assert n not in moved
            if len(moved) == 40:
                break
            await asyncio.sleep(0.05)
        assert len(moved) == 40
        assert gateway.app._current is snapshot
        assert gateway.app.backends == backends
        async with asyncio.timeout(PATIENCE):
            while "chat@2: completed" not in (await show_status(tmp_path, text))[1]:  # noqa: ASYNC110 - none
                await asyncio.sleep(0.1)
        state, reason, since = (await show_status(tmp_path, text))[1].splitlines()
        assert (state, reason) == ("chat@2: completed", "  all steps are done")
        assert re.fullmatch(r"  since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", since)


async def test_gateways_share_a_rollout_that_survives_restarts_and_reloads(
    serve: Serve, tmp_path: Path
) -> None:
    """Both follow an operator's command, and so does one that starts later."""
    async with ScriptedWorker(GOOD) as old, ScriptedWorker(GOOD) as new:
        settings = "step_at_most: 1h"
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more=settings)
        text = text.replace("requests: 30", "requests: 100000")
        first, second = await serve(text), await serve(text)
        share = await send(first)
        assert 0 < share["2"] < 20
        assert await send(second) == share

        code, printed = await show_status(tmp_path, text, "promote")
        assert (code, printed) == (0, "chat@2: running, 50 %\n")
        await send_until(first, lambda versions: versions["2"] > share["2"])
        raised = await send(first)  # the share may have risen amid the requests before
        assert await send_until(second, lambda versions: versions == raised) == raised

        await second.app.apply_config(load_bytes(text.encode(), "g.yaml", env={}))
        assert await send(second) == raised
        third = await serve(text)
        assert await send(third) == raised

        await show_status(tmp_path, text, "abort")
        for gateway in (first, second, third):
            await send_until(gateway, lambda versions: not versions["2"])
        code, printed = await show_status(tmp_path, text, "abort")
        assert code == 1
        assert "the rollout of chat is rolled back" in printed


async def test_move_is_in_the_metrics_the_admin_listener_and_the_webhook(
    serve: Serve, tmp_path: Path
) -> None:
    """The worker of version 2 answers 500. The webhook first answers 500, and then 200."""
    async with (
        ScriptedWorker(GOOD) as old,
        ScriptedWorker(BROKEN) as new,
        ScriptedWorker(BROKEN, [make_reply(b"{}")]) as webhook,
    ):
        settings = f"webhook: {webhook.url}/secret-path"
        text = CONFIG.format(old=old.url, new=new.url, file=tmp_path / "u.sqlite", more=settings)
        gateway = await serve(f'admin: {{address: "127.0.0.1:0"}}\n{text}')
        page = (await gateway.http.get(f"{gateway.admin}/metrics")).text
        assert 'interlingua_rollout_step{model="chat",version="2"} 1.0' in page
        assert 'interlingua_rollout_weight{model="chat",version="2"} 20.0' in page
        assert 'rollout_state{model="chat",state="running",version="2"} 1.0' in page

        await send_until(gateway, lambda versions: not versions["2"])
        page = (await gateway.http.get(f"{gateway.admin}/metrics")).text
        assert 'interlingua_rollout_weight{model="chat",version="2"} 0.0' in page
        assert 'rollout_state{model="chat",state="rolled_back",version="2"} 1.0' in page

        [report] = (await gateway.http.get(f"{gateway.admin}/-/rollouts")).json()["rollouts"]
        [errors] = report.pop("guardrails")
        await webhook.wait_for_request(2)
    assert (report["model"], report["version"], report["phase"]) == ("chat", "2", "rolled back")
    assert (report["steps"], report["step"], report["share"]) == ([20, 50, 100], 0, 0)
    assert report["reason"].startswith("errors: 0.0% → 100.0%")
    assert (errors["name"], errors["verdict"], errors["allowed"]) == ("errors", "breached", 0.05)
    assert 0.05 < errors["low"] < errors["high"] <= 1

    first, second = (json.loads(one.body) for one in webhook.requests)
    assert first == second
    assert (first["model"], first["version"], first["state"]) == ("chat", "2", "rolled_back")
    assert (first["step"], first["share"]) == (1, 0)
    assert first["reason"] == report["reason"]


async def test_move_is_posted_three_times_at_most_and_no_log_has_the_url_of_the_webhook(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The webhook answers with a redirect, which is not followed, then with 500."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rollout_webhook, "_DELAYS", (0.0, 0.0, 0.0))
    moved = make_reply(b"", status="307 Temporary Redirect")
    async with ScriptedWorker([moved], BROKEN) as receiver:
        webhook = rollout_webhook.RolloutWebhook()
        webhook.post(f"{receiver.url}/secret-path", {"model": "chat"})
        async with asyncio.timeout(30):
            await asyncio.gather(*webhook._tasks)
        assert receiver.request_count == 3
        await webhook.aclose()
    assert "rollout of chat: the webhook at 127.0.0.1 failed: status 500" in caplog.text
    assert "secret-path" not in caplog.text


async def test_moves_beyond_those_that_a_slow_webhook_takes_are_dropped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The webhook never answers; closing gives up the move that waits for it."""
    monkeypatch.setattr(rollout_webhook, "_MAX_WAITING", 1)
    async with ScriptedWorker([HANG]) as receiver:
        webhook = rollout_webhook.RolloutWebhook()
        webhook.post(receiver.url, {"model": "chat"})
        webhook.post(receiver.url, {"model": "chat"})
        await webhook.aclose()
    assert "the webhook is too slow; a move is dropped" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('to: "2"', 'to: "3"', "there is no version"),
        ("[20, 50, 100]", "[50, 20]", "must rise, to at most 100 percent"),
        ("[20, 50, 100]", "[50, 120]", "must rise, to at most 100 percent"),
        ('{"1": 100, "2": 0}', '{"2": 1}', "the split has no other version"),
        ("check_every: 1s", "check_every: 999ms", "must be at least 1s"),
        ("check_every: 1s", "start_with: shadow", "needs shadow traffic to the version"),
        ("check_every: 1s", "webhook: 'ftp://host'", "must be an http:// or https:// URL"),
        ("observe:", "#", "a rollout needs observe.usage: {sqlite: FILE}"),
        ("check_every: 1s", "step_at_most: 9ms", "must be at least step_at_least.time, which is"),
        (
            "{errors: {max_increase: 5%}}",
            "{feedback: {thumbs_up: {max_decrease: 5%}}}",
            "no feedback is taken without observe.feedback; add it",
        ),
    ],
)
def test_rollout_that_can_not_work_is_a_mistake_of_the_configuration(
    old: str, new: str, message: str
) -> None:
    text = CONFIG.format(old="http://127.0.0.1:1", new="http://127.0.0.1:2", file="u", more="")
    assert old in text
    with pytest.raises(Exception, match=message):
        load_text(text.replace(old, new), "g.yaml", env={})
