"""Unsupported parameters found by probes are pool settings, and are not sent to the workers."""

from textwrap import indent
from typing import Any

import msgspec

from backends.pool.settings import PoolSettings
from gateway.config.loader import load_text
from gateway.tools.probe import report
from gateway.tools.probe.runner import ProbeResult
from tests.conftest import RunningGateway, Serve
from tests.probe.test_flawed_workers import FlawedWorker
from tests.probe.test_probes import StubWorkerServer, create_adapter, probe_worker
from tests.support.fakes import ReceivedRequest

JsonObject = dict[str, Any]
CHAT: JsonObject = {"model": "m", "messages": [{"role": "user", "content": "one two three four"}]}


def build_config(url: str, unsupported: str = "", protocols: str = "openai") -> str:
    """Build a configuration with the pool's ``unsupported`` setting."""
    return f"""
listeners: [{{address: "127.0.0.1:0", protocols: [{protocols}]}}]
models: {{m: {{backend: a, model: parrot}}}}
backends:
  a:
    protocol: openai
    workers: ["{url}"]
{indent(unsupported, "    ")}
"""


def format_unsupported_parameters(*parameters: str) -> str:
    return f"unsupported_parameters: [{', '.join(parameters)}]"


async def send_chat(running: RunningGateway, **fields: Any) -> tuple[JsonObject, str]:
    reply = await running.http.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 200, reply.text
    body: JsonObject = reply.json()
    return body, reply.headers.get("x-interlingua-loss", "")


def list_texts(answer: JsonObject) -> list[str]:
    return [one["message"]["content"] for one in answer["choices"]]


async def test_unsupported_parameter_found_by_a_probe_is_emulated(serve: Serve) -> None:
    """From the probes to the response: the worker ignores stop strings."""
    async with StubWorkerServer(FlawedWorker("leaves the stop")).serving() as worker:
        results = list((await probe_worker(worker.url, create_adapter("openai"))).values())
        whom = report.ProbedWorker(worker.url, "openai", "openai", "parrot")
        setting = report.encode_unsupported_parameters(whom, results)

        before = await serve(build_config(worker.url))
        after = await serve(build_config(worker.url, setting))
        bad, _ = await send_chat(before, stop=["three"])
        good, lost = await send_chat(after, stop=["three"])

    assert "stopping.stop" in report.unsupported_fields(results)
    assert list_texts(bad) == ["one two three"]
    assert list_texts(good) == ["one two "]
    assert good["choices"][0]["finish_reason"] == "stop"
    assert lost == "stop=emulated"


async def test_unsupported_parameters_are_not_sent_to_the_worker(serve: Serve) -> None:
    bodies: list[JsonObject] = []
    good = FlawedWorker("knows no n")

    def watched(request: ReceivedRequest) -> bytes:
        if request.method == "POST":
            bodies.append(msgspec.json.decode(request.body))
        return good(request)

    async with StubWorkerServer(watched).serving() as worker:
        running = await serve(
            build_config(worker.url, format_unsupported_parameters("n", "sampling.top_p"))
        )
        several, lost = await send_chat(running, n=3, top_p=0.5)
        plain, nothing = await send_chat(running, temperature=0.5)
        strict = await running.http.post(
            "/v1/chat/completions",
            json=CHAT | {"top_p": 0.5},
            headers={"x-interlingua-strict": "1"},
        )

    assert list_texts(several) == ["one two three four"] * 3
    assert set(lost.split(",")) == {"n=emulated", "top_p=dropped"}
    assert len(bodies) == 4
    assert not any({"n", "top_p"} & one.keys() for one in bodies)
    assert (list_texts(plain), nothing) == (["one two three four"], "")
    assert strict.status_code == 400


async def test_unsupported_parameter_in_the_body_disables_passthrough(serve: Serve) -> None:
    bodies: list[bytes] = []
    good = FlawedWorker()

    def watched(request: ReceivedRequest) -> bytes:
        bodies.append(request.body)
        return good(request)

    async with StubWorkerServer(watched).serving() as worker:
        running = await serve(
            build_config(worker.url, format_unsupported_parameters("sampling.top_p"))
        )
        for extra_json in (b"", b',"top_p":0.50'):
            request_body = (
                msgspec.json.encode(CHAT)[:-1] + b',"temperature":0.50' + extra_json + b"}"
            )
            await running.http.post("/v1/chat/completions", content=request_body)

    relayed, translated = (body for body in bodies if body)
    assert b"0.50" in relayed
    assert b"0.50" not in translated
    assert b"top_p" not in translated


def test_written_unsupported_parameters_are_valid_pool_settings() -> None:
    """This holds for any finding."""
    odd = "cost: $5 ${HOME} \"quoted\" 'and' {braces} # x\\n é 日本\n- a\u2028b\x00"
    results = [
        ProbeResult("whole", "w", "passed"),
        ProbeResult("n", "w", "failed", odd, ("n",), ("a: b",)),
        ProbeResult("seed", "w", "failed", "differs", ("sampling.seed",)),
        ProbeResult("stop", "w", "passed", "fine", (), ("- blanks",)),
    ]
    worker = report.ProbedWorker("http://w:1", "openai", "vllm", "org/m: 1")

    written = report.encode_unsupported_parameters(worker, results)
    pool = load_text(build_config("http://w:1", written), "f.yaml", env={}).backends["a"]

    assert isinstance(pool, PoolSettings)
    assert pool.unsupported_parameters == ("n", "sampling.seed")

    comments = [line for line in written.splitlines() if line.startswith("#")]
    assert len(comments) == len(written.splitlines()) - 1
    assert comments[2:] == [
        "# protocol: openai",
        "# profile: vllm",
        "# model: org/m: 1",
        "# quirk of n: cost: $5 ${HOME} \"quoted\" 'and' {braces} # x\\n é 日本 - a b ; a: b",
        "# quirk of seed: differs",
        "# quirk of stop: - blanks",
    ]
