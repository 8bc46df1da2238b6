"""What is told of one request that is explained. Times are in seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from backends.interfaces import WorkerSelection
from protocols.core.events import Usage
from protocols.core.loss import UnsupportedParameter


class ExplainedRule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule that was tried.

    ``unmet`` is what of it does not hold: ``dialect``, ``key``, ``tag``, ``header:NAME``,
    ``body:FIELD``, or ``share``; ``wanted`` what the rule has there. ``sticky`` told who asks for
    the share, ``bucket`` is their hash, and where ``lies`` is below ``share`` they are of it.
    """

    name: str
    followed: bool
    unmet: str = ""
    wanted: str | int | float | bool | None = None
    share: float = 1.0
    sticky: str = ""
    bucket: int | None = None
    lies: float = 0.0
    model: str | None = None
    """Where it leads, as is ``version``."""
    version: str | None = None


class ExplainedStickySource(Struct, frozen=True, omit_defaults=True):
    """A source that was looked at for who asks. ``said`` is told of dry explanations alone."""

    source: str
    present: bool
    said: str | None = None


class ExplainedVersion(Struct, frozen=True):
    """A version of a split; ``share`` is of 1. ``n`` and ``score`` as ``gateway.routing.traffic_split`` has them.

    The two are None where chance decides.
    """

    version: str
    weight: int
    share: float
    n: int | None
    score: float | None
    taken: bool


class ExplainedSplit(Struct, frozen=True, omit_defaults=True):
    """How a version was chosen: by what a source said, or by chance, with the number drawn."""

    name: str
    by: str
    """The source, or ``chance``."""
    arms: Sequence[ExplainedVersion]
    drawn: float | None = None


class ExplainedTarget(Struct, frozen=True):
    """A version of a model, its backend, and that backend's name for the model."""

    model: str
    version: str
    backend: str
    served: str


class ExplainedFallback(Struct, frozen=True, omit_defaults=True):
    """Who would answer in the target's stead, or why it would be ``passed_over``."""

    target: str
    passed_over: str = ""


class ExplainedShadow(Struct, frozen=True):
    """The part of such requests of which a copy goes ``to`` a version, or to another model."""

    to: str
    share: float


class ExplainedDefault(Struct, frozen=True):
    """A default of the model's; ``applied`` where the client was silent."""

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
    """What was left of the request's time when it was asked for an answer."""


class ExplainedUpstreamRequest(Struct, kw_only=True, omit_defaults=True):
    """A request to a worker, with secrets as ``***``. ``url`` is the worker's base.

    ``body`` is text, or base64 where it is none. Of a live request no more than 64 KiB is kept:
    ``size`` is that of the whole, in bytes.
    """

    url: str
    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: str
    size: int
    base64: bool = False
    error: str = ""
    """Why it failed before its answer began."""


class ExplainedAttempt(Struct, kw_only=True, omit_defaults=True):
    """One target that was asked.

    ``relayed``: the client's own bytes are passed on. ``parts`` is how many requests the gateway
    makes of the one. ``choices`` and ``sent`` are of its workers, where it has any; of a dry
    explanation, what the likely worker would be sent.
    """

    target: ExplainedTarget
    relayed: bool
    on_loss: str
    losses: Sequence[UnsupportedParameter]
    limits: ExplainedLimits
    defaults: Sequence[ExplainedDefault] = ()
    parts: int = 1
    choices: list[WorkerSelection] = []
    sent: list[ExplainedUpstreamRequest] = []


class ExplainedResponse(Struct, frozen=True, omit_defaults=True):
    """How it ended. ``body`` and ``error`` are told of a dry explanation's refusal."""

    status: int
    outcome: str
    error: str = ""
    body: str = ""
    headers: Sequence[tuple[str, str]] = ()
    tokens: int = 0
    """Of the answer, as far as they were passed on in a stream."""
    usage: Usage | None = None
    first_byte: float | None = None
    duration: float = 0.0


class Explanation(Struct, kw_only=True, omit_defaults=True):
    """One request: where it goes, and why. What was not come to is left out.

    ``pin`` is ``name`` (``model@version``) or ``path``. ``asked`` is the model as the client calls
    it; ``model`` its own name, or the one that stands for every other name.
    """

    id: str
    dry: bool
    """Nothing was sent."""
    listener: str = ""
    dialect: str = ""
    method: str = ""
    path: str = ""
    endpoint: str = ""
    task: str = ""
    key: str = ""
    tags: Sequence[str] = ()
    peer: str = ""
    stream: bool = False
    asked: str = ""
    model: str = ""
    pin: str = ""
    rules: Sequence[ExplainedRule] = ()
    sticky: Sequence[ExplainedStickySource] = ()
    split: ExplainedSplit | None = None
    target: ExplainedTarget | None = None
    fallbacks: Sequence[ExplainedFallback] = ()
    shadow: ExplainedShadow | None = None
    fell_back: Sequence[str] = ()
    tries: Sequence[ExplainedAttempt] = ()
    answer: ExplainedResponse | None = None
    """None as long as it runs, and where a dry request would be sent to its worker."""
    seconds: Mapping[str, float] = {}
    """In ``read``, ``route``, ``translate``, ``instead`` (with targets that failed, where any did),
    and from there to the ``first_byte``."""
