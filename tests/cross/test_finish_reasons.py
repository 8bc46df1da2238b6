"""Unknown finish reasons, with each client and each worker.

Each worker sends its usual response with another finish reason. A reason that means a failure is an
error for every client. Any other unknown reason is passed to clients of the worker's own protocol,
and is an error for all others; it is never a success.
"""

import json
import os
import random
import re
import string
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from msgspec import Struct
from msgspec.structs import replace

from gateway.config.loader import load_text
from gateway.observability.record import RequestRecord
from gateway.runtime.gateway import Gateway, build_services
from tests.conftest import Serve
from tests.cross.client import Client
from tests.cross.conftest import build_configuration
from tests.cross.script import TOKENS, RequestOptions
from tests.cross.worker_server import (
    ReceivedRequest,
    ScriptedResponse,
    StreamEvents,
    WorkerScript,
    WorkerServer,
)
from tests.cross.workers.table import WORKERS
from tests.support.fakes import ScriptedWorker, chunked, make_reply

FAILURES: Final = ("abort", "error")
WORD: Final = re.compile(
    rb'("(?:finish_reason|stop_reason)"\s*:\s*\[?\s*|"status"\s*:\s*(?="completed"))"(?!None")[^"]*"'
)
"""The finish reason in each protocol, with the bytes before it."""


class UnknownReasonScript:
    """Responds like ``script``, with ``word`` as the finish reason."""

    def __init__(self, script: WorkerScript) -> None:
        self._script = script
        self.content_type = script.content_type
        self.error_responses = script.error_responses
        self.word = ""
        self.replaced = 0
        """The number of reasons replaced; some workers send none."""
        self.path = ""

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        return self._script.respond_to_probe(request)

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        self.path = request.path
        return self._script.parse_request(request)

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        events = self._script.build_stream(request, options)
        return StreamEvents(
            events.opening,
            tuple(map(self._replace_word, events.tokens)),
            tuple(map(self._replace_word, events.closing)),
        )

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        return self._replace_word(self._script.build_unary(request, options))

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        return self._script.build_error_event(request)

    def _replace_word(self, data: bytes) -> bytes:
        changed, count = WORD.subn(rb'\g<1>"%b"' % self.word.encode(), data)
        self.replaced += count
        return changed


class EndingEnvironment(Struct):
    """The gateway's client, the scripts by worker, and the gateway's records."""

    http: httpx.AsyncClient
    scripts: dict[str, UnknownReasonScript]
    records: list[RequestRecord]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ending_environment() -> AsyncIterator[EndingEnvironment]:
    scripts = {name: UnknownReasonScript(row.script) for name, row in WORKERS.items()}
    records: list[RequestRecord] = []
    worker_scripts: dict[str, Any] = {**scripts}
    async with WorkerServer(worker_scripts) as server:
        services = replace(build_services(), observe_request=records.append)
        text = build_configuration(server.url).decode()
        gateway = Gateway(load_text(text, "test.json", env=dict(os.environ)), services)
        [url] = await gateway.start()
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield EndingEnvironment(http, scripts, records)
        await gateway.stop()


def draw_words(seed: str) -> list[str]:
    """Return unknown reasons: STOP in capitals, one with a blank, and random ones."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=12)) for _ in range(2)]
    return ["STOP", "x-new reason", *words]


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_ending_is_passed_on_or_an_error_and_never_a_success(
    ending_environment: EndingEnvironment, client: Client, worker: str, stream: bool
) -> None:
    script, options = ending_environment.scripts[worker], RequestOptions(stream=stream)
    for word in (*FAILURES, *draw_words(f"{client.name} {worker}")):
        ending_environment.records.clear()
        script.word, script.replaced = word, 0
        request = client.build_request(f"{worker}-answer", options)
        path = request.url.raw_path.decode()
        answer = await ending_environment.http.post(
            path, content=request.content, headers=request.headers
        )

        if not script.replaced:
            return  # this worker does not say why it stopped
        [record] = ending_environment.records
        is_same_protocol = record.protocol == WORKERS[worker].protocol
        is_same_api = script.path.endswith("/responses") == path.endswith("/responses")
        if is_same_protocol and is_same_api and word not in FAILURES:
            assert answer.status_code == 200, answer.text
            assert (record.outcome, record.error) == ("worker_error", "UnknownFinishReason")
            assert set(client.read_response(answer, options).reasons.values()) <= {word}
            assert word in answer.text
        elif not stream:
            assert answer.status_code >= 400
            assert record.outcome == "worker_error"
        else:
            response = client.read_response(answer, options)
            assert record.outcome == "truncated"
            assert TOKENS[1] in response.texts[0]
            assert word not in response.reasons.values()
            assert not response.done or not client.end


CONFIGURATION: Final = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
backends:
  pool:
    protocol: openai
    workers: ["%s"]
    retries: {max: 0}
    health: {interval: 1h}
    options: {worker_api: responses}
models: {m: {backend: pool, model: m}}
"""
INCOMPLETE: Final = (
    b'{"id":"r","object":"response","created_at":1,"model":"m","status":"incomplete",'
    b'"incomplete_details":{"reason":"tired"},"output":[{"type":"message","id":"m1","role":'
    b'"assistant","content":[{"type":"output_text","text":"Hi"}]}]}'
)


async def test_unknown_reason_of_an_incomplete_response_is_kept(serve: Serve, stream: bool) -> None:
    """The worker's response is incomplete for the unknown reason ``tired``."""
    event = b'event: response.incomplete\ndata: {"type":"response.incomplete","response":%b}\n\n'
    reply = chunked(event % INCOMPLETE) if stream else make_reply(INCOMPLETE)
    async with ScriptedWorker([reply]) as worker:
        gateway = await serve(CONFIGURATION % worker.url)
        body = {"model": "m", "input": "hi", "stream": stream}
        answer = await gateway.http.post("/v1/responses", json=body)
        chat = await gateway.http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        )

    assert answer.status_code == 200

    final = json.loads(answer.text.split("data: ")[-1])
    response = final["response"] if stream else final
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "tired"},
    )
    assert chat.status_code == 502
    assert [record.outcome for record in gateway.records] == ["worker_error", "worker_error"]
