"""``interlingua compare`` finds the version of a model that is worse, in real recordings."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.observability.recording import read_recordings
from tests.conftest import Serve
from tests.support.chat_worker import Answer, ChatWorker, Json
from tests.support.commands import run_command

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  old: {protocol: openai, workers: ["OLD"]}
  new: {protocol: openai, workers: ["NEW"]}
models:
  chat:
    versions: {"1": {backend: old}, "2": {backend: new}}
    split: {weights: {"1": 100, "2": 0}}
    record: {to: RECORDINGS_PATH, bodies: full}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
COUNT = 90
TARGETS = ("--control", "recorded", "--to", "chat@2")


def make_request(number: int) -> Json:
    """Make a request with tools, stop strings or JSON in turn; most are streamed."""
    body: Json = {
        "model": "chat",
        "stream": number % 6 != 0,
        "messages": [{"role": "user", "content": f"question {number}"}],
    }
    match number % 3:
        case 0:
            return body | {"tools": [TOOL]}
        case 1:
            return body | {"stop": ["END"]}
        case _:
            return body | {"response_format": {"type": "json_object"}}


class Model:
    """A worker with deterministic answers and one fault, on a machine with a load of its own."""

    def __init__(self, fault: str = "none", drift: Callable[[], float] = lambda: 1.0) -> None:
        """``drift``: how much slower the machine is at this moment."""
        self._fault = fault
        self._drift = drift

    def __call__(self, body: Json) -> Answer:
        number = int(body["messages"][-1]["content"].split()[-1])
        pause = (0.06 + 0.002 * (number * 7 % 11)) * self._drift()
        if self._fault == "slower":
            pause *= 1.5
        if "tools" in body and self._fault != "drops tools":
            arguments = '{"town": 1}' if self._fault == "wrong arguments" else '{"city": "Rome"}'
            call = ("weather", f"call_{number}", (arguments,))
            return Answer(text=(pause,), calls=(call,), reason="tool_calls")
        if "response_format" in body:
            text = "It is fine" if self._fault == "no JSON" else '{"fine": true}'
            return Answer(text=(pause, text))
        if self._fault == "cut" and number % 2 == 1:
            return Answer(text=(pause, "answer"), reason="length")
        rest = (" END and more",) if "stop" in body and self._fault == "ignores stop" else ()
        return Answer(text=(pause, f"answer {number}", *rest))


async def record(serve: Serve, config: str, folder: Path) -> None:
    gateway = await serve(config)
    slots = asyncio.Semaphore(8)

    async def send(number: int) -> None:
        async with slots:
            reply = await gateway.http.post("/v1/chat/completions", json=make_request(number))
            assert reply.status_code == 200, reply.text

    await asyncio.gather(*map(send, range(COUNT)))
    for _ in range(200):
        if folder.is_dir() and len([*read_recordings(folder)]) == COUNT:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not all requests are recorded")


async def compare_replay(
    serve: Serve,
    folder: Path,
    fault: str,
    *arguments: str,
    drift: Callable[[], float] = lambda: 1.0,
) -> tuple[int, str]:
    """Record version 1, replay to both in one run, and compare. Version 2 has the fault."""
    recordings, out, file = folder / "recordings", folder / "out", folder / "gateway.yaml"
    async with ChatWorker(Model(drift=drift)) as old, ChatWorker(Model(fault, drift)) as new:
        config = CONFIG.replace("OLD", old.url).replace("NEW", new.url)
        file.write_text(config.replace("RECORDINGS_PATH", str(recordings)))
        await record(serve, file.read_text(), recordings)
        code, printed = await run_command(
            "replay", recordings, "--config", file, *TARGETS, "--seed", "3", "--out", out
        )
        assert code == 0, printed
    return await run_command("compare", out, *arguments)


@pytest.mark.parametrize(
    ("fault", "measure", "verdict"),
    [
        ("ignores stop", "responses with a stop string", "worse"),
        ("drops tools", "responses that call a tool", "worse"),
        pytest.param("wrong arguments", "valid tool arguments", "worse", marks=pytest.mark.slow),
        pytest.param("no JSON", "valid JSON", "worse", marks=pytest.mark.slow),
        ("cut", "responses cut at their limit", "worse"),
        pytest.param("slower", "time to the first token", "worse", marks=pytest.mark.slow),
    ],
)
async def test_regression_of_a_worker_is_found(
    serve: Serve, tmp_path: Path, fault: str, measure: str, verdict: str
) -> None:
    code, printed = await compare_replay(serve, tmp_path, fault, "--json", "--fail-on", "worse")
    report = json.loads(printed)
    verdicts = {result["measure"]: result["verdict"] for result in report["measures"]}

    assert report["pairs"] == COUNT
    assert verdicts[measure] == verdict, verdicts
    assert code == 1


async def test_version_without_regression_is_not_flagged(serve: Serve, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, printed = await compare_replay(serve, tmp_path, "none", "--html", str(page))
    assert code == 0
    assert f"{COUNT} pairs of the same request" in printed

    rows = [line for line in printed.splitlines() if line.startswith(("valid", "responses"))]
    assert len(rows) > 4
    assert all("not enough data" in row or "no relevant difference" in row for row in rows)
    assert "texts: 100.0% of" in printed
    assert page.read_text().startswith("<!doctype html>")


async def test_drift_of_the_machine_is_no_difference(serve: Serve, tmp_path: Path) -> None:
    """The machine of both workers gets three times as slow while the requests are replayed.

    Each request goes to both versions, one right after the other, in random order.
    """
    calls = [0]

    def drift() -> float:
        calls[0] += 1
        return 1.0 + 2.0 * max(0, calls[0] - COUNT) / (2 * COUNT)

    code, printed = await compare_replay(
        serve, tmp_path, "none", "--json", "--fail-on", "different", drift=drift
    )
    report = json.loads(printed)
    [duration] = [one for one in report["measures"] if one["measure"] == "duration"]
    assert report["is_simultaneous"]
    assert duration["verdict"] in ("no relevant difference", "not enough data"), duration
    assert code == 0

    a, b = (read_recordings(tmp_path / "out" / side) for side in "ab")
    starts = {result.replay_of: result.at for result in a}
    first = sum(starts[result.replay_of] < result.at for result in b)
    assert COUNT / 4 < first < COUNT * 3 / 4


async def test_versions_of_one_recording_are_compared(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    async with ChatWorker(Model()) as old, ChatWorker(Model("no JSON")) as new:
        config = CONFIG.replace("OLD", old.url).replace("NEW", new.url)
        config = config.replace('{"1": 100, "2": 0}', '{"1": 50, "2": 50}')
        await record(serve, config.replace("RECORDINGS_PATH", str(folder)), folder)
    code, printed = await run_command(
        "compare", "chat@1", "chat@2", "--in", folder, "--fail-on", "worse"
    )

    assert "different requests" in printed

    [row] = [line for line in printed.splitlines() if line.startswith("valid JSON")]
    assert "worse" in row.split()
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat@1", "chat@2"), "no such recording: chat@1; versions need --in RECORDINGS"),
        (("EMPTY",), "EMPTY is no replay to two targets: name A and B, or replay with --to A"),
        (("EMPTY", "EMPTY"), "there are no recorded requests of EMPTY"),
        (("chat", "b", "--in", "EMPTY"), "chat: with --in, write MODEL@VERSION"),
        (("chat@1", "chat@2", "--in", "EMPTY"), "there are no recorded requests of chat@1"),
    ],
)
async def test_wrong_usage_names_the_missing_argument(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    empty = tmp_path / "EMPTY"
    empty.mkdir()
    command: list[Any] = [empty if one == "EMPTY" else one for one in arguments]

    code, printed = await run_command("compare", *command)

    assert code == 2
    assert message.replace("EMPTY", str(empty)) in printed
