"""The gateway meets the Triton cases, also those that need a special model."""

import asyncio
from typing import Any

import msgspec
import pytest

from backends.interfaces import EventSink, PreparedRequest, RequestContext, StreamItems
from protocols.core.events import ChoiceEnd, StreamEnd, TextDelta
from tests.conformance.cases import Case
from tests.conformance.conftest import RunCase
from tests.conformance.triton import CASES, VLLM, generate_response, stream_body
from tests.conftest import MOCK, Serve

TESTED_HERE = {"TR-34", "TR-50"}
"""The numbers of the cases in this module."""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_conformance_case(run_case: RunCase, case: Case) -> None:
    await run_case("triton", case)


def test_every_case_number_is_covered_and_ids_are_unique() -> None:
    assert {case.number for case in CASES} | TESTED_HERE == {f"TR-{n:02}" for n in range(1, 53)}
    assert len({case.id for case in CASES}) == len(CASES)


async def echo_parameters(
    prepared: PreparedRequest, context: RequestContext, sink: EventSink | None = None
) -> StreamItems:
    """A model whose response is the parameters that it received."""
    text = msgspec.json.encode(dict(prepared.request.extra)).decode()
    yield None, [TextDelta(text), ChoiceEnd("eos"), StreamEnd()]


PARAMETER_VALUES = [
    ("1", 1),
    ("1.5", 1.5),
    ("true", True),
    ('"s"', "s"),
    ("1e3", 1000.0),
    # Triton converts so large an integer to a double; the gateway passes it on unchanged.
    (str(2**63), 2**63),
]


@pytest.mark.parametrize(("sent", "value"), PARAMETER_VALUES)
async def test_tr_34_parameters_keep_their_types(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: str, value: Any
) -> None:
    gateway = await serve(MOCK)
    monkeypatch.setattr(gateway.app.backends["words"], "send", echo_parameters)
    body = f'{{"text_input":"","exclude_input_in_output":true,"foo":{sent}}}'

    response = await gateway.http.post(f"{VLLM}/generate", content=body)

    received = msgspec.json.decode(response.json()["text_output"])["foo"]
    assert (received, type(received)) == (value, type(value))


async def test_tr_50_full_queue_returns_503(serve: Serve) -> None:
    """The worker takes one request and two may wait: of eight, three succeed."""
    slow = MOCK.replace("words: {kind: echo,", "words: {kind: echo, delay: 60ms,")
    worker = await serve(slow)
    queue = f"{{protocol: openai, workers: [{worker.url}], max_concurrency: 1, queue: {{max: 2}}}}"
    gateway = await serve(
        f"""
        listeners: [{{address: "127.0.0.1:0", protocols: [{{name: triton, profile: trtllm}}]}}]
        backends: {{one: {queue}}}
        models: {{trt_like: {{backend: one, model: vllm_like}}}}
        """
    )
    body = {"text_input": "sleep", "max_tokens": 2}

    answers = await asyncio.gather(
        *(gateway.http.post("/v2/models/trt_like/generate", json=body) for _ in range(8))
    )

    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5

    full = "[request id: <id_unknown>] Exceeds maximum queue size"
    assert {one.json()["error"] for one in answers if one.status_code == 503} == {full}


async def send_generate_stream(
    port: int, body: bytes, *, version: str = "1.1"
) -> tuple[bytes, bytes]:
    """Return the head and the body of a generate_stream response as bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {VLLM}/generate_stream HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    response_head, _, rest = response.partition(b"\r\n\r\n")
    return response_head, rest


async def test_tr_43_each_event_is_one_http_chunk(serve: Serve) -> None:
    gateway = await serve(MOCK)

    _, body = await send_generate_stream(
        gateway.port, b'{"text_input":"a","id":"s1","stream":true}'
    )

    bodies = [stream_body(generate_response(f" w{k}", name="s1")) for k in range(3)]
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in [*bodies, b""])


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_http_1_0_client_gets_no_chunked_encoding(serve: Serve, stream: bytes) -> None:
    gateway = await serve(MOCK)

    sent = b'{"text_input":"","max_tokens":1,"stream":%b}' % stream
    head, body = await send_generate_stream(gateway.port, sent, version="1.0")

    assert b"chunked" not in head
    assert body == stream_body(generate_response(" w0"))
