"""The explanation of one request: its Structs and its text form. Times are in seconds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from backends.interfaces import WorkerCandidate, WorkerSelection
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter


class ExplainedRule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule that was tried.

    ``mismatch`` is the condition that is not met: ``protocol``, ``key``, ``tag``, ``header:NAME``,
    ``body:FIELD`` or ``share``; ``wanted`` is its expected value. ``sticky`` is the source that
    identified the user, ``bucket`` is the user's hash. The rule applies if ``position``, from 0
    to 1, is below ``share``.
    """

    name: str
    followed: bool
    mismatch: str = ""
    wanted: str | int | float | bool | None = None
    share: float = 1.0
    sticky: str = ""
    bucket: int | None = None
    position: float = 0.0
    model: str | None = None
    """The model and the ``version`` that it routes to."""
    version: str | None = None


class ExplainedStickySource(Struct, frozen=True, omit_defaults=True):
    """A sticky source that was read. ``value`` is its value, in dry runs only."""

    source: str
    present: bool
    value: str | None = None


class ExplainedVersion(Struct, frozen=True):
    """A version of a traffic split; ``share`` is from 0 to 1.

    ``n`` and ``score`` are those of ``gateway.routing.traffic_split``; None if it was drawn.
    """

    version: str
    weight: int
    share: float
    n: int | None
    score: float | None
    chosen: bool


class ExplainedSplit(Struct, frozen=True, omit_defaults=True):
    """How a version was chosen: by a sticky source, or by chance, with the number drawn."""

    name: str
    assigned_by: str
    """The source, or ``chance``."""
    versions: Sequence[ExplainedVersion]
    random: float | None = None


class ExplainedTarget(Struct, frozen=True):
    """A version of a model, its backend, and that backend's name for the model."""

    model: str
    version: str
    backend: str
    backend_model: str


class ExplainedFallback(Struct, frozen=True, omit_defaults=True):
    """A fallback, or why it would be ``skipped_reason``."""

    target: str
    skipped_reason: str = ""


class ExplainedShadow(Struct, frozen=True):
    """The share of such requests that is copied ``to`` a version or another model."""

    to: str
    share: float


class ExplainedDefault(Struct, frozen=True):
    """A default of the model; ``applied`` if the client did not set the field."""

    field: str
    value: Any
    applied: bool


class ExplainedLimits(Struct, frozen=True):
    """``body`` is in bytes; ``context`` and ``max_tokens`` are the model's, in tokens."""

    body: int
    context: int | None
    max_tokens: int | None
    connect: float
    first_token: float
    idle: float
    total: float
    """The time left until the request's deadline at the start of the attempt."""


class ExplainedUpstreamRequest(Struct, kw_only=True, omit_defaults=True):
    """A request to a worker, with secrets as ``***``. ``url`` is the worker's base URL.

    ``body`` is text, or base64 if it is not UTF-8. At most 64 KiB of a live request's body are
    kept; ``size`` is its full size in bytes.
    """

    url: str
    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: str
    size: int
    base64: bool = False
    error: str = ""
    """The error before the response began."""


class ExplainedAttempt(Struct, kw_only=True, omit_defaults=True):
    """One attempt at a target.

    ``passed_through``: the request is passed through. ``parts`` is the number of requests that the
    gateway makes of it. ``choices`` are the selections of workers and ``sent`` the requests to
    them, if the backend has workers; in a dry run, the request to the expected worker.
    """

    target: ExplainedTarget
    passed_through: bool
    on_loss: str
    unsupported_parameters: Sequence[UnsupportedParameter]
    limits: ExplainedLimits
    defaults: Sequence[ExplainedDefault] = ()
    parts: int = 1
    choices: list[WorkerSelection] = []
    sent: list[ExplainedUpstreamRequest] = []


class ExplainedResponse(Struct, frozen=True, omit_defaults=True):
    """How the request ended. ``body`` and ``headers`` are set if a dry run was rejected."""

    status: int
    outcome: str
    error: str = ""
    body: str = ""
    headers: Sequence[tuple[str, str]] = ()
    tokens: int = 0
    """The text tokens that were streamed."""
    usage: Usage | None = None
    first_byte: float | None = None
    duration: float = 0.0


class Explanation(Struct, kw_only=True, omit_defaults=True):
    """One request: where it goes, and why. Steps that were not reached are left out.

    ``pinned_version`` is ``name`` (``model@version``) or ``path``. ``requested_model`` is the
    model's name in the request; ``model`` is its configured name, or ``*`` for the catch-all
    model.
    """

    id: str
    dry_run: bool
    """Nothing was sent."""
    listener: str = ""
    protocol: str = ""
    method: str = ""
    path: str = ""
    endpoint: str = ""
    task: str = ""
    key: str = ""
    tags: Sequence[str] = ()
    peer: str = ""
    stream: bool = False
    requested_model: str = ""
    model: str = ""
    pinned_version: str = ""
    rules: Sequence[ExplainedRule] = ()
    sticky: Sequence[ExplainedStickySource] = ()
    split: ExplainedSplit | None = None
    target: ExplainedTarget | None = None
    fallbacks: Sequence[ExplainedFallback] = ()
    shadow: ExplainedShadow | None = None
    failed_attempts: Sequence[str] = ()
    attempts: Sequence[ExplainedAttempt] = ()
    answer: ExplainedResponse | None = None
    """None while it runs, and if a dry run would send the request to a worker."""
    seconds: Mapping[str, float] = {}
    """Spent in ``read``, ``route``, ``translate``, ``instead`` (with failed targets, if any), and
    from there to the ``first_byte``."""


# The request for an explanation.


class ExplainRequest(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A request that is to be explained.

    ``body`` is JSON, or a string with the body's text; ``base64`` has any bytes instead. ``key`` is
    the name of an API key. ``peer`` is the client's address. ``listener`` is a listener's address;
    by default the first that has the path. ``random`` is the number drawn wherever chance decides.
    """

    path: Annotated[str, Meta(pattern=r"^/[!-~]*\Z")]
    method: str = "POST"
    headers: Mapping[str, str] = {}
    body: Raw = Raw(b"null")
    base64: bytes = b""
    key: str | None = None
    peer: str = ""
    listener: str | None = None
    random: Annotated[float, Meta(ge=0, lt=1)] = 0.5

    @property
    def body_bytes(self) -> bytes:
        """The body as it would be sent."""
        raw = bytes(self.body)
        if raw == b"null":
            return self.base64
        return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw


# The text form: a label and a value per line.

_LABEL_WIDTH: Final = 11
_AVAILABILITY_TEXTS: Final = {
    "yes": "may be asked",
    "no": "is passed over",
    "full": "has no place free",
    "tried": "failed at it",
}
LabelledLine = tuple[str, str]


def format_explanation(told: Explanation) -> str:
    """The explanation as text, which ends in a newline."""
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
        over = f", passed over: {after.skipped_reason}" if after.skipped_reason else ""
        yield "fallback", f"{after.target}{over}"
    if told.shadow is not None:
        yield "shadow", f"{told.shadow.share:.2%} of such requests are copied to {told.shadow.to}"
    for one in told.failed_attempts:
        yield "fell back", one
    for attempt in told.attempts:
        yield from _format_attempt(attempt, told)
    if told.answer is not None:
        yield from _format_response(told.answer)
    if told.seconds:
        yield "seconds", _format_seconds(told.seconds)


def _format_request(told: Explanation) -> Iterator[LabelledLine]:
    on = f" on {told.listener}" if told.listener else ""
    yield "request", f"{told.method} {told.path}{on}"
    if told.endpoint:
        shape = f", {'streamed' if told.stream else 'whole'}" if told.requested_model else ""
        yield "protocol", f"{told.protocol}, {told.endpoint} ({told.task}){shape}"
    if told.key:
        yield "key", told.key + (f" (tags: {', '.join(told.tags)})" if told.tags else "")
    if told.model:
        named = (
            "" if told.model == told.requested_model else f", asked for as {told.requested_model}"
        )
        pin = f", version pinned by its {told.pinned_version}" if told.pinned_version else ""
        yield "model", f"{told.model}{named}{pin}"


def _format_rule(rule: ExplainedRule) -> str:
    if rule.mismatch and rule.mismatch != "share":
        return f"not followed, {rule.mismatch} is not {rule.wanted!r}"
    share = ""
    if rule.share < 1:
        by = f"by {rule.sticky} (n {rule.bucket})" if rule.sticky else "by chance"
        share = f"; it is for {rule.share:.4%} of them, and this lies at {rule.position:.4%} {by}"
    if not rule.followed:
        return f"not followed{share}"
    leads = [rule.model or "", f"version {rule.version}" if rule.version else ""]
    return f"followed to {', '.join(filter(None, leads))}{share}"


def _format_sticky_source(source: ExplainedStickySource) -> str:
    if source.value is not None:
        return repr(source.value)
    return "present" if source.present else "nothing"


def _format_split(split: ExplainedSplit) -> Iterator[LabelledLine]:
    drawn = "" if split.random is None else f", {split.random:.4f} drawn"
    yield "split", f"{split.name}, by {split.assigned_by}{drawn}"
    for arm in split.versions:
        score = "" if arm.score is None else f", n {arm.n}, score {arm.score:.6f}"
        mark = "taken" if arm.chosen else "not taken"
        yield "", f"{arm.version}: weight {arm.weight} ({arm.share:.2%}){score}: {mark}"


def _format_target(target: ExplainedTarget) -> str:
    return f"{target.model}@{target.version}: {target.backend}, as {target.backend_model}"


def _format_attempt(attempt: ExplainedAttempt, told: Explanation) -> Iterator[LabelledLine]:
    if attempt.target != told.target:
        yield "instead", _format_target(attempt.target)
    yield "way", "passed on as it is" if attempt.passed_through else "translated"
    if attempt.parts > 1:
        yield "parts", f"{attempt.parts} requests are made of the one"
    yield from (
        ("loss", _format_loss(one, attempt.on_loss)) for one in attempt.unsupported_parameters
    )
    yield from (("default", _format_default(one)) for one in attempt.defaults)
    yield "limits", _format_limits(attempt.limits)
    for choice in attempt.choices:
        yield from _format_choice(choice)
    for sent in attempt.sent:
        yield from _format_upstream_request(sent)
    if told.dry_run and not attempt.choices:
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
    budget, failures = f"{choice.retry_budget:.0%}", _join_names(choice.retryable_failures)
    yield "retries", f"{choice.max_retries}, within {budget} of requests, on {failures}"
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
