"""Recordings of requests, from the client's socket to the lines in the file."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.config.loader import LoadedConfig, load_text
from gateway.observability.recording import RecordedRequest, read_recordings
from gateway.runtime.gateway import Gateway, build_services
from tests.support.fakes import ScriptedWorker, chunked, make_reply

CONFIG = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, {name: triton, profile: vllm}]}]
backends:
  says: {kind: echo, script: [one, " two", " anna@exa", mple.org]}
  fails: {kind: echo, fail: {mode: unavailable}}
  cut: {kind: echo, script: [one, two, three], fail: {mode: disconnect, after_chunks: 2}}
  slow: {kind: echo, script: [one, two, three], delay: 1s}
defaults:
  record: {to: TO, bodies: full}
models:
  says: {backend: says}
  redacted: {backend: says, record: {to: TO}}
  none: {backend: says, record: {to: TO, bodies: none}}
  never: {backend: says, record: {to: TO, share: 0%}}
  half: {backend: says, record: {to: TO, share: 25%, bodies: none}}
  falls: {backend: fails, fallback: [says]}
  fails: {backend: fails}
  cut: {backend: cut}
  slow: {backend: slow}
  limited: {backend: says, limits: {max_tokens: 5}}
routes:
  - {name: quiet, when: {header: {x-quiet: "1"}}, to: {model: says}, record: {to: TO, share: 0%}}
  - {name: loud, when: {model: never, header: {x-loud: "1"}}, to: {model: never},
     record: {to: TO, bodies: full}}
"""
SECRET = "bob@mail.example.com"


def build_chat_body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": SECRET}], **fields}


@asynccontextmanager
async def run_gateway(text: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """Run a gateway with a client; its recordings are complete once it has stopped."""
    gateway = Gateway(load_text(text, "test.yaml", env={}), build_services())
    [url, *_] = await gateway.start()
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield gateway, http
    await gateway.stop()


async def record_requests(
    tmp_path: Path, *bodies: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[Sequence[RecordedRequest], Sequence[httpx.Response]]:
    """Send chat requests and return the gateway's recordings of them."""
    to = tmp_path / "recordings"
    async with run_gateway(CONFIG.replace("TO", str(to))) as (_, http):
        responses = [
            await http.post("/v1/chat/completions", json=body, headers=headers) for body in bodies
        ]
    return [*read_recordings(to)] if to.exists() else [], responses


# --- contents -------------------------------------------------------------------------------------


async def test_unary_request_is_recorded_with_its_response(tmp_path: Path) -> None:
    """A recording has both bodies as sent, and the fields of the access log."""
    body = build_chat_body("says", logit_bias={"5": 3})
    headers = {"authorization": "Bearer secret-key", "x-request-id": "mine"}
    [one], [response] = await record_requests(tmp_path, body, headers=headers)

    assert (one.request, one.response) == (body, response.json())
    assert (one.id, one.protocol, one.operation) == ("mine", "openai", "chat")
    assert (one.method, one.path, one.stream) == ("POST", "/v1/chat/completions", False)
    assert (one.model, one.version, one.backend) == ("says", "1", "says")
    assert (one.status, one.outcome, one.error) == (200, "ok", "")
    assert one.request_size == len(response.request.content)
    assert one.response_size == len(response.content)
    assert one.headers["content-type"] == "application/json"
    assert "secret-key" not in str(one)
    assert one.timing.duration > 0
    assert one.usage is not None
    assert one.usage.completion_tokens == 4
    assert {loss.parameter for loss in one.losses} == {
        item.partition("=")[0]
        for item in response.headers.get("x-interlingua-loss", "").split(",")
        if item
    }
    assert one.answer is not None

    [choice] = one.answer.choices
    assert (choice.text, choice.finish_reason) == ("one two anna@example.org", "eos")


async def test_stream_is_recorded_with_the_times_of_its_events(tmp_path: Path) -> None:
    """A recording has the pieces of text with their times, and the aggregated response."""
    [one], [response] = await record_requests(tmp_path, build_chat_body("says", stream=True))
    assert "".join(str(text) for _, text in one.events) == response.text

    times = [at for at, _ in one.events]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= one.timing.duration
    assert one.timing.first_token is not None
    assert one.response is None
    assert one.answer is not None
    assert one.answer.choices[0].text == "one two anna@example.org"
    assert one.stream


async def test_redacted_recording_has_no_secret_in_any_form(tmp_path: Path) -> None:
    """A secret that a stream splits over events is redacted, too; of events only sizes remain."""
    bodies = [build_chat_body("redacted", stream=stream) for stream in (False, True)]
    records, responses = await record_requests(tmp_path, *bodies)
    assert "anna@example.org" in responses[0].text

    [file] = (tmp_path / "recordings").iterdir()
    text = file.read_text()
    assert SECRET not in text
    assert "anna@exa" not in text
    for one in records:
        assert one.request["messages"][0]["content"] == "[redacted:email]"
        assert "request.messages[0].content" in one.redacted
        assert one.answer is not None
        assert one.answer.choices[0].text == "one two [redacted:email]"
    assert sum(int(size) for _, size in records[1].events) == len(responses[1].content)


async def test_request_id_of_the_client_is_redacted(tmp_path: Path) -> None:
    headers = {"x-request-id": "anna@example.org"}
    [one], _ = await record_requests(tmp_path, build_chat_body("redacted"), headers=headers)

    assert one.id == "[redacted:email]"
    assert "id" in one.redacted


async def test_no_bodies_are_recorded_if_none_is_configured(tmp_path: Path) -> None:
    """Times, sizes and usage are still recorded."""
    [one], _ = await record_requests(tmp_path, build_chat_body("none"))
    assert (one.request, one.response, one.answer, one.events) == (None, None, None, [])
    assert one.request_size > 0
    assert one.usage is not None


async def test_failures_are_recorded(tmp_path: Path) -> None:
    """Rejected, failed and truncated requests are recorded with the error that the client got."""
    bodies = [
        build_chat_body("limited", max_tokens=6),
        build_chat_body("fails"),
        build_chat_body("cut", stream=True),
        build_chat_body("says", temperature="hot"),
    ]
    records, responses = await record_requests(tmp_path, *bodies)
    limited, failed, cut, invalid = records

    for one, response in zip(records, responses, strict=True):
        assert one.status == response.status_code
    assert (limited.outcome, limited.error, limited.status) == (
        "client_error", "InvalidParameter", 400
    )  # fmt: skip
    assert limited.response == responses[0].json()
    assert (failed.outcome, failed.answer) == ("gateway_error", None)
    assert failed.error == "Overloaded"
    assert cut.outcome == "truncated"
    assert cut.answer is not None

    [choice] = cut.answer.choices
    assert (choice.text, choice.finish_reason) == ("onetwo", None)
    assert "".join(str(text) for _, text in cut.events) == responses[2].text
    assert invalid.request["temperature"] == "hot"
    assert invalid.status == 400


async def test_disconnected_client_is_recorded_with_the_events_that_it_received(
    tmp_path: Path,
) -> None:
    """The outcome is ``cancelled``, and the events end at the disconnect."""
    to = tmp_path / "recordings"
    async with run_gateway(CONFIG.replace("TO", str(to))) as (_, http):
        body = build_chat_body("slow", stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if "one" in line:
                    break

    [one] = read_recordings(to)

    assert one.outcome == "cancelled"
    assert one.answer is not None
    assert one.answer.choices[0].text == "one"
    assert one.answer.choices[0].finish_reason is None
    assert "three" not in str(one.events)


async def test_fallback_is_recorded_with_the_target_that_answered(tmp_path: Path) -> None:
    """The response is the fallback's, and ``fallback_from`` names the first target."""
    [one], _ = await record_requests(tmp_path, build_chat_body("falls"))
    assert (one.model, one.fallback_from) == ("says", "falls@1")
    assert one.answer is not None
    assert one.answer.choices[0].text == "one two anna@example.org"


# --- passthrough, translation and forwarding ------------------------------------------------------

WORKER_CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
  pool: {{protocol: openai, profile: vllm, workers: ["{url}"], health: {{interval: 1h}}}}
defaults: {{record: {{to: {to}, bodies: full}}}}
models:
  passed: {{backend: pool}}
  translated: {{backend: pool, defaults: {{temperature: 0.5}}}}
"""
WORKER_ANSWER = (
    b'{"id":"c1","model":"passed","odd":1.50,"choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"Hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}'
)
WORKER_EVENTS = (
    b'data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"content":"H"}}]}\n\n',
    (
        b'data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"content":"i"},'
        b'"finish_reason":"stop"}]}\n\n'
    ),
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize("model", ["passed", "translated"])
@pytest.mark.parametrize("stream", [False, True])
async def test_worker_response_is_recorded_as_the_client_got_it(
    tmp_path: Path, model: str, *, stream: bool
) -> None:
    """Passed through or translated, a recording has the client's bytes and the worker's URL."""
    reply = chunked(*WORKER_EVENTS) if stream else make_reply(WORKER_ANSWER)
    async with ScriptedWorker([reply]) as worker:
        text = WORKER_CONFIG.format(url=worker.url, to=tmp_path / "rec")
        async with run_gateway(text) as (_, http):
            body = build_chat_body(model, stream=stream)
            response = await http.post("/v1/chat/completions", json=body)

    [one] = read_recordings(tmp_path / "rec")

    assert response.status_code == 200
    assert one.worker == worker.url
    assert one.request == body
    assert one.answer is not None
    assert (one.answer.choices[0].text, one.answer.choices[0].finish_reason) == ("Hi", "eos")
    if stream:
        assert "".join(str(text) for _, text in one.events) == response.text
    else:
        assert one.response == response.json()
        assert one.response["odd"] == 1.5


async def test_forwarded_request_is_recorded_without_bodies(tmp_path: Path) -> None:
    """A forwarded request has model, worker, status, sizes and times."""
    async with ScriptedWorker([make_reply(b'{"results":[]}')]) as worker:
        text = WORKER_CONFIG.format(url=worker.url, to=tmp_path / "rec")
        async with run_gateway(text) as (_, http):
            body = {"model": "passed", "input": SECRET}
            response = await http.post("/v1/moderations", json=body)

    [one] = read_recordings(tmp_path / "rec")

    assert response.status_code == 200
    assert (one.path, one.model, one.worker) == ("/v1/moderations", "passed", worker.url)
    assert (one.status, one.response_size) == (200, len(response.content))
    assert (one.request, one.response, one.request_text, one.response_text) == (None, None, "", "")


# --- which requests are recorded ------------------------------------------------------------------


async def test_share_of_the_requests_is_recorded(tmp_path: Path) -> None:
    """Of 400 requests, 25 % are recorded, within six standard deviations."""
    records, _ = await record_requests(tmp_path, *[build_chat_body("half")] * 400)
    assert 48 <= len(records) <= 152


async def test_draw_decides_whether_a_request_is_recorded(tmp_path: Path) -> None:
    """A request is recorded if its number is below the share; the split draws its number first."""
    draws = iter([0.5, 0.24, 0.5, 0.25, 0.5, 0.0, 0.5, 0.99])
    text = CONFIG.replace("TO", str(tmp_path / "recordings"))
    services = replace(build_services(), draw=lambda: next(draws, 0.5))
    gateway = Gateway(load_text(text, "test.yaml", env={}), services)
    [url] = await gateway.start()
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for number in range(4):
            headers = {"x-request-id": f"id-{number}"}
            body = build_chat_body("half")
            await http.post("/v1/chat/completions", json=body, headers=headers)

    await gateway.stop()

    assert [one.id for one in read_recordings(tmp_path / "recordings")] == ["id-0", "id-2"]


async def test_route_overrides_the_model(tmp_path: Path) -> None:
    """A route may record although its model does not, and the other way around."""
    body = build_chat_body("never")
    assert (await record_requests(tmp_path, body))[0] == []

    [one], _ = await record_requests(tmp_path, body, headers={"x-loud": "1"})
    assert (one.model, one.rule) == ("never", "loud")

    records, _ = await record_requests(tmp_path, build_chat_body("says"), headers={"x-quiet": "1"})
    assert records == [one]


async def test_requests_without_a_model_are_not_recorded(tmp_path: Path) -> None:
    """Model lists and unknown models have no model whose setting could apply."""
    records, _ = await record_requests(tmp_path, build_chat_body("unknown"))
    assert records == []


async def test_reload_changes_what_is_recorded(tmp_path: Path) -> None:
    """From the next request on, the new folder and the new setting for bodies apply."""
    text = CONFIG.replace("TO", str(tmp_path / "first"))
    async with run_gateway(text) as (gateway, http):
        await http.post("/v1/chat/completions", json=build_chat_body("says"))
        changed = text.replace(str(tmp_path / "first"), str(tmp_path / "second"))
        changed = changed.replace("bodies: full}\nmodels", "bodies: none}\nmodels")
        config = load_text(changed, "test.yaml", env={})
        await gateway.apply_config(LoadedConfig(config, "test.yaml", "hash-2", frozenset(), {}))
        await http.post("/v1/chat/completions", json=build_chat_body("says"))
    [first] = read_recordings(tmp_path / "first")

    [second] = read_recordings(tmp_path / "second")

    assert (first.request is None, second.request is None) == (False, True)
