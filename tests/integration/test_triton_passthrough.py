"""Between a Triton client and Triton workers, any body passes through unchanged."""

import pytest

from tests.conftest import Serve
from tests.integration.test_passthrough import (
    build_response,
    build_stream_reply,
    format_worker_urls,
    get_post_bodies,
)
from tests.support.fakes import CLOSE, ScriptedWorker

FRONT = """
listeners: [{{address: "127.0.0.1:0", protocols: [triton]}}]
limits: {{drain_timeout: 1s}}
backends:
  pool: {{protocol: triton, workers: [{workers}], health: {{interval: 1h}}}}
  own: {{kind: echo, script: ["so"]}}
models:
  chat: {{backend: pool, model: llama/versions/2, fallback: [spare]}}
  warm: {{backend: pool, model: llama, defaults: {{temperature: 0.5}}}}
  spare: {{backend: own}}
"""
ODD = b'{"PROMPT":["hi"],"STREAM":true,"PROMPT":1.50'
ANSWER = b'{"TEXT":"Hi","model_name":"llama","model_version":"2","num_input_tokens":3}'
EVENTS = [
    b'data: {"TEXT":"H","model_name":"llama","model_version":"2"}\n\n',
    b'data: {"TEXT":"i","model_name":"llama","model_version":"2"}\n\n',
]
ERROR = b'data: {"error":"An Error\\u0000Occurred"}\n\n'
CLEAN = b'data: {"error":"An Error Occurred"}\n\n'
SHOWN = b"".join(EVENTS).replace(b"llama", b"chat")
GENERATE = "/v2/models/chat/generate"


async def test_unary_passthrough_changes_only_the_model_name(serve: Serve) -> None:
    async with ScriptedWorker([build_response(ANSWER)]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(GENERATE, content=ODD)

    assert response.status_code == 200
    assert response.content == ANSWER.replace(b"llama", b"chat")
    assert get_post_bodies(worker) == [ODD]
    assert "/v2/models/llama/versions/2/generate" in [one.path for one in worker.requests]

    record = gateway.records[0]
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (3, 1)


@pytest.mark.parametrize("events", [EVENTS, []], ids=["events", "none"])
async def test_streamed_passthrough_changes_only_the_model_name(
    serve: Serve, events: list[bytes]
) -> None:
    async with ScriptedWorker(build_stream_reply(*events)) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(f"{GENERATE}_stream", content=ODD)

    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content == b"".join(events).replace(b"llama", b"chat")

    record = gateway.records[0]
    assert (record.outcome, record.stream, record.tokens) == ("ok", True, len(events))


async def test_worker_error_event_ends_the_stream_with_an_error(serve: Serve) -> None:
    async with ScriptedWorker(build_stream_reply(*EVENTS, ERROR, *EVENTS)) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(f"{GENERATE}_stream", content=ODD)

    assert response.content == SHOWN + CLEAN
    assert gateway.records[0].outcome == "truncated"


async def test_truncated_stream_ends_with_an_error(serve: Serve) -> None:
    async with ScriptedWorker([*build_stream_reply(*EVENTS, end=b""), CLOSE]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(f"{GENERATE}_stream", content=ODD)

    assert response.content.startswith(SHOWN + b'data: {"error":"')
    assert gateway.records[0].outcome == "truncated"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("500 Internal Server Error", "attempt to access JSON non-string as string"),
        ("400 Bad Request", "[request id: 7] expected 1 inputs but got 0 inputs for model 'chat'"),
        ("400 Bad Request", "input 'PROMPT' already exists in request"),
    ],
)
async def test_worker_client_error_is_forwarded_and_does_not_eject_the_worker(
    serve: Serve, status: str, message: str
) -> None:
    body = b'{"error":"%b"}' % message.encode()
    complaint = [build_response(body.replace(b"chat", b"llama"), status)]

    async with ScriptedWorker(complaint) as one, ScriptedWorker(complaint) as two:
        gateway = await serve(FRONT.format(workers=format_worker_urls(one, two)))
        for _ in range(12):
            response = await gateway.http.post(GENERATE, content=b"{}")
            assert f"{response.status_code} {response.reason_phrase}" == status
            assert response.content == body

        assert len(get_post_bodies(one)) + len(get_post_bodies(two)) == 12, (
            "none was asked in another's place"
        )

    assert {record.outcome for record in gateway.records} == {"client_error"}


async def test_model_error_does_not_eject_the_worker(serve: Serve) -> None:
    complaint = [build_response(b'data: {"error":"An Error Occurred"}\n\n', "400 Bad Request")]
    async with ScriptedWorker(complaint) as worker:
        gateway = await serve(
            FRONT.format(workers=format_worker_urls(worker)).replace(", fallback: [spare]", "")
        )
        for _ in range(12):
            response = await gateway.http.post(f"{GENERATE}_stream", content=ODD)
            assert response.status_code == 400
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.content == CLEAN

    assert len(get_post_bodies(worker)) == 12


async def test_passthrough_request_is_retried_on_another_worker(serve: Serve) -> None:
    broken = [build_response(b'{"error":"the device is gone"}', "500 Internal Server Error")]
    async with (
        ScriptedWorker(broken) as one,
        ScriptedWorker([build_response(ANSWER)]) as two,
    ):
        gateway = await serve(FRONT.format(workers=format_worker_urls(one, two)))
        for _ in range(4):
            assert (await gateway.http.post(GENERATE, content=ODD)).status_code == 200


async def test_passthrough_request_falls_back_to_a_backend_of_another_kind(serve: Serve) -> None:
    async with ScriptedWorker([CLOSE]) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(f"{GENERATE}_stream", content=b'{"text_input":"hi"}')
        odd = await gateway.http.post(f"{GENERATE}_stream", content=ODD)

    assert response.status_code == 200
    assert b'"text_output":"hiso"' in response.content
    assert gateway.records[0].stream is False
    assert b"closed the connection" in odd.content
    assert gateway.records[1].error == "StreamBroken"
    assert gateway.records[1].failed_attempts == ("spare@1 MalformedRequest",)


async def test_model_defaults_disable_passthrough(serve: Serve) -> None:
    responses = [build_response(b'{"text_output":"Hi","model_name":"llama","model_version":"2"}')]
    async with ScriptedWorker(responses) as worker:
        gateway = await serve(FRONT.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(
            "/v2/models/warm/generate", content=b'{"text_input":"hi","max_tokens":2}'
        )
        assert response.status_code == 200

    assert b'"temperature' in get_post_bodies(worker)[-1]


@pytest.mark.parametrize("model", ["warm", "direct"], ids=["translated", "passed through"])
async def test_generation_that_a_worker_aborted_is_no_mistake_of_the_client(
    serve: Serve, model: str
) -> None:
    answer = build_response(b'{"text_output":"Hi","finish_reason":"abort","model_name":"llama"}')
    front = FRONT.replace("  spare:", "  direct: {{backend: pool, model: llama}}\n  spare:")
    async with ScriptedWorker([answer]) as worker:
        gateway = await serve(front.format(workers=format_worker_urls(worker)))
        response = await gateway.http.post(
            f"/v2/models/{model}/generate", json={"text_input": "hi"}
        )

    assert (response.status_code, gateway.records[0].outcome) == (502, "worker_error")
