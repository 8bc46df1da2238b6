"""The CPU time of single steps: functions that are called repeatedly in this process.

They show which step caused a change in a load's result.
"""

import gc
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import msgspec

from backends.histogram import Histogram
from backends.interfaces import Deadline, RequestContext, ignore_memory
from gateway.auth.api_keys import Authenticator, Principal
from gateway.http_server.response import UNARY_PREFIXES, render_head, render_headers
from gateway.observability.metrics.requests import MetricsCollector
from gateway.observability.record import RequestRecord, ignore_record
from gateway.observability.stats import RequestStats
from protocols.core import sse
from protocols.core.events import Usage
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.openai.endpoints import OpenAI
from protocols.triton.endpoints import Triton
from tests.bench import traffic
from tests.bench.gateways import KEY
from tests.bench.loads import Form
from tests.bench.results import Step

_REPETITIONS: Final = 5
_UNKNOWN: Final = "0" * 64
_KEY_DIGEST: Final = hashlib.sha256(KEY.encode()).hexdigest()
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1763690000,"model":"mock","choices":[{"index":0,"delta":{"content":" brown"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)

Call = Callable[[], object]


def measure_steps(seconds: float) -> list[Step]:
    """Return microseconds of CPU time per call of every step, by repetition."""
    gc.collect()
    return [_measure_step(name, call, seconds) for name, call in list_steps()]


def _measure_step(name: str, call: Call, seconds: float) -> Step:
    calls = 1
    while (elapsed := _time_calls(call, calls)) < seconds / 10:
        calls *= 4
    calls = max(1, round(calls * seconds / elapsed))
    turns = sorted(_time_calls(call, calls) / calls * 1e6 for _ in range(_REPETITIONS))
    return Step(name, turns[_REPETITIONS // 2], turns[0], turns[-1])


def _time_calls(call: Call, calls: int) -> float:
    """Return seconds of CPU time."""
    started = time.process_time()
    for _ in itertools.repeat(None, calls):
        call()
    return time.process_time() - started


def list_steps() -> Iterator[tuple[str, Call]]:
    """Return the steps of a request in order, each with the function to call."""
    yield from _request_steps()
    yield from _event_steps()
    yield from _accounting_steps()


def _context() -> RequestContext:
    return RequestContext("r1", Deadline(lambda: 0.0, 60.0), lambda: 0.0, ignore_memory)


def _response_context() -> ResponseContext:
    return ResponseContext("r1", 1_763_690_000, "mock", "1", "served", _context().clock)


def _call(size: int = 650, form: Form = "unary") -> ClientRequest:
    body = msgspec.json.encode(traffic.chat_body(size, form, "mock"))
    endpoint = OpenAI().endpoints[0]
    return ClientRequest(endpoint, {}, {}, "", body, endpoint.path, "r1", 1_763_690_000.0)


def _request_steps() -> Iterator[tuple[str, Call]]:
    """Return the steps of each request."""
    openai, context = OpenAI(), _response_context()
    for size, label in ((650, "0.65 kB"), (40_000, "40 kB"), (1_000_000, "1 MB")):
        call = _call(size)
        yield f"read the routing fields of a body, {label}", partial(openai.read_routing_info, call)
        rename = partial(openai.prepare_passthrough, openai, call, context)
        yield f"prepare a body for pass-through, {label}", rename
        yield f"decode a body, {label}", partial(openai.decode_request, call)
    authenticator = Authenticator([Principal("bench", _UNKNOWN), Principal("other", _KEY_DIGEST)])
    headers = {"authorization": f"Bearer {KEY}"}
    yield "authenticate a key", lambda: authenticator.authenticate(headers)
    own_headers = (("x-request-id", "r1"), ("Content-Type", "application/json"))
    yield (
        "render the head of a response",
        lambda: render_head(200, render_headers(own_headers, UNARY_PREFIXES)[0]),
    )


def _event_steps() -> Iterator[tuple[str, Call]]:
    """Return the steps of each token."""
    openai, triton, context = OpenAI(), Triton("vllm"), _response_context()
    call = _call(form="stream")
    request = openai.decode_request(call)
    assert isinstance(request, GenerationRequest)
    parser = sse.SseParser()
    yield "parse a server-sent event", lambda: list(parser.feed(_EVENT))
    passthrough = openai.prepare_passthrough(openai, call, context)
    assert passthrough is not None
    reader = passthrough.create_reader()
    yield "pass an event through", lambda: reader.feed([_EVENT])
    decoder = openai.create_decoder(request)
    yield "decode an event", lambda: decoder.feed(_EVENT)
    events = decoder.feed(_EVENT)
    openai_encoder = openai.create_encoder(call, request, context)
    yield "encode an event, OpenAI", lambda: openai_encoder.encode_events(events)
    generate_endpoint = triton.endpoints[1]
    body = msgspec.json.encode(traffic.generate_body(650, "stream"))
    generate_call = ClientRequest(
        generate_endpoint, {"model": "mock"}, {}, "", body, generate_endpoint.path, "r1", 0.0
    )
    triton_request = triton.decode_request(generate_call)
    triton_encoder = triton.create_encoder(generate_call, triton_request, context)
    yield "encode an event, Triton", lambda: triton_encoder.encode_events(events)
    yield (
        "translate an event, OpenAI to Triton",
        lambda: triton_encoder.encode_events(decoder.feed(_EVENT)),
    )


def _accounting_steps() -> Iterator[tuple[str, Call]]:
    """Return the steps at the end of a request."""
    usage = Usage(120, 100, source="worker")
    record = RequestRecord(
        "r1", 1_763_690_000.0, "openai", "/v1/chat/completions", "mock", "1", "same"
    )
    record.usage, record.finish_reasons, record.duration = usage, ("stop",), 0.5
    stats = RequestStats(Histogram)
    yield "add a record to the statistics", lambda: stats.add_records(record)
    metrics = MetricsCollector(ignore_record, dict)
    yield "record the metrics of a request", lambda: metrics.record_request(record)
    encode = msgspec.json.Encoder().encode
    yield "encode a record as JSON", lambda: encode(record)
