"""Runs Schemathesis against a gateway and reports requests, responses and failed checks.

It runs in a process of its own: the generated requests depend on the loaded modules, and would
otherwise depend on the tests before.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import schemathesis
from msgspec import Struct, field
from schemathesis.core.failures import ServerError
from schemathesis.engine import events, from_schema
from schemathesis.engine.recorder import ScenarioRecorder

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
SEED = 20260101
ROOT = Path(__file__).parents[2]


class Finding(Struct, frozen=True):
    """A failed check. ``why`` is its message, ``sent`` a command that repeats it."""

    operation: str
    check: str
    why: str
    sent: str


class SchemathesisReport(Struct):
    """One run. ``statuses`` counts responses to valid random requests, by operation."""

    statuses: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    findings: list[Finding] = field(default_factory=list[Finding])
    sent: int = 0

    def accepted(self, operation: str) -> float:
        """Return the share of an operation's requests with status 200."""
        statuses = self.statuses[operation]
        return statuses.get(200, 0) / sum(statuses.values())


class SchemathesisJob(Struct):
    """The settings of a run."""

    document: dict[str, Any]
    url: str
    examples: int


async def run_schemathesis(
    document: dict[str, Any], url: str, *, examples: int
) -> SchemathesisReport:
    """Send valid and invalid requests of the document to the gateway at ``url``.

    For each operation: values at and beyond each limit of its schema, one at a time, and
    ``examples`` valid random requests. The requests are the same each time.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.schema.schemathesis_run"),
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        order = msgspec.json.encode(SchemathesisJob(document, url, examples))
        output, complaint = await process.communicate(order)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complaint.decode()[-4000:]
    return msgspec.json.decode(output, type=SchemathesisReport)


def run_job(order: SchemathesisJob) -> SchemathesisReport:
    off = {"enabled": False}
    config = schemathesis.Config.from_dict(
        {
            "seed": SEED,
            "base-url": order.url,
            "continue-on-failure": True,
            "warnings": False,
            "generation": {"max-examples": order.examples, "database": "none", "no-shrink": True},
            "phases": {
                "examples": off,
                "stateful": off,
                "fuzzing": {"generation": {"mode": "positive"}},
            },
            "checks": {"enabled": False, **{name: {"enabled": True} for name in CHECKS}},
        }
    )
    schema = schemathesis.openapi.from_dict(order.document, config=config)
    report = SchemathesisReport()
    for event in from_schema(schema).execute():
        match event:
            case events.ScenarioFinished(phase=phase, recorder=recorder):
                record_scenario(report, recorder, random=phase.value == "fuzzing")
            case events.NonFatalError(value=error) | events.FatalError(exception=error):
                raise error
            case _:
                pass
    return report


def record_scenario(
    report: SchemathesisReport, recorder: ScenarioRecorder, *, random: bool
) -> None:
    answered = [one for one in recorder.interactions.values() if one.response is not None]
    report.sent += len(answered)
    if random and answered:
        counts = report.statuses.setdefault(recorder.label, {})
        for status in (one.response.status_code for one in answered if one.response):
            counts[status] = counts.get(status, 0) + 1
    report.findings += list_findings(recorder)


def is_documented_refusal(info: Any) -> bool:
    """Return whether the status is 501, documented for unsupported requests."""
    return (
        isinstance(info.failure, ServerError)
        and info.failure.status_code == HTTPStatus.NOT_IMPLEMENTED
    )


def list_findings(recorder: ScenarioRecorder) -> Iterator[Finding]:
    for checks in recorder.checks.values():
        for check in checks:
            if (info := check.failure_info) is not None and not is_documented_refusal(info):
                why = f"{info.failure.title}: {info.failure.message}"
                yield Finding(recorder.label, check.name, why, info.code_sample)


if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SchemathesisJob)
    sys.stdout.buffer.write(msgspec.json.encode(run_job(job)))
