"""An explanation for people: one thing a line, with what it is in front."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from backends.interfaces import WorkerCandidate, WorkerSelection
from gateway.watching.account import (
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
)
from protocols.core.loss import UnsupportedParameter

_LABEL_WIDTH: Final = 11
_AVAILABILITY_TEXTS: Final = {
    "yes": "may be asked",
    "no": "is passed over",
    "full": "has no place free",
    "tried": "failed at it",
}
LabelledLine = tuple[str, str]


def format_explanation(told: Explanation) -> str:
    """The whole, with a line's end at its end."""
    return "".join(
        f"{name:<{_LABEL_WIDTH}}{said}".rstrip() + "\n" for name, said in _format_lines(told)
    )


def _format_lines(told: Explanation) -> Iterator[LabelledLine]:
    yield from _format_request(told)
    for rule in told.rules:
        yield "rule", f"{rule.name}: {_format_rule(rule)}"
    for source in told.sticky:
        yield "sticky", f"{source.source}: {_format_sticky_source(source)}"
    if told.split is not None:
        yield from _format_split(told.split)
    if told.target is not None:
        yield "target", _format_target(told.target)
    for after in told.fallbacks:
        over = f", passed over: {after.passed_over}" if after.passed_over else ""
        yield "fallback", f"{after.target}{over}"
    if told.shadow is not None:
        yield "shadow", f"{told.shadow.share:.2%} of such requests are copied to {told.shadow.to}"
    for one in told.fell_back:
        yield "fell back", one
    for attempt in told.tries:
        yield from _format_attempt(attempt, told)
    if told.answer is not None:
        yield from _format_response(told.answer)
    if told.seconds:
        yield "seconds", _format_seconds(told.seconds)


def _format_request(told: Explanation) -> Iterator[LabelledLine]:
    on = f" on {told.listener}" if told.listener else ""
    yield "request", f"{told.method} {told.path}{on}"
    if told.endpoint:
        shape = f", {'streamed' if told.stream else 'whole'}" if told.asked else ""
        yield "dialect", f"{told.dialect}, {told.endpoint} ({told.task}){shape}"
    if told.key:
        yield "key", told.key + (f" (tags: {', '.join(told.tags)})" if told.tags else "")
    if told.model:
        named = "" if told.model == told.asked else f", asked for as {told.asked}"
        pin = f", version pinned by its {told.pin}" if told.pin else ""
        yield "model", f"{told.model}{named}{pin}"


def _format_rule(rule: ExplainedRule) -> str:
    if rule.unmet and rule.unmet != "share":
        return f"not followed, {rule.unmet} is not {rule.wanted!r}"
    share = ""
    if rule.share < 1:
        by = f"by {rule.sticky} (n {rule.bucket})" if rule.sticky else "by chance"
        share = f"; it is for {rule.share:.4%} of them, and this lies at {rule.lies:.4%} {by}"
    if not rule.followed:
        return f"not followed{share}"
    leads = [rule.model or "", f"version {rule.version}" if rule.version else ""]
    return f"followed to {', '.join(filter(None, leads))}{share}"


def _format_sticky_source(source: ExplainedStickySource) -> str:
    if source.said is not None:
        return repr(source.said)
    return "present" if source.present else "nothing"


def _format_split(split: ExplainedSplit) -> Iterator[LabelledLine]:
    drawn = "" if split.drawn is None else f", {split.drawn:.4f} drawn"
    yield "split", f"{split.name}, by {split.by}{drawn}"
    for arm in split.arms:
        score = "" if arm.score is None else f", n {arm.n}, score {arm.score:.6f}"
        mark = "taken" if arm.taken else "not taken"
        yield "", f"{arm.version}: weight {arm.weight} ({arm.share:.2%}){score}: {mark}"


def _format_target(target: ExplainedTarget) -> str:
    return f"{target.model}@{target.version}: {target.backend}, as {target.served}"


def _format_attempt(attempt: ExplainedAttempt, told: Explanation) -> Iterator[LabelledLine]:
    if attempt.target != told.target:
        yield "instead", _format_target(attempt.target)
    yield "way", "passed on as it is" if attempt.relayed else "translated"
    if attempt.parts > 1:
        yield "parts", f"{attempt.parts} requests are made of the one"
    yield from (("loss", _format_loss(one, attempt.on_loss)) for one in attempt.losses)
    yield from (("default", _format_default(one)) for one in attempt.defaults)
    yield "limits", _format_limits(attempt.limits)
    for choice in attempt.choices:
        yield from _format_choice(choice)
    for sent in attempt.sent:
        yield from _format_upstream_request(sent)
    if told.dry and not attempt.choices:
        yield "upstream", "none, since the backend has no workers"


def _format_loss(one: UnsupportedParameter, on_loss: str) -> str:
    untold = " (not told)" if on_loss == "ignore" else ""
    return f"{one.field} {one.reason}{f': {one.detail}' if one.detail else ''}{untold}"


def _format_default(one: ExplainedDefault) -> str:
    return f"{one.field} {one.value}{'' if one.applied else ', not applied'}"


def _format_limits(limits: ExplainedLimits) -> str:
    tokens = [("context", limits.context), ("max_tokens", limits.max_tokens)]
    told = [f"{name} {most}" for name, most in tokens if most is not None]
    return ", ".join([f"body {limits.body} bytes", *told, f"total {limits.total:.6g} s"])


def _format_choice(choice: WorkerSelection) -> Iterator[LabelledLine]:
    yield "timeouts", _format_seconds(choice.timeouts)
    yield (
        "retries",
        f"{choice.max_retries}, within {choice.retry_budget:.0%} of requests, on {_join_names(choice.retryable_failures)}",
    )
    yield (
        "queue",
        f"{choice.queue_length} of {choice.queue_limit} wait, {choice.queue_timeout:.6g} s at most",
    )
    least = {"least": "the least score", "most": "the highest score"}
    by = least.get(choice.score_rule, "the least score of two drawn")
    yield "policy", f"{choice.policy}: {by}"
    for one in choice.candidates:
        yield "worker", _format_candidate(one, choice.expected_url)
    if not choice.candidates:
        yield "worker", "none is known yet"


def _format_candidate(one: WorkerCandidate, likely: str) -> str:
    load = f"{one.in_flight} in flight" + ("" if one.limit is None else f" of {one.limit}")
    known = "" if one.latency is None else f", {one.latency:.6g} s to a token"
    score = "" if one.score is None else f", score {one.score:.6g}"
    mark = ": is taken" if one.url == likely else f": {_AVAILABILITY_TEXTS[one.availability]}"
    return f"{one.url} {one.state}, weight {one.weight:.6g}, {load}{known}{score}{mark}"


def _format_upstream_request(sent: ExplainedUpstreamRequest) -> Iterator[LabelledLine]:
    yield "upstream", f"{sent.method} {sent.url}{sent.path}"
    yield from (("", f"{name}: {value}") for name, value in sent.headers)
    kept = " in base64" if sent.base64 else ""
    yield "", f"{sent.size} bytes{kept}:"
    yield from (("", line) for line in sent.body.splitlines())
    if sent.error:
        yield "failed", sent.error


def _format_response(answer: ExplainedResponse) -> Iterator[LabelledLine]:
    error = f", {answer.error}" if answer.error else ""
    took = f", {answer.duration:.6g} s" if answer.duration else ""
    yield "answer", f"{answer.status} {answer.outcome}{error}{took}"
    if answer.usage is not None:
        spent = answer.usage
        both = f"{spent.prompt_tokens} of the prompt, {spent.completion_tokens} of the answer"
        yield "tokens", f"{both} ({spent.source})"
    yield from (("", f"{name}: {value}") for name, value in answer.headers)
    yield from (("", line) for line in answer.body.splitlines())


def _format_seconds(told: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.6g} s" for name, seconds in told.items())


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(names)
