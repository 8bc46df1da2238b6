"""Limits of what is recorded of a request."""

import json

from msgspec import Raw
from msgspec.structs import replace

from backends.interfaces import WorkerCandidate, WorkerFailure, WorkerSelection
from gateway.explain.recorder import ExplanationRecorder
from gateway.explain.report import (
    ExplainedAttempt,
    ExplainedLimits,
    ExplainedTarget,
    ExplainRequest,
)
from gateway.observability.record import RequestRecord
from protocols.core.interfaces import UpstreamRequest
from protocols.core.loss import UnsupportedParameter
from tests.unit.gateway.explain.test_dry_run import explain_dry_run


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
