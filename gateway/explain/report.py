"""The explanation of one request: its Structs and its text form. Times are in seconds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from msgspec import Meta, Raw, Struct

from backends.interfaces import WorkerCandidate, WorkerSelection
from protocols.core.events import Usage
from protocols.core.json_text import decode_json
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


class ExplainedJudge(Struct, frozen=True):
    """The share of such answers that a ``model`` judges."""

    model: str
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
    """A request to a worker, with secrets as ``***``.

    ``url`` is the worker's, and ``path`` the whole path that was requested of its server.

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
    """The error that ended the attempt."""
    worker_status: int | None = None
    worker_text: str = ""
    """The status and the text of the worker's error."""


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
    judge: ExplainedJudge | None = None
    failed_attempts: Sequence[str] = ()
    attempts: Sequence[ExplainedAttempt] = ()
    answer: ExplainedResponse | None = None
    """None while it runs, and if a dry run would send the request to a worker."""
    seconds: Mapping[str, float] = {}
    """Spent in ``read``, ``route``, ``translate``, ``fallback`` (with failed targets, if any), and
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
        return decode_json(raw, kind=str).encode() if raw.startswith(b'"') else raw


# The text form: a label and a value per line.

_LABEL_WIDTH: Final = 11
_AVAILABILITY_TEXTS: Final = {
    "yes": "available",
    "no": "unavailable",
    "full": "at its limit",
    "tried": "already tried",
}
LabelledLine = tuple[str, str]


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
