"""Audio, image and moderation requests are forwarded without translation."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import RunningGateway, Serve
from tests.support.tcp_server import run_server
from tests.support.waiting import wait_until

KEY = "sk-of-a-client"
CONFIG = """
listeners:
  - address: "127.0.0.1:0"
    protocols: [openai, databricks]
    {listener}
limits: {{body: 3MiB, memory: 4MiB}}
backends:
  media: {{protocol: openai, policy: round_robin, health: {{interval: 60s}}, workers: [{workers}]}}
  echo: {{kind: echo}}
  triton: {{protocol: triton, workers: ["http://127.0.0.1:9"]}}
models:
  mock-media: {{backend: media, model: whisper-x}}
  same: {{backend: media}}
  text: {{backend: echo}}
  other: {{backend: triton}}
keys:
  - {{name: client, sha256: "{digest}", limits: {{requests: 100/min}}}}
"""
SPEECH = {"model": "mock-media", "input": "hi", "voice": "alloy"}
BOUNDARY = "----b0"
AUDIO = b"RIFF\x00\xff\r\n--not-a-boundary\r\n\x00"


class MediaWorker:
    """Records the pieces of each request and sends scripted responses."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.bodies: list[bytearray] = []
        self.answer: Callable[[asyncio.StreamWriter], Awaitable[None]] = self.send_json
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET "):
                await self.send_json(writer)
                continue
            body = bytearray()
            self.heads.append(head.decode())
            self.bodies.append(body)
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if length is None:
                while size := int(await reader.readline(), 16):
                    body += await reader.readexactly(size)
                    await reader.readexactly(2)
                await reader.readexactly(2)
            else:
                while len(body) < int(length[1]):
                    body += await reader.read(1 << 16)
            await self.answer(writer)

    async def send(
        self, writer: asyncio.StreamWriter, body: bytes, kind: str, status: str = "200 OK"
    ) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nX-Internal: 1\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def send_json(self, writer: asyncio.StreamWriter) -> None:
        await self.send(writer, b'{"text":"hello"}', "application/json")

    async def send_chunks(
        self, writer: asyncio.StreamWriter, kind: str, *pieces: bytes, end: bool = True
    ) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.02)
        if end:
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()


@pytest.fixture
async def worker() -> AsyncIterator[MediaWorker]:
    media = MediaWorker()

    async with run_server(media.serve) as url:
        media.url = url
        yield media


@pytest.fixture
async def gateway(serve: Serve, worker: MediaWorker) -> RunningGateway:
    return await start(serve, worker.url)


async def start(
    serve: Serve, *workers: str, listener: str = "", settings: str = ""
) -> RunningGateway:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    listed = ", ".join(f'{{url: "{url}", auth: {{bearer: worker-key}}}}' for url in workers)
    text = CONFIG.format(workers=listed, digest=digest, listener=listener)
    running = await serve(text + settings)
    running.http.headers["authorization"] = f"Bearer {KEY}"
    return running


def build_form(*fields: tuple[str, bytes], file_name: str = "a.wav") -> bytes:
    parts = []
    for name, value in fields:
        attributes = (
            f'; filename="{file_name}"\r\nContent-Type: audio/wav' if name == "file" else ""
        )
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{attributes}\r\n\r\n'
        parts.append(head.encode() + value + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


async def post_form(
    running: RunningGateway, body: bytes, path: str = "transcriptions", **headers: str
) -> httpx.Response:
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    return await running.http.post(
        f"/v1/audio/{path}", content=body, headers={"content-type": kind} | headers
    )


def get_error(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_speech_is_streamed_as_the_worker_sends_it(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    first_arrived = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"3\r\n\x00\x01\x02\r\n")
        await asyncio.wait_for(first_arrived.wait(), 10)
        writer.write(b"2\r\n\xff\xfe\r\n0\r\n\r\n")

    worker.answer = answer
    async with gateway.http.stream("POST", "/v1/audio/speech", json=SPEECH) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "audio/mpeg")
        received = b""
        async for piece in response.aiter_raw():
            received += piece
            first_arrived.set()
    assert received == b"\x00\x01\x02\xff\xfe"
    assert json.loads(worker.bodies[0]) == SPEECH | {"model": "whisper-x"}

    [record] = gateway.records
    assert (record.model, record.backend, record.key, record.status) == (
        "mock-media", "media", "client", 200
    )  # fmt: skip
    assert record.path == "/v1/audio/speech"


@pytest.mark.parametrize("file_first", [False, True])
async def test_form_reaches_the_worker_with_its_model_name_and_is_otherwise_unchanged(
    gateway: RunningGateway, worker: MediaWorker, *, file_first: bool
) -> None:
    fields = [("model", b"mock-media"), ("language", b"de"), ("file", AUDIO * 40_000)]
    if file_first:
        fields.reverse()
    body = build_form(*fields)

    response = await post_form(gateway, body)

    assert (response.status_code, response.content) == (200, b'{"text":"hello"}')
    assert worker.bodies[0] == body.replace(b"mock-media", b"whisper-x")
    assert f"boundary={BOUNDARY}\r\n" in worker.heads[0]
    assert worker.heads[0].startswith("POST /v1/audio/transcriptions HTTP/1.1\r\n")
    assert "authorization: bearer worker-key" in worker.heads[0].lower()
    assert KEY not in worker.heads[0]
    assert "x-internal" not in response.headers


async def test_headers_of_the_protocol_are_forwarded_or_reported(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    headers = {"OpenAI-Beta": "x=1", "OpenAI-Project": "p", "OpenAI-New": "1", "X-Other": "1"}

    response = await gateway.http.post(
        "/v1/audio/transcriptions?later=1",
        content=build_form(("model", b"mock-media"), ("file", AUDIO)),
        headers={"content-type": kind} | headers,
    )

    assert response.status_code == 200
    assert "openai-beta: x=1\r\n" in worker.heads[0].lower()
    for name in ("openai-project", "openai-new", "x-other"):
        assert name not in worker.heads[0].lower()
    reported = [
        *(f"header.{name}=dropped" for name in ("openai-project", "openai-new", "x-other")),
        "query.later=dropped",
    ]
    assert response.headers["x-interlingua-loss"].split(",") == reported


async def test_form_without_a_length_is_sent_on_with_one(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    body = build_form(("model", b"same"), ("file", AUDIO * 9000))

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    kind = f'multipart/form-data; boundary="{BOUNDARY}"'
    response = await gateway.http.post(
        "/v1/audio/translations", content=pieces(), headers={"content-type": kind}
    )

    assert response.status_code == 200
    assert worker.bodies[0] == body
    assert f"content-length: {len(body)}\r\n" in worker.heads[0].lower()
    assert f"boundary={BOUNDARY}\r\n" in worker.heads[0]


async def test_worker_gets_nothing_of_a_form_before_its_last_field_was_read(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    """A second model at the end of a form is rejected before a worker gets any of the form."""
    body = build_form(("model", b"same"), ("file", AUDIO * 9000), ("model", b"other"))

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:100_000]
        await asyncio.sleep(0.05)
        yield body[100_000:]

    kind = f"multipart/form-data; boundary={BOUNDARY}"
    headers = {"content-type": kind, "content-length": str(len(body))}

    response = await gateway.http.post(
        "/v1/audio/transcriptions", content=pieces(), headers=headers
    )

    assert (response.status_code, get_error(response)["param"]) == (400, "model")
    assert worker.bodies == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/audio/speech", b'{"model":"same","Model":"other","input":"a"}', None),
        ("/v1/moderations", b'{"model":"same","MODEL":"other","input":"a"}', None),
        ("/v1/images/edits", build_form(("model", b"same"), ("MODEL", b"other")), "model"),
    ],
)
async def test_model_in_another_case_is_refused(
    gateway: RunningGateway, worker: MediaWorker, path: str, body: bytes, param: str | None
) -> None:
    is_form = body.startswith(b"--")
    kind = f"multipart/form-data; boundary={BOUNDARY}" if is_form else "application/json"

    response = await gateway.http.post(path, content=body, headers={"content-type": kind})

    assert (response.status_code, get_error(response)["param"]) == (400, param)
    assert worker.bodies == []


async def test_memory_of_a_form_and_of_its_copy_is_reserved(serve: Serve) -> None:
    """A form reserves twice its size: as it is received, and as it is sent on."""
    media, peak = MediaWorker(), 0

    async def note_peak(writer: asyncio.StreamWriter) -> None:
        nonlocal peak
        peak = budget.get_use("bodies")
        await media.send_json(writer)

    media.answer = note_peak
    async with run_server(media.serve) as url:
        gateway = await start(serve, url)
        budget = gateway.app.memory
        body = build_form(("model", b"same"), ("file", b"a" * (1 << 20)))
        answers = [(await post_form(gateway, body)).status_code]
        budget.limit = budget.used + len(body) + 100
        answers.append((await post_form(gateway, body)).status_code)

    assert answers == [200, 503]
    assert peak == 2 * len(body)
    assert budget.get_use("bodies") == 0


async def test_text_and_events_are_passed_on_unchanged(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    body = build_form(("model", b"same"), ("response_format", b"text"), ("file", AUDIO))
    worker.answer = lambda writer: worker.send(writer, b"hello\n", "text/plain")
    response = await post_form(gateway, body)

    assert (response.headers["content-type"], response.content) == ("text/plain", b"hello\n")

    events = [b'event: x\ndata: {"type":"transcript.text.delta"}\n\n', b"data: [DONE]\n\n"]
    worker.answer = lambda writer: worker.send_chunks(writer, "text/event-stream", *events)
    response = await post_form(gateway, body)

    assert response.headers["content-type"] == "text/event-stream"
    assert response.content == b"".join(events)


@pytest.mark.parametrize(
    "path", ["images/generations", "moderations", "audio/speech", "images/edits"]
)
async def test_json_bodies_are_forwarded_on_every_path(
    gateway: RunningGateway, worker: MediaWorker, path: str
) -> None:
    sent = b'{"model": "same",  "input":"a \\u00e9" }'
    response = await gateway.http.post(f"/v1/{path}", content=sent)

    assert response.json() == {"text": "hello"}
    assert worker.bodies == [b'{"model":"same","input":"a \\u00e9"}']
    assert worker.heads[0].startswith(f"POST /v1/{path} HTTP/1.1\r\n")
    assert "content-type: application/json\r\n" in worker.heads[0].lower()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (build_form(("file", AUDIO)), (400, "missing_required_parameter", "model")),
        (build_form(("model", b""), ("file", AUDIO)), (400, "invalid_value", "model")),
        (build_form(("model", b"nope"), ("file", AUDIO)), (404, "model_not_found", "model")),
        (b"no form", (400, None, None)),
        (build_form(("model", b"text"), ("file", AUDIO)), (400, "unsupported_value", "model")),
        (build_form(("model", b"other"), ("file", AUDIO)), (400, "unsupported_value", "model")),
    ],
)
async def test_form_that_no_worker_can_get_is_refused_in_openais_words(
    gateway: RunningGateway,
    worker: MediaWorker,
    body: bytes,
    expected: tuple[int, str | None, str | None],
) -> None:
    response = await post_form(gateway, body)
    error = get_error(response)
    assert (response.status_code, error["code"], error["param"]) == expected
    assert error["type"] == "invalid_request_error"
    assert worker.bodies == []

    again = await gateway.http.post("/v1/moderations", json={"model": "same", "input": "a"})
    assert again.status_code == 200


async def test_body_over_the_limit_is_refused_before_and_while_it_is_sent(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    body = build_form(("model", b"same"), ("file", b"a" * (4 << 20)))
    response = await post_form(gateway, body)
    assert (response.status_code, get_error(response)["code"]) == (413, "request_too_large")
    assert worker.bodies == []

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    kind = f"multipart/form-data; boundary={BOUNDARY}"
    try:
        response = await gateway.http.post(
            "/v1/audio/transcriptions", content=pieces(), headers={"content-type": kind}
        )
    except httpx.HTTPError:
        pass  # the gateway closed the connection during the upload
    else:
        assert response.status_code == 413
    await wait_until(lambda: len(gateway.records) == 2)

    assert gateway.records[1].error == "RequestTooLarge"


async def test_response_that_breaks_off_ends_in_a_broken_connection(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    worker.answer = lambda writer: worker.send_chunks(writer, "audio/mpeg", b"\x00" * 9, end=False)
    with pytest.raises(httpx.RemoteProtocolError):
        await gateway.http.post("/v1/audio/speech", json=SPEECH)

    await wait_until(lambda: bool(gateway.records))
    assert (gateway.records[0].outcome, gateway.records[0].error) == ("truncated", "StreamBroken")


async def test_worker_error_is_filtered_for_the_client_and_logged_for_the_operator(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    error_body = b'{"error":{"message":"CUDA is out of memory, worker-key"}}'
    worker.answer = lambda writer: worker.send(writer, error_body, "application/json", "500 Oops")
    response = await gateway.http.post("/v1/audio/speech", json=SPEECH)

    assert (response.status_code, get_error(response)["code"]) == (502, "bad_gateway")
    assert "CUDA" not in response.text

    [failure] = gateway.records[0].worker_failures
    assert (failure.status, failure.text) == (500, "CUDA is out of memory, ***")

    backend: Any = gateway.app.backends["media"]
    assert backend.metrics.failures == {"500": 1}
    assert backend.report_workers()[0].error == "500"

    error_body = b'{"error":{"message":"no such voice","param":"voice"}}'
    worker.answer = lambda writer: worker.send(writer, error_body, "application/json", "400 Bad")
    response = await gateway.http.post("/v1/audio/speech", json=SPEECH)

    assert response.status_code == 400
    assert get_error(response)["message"] == "no such voice"


async def test_key_and_its_rate_limit_apply(serve: Serve, worker: MediaWorker) -> None:
    gateway = await start(serve, worker.url)
    response = await gateway.http.post("/v1/audio/speech", json=SPEECH)
    assert response.headers["x-ratelimit-remaining-requests"] == "99"

    response = await gateway.http.post(
        "/v1/audio/speech", json=SPEECH, headers={"authorization": "Bearer wrong"}
    )
    assert (response.status_code, get_error(response)["code"]) == (401, "invalid_api_key")
    assert len(worker.bodies) == 1


async def test_unreachable_worker_is_replaced_by_another(serve: Serve, worker: MediaWorker) -> None:
    gateway = await start(serve, "http://127.0.0.1:9", worker.url)
    body = build_form(("model", b"same"), ("file", AUDIO * 9000))

    for _ in range(4):
        assert (await post_form(gateway, body)).status_code == 200
    assert [bytes(one) for one in worker.bodies] == [body] * 4


async def test_request_without_a_model_goes_to_the_default_model(
    serve: Serve, worker: MediaWorker
) -> None:
    gateway = await start(serve, worker.url, listener="default_model: mock-media")
    response = await gateway.http.post("/v1/moderations", json={"input": "a"})

    assert response.status_code == 200
    assert worker.bodies == [b'{"input":"a"}']
    assert gateway.records[0].model == "mock-media"


async def test_client_that_leaves_ends_the_request_at_the_worker(
    serve: Serve, worker: MediaWorker
) -> None:
    gateway = await start(serve, worker.url)
    began, closed = asyncio.Event(), asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        began.set()
        await writer.wait_closed()
        closed.set()

    @asynccontextmanager
    async def sending() -> AsyncIterator[asyncio.Task[httpx.Response]]:
        task = asyncio.create_task(gateway.http.post("/v1/audio/speech", json=SPEECH))
        yield task
        task.cancel()

    worker.answer = answer
    async with sending():
        await asyncio.wait_for(began.wait(), 10)
    await wait_until(lambda: bool(gateway.records))

    assert gateway.records[0].outcome == "cancelled"

    backend: Any = gateway.app.backends["media"]
    assert [one.in_flight for one in backend.report_workers()] == [0]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "files"), ("GET", "files"), ("GET", "files/f"), ("DELETE", "files/f"),
        ("GET", "files/f/content"), ("POST", "batches"), ("GET", "batches/b"),
        ("POST", "batches/b/cancel"),
    ],
)  # fmt: skip
async def test_files_and_batches_are_refused_by_name(
    gateway: RunningGateway, method: str, path: str
) -> None:
    response = await gateway.http.request(method, f"/v1/{path}")
    assert response.status_code == 400
    assert ("Files API" if path.startswith("files") else "Batch API") in get_error(response)[
        "message"
    ]


async def test_openai_client_uses_speech_transcription_and_moderation(
    gateway: RunningGateway, worker: MediaWorker
) -> None:
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
    async with client:
        worker.answer = lambda writer: worker.send_chunks(
            writer, "audio/mpeg", b"\x00\x01", b"\xff"
        )
        async with client.audio.speech.with_streaming_response.create(
            model="mock-media", voice="alloy", input="hi"
        ) as speech:
            assert b"".join([piece async for piece in speech.iter_bytes()]) == b"\x00\x01\xff"

        worker.answer = worker.send_json
        transcription = await client.audio.transcriptions.create(
            model="mock-media", file=("a.wav", AUDIO), timestamp_granularities=["word"]
        )
        assert transcription.text == "hello"

        body = bytes(worker.bodies[-1])
        assert b'filename="a.wav"' in body
        assert AUDIO in body
        assert b"whisper-x" in body
        assert b"mock-media" not in body

        events = [
            b'data: {"type":"transcript.text.delta","delta":"hel"}\n\n',
            b'data: {"type":"transcript.text.done","text":"hello"}\n\n',
        ]
        worker.answer = lambda writer: worker.send_chunks(writer, "text/event-stream", *events)
        stream = await client.audio.transcriptions.create(
            model="same", file=("a.wav", AUDIO), stream=True
        )
        kinds = [event.type async for event in stream]

        assert kinds == ["transcript.text.delta", "transcript.text.done"]

        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.moderations.create(model="nope", input="a")
        with pytest.raises(openai.BadRequestError, match="Files API"):
            await client.files.list()


# --- usage, fallbacks and requests in flight ------------------------------------------------------

FALLBACK_CONFIG = """
listeners:
  - {{address: "127.0.0.1:0", protocols: [openai]}}
  - {{address: "127.0.0.1:0", protocols: [{{name: openai, profile: azure}}]}}
backends:
  bad: {{protocol: openai, health: {{interval: 60s}}, workers: ["{bad}"]}}
  good: {{protocol: openai, health: {{interval: 60s}}, workers: ["{good}"]}}
  triton: {{protocol: triton, workers: ["http://127.0.0.1:9"]}}
  cloud:
    protocol: openai
    profile: azure
    health: {{interval: 60s}}
    workers: ["{good}"]
models:
  m: {{backend: bad, model: w1, fallback: [other, tts]}}
  other: {{backend: triton}}
  tts: {{backend: good, model: w2}}
  cloud: {{backend: cloud, model: deployed}}
"""


@pytest.fixture
async def bad_worker() -> AsyncIterator[MediaWorker]:
    media = MediaWorker()

    async def fail(writer: asyncio.StreamWriter) -> None:
        await media.send(writer, b'{"error":{"message":"x"}}', "application/json", "500 Oops")

    media.answer = fail
    async with run_server(media.serve) as url:
        media.url = url
        yield media


async def test_fallback_gets_json_and_forms(
    serve: Serve, worker: MediaWorker, bad_worker: MediaWorker
) -> None:
    gateway = await serve(FALLBACK_CONFIG.format(bad=bad_worker.url, good=worker.url))
    body = SPEECH | {"model": "m"}
    spoken = await gateway.http.post("/v1/audio/speech", json=body)

    form = await post_form(gateway, build_form(("model", b"m"), ("file", AUDIO * 9000)))

    assert (spoken.status_code, spoken.json()) == (200, {"text": "hello"})
    assert json.loads(worker.bodies[0])["model"] == "w2"
    assert (form.status_code, form.json()) == (200, {"text": "hello"})
    assert worker.bodies[1] == build_form(("model", b"w2"), ("file", AUDIO * 9000))
    for record in gateway.records:
        assert (record.model, record.backend, record.fallback_from) == ("tts", "good", "m@1")
        assert [one.split()[0] for one in record.failed_attempts] == ["m@1", "other@1"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_usage_of_the_response_is_recorded(
    serve: Serve,
    worker: MediaWorker,
    is_stream: bool,
) -> None:
    usage = b'{"type":"tokens","input_tokens":14,"output_tokens":45}'

    async def answer(writer: asyncio.StreamWriter) -> None:
        if not is_stream:
            await worker.send(writer, b'{"text":"a","usage":' + usage + b"}", "application/json")
            return
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        event = b'data: {"type":"transcript.text.done","usage":' + usage + b"}\n\n"
        writer.write(head.encode() + b"\r\n\r\n%x\r\n" % len(event) + event + b"\r\n")
        await writer.drain()
        writer.write(b"0\r\n\r\n")

    worker.answer = answer
    gateway = await start(serve, worker.url)
    answered = await post_form(gateway, build_form(("model", b"mock-media"), ("file", AUDIO)))

    assert answered.status_code == 200

    [record] = gateway.records
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (14, 45)


async def test_running_request_is_listed_and_cancelled(serve: Serve, worker: MediaWorker) -> None:
    arrived = asyncio.Event()

    async def wait_forever(writer: asyncio.StreamWriter) -> None:
        del writer
        arrived.set()
        await asyncio.Event().wait()

    worker.answer = wait_forever
    gateway = await start(serve, worker.url, settings='admin: {address: "127.0.0.1:0"}')
    task = asyncio.ensure_future(gateway.http.post("/v1/audio/speech", json=SPEECH))
    await arrived.wait()

    async with httpx.AsyncClient(base_url=gateway.admin, timeout=30) as admin:
        [listed] = (await admin.get("/-/requests")).json()["requests"]
        cancelled = await admin.post(f"/-/requests/{listed['id']}/cancel")

    assert (listed["model"], listed["backend"], listed["phase"]) == (
        "mock-media",
        "media",
        "waiting",
    )
    assert cancelled.json() == {"cancelled": 1}
    assert (await task).status_code == 499
    assert gateway.records[0].outcome == "client_error"


async def test_azures_deployment_reaches_workers_of_both_kinds(
    serve: Serve, worker: MediaWorker, bad_worker: MediaWorker
) -> None:
    gateway = await serve(FALLBACK_CONFIG.format(bad=bad_worker.url, good=worker.url))
    azure = openai.AsyncAzureOpenAI(
        azure_endpoint=gateway.admin,  # the URL of the last listener
        api_key="k",
        api_version="2024-10-21",
        max_retries=0,
    )
    for model in ("tts", "cloud"):
        text = await azure.audio.transcriptions.create(model=model, file=("a.wav", AUDIO))
        assert text.text == "hello"
    await azure.close()

    paths = [head.split()[1] for head in worker.heads]
    assert paths == [
        "/v1/audio/transcriptions",
        "/openai/deployments/deployed/audio/transcriptions?api-version=2024-10-21",
    ]
    assert b"\r\n\r\nw2\r\n" in bytes(worker.bodies[0])
    assert b"\r\n\r\ndeployed\r\n" in bytes(worker.bodies[1])
