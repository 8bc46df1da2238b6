"""An explanation as text: a label and a value per line."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from backends.interfaces import WorkerCandidate, WorkerSelection
from gateway.explain.report import (
    ExplainedAttempt,
    ExplainedDefault,
    ExplainedLimits,
    ExplainedResponse,
    ExplainedRule,
    ExplainedSplit,
    ExplainedStickySource,
    ExplainedTarget,
    ExplainedUpstreamRequest,
    Explanation,
    LabelledLine,
)
from protocols.core.loss import UnsupportedParameter

_LABEL_WIDTH: Final = 11
_AVAILABILITY_TEXTS: Final = {
    "yes": "available",
    "no": "unavailable",
    "full": "at its limit",
    "tried": "already tried",
}


def format_explanation(explanation: Explanation) -> str:
    """The explanation as text, which ends in a newline."""
    return "".join(
        f"{name:<{_LABEL_WIDTH}}{value}".rstrip() + "\n"
        for name, value in _format_lines(explanation)
    )


def _format_lines(explanation: Explanation) -> Iterator[LabelledLine]:
    yield from _format_request(explanation)
    for rule in explanation.rules:
        yield "rule", f"{rule.name}: {_format_rule(rule)}"
    for source in explanation.sticky:
        yield "sticky", f"{source.source}: {_format_sticky_source(source)}"
    if explanation.split is not None:
        yield from _format_split(explanation.split)
    if explanation.target is not None:
        yield "target", _format_target(explanation.target)
    for fallback in explanation.fallbacks:
        skipped = f", skipped: {fallback.skipped_reason}" if fallback.skipped_reason else ""
        yield "fallback", f"{fallback.target}{skipped}"
    if (shadow := explanation.shadow) is not None:
        yield "shadow", f"{shadow.share:.2%} of such requests are copied to {shadow.to}"
    if (judge := explanation.judge) is not None:
        yield "judge", f"{judge.share:.2%} of such answers are judged by {judge.model}"
    for failure in explanation.failed_attempts:
        yield "failed", failure
    for attempt in explanation.attempts:
        yield from _format_attempt(attempt, explanation)
    if explanation.answer is not None:
        yield from _format_response(explanation.answer)
    if explanation.seconds:
        yield "seconds", _format_seconds(explanation.seconds)


def _format_request(explanation: Explanation) -> Iterator[LabelledLine]:
    on = f" on {explanation.listener}" if explanation.listener else ""
    yield "request", f"{explanation.method} {explanation.path}{on}"
    if explanation.endpoint:
        protocol = f"{explanation.protocol}, {explanation.endpoint} ({explanation.task})"
        if explanation.requested_model:
            protocol += ", streaming" if explanation.stream else ", non-streaming"
        yield "protocol", protocol
    if explanation.key:
        tags = f" (tags: {', '.join(explanation.tags)})" if explanation.tags else ""
        yield "key", explanation.key + tags
    if model := explanation.model:
        if model != explanation.requested_model:
            model += f", requested as {explanation.requested_model}"
        if explanation.pinned_version:
            model += f", version pinned by its {explanation.pinned_version}"
        yield "model", model


def _format_rule(rule: ExplainedRule) -> str:
    if rule.mismatch and rule.mismatch != "share":
        return f"not applied, {rule.mismatch} is not {rule.wanted!r}"
    share = ""
    if rule.share < 1:
        source = f"by {rule.sticky} (hash {rule.bucket})" if rule.sticky else "by chance"
        share = f"; share {rule.share:.4%}, this request at {rule.position:.4%} {source}"
    if not rule.followed:
        return f"not applied{share}"
    targets = [rule.model or "", f"version {rule.version}" if rule.version else ""]
    return f"applied, routes to {', '.join(filter(None, targets))}{share}"


def _format_sticky_source(source: ExplainedStickySource) -> str:
    if source.value is not None:
        return repr(source.value)
    return "present" if source.present else "absent"


def _format_split(split: ExplainedSplit) -> Iterator[LabelledLine]:
    random_text = "" if split.random is None else f", {split.random:.4f} drawn"
    yield "split", f"{split.name}, by {split.assigned_by}{random_text}"
    for version in split.versions:
        score = "" if version.score is None else f", hash {version.n}, score {version.score:.6f}"
        mark = "selected" if version.chosen else "not selected"
        yield "", f"{version.version}: weight {version.weight} ({version.share:.2%}){score}: {mark}"


def _format_target(target: ExplainedTarget) -> str:
    return f"{target.model}@{target.version}: {target.backend}, as {target.backend_model}"


def _format_attempt(attempt: ExplainedAttempt, explanation: Explanation) -> Iterator[LabelledLine]:
    if attempt.target != explanation.target:
        yield "fallback", _format_target(attempt.target)
    yield "mode", "passed through" if attempt.passed_through else "translated"
    if attempt.parts > 1:
        yield "parts", f"sent as {attempt.parts} requests"
    yield from (
        ("loss", _format_loss(one, attempt.on_loss)) for one in attempt.unsupported_parameters
    )
    yield from (("default", _format_default(one)) for one in attempt.defaults)
    yield "limits", _format_limits(attempt.limits)
    for selection in attempt.choices:
        yield from _format_selection(selection)
    for sent in attempt.sent:
        yield from _format_upstream_request(sent)
    if explanation.dry_run and not attempt.choices:
        yield "upstream", "none: the backend has no workers"


def _format_loss(one: UnsupportedParameter, on_loss: str) -> str:
    suffix = " (not reported)" if on_loss == "ignore" else ""
    return f"{one.field} {one.reason}{f': {one.detail}' if one.detail else ''}{suffix}"


def _format_default(one: ExplainedDefault) -> str:
    return f"{one.field} {one.value}{'' if one.applied else ', not applied'}"


def _format_limits(limits: ExplainedLimits) -> str:
    tokens = [("context", limits.context), ("max_tokens", limits.max_tokens)]
    token_limits = [f"{name} {limit}" for name, limit in tokens if limit is not None]
    return ", ".join([f"body {limits.body} bytes", *token_limits, f"total {limits.total:.6g} s"])


def _format_selection(selection: WorkerSelection) -> Iterator[LabelledLine]:
    yield "timeouts", _format_seconds(selection.timeouts)
    budget, failures = f"{selection.retry_budget:.0%}", _join_names(selection.retryable_failures)
    yield "retries", f"{selection.max_retries}, within {budget} of requests, on {failures}"
    queue = f"{selection.queue_length} of {selection.queue_limit} waiting"
    yield "queue", f"{queue}, at most {selection.queue_timeout:.6g} s"
    winners = {"least": "the lowest score", "most": "the highest score"}
    winner = winners.get(selection.score_rule, "the lower score of two workers drawn at random")
    yield "policy", f"{selection.policy}: {winner}"
    for one in selection.candidates:
        yield "worker", _format_candidate(one, selection.expected_url)
    if not selection.candidates:
        yield "worker", "none known yet"


def _format_candidate(one: WorkerCandidate, expected_url: str) -> str:
    load = f"{one.in_flight} in flight" + ("" if one.limit is None else f" of {one.limit}")
    latency = "" if one.latency is None else f", first token after {one.latency:.6g} s"
    score = "" if one.score is None else f", score {one.score:.6g}"
    mark = "selected" if one.url == expected_url else _AVAILABILITY_TEXTS[one.availability]
    return f"{one.url} {one.state}, weight {one.weight:.6g}, {load}{latency}{score}: {mark}"


def _format_upstream_request(sent: ExplainedUpstreamRequest) -> Iterator[LabelledLine]:
    origin = sent.url.removesuffix(urlsplit(sent.url).path)
    yield "upstream", f"{sent.method} {origin}{sent.path}"
    yield from (("", f"{name}: {value}") for name, value in sent.headers)
    encoding = " in base64" if sent.base64 else ""
    yield "", f"{sent.size} bytes{encoding}:"
    yield from (("", line) for line in sent.body.splitlines())
    if sent.error:
        status = "" if sent.worker_status is None else f", status {sent.worker_status}"
        yield "error", f"{sent.error}{status}" + (sent.worker_text and f": {sent.worker_text}")


def _format_response(response: ExplainedResponse) -> Iterator[LabelledLine]:
    error = f", {response.error}" if response.error else ""
    duration = f", {response.duration:.6g} s" if response.duration else ""
    yield "response", f"{response.status} {response.outcome}{error}{duration}"
    if (usage := response.usage) is not None:
        counts = f"{usage.prompt_tokens} prompt, {usage.completion_tokens} completion"
        yield "tokens", f"{counts} ({usage.source})"
    yield from (("", f"{name}: {value}") for name, value in response.headers)
    yield from (("", line) for line in response.body.splitlines())


def _format_seconds(durations: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.6g} s" for name, seconds in durations.items())


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(names)
