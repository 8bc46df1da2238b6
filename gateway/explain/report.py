"""The Structs of an explanation, and of the request for one. Times are in seconds."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from backends.interfaces import WorkerSelection
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


LabelledLine = tuple[str, str]
