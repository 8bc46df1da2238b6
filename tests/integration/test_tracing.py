"""The spans and metrics of requests that an OpenTelemetry collector receives."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.observability.record import RequestRecord
from tests.fault.gateway_process import GatewayProcess, build_config
from tests.support.fakes import make_reply
from tests.support.otlp_collector import Collector, decode_attributes
from tests.support.tcp_server import run_server
from tests.support.waiting import wait_until

CANARY = "canary-of-a-prompt"
ANSWERED = "canary-of-an-answer"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STATE = "other=t61rcWkgMzE"
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}"


def build_answer(text: str, *, prompt_tokens: int, completion_tokens: int) -> bytes:
    """Build a worker's complete response."""
    message = {"role": "assistant", "content": text}
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return make_reply(
        msgspec.json.encode(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": "served",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": usage,
            }
        )
    )


class TracedWorkers(Struct):
    """Two workers that give their answers in turn, whichever is asked; the last one is repeated."""

    answers: list[bytes]
    received: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """The headers of the generating requests."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            first, *lines = head.decode().splitlines()
            headers = {k.lower(): v.strip() for k, _, v in (one.partition(":") for one in lines)}
            await reader.readexactly(int(headers.get("content-length", 0)))
            if not first.startswith("POST"):
                writer.write(make_reply(b"{}"))
                continue
            self.received.append(headers)
            writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


@asynccontextmanager
async def run_traced_gateway(
    folder: Path, collector: Collector, answers: list[bytes], **traces: Any
) -> AsyncIterator[tuple[GatewayProcess, TracedWorkers]]:
    workers = TracedWorkers(answers)
    folder.mkdir()
    async with run_server(workers.answer) as one, run_server(workers.answer) as other:
        text = build_config(
            backends={
                "pool": {"protocol": "ovms", "workers": [one, other]},
                "local": {"kind": "echo", "script": ["a", "b", "c"]},
            },
            models={"m": {"backend": "pool"}, "here": {"backend": "local"}},
            observe={
                "traces": {"otlp": collector.url, "auth": {"bearer": "k1"}, **traces},
                "metrics": {"push": {"otlp": collector.url, "interval": "200ms"}},
            },
        )
        async with GatewayProcess(folder, text) as gateway:
            yield gateway, workers


async def send_chat(
    gateway: GatewayProcess, model: str, headers: dict[str, str], **fields: Any
) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": CANARY}], **fields}
    url = f"{gateway.urls[0]}/v1/chat/completions"
    response = await gateway.http.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text


def parse_traceparent(headers: dict[str, str]) -> tuple[str, str]:
    """Return the trace id and the span id that a worker received."""
    version, trace, span, flags = headers["traceparent"].split("-")
    assert (version, flags) == ("00", "01")
    return trace, span


def check_server_span(server: Span, record: RequestRecord) -> None:
    """The span of the request begins a trace, links the client's, and is the access log's."""
    assert server.kind == Span.SPAN_KIND_SERVER
    assert server.parent_span_id == b""
    [link] = server.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (TRACE, PARENT)
    assert server.trace_id.hex() != TRACE
    assert (record.trace_id, record.span_id) == (server.trace_id.hex(), server.span_id.hex())
    facts = decode_attributes(server.attributes)
    assert facts["http.request.method"] == "POST"
    assert facts["url.path"] == "/v1/chat/completions"
    assert facts["http.response.status_code"] == 200
    assert (facts["interlingua.model"], facts["interlingua.backend"]) == ("m", "pool")
    assert server.status.code == Status.STATUS_CODE_UNSET


def check_attempt_spans(
    server: Span, first: Span, second: Span, received: list[dict[str, str]]
) -> None:
    """The first worker is busy and the second one answers; both get the ids of the span."""
    tries = [(one.trace_id.hex(), one.span_id.hex()) for one in (first, second)]
    assert tries == [*map(parse_traceparent, received)]
    assert ["tracestate" in one for one in received] == [False, False]
    assert {one.parent_span_id for one in (first, second)} == {server.span_id}
    assert {one.kind for one in (first, second)} == {Span.SPAN_KIND_CLIENT}
    assert decode_attributes(first.attributes)["error.type"] == "Overloaded"
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert second.name == "chat m"
    assert server.start_time_unix_nano <= first.start_time_unix_nano <= first.end_time_unix_nano
    assert first.end_time_unix_nano <= second.start_time_unix_nano <= second.end_time_unix_nano
    answered = decode_attributes(second.attributes)
    assert answered.pop("server.port") > 0
    assert answered == {
        "server.address": "127.0.0.1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pool",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 2,
    }


async def test_request_has_a_server_span_and_one_client_span_per_attempt(tmp_path: Path) -> None:
    """Given a worker that is busy and one that answers, and a collector that first fails."""
    answers = [BUSY, build_answer(ANSWERED, prompt_tokens=9, completion_tokens=2)]
    with Collector(503) as collector:
        async with run_traced_gateway(tmp_path / "g", collector, answers, sample=1) as (
            gateway,
            workers,
        ):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": STATE}
            await send_chat(gateway, "m", headers, temperature=0.5, max_tokens=7, seed=7)
            await wait_until(lambda: len(collector.spans()) >= 3)
        server, first, second = collector.spans()[-3:]
        [record] = gateway.read_records()

    check_server_span(server, record)
    check_attempt_spans(server, first, second, workers.received)

    sent = [one for one in collector.taken if one.path == "/v1/traces"]
    assert all(one.headers["authorization"] == "Bearer k1" for one in sent)
    every = b"".join(one.body for one in collector.taken)
    assert CANARY.encode() not in every
    assert ANSWERED.encode() not in every
    [resource] = next(collector.traces()).resource_spans
    assert decode_attributes(resource.resource.attributes)["service.name"] == "interlingua"


def check_request_metrics(metrics: Mapping[str, Metric]) -> None:
    """Each request is counted, whether or not it was sampled: three for m and one for here.

    Each response of m has 9 tokens of the prompt and 2 of its own; here has 3 tokens.
    """
    assert {name: one.unit for name, one in metrics.items()} == {
        "gen_ai.server.request.duration": "s",
        "gen_ai.server.time_to_first_token": "s",
        "gen_ai.server.time_per_output_token": "s",
        "gen_ai.client.operation.duration": "s",
        "gen_ai.client.token.usage": "{token}",
    }
    durations = metrics["gen_ai.server.request.duration"].histogram.data_points
    by_model = {decode_attributes(one.attributes)["gen_ai.request.model"]: one for one in durations}
    assert {name: one.count for name, one in by_model.items()} == {"m": 3, "here": 1}
    tokens = {
        (it["gen_ai.provider.name"], it["gen_ai.token.type"]): one.sum
        for one in metrics["gen_ai.client.token.usage"].histogram.data_points
        if (it := decode_attributes(one.attributes))
    }
    assert tokens["pool", "input"] == 27
    assert tokens["pool", "output"] == 6
    assert tokens["local", "output"] == 3


async def test_trusted_client_determines_sampling(tmp_path: Path) -> None:
    """Given a gateway that samples nothing itself, a request whose client samples it has spans."""
    answers = [build_answer("hello", prompt_tokens=9, completion_tokens=2)]
    traces = {"sample": 0, "trust": True}
    with Collector() as collector:
        async with run_traced_gateway(tmp_path / "g", collector, answers, **traces) as (
            gateway,
            workers,
        ):
            unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00", "tracestate": STATE}
            await send_chat(gateway, "m", unsampled)
            await send_chat(gateway, "m", {})
            await send_chat(gateway, "m", {**unsampled, "traceparent": f"00-{TRACE}-{PARENT}-01"})
            await send_chat(
                gateway, "here", {"traceparent": f"00-{TRACE}-{PARENT}-01"}, stream=True
            )
            await wait_until(lambda: len(collector.spans()) >= 3)
        server, client, local = collector.spans()

    copied, bare, followed = workers.received
    assert (copied["traceparent"], copied["tracestate"]) == (unsampled["traceparent"], STATE)
    assert "traceparent" not in bare
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert parse_traceparent(followed) == (TRACE, client.span_id.hex())
    assert followed["tracestate"] == STATE
    assert not server.links
    assert not [name for name in decode_attributes(server.attributes) if name.startswith("gen_ai.")]
    spoken = decode_attributes(local.attributes)
    assert spoken["gen_ai.request.stream"] is True
    assert spoken["gen_ai.response.time_to_first_chunk"] > 0
    assert spoken["gen_ai.usage.output_tokens"] == 3

    check_request_metrics(collector.metrics())
