"""Series of runs over real sockets: two versions that are equal, or of which one has a fault.

Each run sends requests to a gateway whose workers share a machine that gets slower and faster. The
same requests are judged by ``ab`` and by a rollout, both after each batch, and pairs of further
requests by ``compare``, once.
"""

import asyncio
import json
import math
import random
import sqlite3
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from gateway.config.schema import RolloutConfig
from gateway.evidence.measures import is_difference
from gateway.evidence.recordings import compare
from gateway.evidence.rollout import RolloutState, StepSamples, decide
from gateway.evidence.rollout_samples import read_samples
from gateway.evidence.rollout_sqlite import query_sqlite
from gateway.evidence.sources import UsageQuery, read_usage_rows
from gateway.evidence.versions import compare_versions
from gateway.observability.record import RequestRecord
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedRequest,
    RecordedTiming,
)
from gateway.observability.usage import USAGE_COLUMNS, UsageExtract, UsageSources, build_usage_row
from tests.conftest import RunningGateway, load_config, run_gateways
from tests.support.chat_worker import Answer, ChatWorker, Json

Fault = Literal["none", "errors", "broken JSON", "slower"]
_CONFIG: Final = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
backends:
  old: {{protocol: openai, workers: ["{old}"]}}
  new: {{protocol: openai, workers: ["{new}"]}}
models:
  chat:
    versions: {{"1": {{backend: old}}, "2": {{backend: new}}}}
    split: {{weights: {{"1": 50, "2": 50}}}}
    rollout:
      to: "2"
      steps: [50, 100]
      check_every: 1h
      guardrails: {{{guardrails}}}
defaults: {{retries: {{max: 0}}}}
observe: {{usage: {file}}}
"""
_GUARDRAILS: Final[dict[Fault, str]] = {
    "errors": "errors: {max_increase: 0%}",
    "slower": "first_token_p50: {max_increase: 0%}",
    "broken JSON": "compare: {json_valid: {max_decrease: 0%}}",
}
"""By the fault that each finds. A rollout of equal versions has them all."""
_AB_MEASURES: Final[dict[Fault, str]] = {
    "none": "",
    "errors": "failed",
    "slower": "time to first token",
    "broken JSON": "none: usage rows have no texts",
}
"""How the measures start in which ``ab`` finds each fault; another one may differ by chance."""
_BODY: Final[Json] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "response_format": {"type": "json_object"},
    "stream": True,
}
_BATCH: Final = 20
_CONCURRENCY: Final = 8
_MEAN_PAUSE: Final = 0.04
"""Seconds until a worker answers: so many that those of the gateway and the clients are few."""
_DRIFT_PERIOD: Final = 3.0
"""Seconds in which the machine gets three times as slow, and fast again."""
_ERRORS: Final = 0.1
_BROKEN: Final = 0.1


class RunResult(Struct):
    """What each tool says of version 2 in one run: the verdict, after how many requests and when.

    The requests are those to both versions.
    """

    ab: str = ""
    ab_requests: int = 0
    ab_seconds: float = 0.0
    rollout: str = ""
    rollout_requests: int = 0
    rollout_seconds: float = 0.0
    compare: str = ""


def _build_answer(fault: Fault, rng: random.Random) -> Callable[[Json], Answer]:
    """A worker that fails and breaks JSON at random; with the fault, more often."""
    errors = 4 * _ERRORS if fault == "errors" else _ERRORS
    broken = 5 * _BROKEN if fault == "broken JSON" else _BROKEN
    slower = 2.0 if fault == "slower" else 1.0

    def answer(_: Json) -> Answer:
        if rng.random() < errors:
            return Answer(status=500, error="it failed")
        drift = 2 - math.cos(2 * math.pi * time.monotonic() / _DRIFT_PERIOD)
        pause = _MEAN_PAUSE * (1 + rng.expovariate(1)) / 2 * slower * drift
        return Answer(text=(pause, '{"fine":', "" if rng.random() < broken else " true}"))

    return answer


class _Client:
    """Sends requests and keeps their records and texts, by the request's id."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway = gateway
        self._slots = asyncio.Semaphore(_CONCURRENCY)
        self.texts: dict[str, str] = {}

    async def send(self, request_id: str, model: str) -> None:
        headers = {"x-request-id": request_id}
        async with self._slots:
            reply = await self._gateway.http.post(
                "/v1/chat/completions", json=_BODY | {"model": model}, headers=headers
            )
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line).get("choices", ())]
        self.texts[request_id] = "".join(one["delta"].get("content") or "" for one in choices)

    async def send_pair(self, request_id: str, models: Sequence[str]) -> None:
        for model in models:
            await self.send(f"{request_id}@{model[-1]}", model)

    def take_records(self) -> dict[str, RequestRecord]:
        """The records since the last call."""
        records = {one.id: one for one in self._gateway.records}
        self._gateway.records.clear()
        return records

    def build_recorded(self, record: RequestRecord) -> RecordedRequest:
        choice = RecordedChoice(text=self.texts[record.id], finish_reason="eos")
        return RecordedRequest(
            id=record.id,
            at=record.started_at,
            model="chat",
            version=record.version,
            request=_BODY,
            answer=RecordedAnswer([choice]) if record.outcome == "ok" else None,
            status=record.status,
            outcome=record.outcome,
            error=record.error,
            stream=True,
            timing=RecordedTiming(record.first_byte, record.first_token, record.duration),
            replay_of=record.id.partition("@")[0],
            replay_run="series",
        )


def _judge_rows(
    result: RunResult, rows: list[Any], rollout: RolloutConfig, measure: str, elapsed: float
) -> None:
    """What ``ab`` and the rollout say now, unless they have named a difference before.

    ``measure``: how the measures of ``ab`` start that count.
    """
    extract = UsageExtract(["chat"], rows, [])
    if not result.ab:
        evidence = read_usage_rows(extract, UsageQuery("chat"))
        if len(evidence.versions("chat")) > 1:
            comparison = compare_versions(evidence, "chat", ("1", "2"), 0.95)
            differences = [
                one
                for one in comparison.verdicts
                if is_difference(one) and one.measure.startswith(measure)
            ]
            if differences:
                result.ab = f"{differences[0].measure}: {differences[0].verdict}"
                result.ab_requests, result.ab_seconds = len(rows), elapsed
    if not result.rollout:
        samples = _read_samples(rows, rollout)
        after = decide(rollout, RolloutState(), samples, 0.0)
        if after.phase == "rolled back":
            result.rollout = after.reason
            result.rollout_requests, result.rollout_seconds = len(rows), elapsed


def _read_samples(rows: Sequence[Any], rollout: RolloutConfig) -> StepSamples:
    """The samples of a step with these usage rows, as a store reads them."""
    with sqlite3.connect(":memory:") as file:
        columns = [name for name, _ in USAGE_COLUMNS]
        file.execute(f"CREATE TABLE usage ({', '.join(columns)})")
        values = ", ".join("?" * len(columns))
        file.executemany(f"INSERT INTO usage VALUES ({values})", rows)  # noqa: S608 - placeholders
        sources = UsageSources.build({"usage": columns, "feedback": ()})

        def query(build: Callable[[UsageSources], str], *values: object) -> Sequence[Sequence[Any]]:
            return query_sqlite(file, build(sources), *values)

        return read_samples(query, rollout, "chat", "chat", 0.0, is_shadow=False)


async def _run_once(
    client: _Client,
    rollout: RolloutConfig,
    measure: str,
    *,
    rng: random.Random,
    requests: int,
    pairs: int,
) -> RunResult:
    result, rows, began = RunResult(), list[Any](), time.monotonic()
    for first in range(0, requests, _BATCH):
        sends = (client.send(f"r{n}", "chat") for n in range(first, first + _BATCH))
        await asyncio.gather(*sends)
        rows += map(build_usage_row, client.take_records().values())
        _judge_rows(result, rows, rollout, measure, time.monotonic() - began)
        if result.ab and result.rollout:
            break
    orders = [rng.sample(["chat@1", "chat@2"], 2) for _ in range(pairs)]
    await asyncio.gather(*(client.send_pair(f"p{n}", order) for n, order in enumerate(orders)))
    recorded = [client.build_recorded(one) for one in client.take_records().values()]
    sides = ([one for one in recorded if one.version == version] for version in ("1", "2"))
    report = compare(("1", "2"), *sides)
    result.compare = ", ".join(
        f"{one.measure}: {one.verdict}" for one in report.measures if is_difference(one)
    )
    return result


async def run_series(
    folder: Path, fault: Fault, *, runs: int, requests: int, pairs: int
) -> list[RunResult]:
    """Run a series with one gateway. ``folder`` has its usage rows, and the results so far.

    A series that was broken off goes on: each result is saved when its run ends.
    A run ends as soon as ``ab`` and the rollout have named a difference, or after ``requests``.
    With a fault they look for that fault alone: with other measures each would be wrong once in
    twenty runs, as it may.
    """
    saved = folder / f"{fault.replace(' ', '_')}.jsonl"
    saved.touch()
    results = [msgspec.json.decode(one, type=RunResult) for one in saved.read_bytes().splitlines()]
    rng = random.Random(len(results))
    async with (
        ChatWorker(_build_answer("none", rng)) as old,
        ChatWorker(_build_answer(fault, rng)) as new,
        run_gateways() as serve,
    ):
        guardrails = _GUARDRAILS.get(fault) or ", ".join(_GUARDRAILS.values())
        file = folder / "usage.sqlite"
        text = _CONFIG.format(old=old.url, new=new.url, file=file, guardrails=guardrails)
        gateway, rollout = await serve(text), load_config(text).models["chat"].rollout
        assert rollout is not None
        client = _Client(gateway)
        measure = _AB_MEASURES[fault]
        while len(results) < runs:
            result = await _run_once(
                client, rollout, measure, rng=rng, requests=requests, pairs=pairs
            )
            results.append(result)
            with saved.open("ab") as out:
                out.write(msgspec.json.encode(result) + b"\n")
    return results[:runs]


_EQUAL_RUNS: Final = 200
_MOST_FLAGGED: Final = 17
"""Of 200 runs with an error rate of 5 %, more are flagged with a probability of 1 %."""
_FAULT_RUNS: Final = 10
_FAULT_REQUESTS: Final = 2000
_FAULTS: Final[Sequence[tuple[Fault, str, str]]] = (
    ("errors", "40 % of the requests fail instead of 10 %", "errors"),
    ("broken JSON", "50 % of the texts are no JSON instead of 10 %", "json_valid"),
    ("slower", "responses take twice as long", "first_token_p50"),
)
"""With a description, and the guardrail that finds it."""


def build_equal_series(folder: Path) -> str:
    """The table of runs with equal versions."""
    results = asyncio.run(run_series(folder, "none", runs=_EQUAL_RUNS, requests=120, pairs=40))
    flagged = {name: sum(bool(getattr(one, name)) for one in results) for name in _TOOLS}
    assert max(flagged.values()) <= _MOST_FLAGGED, flagged
    lines = [f"| {_TOOLS[name]} | {len(results)} | {count} |" for name, count in flagged.items()]
    return "\n".join(["| | runs | reported as different |", "| --- | ---: | ---: |", *lines])


_TOOLS: Final = {"ab": "`ab`", "rollout": "rollout", "compare": "`compare`"}


def build_fault_series(folder: Path) -> str:
    """The table of runs in which version 2 has a fault."""
    lines = ["| fault | | found | requests | seconds |", "| --- | --- | ---: | ---: | ---: |"]
    for fault, text, guardrail in _FAULTS:
        series = run_series(folder, fault, runs=_FAULT_RUNS, requests=_FAULT_REQUESTS, pairs=150)
        results = asyncio.run(series)
        assert not any("better" in one.ab + one.compare for one in results), results
        if fault != "broken JSON":  # usage rows have no texts for ab to look at
            matches = [one for one in results if one.ab.endswith("worse")]
            lines.append(_format_fault(text, "`ab`", matches, "ab"))
        matches = [one for one in results if one.rollout.startswith(guardrail)]
        lines.append(_format_fault(text, "rollout", matches, "rollout"))
        matches = [one for one in results if "worse" in one.compare]
        lines.append(f"| {text} | `compare` | {len(matches)} of {_FAULT_RUNS} | 300 | |")
    return "\n".join(lines)


def _format_fault(text: str, tool: str, matches: Sequence[RunResult], name: str) -> str:
    count = f"{len(matches)} of {_FAULT_RUNS}"
    if not matches:
        return f"| {text} | {tool} | {count} | over {_FAULT_REQUESTS:,} | |"
    requests, seconds = (
        statistics.median(getattr(one, f"{name}_{unit}") for one in matches)
        for unit in ("requests", "seconds")
    )
    return f"| {text} | {tool} | {count} | {requests:,.0f} | {seconds:.1f} |"
