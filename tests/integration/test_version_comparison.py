"""The request record has what a comparison of two versions needs."""

import asyncio
from collections.abc import Mapping

import pytest

from gateway.observability.record import RequestRecord
from tests.conftest import RunningGateway, Serve

FRONT = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, databricks]}]
backends:
  one: {kind: echo, script: [first]}
  two: {kind: echo, script: [a, b, c], delay: 10ms}
  late: {kind: echo, script: [a, b, c], fail: {mode: disconnect, after_chunks: 2}}
  gone: {protocol: openai, workers: ["http://127.0.0.1:1"]}
models:
  chat:
    versions: {"1": {backend: one}, "2": {backend: two}}
    split: {name: rollout, weights: {"1": 1, "2": 99}, sticky: [header:x-user-id]}
  lucky: {versions: {"1": {backend: two}, "2": {backend: two}},
          split: {weights: {"1": 1, "2": 1}}}
  over: {versions: {"1": {backend: two}, "2": {backend: one}}, split: {weights: {"1": 1, "2": 0}}}
  alone: {backend: two}
  weak: {versions: {"1": {backend: gone}, "2": {backend: gone}, "3": {backend: two}},
         split: {name: trial, weights: {"1": 1, "2": 1, "3": 0}}, fallback: ["3", chat]}
  weaker: {versions: {"1": {backend: gone}, "2": {backend: gone}},
           split: {weights: {"1": 1, "2": 1}}, fallback: [lucky]}
  cut: {backend: late}
routes:
  - {name: testers, when: {model: chat, header: {x-cohort: beta}}, to: {version: "2"}}
  - {name: moved, when: {model: alone, header: {x-cohort: beta}}, to: {model: lucky}}
"""
HELLO = [{"role": "user", "content": "hi"}]


async def send_chat(
    gateway: RunningGateway, model: str, headers: Mapping[str, str] | None = None, **fields: object
) -> RequestRecord:
    body = {"model": model, "messages": HELLO, **fields}
    await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    return gateway.records[-1]


async def test_streamed_response_records_time_to_first_token(serve: Serve) -> None:
    gateway = await serve(FRONT)
    record = await send_chat(gateway, "lucky", stream=True)

    assert record.first_byte is not None
    assert record.first_token is not None
    assert record.first_byte <= record.first_token < record.duration
    assert record.finish_reasons == ("eos",)


async def test_unary_response_records_no_time_to_first_token(serve: Serve) -> None:
    record = await send_chat(await serve(FRONT), "lucky", n=2, max_tokens=2)

    assert record.first_token is None
    assert record.finish_reasons == ("length", "length")


async def test_truncated_stream_records_no_finish_reason(serve: Serve) -> None:
    record = await send_chat(await serve(FRONT), "cut", stream=True)

    assert record.outcome == "truncated"
    assert record.first_token is not None
    assert record.finish_reasons == ()


@pytest.mark.parametrize("stream", [True, False])
async def test_passthrough_records_finish_reason_and_time_to_first_token(
    serve: Serve, *, stream: bool
) -> None:
    worker = await serve(FRONT)
    gateway = await serve(f"""
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends: {{w: {{protocol: openai, workers: ["{worker.url}"]}}}}
models: {{lucky: {{backend: w}}}}
""")

    record = await send_chat(gateway, "lucky", stream=stream)

    assert record.finish_reasons == ("eos",)
    assert (record.first_token is not None) == stream


@pytest.mark.parametrize(
    ("model", "headers", "split"),
    [
        ("chat", {}, "rollout"),
        ("chat", {"x-user-id": "user-1"}, "rollout"),
        ("chat", {"x-cohort": "beta"}, ""),
        ("chat@2", {}, ""),
        ("lucky", {}, "lucky"),
        ("over", {}, ""),
        ("alone", {}, ""),
        ("alone", {"x-cohort": "beta"}, "lucky"),
    ],
)
async def test_record_names_the_traffic_split_that_chose_the_version(
    serve: Serve, model: str, headers: dict[str, str], split: str
) -> None:
    record = await send_chat(await serve(FRONT), model, headers)
    assert (record.split, record.fallback_from) == (split, "")


async def test_fallback_record_names_the_original_version(serve: Serve) -> None:
    gateway = await serve(FRONT)
    own, other = await send_chat(gateway, "weak"), await send_chat(gateway, "weaker")

    assert (own.model, own.version, own.split) == ("weak", "3", "trial")
    assert own.fallback_from in ("weak@1", "weak@2")
    assert (other.model, other.split) == ("lucky", "weaker")
    assert other.fallback_from in ("weaker@1", "weaker@2")


async def test_record_has_the_start_time(serve: Serve) -> None:
    gateway = await serve(FRONT)
    one = await send_chat(gateway, "alone")
    await asyncio.sleep(0.01)

    two = await send_chat(gateway, "nobody")

    assert one.started_at > 1_700_000_000
    assert one.started_at < two.started_at
