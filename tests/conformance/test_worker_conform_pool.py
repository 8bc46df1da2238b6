"""What was found of workers, as a pool of them uses it: what they don't do is not asked of them."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gateway.config import ConfigError, capabilities, load
from gateway.conformance.worker import found as finds
from gateway.conformance.worker.probing import Found
from gateway.core.errors import Malformed
from gateway.core.ports import Cancelling, Learning, Relaying, WorkerDialect
from gateway.core.restricted import PATHS, Sparing, without
from gateway.core.types import (
    EmbedRequest,
    GenerateRequest,
    Logprobs,
    Message,
    Sampling,
    Stopping,
    TextPart,
    Tool,
)
from gateway.making import make_dialect
from protocols import DIALECTS
from tests.conformance.test_worker_conform import Answering, found, spoken
from tests.conformance.test_worker_conform_bad import Worker
from tests.conftest import Running, Serve
from tests.fakes import Received

Asked = dict[str, Any]
CHAT: Asked = {"model": "m", "messages": [{"role": "user", "content": "one two three four"}]}


def gateway(url: str, file: str, dialects: str = "openai") -> str:
    return f"""
listeners: [{{address: "127.0.0.1:0", dialects: [{dialects}]}}]
backends:
  a: {{dialect: openai, workers: ["{url}"], capabilities: {file}}}
models: {{m: {{backend: a, model: parrot}}}}
"""


def listing(where: Path, *fields: str, dialect: str = "openai") -> str:
    file = where / "found.yaml"
    file.write_text(f"dialect: {dialect}\nfields: [{', '.join(fields)}]\n", "utf-8")
    return str(file)


async def chat(running: Running, **more: Any) -> tuple[Asked, str]:
    reply = await running.http.post("/v1/chat/completions", json=CHAT | more)
    assert reply.status_code == 200, reply.text
    told: Asked = reply.json()
    return told, reply.headers.get("x-interlingua-loss", "")


def texts(answer: Asked) -> list[str]:
    return [one["message"]["content"] for one in answer["choices"]]


async def test_what_is_found_makes_a_gateway_do_it_itself(serve: Serve, tmp_path: Path) -> None:
    """From the probes to the answer: a worker that leaves its stops in the text."""
    async with Answering(Worker("leaves the stop")).serving() as worker:
        told = list((await found(worker.url, spoken("openai"))).values())
        file = tmp_path / "found.yaml"
        whom = finds.Worker(worker.url, "openai", "openai", "parrot")
        file.write_text(finds.capabilities(whom, told), "utf-8")

        before = await serve(gateway(worker.url, "null"))
        after = await serve(gateway(worker.url, str(file)))
        bad, _ = await chat(before, stop=["three"])
        good, lost = await chat(after, stop=["three"])

    assert "stopping.stop" in finds.fields(told)
    assert texts(bad) == ["one two three"]
    assert texts(good) == ["one two "]
    assert good["choices"][0]["finish_reason"] == "stop"
    assert lost == "stop=emulated"


async def test_a_worker_is_not_told_what_it_does_not_do(serve: Serve, tmp_path: Path) -> None:
    seen: list[Asked] = []
    good = Worker("knows no n")

    def watched(request: Received) -> bytes:
        if request.method == "POST":
            seen.append(msgspec.json.decode(request.body))
        return good(request)

    async with Answering(watched).serving() as worker:
        running = await serve(gateway(worker.url, listing(tmp_path, "n", "sampling.top_p")))
        several, lost = await chat(running, n=3, top_p=0.5)
        plain, nothing = await chat(running, temperature=0.5)
        strict = await running.http.post(
            "/v1/chat/completions",
            json=CHAT | {"top_p": 0.5},
            headers={"x-interlingua-strict": "1"},
        )

    assert texts(several) == ["one two three four"] * 3
    assert set(lost.split(",")) == {"n=emulated", "top_p=dropped"}
    assert len(seen) == 4
    assert not any({"n", "top_p"} & one.keys() for one in seen)
    assert (texts(plain), nothing) == (["one two three four"], "")
    assert strict.status_code == 400


async def test_bodies_are_passed_on_unless_they_hold_such_a_field(
    serve: Serve, tmp_path: Path
) -> None:
    seen: list[bytes] = []
    good = Worker()

    def watched(request: Received) -> bytes:
        seen.append(request.body)
        return good(request)

    async with Answering(watched).serving() as worker:
        running = await serve(gateway(worker.url, listing(tmp_path, "sampling.top_p")))
        for more in (b"", b',"top_p":0.50'):
            asked = msgspec.json.encode(CHAT)[:-1] + b',"temperature":0.50' + more + b"}"
            await running.http.post("/v1/chat/completions", content=asked)

    relayed, translated = (body for body in seen if body)
    assert b"0.50" in relayed
    assert b"0.50" not in translated
    assert b"top_p" not in translated


# --- the dialect ----------------------------------------------------------------------------------

SAID = (Message("user", (TextPart("hi"),)),)
EVERYTHING = GenerateRequest(
    model="m",
    kind="chat",
    messages=SAID,
    n=2,
    sampling=Sampling(temperature=0.5, top_k=5),
    stopping=Stopping(max_tokens=3, stop=("x",)),
    logprobs=Logprobs(top=3),
    tools=(Tool("t"),),
    tool_choice="required",
)


def sparing(*paths: str, dialect: str = "openai", profile: str | None = "vllm") -> Sparing:
    return Sparing(cast("WorkerDialect", make_dialect(dialect, profile, {})), paths)


KEPT: list[tuple[str, Asked, str]] = [
    ("sampling.top_k", {}, "top_k"),
    ("stopping.stop", {}, "stop"),
    ("n", {}, "n"),
    ("logprobs", {}, "logprobs"),
    ("logprobs.top", {"logprobs": True}, "top_logprobs"),
    ("tools", {}, "tools"),
]


@pytest.mark.parametrize(("path", "stays", "goes"), KEPT)
def test_a_field_is_kept_back_and_lost(path: str, stays: Asked, goes: str) -> None:
    plain = sparing()
    spared = sparing(path)
    before = msgspec.json.decode(plain.encode(EVERYTHING).body)
    after = msgspec.json.decode(spared.encode(EVERYTHING).body)

    assert goes in before
    assert goes not in after
    assert after.items() >= stays.items()
    lost = [one for one in spared.losses(EVERYTHING, {path: "told"}) if one.path == path]
    assert [(one.field, one.reason) for one in lost] == [("told", "dropped")]
    assert path not in {one.path for one in plain.losses(EVERYTHING, {})}


def test_nothing_is_lost_that_was_not_asked() -> None:
    plain = GenerateRequest(model="m", kind="chat", messages=SAID, n=1)
    spared = sparing(*PATHS)

    assert spared.losses(plain, {}) == ()
    assert spared.encode(plain) == sparing().encode(plain)


def test_all_fields_can_be_kept_back_at_once() -> None:
    told = msgspec.json.decode(sparing(*PATHS).encode(EVERYTHING).body)
    assert told == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_several_become_one() -> None:
    prompts = GenerateRequest(model="m", kind="completion", prompts=("a", "b"))
    inputs = EmbedRequest(model="m", inputs=("a", "b"), encoding="base64", dimensions=4)
    spared = sparing("prompts", "inputs", "encoding", "dimensions", profile=None)

    assert msgspec.json.decode(spared.encode(prompts).body)["prompt"] == "a"
    assert msgspec.json.decode(spared.encode(inputs).body) == {"model": "m", "input": "a"}
    assert [one.path for one in spared.losses(prompts, {})] == ["prompts"]
    assert {one.path for one in spared.losses(inputs, {})} == {"inputs", "dimensions"}


def test_without_leaves_the_rest_alone() -> None:
    assert without(EVERYTHING, ()) == EVERYTHING
    assert without(EVERYTHING, ["logprobs", "logprobs.top"]).logprobs is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", DIALECTS)
def test_what_a_dialect_may_also_be_it_stays(name: str) -> None:
    plain = spoken(name)
    spared = Sparing(plain, ("n",))

    for port in (Learning, Cancelling, Relaying):
        assert isinstance(spared, port) is isinstance(plain, port), port
    assert (spared.name, spared.probe) == (plain.name, plain.probe)


class Client:
    """A client's dialect of which only the reading matters here."""

    def __init__(self, decoded: GenerateRequest | None) -> None:
        self._decoded = decoded

    def decode(self, call: Any) -> GenerateRequest:
        del call
        if self._decoded is None:
            raise Malformed("no JSON")
        return self._decoded


@pytest.mark.parametrize(
    ("decoded", "passed_on"),
    [
        (GenerateRequest(model="m", kind="chat", messages=SAID), True),
        (EVERYTHING, False),
        (None, False),
    ],
)
def test_bytes_are_passed_on_that_say_nothing_of_it(
    decoded: GenerateRequest | None, passed_on: bool
) -> None:
    relay = object()
    plain: Any = spoken("openai")
    plain.relay = lambda *_: relay
    spared: Any = Sparing(plain, ("sampling.top_k",))

    assert (spared.relay(Client(decoded), None, None) is relay) is passed_on
    plain.relay = lambda *_: None
    assert Sparing(plain, ()).relay(Client(decoded), None, None) is None  # type: ignore[arg-type]


# --- the file -------------------------------------------------------------------------------------

WRONG = [
    ("dialect: openai\nfields: [sampling.top_q]\n", ":2:10: 'sampling.top_q' is no field that can"),
    ("dialect: openai\nfields: [model]\n", ":2:10: 'model' is no field that can be kept"),
    ("fields: []\n", ":1:1: "),
    ("dialect: openai\nversion: 2\n", ":2:10: "),
    ("dialect: openai\nfield: [n]\n", ":2:1: "),
    ("dialect: [\n", ":2:1: "),
    ("", ":1:1: "),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_wrong_file_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "found.yaml"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigError) as alone:
        capabilities(file.read_bytes(), "found.yaml")
    with pytest.raises(ConfigError) as configured:
        load(gateway("http://127.0.0.1:1", str(file)), "g.yaml", env={})

    assert f"found.yaml{said}" in str(alone.value)
    assert "g.yaml:4:71: can't be used: " in str(configured.value)
    assert f"{file}{said}" in str(configured.value)


def test_a_file_of_other_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(gateway("http://w:1", listing(tmp_path, "n", dialect="triton")), "g.yaml", env={})

    said = "g.yaml:4:63: was found of workers that speak triton, and these speak openai; probe"
    assert said in str(caught.value)


def test_a_file_of_another_profile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "found.yaml"
    file.write_text("dialect: openai\nprofile: vllm\n", "utf-8")

    with pytest.raises(ConfigError, match="speak openai vllm, and these speak openai openai;"):
        load(gateway("http://w:1", str(file)), "g.yaml", env={})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no file"):
        load(gateway("http://w:1", str(tmp_path / "none.yaml")), "g.yaml", env={})


def test_what_is_written_is_read_again() -> None:
    """Whatever a worker has said."""
    odd = "cost: $5 ${HOME} \"quoted\" 'and' {braces} # x\\n é 日本"
    told = [
        Found("whole", "w", "passed"),
        Found("n", "w", "failed", odd, ("n",), ("a: b",)),
        Found("seed", "w", "failed", "differs", ("sampling.seed",)),
        Found("stop", "w", "passed", "fine", (), ("- blanks",)),
    ]
    worker = finds.Worker("http://w:1", "openai", "vllm", "org/m: 1")

    read = capabilities(finds.capabilities(worker, told).encode(), "f.yaml")

    assert (read.dialect, read.profile, read.model) == ("openai", "vllm", "org/m: 1")
    assert read.fields == ("n", "sampling.seed")
    assert read.quirks == {"n": f"{odd}; a: b", "seed": "differs", "stop": "- blanks"}
