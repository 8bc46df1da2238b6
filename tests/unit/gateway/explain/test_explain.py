"""Explanations: parts that the golden cases do not cover."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from backends.interfaces import WorkerCandidate, WorkerFailure, WorkerSelection
from gateway.cli.built_in import read_built_in_config
from gateway.config.loader import load_text
from gateway.explain.dry_run import ServersByListener, run_dry
from gateway.explain.parts import explain_upstream_request, mask_headers
from gateway.explain.recorder import ExplanationRecorder
from gateway.explain.report import (
    ExplainedAttempt,
    ExplainedLimits,
    ExplainedResponse,
    ExplainedTarget,
    ExplainRequest,
    Explanation,
)
from gateway.explain.report_text import format_explanation
from gateway.explain.sample_requests import PartialRequest, build_sample_request, complete_request
from gateway.observability.record import RequestRecord
from gateway.routing.paths import AdapterMount
from gateway.runtime.gateway import build_services
from gateway.runtime.snapshot import ConfigSnapshot
from protocols.core.events import Usage
from protocols.core.interfaces import UpstreamRequest
from protocols.core.loss import UnsupportedParameter

CONFORMANCE, _ = read_built_in_config("conformance")


def build_handlers(text: str = CONFORMANCE.partition("\nkeys:")[0]) -> ServersByListener:
    env = {"PORT": "0", "ALONE_PORT": "0"}
    return ConfigSnapshot(
        load_text(text, "test.yaml", env=env), build_services()
    ).handlers_by_address


async def explain_dry_run(
    question: ExplainRequest, handlers: ServersByListener | None = None
) -> Explanation:
    return await run_dry(question, handlers or build_handlers(), lambda: 0.0)


# --- queries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, b""),
        ({"body": Raw(b'{"a": 1.50}')}, b'{"a": 1.50}'),
        ({"body": Raw(b'"a\\u00e9"')}, "aé".encode()),
        ({"base64": b"\xff"}, b"\xff"),
    ],
)
def test_request_body_is_json_text_or_base64(fields: dict[str, Any], content: bytes) -> None:
    assert ExplainRequest(path="/", **fields).body_bytes == content


async def test_dry_run_does_not_execute_stop_and_tokenize() -> None:
    handlers = build_handlers()
    paths = {
        (one.task, mount.prefix + one.path.replace("{model}", "mock")): mount.adapter.name
        for server in handlers.values()
        for mount in server.path_router.mounts
        for one in mount.adapter.endpoints
        if one.task in {"stop", "tokenize"}
    }

    assert {task for task, _ in paths} == {"stop", "tokenize"}

    for (task, path), name in paths.items():
        dry_run = await explain_dry_run(ExplainRequest(path=path, body=Raw(b"{}")), handlers)
        assert (dry_run.task, dry_run.protocol, dry_run.answer) == (task, name, None)
        assert not dry_run.requested_model


async def test_body_over_the_limit_is_rejected_with_413() -> None:
    small = """
listeners: [{address: "127.0.0.1:0", protocols: [openai]}]
limits: {body: 1KiB}
backends: {a: {kind: echo}}
models: {chat: {backend: a}}
"""
    dry_run = await explain_dry_run(
        ExplainRequest(path="/v1/completions", base64=b"x" * 1025), build_handlers(small)
    )

    assert dry_run.answer is not None
    assert (dry_run.answer.status, dry_run.answer.error) == (413, "RequestTooLarge")


async def test_listeners_with_equal_addresses_are_numbered() -> None:
    two = """
listeners:
  - {address: "127.0.0.1:0", protocols: [openai]}
  - {address: "127.0.0.1:0", protocols: [ovms]}
backends: {a: {kind: echo}}
models: {chat: {backend: a}}
"""
    dry_run = await explain_dry_run(
        ExplainRequest(path="/v3/models", method="GET"), build_handlers(two)
    )

    assert dry_run.listener == "127.0.0.1:0 (2)"


# --- emulation ------------------------------------------------------------------------------------


class FakeAdapter:
    """A protocol without workers."""

    name = "mute"


def test_protocol_without_upstream_adapter_has_no_sample_request() -> None:
    assert build_sample_request(AdapterMount(FakeAdapter()), "m", None, stream=False) is None  # type: ignore[arg-type]


def test_every_client_protocol_has_a_sample_request() -> None:
    mounts = [mount for one in build_handlers().values() for mount in one.path_router.mounts]

    clients_only = {one.adapter.name for one in mounts if not hasattr(one.adapter, "read_error")}
    assert clients_only == {"ollama"}

    for mount in (one for one in mounts if one.adapter.name not in clients_only):
        for stream in (False, True):
            sample_request = build_sample_request(mount, "chat", None, stream=stream)
            assert sample_request is not None
            assert sample_request.path.startswith(mount.prefix)


CHAT = b'{"messages":[],"model":"mine"}'


@pytest.mark.parametrize(
    ("partial", "path", "body"),
    [
        (PartialRequest(path="/v1/models"), "/v1/models", b""),
        (PartialRequest(path="/v1/chat/completions", body=CHAT), "/v1/chat/completions", CHAT),
        (PartialRequest(body=CHAT), "/v1/chat/completions", CHAT),
        (
            PartialRequest("new", body=CHAT, stream=True),
            "/v1/chat/completions",
            b'{"messages":[],"model":"new","stream":true}',
        ),
        (PartialRequest("new", body=b"[1]"), "/v1/chat/completions", b"[1]"),
        (PartialRequest("new", path="/nowhere", body=b"x"), "/nowhere", b"x"),
        (
            PartialRequest(path="/v2/models/chat/infer", body=CHAT, stream=True),
            "/v2/models/chat/infer",
            CHAT,
        ),
        (
            PartialRequest("a", protocol="triton", body=b'{"text_input":"x"}'),
            "/v2/models/a/generate",
            b'{"text_input":"x"}',
        ),
    ],
)
def test_partial_request_is_completed(partial: PartialRequest, path: str, body: bytes) -> None:
    completed = complete_request(ExplainRequest(path="/"), partial, build_handlers())

    assert (completed.path, completed.body_bytes) == (path, body)


@pytest.mark.parametrize(
    ("partial", "says"),
    [
        (PartialRequest(), "give the --model"),
        (PartialRequest(body=b"{}"), "give the --model"),
        (PartialRequest(body=b'{"model":1}'), "give the --model"),
        (PartialRequest("m", protocol="none"), "give --path"),
        (PartialRequest(path="/v1/chat/completions"), "give --model, or a --body"),
        (PartialRequest("m", path="/v2/models/m/infer"), "give --model, or a --body"),
    ],
)
def test_missing_request_parts_are_reported(partial: PartialRequest, says: str) -> None:
    with pytest.raises(LookupError, match=says):
        complete_request(ExplainRequest(path="/"), partial, build_handlers())


def test_completed_request_keeps_its_listener() -> None:
    handlers = build_handlers()
    address = list(handlers)[-1]

    completed = complete_request(
        ExplainRequest(path="/", listener=address), PartialRequest("m"), handlers
    )

    assert completed.listener == address


# --- contents -------------------------------------------------------------------------------------


def test_secret_headers_are_masked_in_any_letter_case() -> None:
    headers = (("Authorization", "a"), ("X-API-Key", "b"), ("api-key", "c"), ("X-More", "d"))

    assert [value for _, value in mask_headers(headers)] == ["***", "***", "***", "d"]


@pytest.mark.parametrize(
    ("body", "most", "shown", "base64"),
    [
        (b"abc", None, "abc", False),
        (b"abc", 2, "ab", False),
        ("aé".encode(), 2, "a", False),
        (b"\xff\x00", None, "/wA=", True),
        (b"a\xc3", None, "a", False),
    ],
)
def test_upstream_body_is_shown_as_text_or_base64(
    body: bytes, most: int | None, shown: str, *, base64: bool
) -> None:
    explained = explain_upstream_request("http://a", UpstreamRequest("/p", body), most)

    assert (explained.body, explained.base64, explained.size) == (shown, base64, len(body))


def make_recorder(record: RequestRecord) -> ExplanationRecorder:
    return ExplanationRecorder(record, lambda: 0.0, lambda: 0.5)


def test_explain_header_is_ascii_and_limited_in_size() -> None:
    odd = '"\\é😀' * 1000
    record = RequestRecord("r", model=odd, version=odd, rule="r", sticky="header:" + "x" * 100)
    record.failed_attempts = (odd,) * 50
    record.unsupported_parameters = tuple(UnsupportedParameter(odd, "dropped") for _ in range(500))

    text = make_recorder(record).format_header()

    assert text.isascii()
    assert len(text) <= 4096
    assert "\n" not in text
    assert len(json.loads(text)["failed_attempts"]) == 8


CHOICE = WorkerSelection(
    policy="least_load",
    score_rule="least",
    candidates=[],
    expected_url="",
    queue_length=0,
    queue_limit=0,
    queue_timeout=0.0,
    timeouts={},
    max_retries=0,
    retry_budget=0.0,
    retryable_failures=[],
)
WIRE = UpstreamRequest("/p", b"{}")


async def test_recorded_attempts_are_limited_but_all_are_counted() -> None:
    recorder = make_recorder(RequestRecord("r"))
    dry_run = await explain_dry_run(
        ExplainRequest(path="/v1/completions", body=Raw(COMPLETION_BODY))
    )
    recorder._attempts = list(dry_run.attempts)

    for number in range(20):
        recorder.on_selection(_make_selection(number), WIRE)
        recorder.on_send("http://a", WIRE)
        recorder.on_failure(WorkerFailure("http://a", "WorkerUnreachable"))
    recorder.on_failure(WorkerFailure("http://b", "WorkerUnreachable"))

    [one] = recorder.build_explanation().attempts
    assert len(one.choices) == len(one.sent) == 8
    assert {each.error for each in one.sent} == {"WorkerUnreachable"}
    assert json.loads(recorder.format_header())["attempts"] == 20


def test_recorded_candidates_are_limited_and_include_the_expected_worker() -> None:
    many = [
        WorkerCandidate(
            url=f"http://{n}",
            state="up",
            weight=1,
            in_flight=0,
            limit=None,
            latency=None,
            availability="yes",
            score=1.0,
        )
        for n in range(1000)
    ]
    recorder = make_recorder(RequestRecord("r"))
    recorder._attempts = [TRY]

    recorder.on_selection(replace(CHOICE, candidates=many, expected_url="http://999"), WIRE)

    [choice] = recorder.build_explanation().attempts[0].choices
    assert [one.url for one in choice.candidates[:2]] == ["http://999", "http://0"]
    assert len(choice.candidates) == 50


TRY = ExplainedAttempt(
    target=ExplainedTarget("m", "1", "gpu", "m"),
    passed_through=True,
    on_loss="report",
    unsupported_parameters=(),
    limits=ExplainedLimits(1, None, None, 1.0, 1.0, 1.0, 1.0),
)
COMPLETION_BODY = b'{"model":"mock","prompt":"a","max_tokens":5}'


def _make_selection(number: int) -> WorkerSelection:
    return replace(CHOICE, queue_length=number)


# --- text output ----------------------------------------------------------------------------------


def format_lines(explanation: Explanation) -> Mapping[str, str]:
    lines = {}
    for line in format_explanation(explanation).splitlines():
        lines[line[:11].strip()] = line[11:]
    return lines


async def test_explanation_is_formatted_in_lines() -> None:
    dry_run = await explain_dry_run(
        ExplainRequest(path="/v1/completions", body=Raw(COMPLETION_BODY))
    )
    record = RequestRecord("r", status=200, duration=1.5)
    record.failed_attempts = ("chat@1 WorkerUnreachable",)
    live = make_recorder(record)
    live._attempts = list(dry_run.attempts)
    live.on_selection(CHOICE, WIRE)
    live.on_send("http://a", UpstreamRequest("/p", b"\xff"))
    live.on_failure(WorkerFailure("http://a", "WorkerFailed", 500, "CUDA out of memory"))

    assert "CUDA" not in live.format_header()

    formatted = format_lines(live.build_explanation())

    assert formatted["failed"] == "chat@1 WorkerUnreachable"
    assert formatted["fallback"].startswith("mock@1: ")
    assert formatted["error"] == "WorkerFailed, status 500: CUDA out of memory"
    assert formatted["response"] == "200 ok, 1.5 s"
    assert formatted["seconds"] == "first_byte 0 s"
    assert "1 bytes in base64:" in format_explanation(live.build_explanation())


def test_formatted_tokens_name_the_source_of_the_usage() -> None:
    response = ExplainedResponse(200, "ok", usage=Usage(3, 4, source="counted"))

    formatted = format_lines(Explanation(id="r", dry_run=False, answer=response))

    assert formatted["tokens"] == "3 prompt, 4 completion (counted)"
