"""Routing rules: which requests go to another model or version than the traffic split's. Pure.

Rules are tried in their order before the split, and the first that matches applies. They do not
apply to a version that the client pinned.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gateway.routing.request_attributes import RequestAttributes, Scalar
from gateway.routing.traffic_split import bucket_to_fraction, compute_bucket


class RouteConditions(Struct, frozen=True):
    """The conditions of a rule; all must match. A condition that is not set always matches."""

    protocol: str | None = None
    headers: Mapping[str, str] = {}
    """By lower-case name."""
    body: Mapping[str, Scalar] = {}
    """Scalars of the body's top level."""
    key: str | None = None
    tag: str | None = None
    """A tag of the API key."""
    share: float = 1.0
    """The share of the matching requests that the rule takes, from 0 to 1."""

    def find_mismatch(self, traits: RequestAttributes) -> str:
        """The first condition that a request does not meet, the share aside; "" if it meets all.

        One of ``protocol``, ``key``, ``tag``, ``header:NAME`` and ``body:FIELD``. The body is read
        last.
        """
        if self.protocol not in (None, traits.protocol):
            return "protocol"
        if self.key not in (None, traits.key):
            return "key"
        if self.tag is not None and self.tag not in traits.tags:
            return "tag"
        for name, text in self.headers.items():
            if traits.headers.get(name) != text:
                return f"header:{name}"
        for name, value in self.body.items():
            if not _is_same_scalar(traits.read_field(name), value):
                return f"body:{name}"
        return ""


class RouteRule(Struct, frozen=True):
    """One rule. ``to`` is a model's name; None keeps the requested model."""

    name: str
    model: str | None = None
    """The model whose requests it applies to; None is every model."""
    conditions: RouteConditions = RouteConditions()
    to: str | None = None
    version: str | None = None
    """None leaves the version to the model's traffic split."""


class RuleMatch(Struct, frozen=True):
    """A rule whose conditions match, and the request's position relative to its share."""

    rule: RouteRule
    sticky: str = ""
    bucket: int | None = None
    position: float = 0.0
    """Between 0 and 1; the rule applies if it is below the share."""

    @property
    def is_selected(self) -> bool:
        """Whether the rule applies."""
        return self.position < self.rule.conditions.share


RuleObserver = Callable[[RouteRule, str, RuleMatch | None], None]
"""Called for each rule that was tried, with the condition that is not met, or with its match."""


def find_matching_rule(
    rules: Sequence[RouteRule],
    traits: RequestAttributes,
    sticky: Sequence[str],
    draw: Callable[[], float],
    tell: RuleObserver | None = None,
) -> RuleMatch | None:
    """The first rule that applies.

    A share is taken by the user's hash, from the first source of ``sticky`` that is present, so
    that a user stays in it; without one it is drawn.
    """
    for rule in rules:
        unmet = rule.conditions.find_mismatch(traits)
        found = None if unmet else _match_share(rule, traits, sticky, draw)
        if tell is not None:
            tell(rule, unmet, found)
        if found is not None and found.is_selected:
            return found
    return None


def _match_share(
    rule: RouteRule, traits: RequestAttributes, sticky: Sequence[str], draw: Callable[[], float]
) -> RuleMatch:
    """A request's position in a rule's share: hashed like a version "" of a split of that name."""
    if rule.conditions.share >= 1:
        return RuleMatch(rule)
    source, who = traits.find_first_source(sticky)
    if not source:
        return RuleMatch(rule, position=draw())
    number = compute_bucket(rule.name, "", who)
    return RuleMatch(rule, source, number, bucket_to_fraction(number))


def _is_same_scalar(found: Scalar | None, wanted: Scalar) -> bool:
    """Whether two scalars are equal: 1 is 1.0, but not true."""
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
