"""The parts of an explanation, made of what serving a request brought about."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gateway.core.context import Context
from gateway.core.ports import Call, Dialect, Headers, WireRequest
from gateway.core.types import GenerateRequest
from gateway.emulation import parts
from gateway.exchange import Answering
from gateway.fitting import unsaid
from gateway.router import Route
from gateway.rules import Match, Rule, When
from gateway.splits import score
from gateway.traits import Scalar, Traits
from gateway.translation import Translation
from gateway.watching.account import (
    Arm,
    Copied,
    Default,
    Limits,
    Sent,
    Split,
    Sticky,
    Target,
    Tried,
    Try,
)

_SECRET: Final = frozenset(
    {"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie", "set-cookie"}
)


def tried(rule: Rule, unmet: str, match: Match | None) -> Tried:
    """A rule, as it was tried; ``match`` is None where ``unmet`` does not hold."""
    when = rule.conditions
    if match is None:
        return Tried(name=rule.name, followed=False, unmet=unmet, wanted=_wanted(when, unmet))
    return Tried(
        name=rule.name,
        followed=match.is_selected,
        unmet="" if match.is_selected else "share",
        share=when.share,
        sticky=match.sticky,
        bucket=match.bucket,
        lies=match.position,
        model=rule.to,
        version=rule.version,
    )


def _wanted(when: When, unmet: str) -> Scalar | None:
    kind, _, name = unmet.partition(":")
    match kind:
        case "header":
            return when.headers[name]
        case "body":
            return when.body[name]
        case _:
            found: Scalar | None = getattr(when, kind)
            return found


def sticky(sources: Sequence[str], traits: Traits, *, said: bool) -> list[Sticky]:
    """The sources, up to the first that says something; with ``said`` also what."""
    found = []
    for source in sources:
        text = traits.read_source(source)
        found.append(Sticky(source, bool(text), text if said and text else None))
        if text:
            break
    return found


def split(route: Route, traits: Traits, drawn: float) -> Split | None:
    """How the split chose; None where none did."""
    if not route.split:
        return None
    source, held = route.reason.sticky, route.model.split
    numbers: Mapping[str, int] = held.compute_buckets(traits.read_source(source)) if source else {}
    whole = sum(held.weights.values())
    arms = [
        Arm(
            version,
            weight,
            weight / whole,
            numbers.get(version),
            score(numbers[version], weight) if numbers else None,
            version == route.target.version,
        )
        for version, weight in held.weights.items()
    ]
    return Split(route.split, source or "chance", arms, None if source else drawn)


def target(route: Route) -> Target:
    """Where a route leads."""
    to = route.target
    return Target(route.model.info.name, to.version, to.backend_name, to.backend_model)


def shadow(route: Route) -> Copied | None:
    """Where copies may go; none of a request that pinned its version does."""
    found = route.model.shadow
    return None if found is None or route.pinned else Copied(found.to, found.share)


class Asking(Struct, frozen=True):
    """One target that is about to be asked. ``body`` is the most that a request may bring."""

    adapter: Dialect
    client_request: Call
    route: Route
    backend: Answering
    context: Context
    max_body: int


def defaults(asking: Asking) -> tuple[Default, ...]:
    """The model's defaults, and which of them hold for the request as the client sent it."""
    told = asking.route.model.defaults
    if not told.has_values:
        return ()
    applied: dict[str, Any] = {}
    request = asking.adapter.decode_request(asking.client_request, asking.route.model.info)
    if isinstance(request, GenerateRequest):
        applied |= unsaid(request.sampling, told.sampling)
        applied |= unsaid(request.stopping, told.stopping)
    both = {**told.sampling, **told.stopping}
    return tuple(Default(name, value, name in applied) for name, value in both.items())


def attempt(asking: Asking) -> Try:
    """What is known of a target before it is asked."""
    route, answering = asking.route, asking.backend
    info, timeouts = route.model.info, asking.context.timeouts
    plan = answering.plan if isinstance(answering, Translation) else None
    return Try(
        target=target(route),
        relayed=plan is None,
        on_loss=route.model.on_loss,
        defaults=defaults(asking),
        losses=() if plan is None else plan.unsupported_parameters,
        limits=Limits(
            asking.max_body,
            info.context_length,
            info.max_tokens,
            timeouts.connect,
            timeouts.first_token,
            timeouts.idle,
            asking.context.deadline.remaining(),
        ),
        parts=1 if plan is None else parts(answering.request, plan),
    )


def sent(url: str, wire: WireRequest, most: int | None) -> Sent:
    """A request to a worker, of its body no more than ``most`` bytes."""
    body = wire.body[:most]
    text, is_text = _text(body)
    return Sent(
        url=url,
        method=wire.method,
        path=wire.path,
        headers=masked(wire.headers),
        body=text,
        size=len(wire.body),
        base64=not is_text,
    )


def masked(headers: Headers) -> list[tuple[str, str]]:
    """These headers, without what is secret in them."""
    return [(name, "***" if name.lower() in _SECRET else value) for name, value in headers]


def _text(body: bytes) -> tuple[str, bool]:
    """A body as text, and whether it is one; a character that was cut in two is left out."""
    try:
        return body.decode(), True
    except UnicodeDecodeError as error:
        if len(body) - error.start < 4 and error.reason == "unexpected end of data":  # noqa: PLR2004 - the longest character
            return body[: error.start].decode(), True
        return b64encode(body).decode(), False
