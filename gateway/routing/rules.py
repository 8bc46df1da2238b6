"""Exceptions from the splits: which requests go elsewhere, and where. Pure.

They are tried in their order before the split, and the first that holds is followed. A version that
a client pinned is not theirs to change.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gateway.routing.request_attributes import RequestAttributes, Scalar
from gateway.routing.traffic_split import bucket_to_fraction, compute_bucket


class RouteConditions(Struct, frozen=True):
    """What has to hold, all of it. What is not said holds for every request."""

    protocol: str | None = None
    headers: Mapping[str, str] = {}
    """By lower-case name."""
    body: Mapping[str, Scalar] = {}
    """Scalars of the body's top level."""
    key: str | None = None
    tag: str | None = None
    """One that the key has."""
    share: float = 1.0
    """How many of those for whom the rest holds, from 0 to 1."""

    def find_mismatch(self, traits: RequestAttributes) -> str:
        """What does not hold for a request, its share left aside; "" where all does.

        ``protocol``, ``key``, ``tag``, ``header:NAME`` or ``body:FIELD``: the first of them. The
        body comes last.
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
    """One exception. ``to`` is a model's name, and None the one asked for."""

    name: str
    model: str | None = None
    """Whose requests it is for; None means every model's."""
    conditions: RouteConditions = RouteConditions()
    to: str | None = None
    version: str | None = None
    """None leaves it to the split of the model it goes to."""


class RuleMatch(Struct, frozen=True):
    """A rule that holds but for its share, and what that is taken by, if it has one."""

    rule: RouteRule
    sticky: str = ""
    bucket: int | None = None
    position: float = 0.0
    """Where the request lies between 0 and 1; below the share it is of it."""

    @property
    def is_selected(self) -> bool:
        """Whether the rule is followed."""
        return self.position < self.rule.conditions.share


RuleObserver = Callable[[RouteRule, str, RuleMatch | None], None]
"""Is told of each rule that was tried: what of it does not hold, or else its match."""


def find_matching_rule(
    rules: Sequence[RouteRule],
    traits: RequestAttributes,
    sticky: Sequence[str],
    draw: Callable[[], float],
    tell: RuleObserver | None = None,
) -> RuleMatch | None:
    """The first rule that holds.

    A share is taken of those who ask, told apart by the first present of ``sticky``, so that the
    same are taken each time; or else by luck.
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
    """Where a request lies in a rule's share: as an arm of no name, in a split of the rule's."""
    if rule.conditions.share >= 1:
        return RuleMatch(rule)
    source, who = traits.find_first_source(sticky)
    if not source:
        return RuleMatch(rule, position=draw())
    number = compute_bucket(rule.name, "", who)
    return RuleMatch(rule, source, number, bucket_to_fraction(number))


def _is_same_scalar(found: Scalar | None, wanted: Scalar) -> bool:
    """Whether two values are one: 1 is 1.0, and is not true."""
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
