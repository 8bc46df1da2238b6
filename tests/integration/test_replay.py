"""``interlingua replay`` sends recorded requests of a gateway again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.observability.recording import RecordedRequest, read_recordings
from tests.conftest import RunningGateway, Serve
from tests.support.commands import run_command
from tests.support.fakes import ScriptedWorker, make_reply

CONFIG = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, anthropic, databricks, triton, ovms, ollama,
      {name: mindie, prefix: /mindie}, {name: tgi, prefix: /tgi}]
backends:
  old: {kind: echo, script: ["It", " is", " noon"]}
  new: {kind: echo, script: ["It", " is", " night"]}
  slow: {kind: echo, script: [a, b, c, d, e, f, g, h], delay: 300ms}
  strict: {protocol: databricks, workers: ["http://127.0.0.1:9"]}
models:
  chat:
    aliases: [gpt]
    versions:
      {"1": {backend: old}, "2": {backend: new}, "3": {backend: slow}, "4": {backend: strict}}
    split: {weights: {"1": 100, "2": 0}}
    record: {to: FOLDER, bodies: full}
"""
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "What time is it?"}]}
DAWN = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "llama",
    "choices": [{"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": "It is dawn"}}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
}  # fmt: skip
GENERATE = {"text_input": "What time is it?"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"model": "gpt", "stream": True}),
    ("/v1/chat/completions", CHAT | {"model": "chat@1", "temperature": 9}),
    ("/v1/completions", {"model": "chat", "prompt": "?"}),
    ("/v1/responses", {"model": "chat", "input": "?"}),
    ("/v1/messages", CHAT | {"max_tokens": 9}),
    ("/v1/messages", CHAT | {"max_tokens": 9, "stream": True}),
    ("/serving-endpoints/gpt/invocations", {"messages": CHAT["messages"]}),
    ("/v2/models/chat/generate", GENERATE),
    ("/v2/models/chat/versions/1/generate_stream", GENERATE),
    ("/mindie/v2/models/chat/generate_stream", GENERATE | {"id": "7"}),
    ("/v3/chat/completions", CHAT),
    ("/api/chat", CHAT),
    ("/tgi/generate", {"inputs": "?"}),
]


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


@pytest.fixture
def config(tmp_path: Path, recordings: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG.replace("FOLDER", str(recordings)))
    return path


async def send_all(gateway: RunningGateway, requests: list[tuple[str, dict[str, Any]]]) -> None:
    for path, body in requests:
        reply = await gateway.http.post(path, json=body)
        assert reply.status_code < 500, (path, reply.text)


def read_texts(results: list[RecordedRequest]) -> dict[str, str]:
    return {
        result.replay_of: "".join(choice.text for choice in result.answer.choices)
        for result in results
        if result.answer is not None
    }


async def wait_for(recordings: Path, count: int) -> list[RecordedRequest]:
    """Wait until all requests are recorded, and return them."""
    records = list[RecordedRequest]()
    for _ in range(600):
        records = [*read_recordings(recordings)] if recordings.is_dir() else []
        if len(records) >= count:
            return records
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(records)} of {count} requests are recorded")


async def test_requests_of_every_protocol_go_to_another_version(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    await send_all(await serve(config.read_text()), REQUESTS)
    originals = {one.id: one for one in await wait_for(recordings, len(REQUESTS))}

    code, printed = await run_command(
        "replay", recordings, "--config", config, "--to", "chat@2", "--out", tmp_path / "out"
    )

    assert code == 0, printed
    assert f"{len(REQUESTS)} of {len(REQUESTS)} requests were sent" in printed

    results = [*read_recordings(tmp_path / "out")]
    assert {result.replay_of for result in results} == set(originals)
    assert {result.replay_target for result in results} == {"chat@2"}

    for result in results:
        original = originals[result.replay_of]
        assert (result.protocol, result.stream, result.status, result.outcome) == (
            original.protocol, original.stream, original.status, original.outcome,
        )  # fmt: skip
        assert result.version == "2"
    texts = read_texts([result for result in results if result.outcome == "ok"])
    assert len(texts) == len(REQUESTS) - 1  # OpenAI rejects a temperature of 9
    assert all(text.endswith("It is night") for text in texts.values())
    assert oct((tmp_path / "out").stat().st_mode)[-3:] == "700"
    for file in (tmp_path / "out").iterdir():
        assert oct(file.stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
async def test_losses_and_failures_are_results(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path, status: str
) -> None:
    async with ScriptedWorker([make_reply(json.dumps(DAWN).encode(), status=status)]) as worker:
        config.write_text(config.read_text().replace("http://127.0.0.1:9", worker.url))
        request = ("/v1/chat/completions", CHAT | {"logit_bias": {"5": 1}})
        await send_all(await serve(config.read_text()), [request])
        await wait_for(recordings, 1)
        code, printed = await run_command(
            "replay", recordings, "--config", config, "--to", "chat@4", "--out", tmp_path / "out"
        )
    assert code == 0

    [result] = read_recordings(tmp_path / "out")
    if status == "200 OK":
        assert "1 of 1 requests were sent, 0 of them failed" in printed
        assert [loss.parameter for loss in result.losses] == ["logit_bias"]
        assert read_texts([result]) == {result.replay_of: "It is dawn"}
    else:
        assert "1 of 1 requests were sent, 1 of them failed" in printed
        assert (result.status >= 500, result.outcome) == (True, "worker_error")


async def test_worker_answers_by_its_own_name_of_the_model(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    await send_all(await serve(config.read_text()), REQUESTS[:1])
    await wait_for(recordings, 1)
    async with ScriptedWorker([make_reply(json.dumps(DAWN).encode())]) as worker:
        code, printed = await run_command(
            "replay",
            recordings,
            "--to",
            worker.url,
            "--model",
            "llama",
            "--out",
            tmp_path / "out",
            "--worker-key",
            "secret",
        )
        sent = [one for one in worker.requests if one.method == "POST"]
        bodies = [json.loads(one.body) for one in sent]

    assert code == 0, printed
    assert [one["model"] for one in bodies] == ["llama"]
    assert [one.headers["authorization"] for one in sent] == ["Bearer secret"]

    [file] = (tmp_path / "out").iterdir()
    assert "secret" not in file.read_text()

    [result] = read_recordings(tmp_path / "out")
    assert read_texts([result]) == {result.replay_of: "It is dawn"}
    assert result.replay_target == worker.url


async def test_interrupted_replay_keeps_its_results_and_can_be_resumed(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    await send_all(await serve(config.read_text()), [REQUESTS[0]] * 6)
    originals = {one.id for one in await wait_for(recordings, 6)}
    out = tmp_path / "out"
    arguments = (recordings, "--config", config, "--out", out, "--concurrency", 1)

    code, printed = await run_command(
        "replay", *arguments, "--to", "chat@3", stop_after=b"1 of 6\n"
    )

    assert code == 130, printed
    assert "stopped: 1 of 6 requests were sent" in printed

    first = [*read_recordings(out)]
    assert [result.outcome for result in first] == ["ok"]

    code, printed = await run_command("replay", *arguments, "--to", "chat@2")

    assert code == 0, printed
    assert "5 of 6 recorded requests go to chat@2" in printed
    assert "1 have a result there already" in printed

    results = [*read_recordings(out)]
    assert len(results) == 6
    assert {result.replay_of for result in results} == originals


async def test_recorded_pace_keeps_the_pauses_between_requests(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    gateway = await serve(config.read_text())
    for pause in (1.5, 0.0):
        await send_all(gateway, REQUESTS[:1])
        await asyncio.sleep(pause)
    originals = await wait_for(recordings, 2)
    code, printed = await run_command(
        "replay",
        recordings, "--config", config, "--to", "chat@2", "--out", tmp_path / "out",
        "--pace", "recorded",
    )  # fmt: skip

    assert code == 0, printed

    times = {result.replay_of: result.at for result in read_recordings(tmp_path / "out")}
    first, second = (one.id for one in sorted(originals, key=lambda one: one.at))
    assert times[second] - times[first] > 1


async def test_rollout_of_the_configuration_does_not_run_in_a_replay(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    await send_all(await serve(config.read_text()), REQUESTS[:1])
    await wait_for(recordings, 1)
    rollout = "  chat:\n    rollout: {to: '2', steps: [1, 100]}\n"
    text = config.read_text().replace("  chat:\n", rollout)
    config.write_text(f"{text}observe: {{usage: {tmp_path / 'usage.sqlite'}}}\n")

    code, printed = await run_command(
        "replay", recordings, "--config", config, "--to", "chat@2", "--out", tmp_path / "out"
    )

    assert code == 0, printed
    assert "1 of 1 requests were sent, 0 of them failed" in printed


async def test_requests_without_body_are_counted_and_not_sent(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    text = config.read_text().replace("bodies: full", "bodies: none")
    await send_all(await serve(text), REQUESTS[:2])
    await wait_for(recordings, 2)

    code, printed = await run_command(
        "replay", recordings, "--config", config, "--to", "chat@2", "--out", tmp_path / "out"
    )

    assert code == 0
    assert "2 have no recorded body" in printed
    assert "There is nothing to send." in printed


async def test_repeated_comparison_with_the_recorded_version_sends_nothing(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    await send_all(await serve(config.read_text()), REQUESTS[:1])
    await wait_for(recordings, 1)
    targets = ("--control", "recorded", "--to", "chat@2", "--out", tmp_path / "out")

    runs = [await run_command("replay", recordings, "--config", config, *targets) for _ in range(2)]

    assert [code for code, _ in runs] == [0, 0], runs
    assert "1 have a result there already" in runs[1][1]
    assert "There is nothing to send." in runs[1][1]


async def test_token_limit_leaves_requests_out(
    serve: Serve, config: Path, recordings: Path, tmp_path: Path
) -> None:
    await send_all(await serve(config.read_text()), [REQUESTS[0]] * 4)
    await wait_for(recordings, 4)

    code, printed = await run_command(
        "replay",
        recordings, "--config", config, "--to", "chat@2", "--out", tmp_path / "out",
        "--max-tokens", 15, "--prices", 1000000, 2000000,
    )  # fmt: skip

    assert code == 0, printed
    assert "2 of 4 recorded requests go to chat@2" in printed
    assert "2 are beyond the limit of tokens or cost" in printed
    assert (
        "about 8 prompt tokens and 6 completion tokens, as they were recorded, at a cost of 20.00"
        in printed
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--config FILE is needed, or --to with the URL of a worker"),
        (("--to", "chat@2"), "--config FILE is needed, or --to with the URL of a worker"),
        (("--config", "CONFIG", "--to", "http://127.0.0.1:9"), "--config can't be used"),
        (
            ("--config", "CONFIG", "--to", "no@2"),
            "there is no model 'no'; the configuration has chat",
        ),
        (("--config", "CONFIG", "--max-cost", "1"), "--max-cost needs --prices"),
        (("--config", "CONFIG", "--model", "m"), "--model is only for --to with the URL"),
        (("--to", "http://127.0.0.1:9", "--protocol", "smtp"), "smtp"),
    ],
)
async def test_wrong_usage_names_the_missing_argument(
    config: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    command = [str(config) if one == "CONFIG" else one for one in arguments]

    code, printed = await run_command("replay", folder, *command)

    assert code == 2
    assert message in printed
