"""The probes pass for correct workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from gateway.runtime.build import build_adapter
from gateway.tools.probe.client import Unreachable, WorkerClient, WorkerTarget
from gateway.tools.probe.runner import PROBES, ProbeResult, run_probes
from protocols.core.interfaces import UpstreamAdapter
from tests.conftest import Serve
from tests.support.fakes import ReceivedRequest, chunked, make_reply
from tests.support.tcp_server import run_server

PARROT = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks, triton, ovms, {name: mindie, prefix: /mindie}]
backends: {parrot: {kind: echo, context: 5000}}
models:
  parrot: {backend: parrot}
  vectors: {backend: parrot, task: embedding}
"""
"""A gateway that echoes prompts, so that a probe can request any text."""

Respond = Callable[[ReceivedRequest], bytes]


class StubWorkerServer:
    """A worker that computes each response from its request."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["StubWorkerServer"]:
        async with run_server(self._serve, limit=1 << 23) as self.url:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
            first, *lines = head.rstrip("\r\n").split("\r\n")
            method, path, _ = first.split(" ")
            split = (line.partition(":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in split}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            response = self._respond(ReceivedRequest(method, path, headers, body, 0))
            writer.write(response)
            await writer.drain()
            if not response.endswith((b"\r\n\r\n", b"}", b"]", b"ok")):
                break  # truncated


async def probe_worker(
    url: str, protocol: UpstreamAdapter, *, only: str = "", mode: str = "chat", **target: Any
) -> dict[str, ProbeResult]:
    """Return the findings by probe, of all probes or ``only`` some."""
    chosen = [one for one in PROBES if not only or one.name in only.split()]
    assert len(chosen) == len(only.split()) or not only
    results = WorkerTarget(url, mode=mode, **{"model": "parrot"} | target)  # type: ignore[arg-type]
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:  # noqa: S113 - probes have one
        worker = WorkerClient(http, protocol, results)
        return {one.name: one async for one in run_probes(chosen, worker, seconds=20, total=100)}


def create_adapter(name: str, profile: str | None = None) -> UpstreamAdapter:
    protocol: Any = build_adapter(name, profile, {})
    return protocol  # type: ignore[no-any-return]


def filter_outcomes(results: dict[str, ProbeResult], outcome: str) -> dict[str, str]:
    return {name: one.detail for name, one in results.items() if one.outcome == outcome}


WORKER_KINDS: list[tuple[str, str | None, str, str, int]] = [
    ("openai", None, "", "chat", 90),
    ("openai", "vllm", "", "chat", 98),
    ("openai", "vllm", "", "prompt", 85),
    ("databricks", None, "", "chat", 80),
    ("triton", None, "", "chat", 75),
    ("ovms", None, "", "chat", 80),
    ("mindie", None, "/mindie", "chat", 85),
    ("mindie", None, "/mindie", "prompt", 55),
]


def test_probe_names_are_unique_and_at_least_40() -> None:
    names = [one.name for one in PROBES]
    assert len(names) == len(set(names)) >= 40
    assert all(one.what.endswith(".") for one in PROBES)


@pytest.mark.parametrize("kind", WORKER_KINDS, ids=lambda one: "-".join(map(str, one[:4])))
async def test_gateway_passes_all_probes_as_a_worker(
    serve: Serve, kind: tuple[str, str | None, str, str, int]
) -> None:
    protocol, profile, prefix, expected, least = kind
    gateway = await serve(PARROT)

    results = await probe_worker(
        gateway.url + prefix, create_adapter(protocol, profile), mode=expected, embedder="vectors"
    )

    assert not filter_outcomes(results, "failed")
    assert len(filter_outcomes(results, "passed")) >= least
    assert not {path for one in results.values() for path in one.fields}


async def test_parameter_unsupported_by_the_protocol_is_not_offered(serve: Serve) -> None:
    gateway = await serve(PARROT)

    results = await probe_worker(gateway.url, create_adapter("openai"), only="top-k n embedding")

    assert results["top-k"].outcome == "not offered"
    assert results["top-k"].detail == "the protocol can't carry sampling.top_k: dropped"
    assert results["embedding"].detail == "no embedding model given (--embedder)"
    assert results["n"].outcome == "passed"


async def test_probes_have_time_limits(serve: Serve) -> None:
    gateway = await serve(PARROT.replace("context: 5000", "delay: 2s"))
    chosen = [one for one in PROBES if one.name in ("health", "whole", "stream")]
    async with httpx.AsyncClient(timeout=None) as http:  # noqa: S113 - what is tested
        worker = WorkerClient(http, create_adapter("openai"), WorkerTarget(gateway.url, "parrot"))
        results = [one async for one in run_probes(chosen, worker, seconds=1, total=1.5)]

    details = [one.detail for one in results]
    assert details[1].startswith("no answer within")
    assert [one.outcome for one in results] in (
        ["passed", "failed", "not offered"],
        ["passed", "failed", "failed"],
    )


async def test_unreachable_worker_is_an_error() -> None:
    with pytest.raises(Unreachable, match="can't be reached"):
        await probe_worker("http://127.0.0.1:1", create_adapter("openai"), only="whole")


async def test_key_is_sent_and_masked_in_the_report(serve: Serve) -> None:
    def refuse(request: ReceivedRequest) -> bytes:
        shown = request.headers.get("authorization", "nobody")
        body = {"error": {"message": f"{shown} may not", "type": "invalid_request_error"}}
        return make_reply(msgspec.json.encode(body), "400 Bad Request")

    async with StubWorkerServer(refuse).serving() as worker:
        results = await probe_worker(
            worker.url, create_adapter("openai"), only="whole", key="sk-very-secret"
        )

    assert results["whole"].outcome == "failed"
    assert "Bearer *** may not" in results["whole"].detail


# --- a worker that no gateway can play ------------------------------------------------------------


def respond_as_tgi(request: ReceivedRequest) -> bytes:
    """Answer like TGI, as far as the probes need it: it echoes the prompt's words."""
    match request.method, request.path:
        case "GET", "/health":
            return make_reply(b"")
        case "GET", "/info":
            return make_reply(
                b'{"max_concurrent_requests":128,"max_stop_sequences":4,"max_best_of":2}'
            )
        case "POST", "/generate" | "/generate_stream" as path:
            return _respond_to_generate(request, stream=path.endswith("stream"))
        case "PUT", _:
            return make_reply(b"{}", "405 Method Not Allowed")
        case _:
            return make_reply(b"{}", "404 Not ProbeResult")


def _respond_to_generate(request: ReceivedRequest, *, stream: bool) -> bytes:
    try:
        body = msgspec.json.decode(request.body, type=dict[str, Any])
        parameters = body.get("parameters", {})
        words = str(body["inputs"] + "").split()
        most = parameters.get("max_new_tokens") or 100
        assert isinstance(most, int)
        assert isinstance(parameters.get("temperature", 1.0), float | int)
        assert 0 < most < 4096
        assert len(words) < 4000
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return make_reply(
            b'{"error":"not JSON","error_type":"validation"}', "422 Unprocessable Entity"
        )
    except AssertionError:
        return make_reply(
            b'{"error":"Input validation error","error_type":"validation"}',
            "422 Unprocessable Entity",
        )
    tokens = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
    reason = "length" if len(tokens) > most else "eos_token"
    return _generate_response(words, tokens[:most], reason, parameters, stream=stream)


def _generate_response(
    words: list[str], tokens: list[str], reason: str, parameters: dict[str, Any], *, stream: bool
) -> bytes:
    for n in range(1, len(tokens) + 1):
        stop = next((one for one in parameters.get("stop", ()) if one in "".join(tokens[:n])), None)
        if stop is not None:
            tokens, reason = tokens[:n], "stop_sequence"
            break
    full = "".join(tokens)
    details = {
        "finish_reason": reason,
        "generated_tokens": max(len(tokens), 1),
        "seed": parameters.get("seed"),
        "input_length": max(len(words), 1),
    }
    token_rows = [
        {"id": i, "text": token, "logprob": -0.5, "special": False}
        for i, token in enumerate(tokens or [""])
    ]
    tops = [[token] * parameters.get("top_n_tokens", 0) for token in token_rows]
    if not stream:
        all_details = details | {"prefill": [], "tokens": token_rows, "top_tokens": tops}
        body = {"generated_text": full, "details": all_details}
        return make_reply(msgspec.json.encode(body))
    events = []
    for i, token in enumerate(token_rows):
        last = i == len(token_rows) - 1
        event = {
            "index": i + 1,
            "token": token,
            "top_tokens": tops[i],
            "generated_text": full if last else None,
            "details": details if last else None,
        }
        events.append(b"data:" + msgspec.json.encode(event) + b"\n\n")
    return chunked(*events)


async def test_tgi_worker_passes_all_probes() -> None:
    async with StubWorkerServer(respond_as_tgi).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("tgi"), mode="prompt")

    assert filter_outcomes(results, "failed") == {}
    assert len(filter_outcomes(results, "passed")) >= 50
    assert results["capacity"].detail == "1 of 1 metadata requests answered; takes 128 at a time"
    assert results["stop"].outcome == "not offered"
