"""Explanations as text."""

from collections.abc import Mapping

from msgspec import Raw

from backends.interfaces import WorkerFailure
from gateway.explain.report import (
    ExplainedResponse,
    ExplainRequest,
    Explanation,
)
from gateway.explain.report_text import format_explanation
from gateway.observability.record import RequestRecord
from protocols.core.events import Usage
from protocols.core.interfaces import UpstreamRequest
from tests.unit.gateway.explain.test_dry_run import explain_dry_run
from tests.unit.gateway.explain.test_recorder import CHOICE, COMPLETION_BODY, WIRE, make_recorder


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
