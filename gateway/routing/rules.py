"""Routing rules: which requests go to another model or version than the traffic split's. Pure.

Rules are tried in their order before the split, and the first that matches applies. They do not
apply to a version that the client pinned.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gateway.config.schema import RouteConfig
from gateway.observability.recording_writer import RecordingPolicy
from gateway.routing.request_attributes import RequestAttributes, Scalar
from gateway.routing.traffic_split import bucket_to_fraction, compute_bucket


class RouteRule(Struct, frozen=True):
    """A route of the configuration, compiled."""

    config: RouteConfig
    headers: Mapping[str, str] = {}
    """The headers that must match, by lower-case name."""
    share: float = 1.0
    """The share of the matching requests that the rule takes, from 0 to 1."""
    recording: RecordingPolicy | None = None
    """How its requests are recorded, if it says so."""

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.config.name

    def find_mismatch(self, attributes: RequestAttributes) -> str:
        """The first condition that a request does not meet, the share aside; "" if it meets all.

        One of ``protocol``, ``key``, ``tag``, ``header:NAME`` and ``body:FIELD``. The body is read
        last.
        """
        when = self.config.when
        if when.protocol not in (None, attributes.protocol):
            return "protocol"
        if when.key not in (None, attributes.key):
            return "key"
        if when.tag is not None and when.tag not in attributes.tags:
            return "tag"
        for name, text in self.headers.items():
            if attributes.headers.get(name) != text:
                return f"header:{name}"
        for name, value in when.body.items():
            if not _is_same_scalar(attributes.read_field(name), value):
                return f"body:{name}"
        return ""

    def get_expected_value(self, condition: str) -> Scalar | None:
        """The value of a condition that ``find_mismatch`` returned."""
        when = self.config.when
        kind, _, name = condition.partition(":")
        match kind:
            case "header":
                return self.headers[name]
            case "body":
                return when.body[name]
            case "protocol":
                return when.protocol
            case "key":
                return when.key
            case _:
                return when.tag


def compile_rule(config: RouteConfig, recording: RecordingPolicy | None = None) -> RouteRule:
    """Compile a route: header names in lower case."""
    headers = {name.lower(): text for name, text in config.when.header.items()}
    share = config.when.share
    return RouteRule(config, headers, 1.0 if share is None else share, recording)


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
        return self.position < self.rule.share


RuleObserver = Callable[[RouteRule, str, RuleMatch | None], None]
"""Called for each rule that was tried, with the condition that is not met, or with its match."""


def find_matching_rule(
    rules: Sequence[RouteRule],
    attributes: RequestAttributes,
    sticky: Sequence[str],
    draw: Callable[[], float],
    observe: RuleObserver | None = None,
) -> RuleMatch | None:
    """The first rule that applies.

    A share is taken by the user's hash, from the first source of ``sticky`` that is present, so
    that a user stays in it; without one it is drawn.
    """
    for rule in rules:
        mismatch = rule.find_mismatch(attributes)
        match = None if mismatch else _match_share(rule, attributes, sticky, draw)
        if observe is not None:
            observe(rule, mismatch, match)
        if match is not None and match.is_selected:
            return match
    return None


def _match_share(
    rule: RouteRule,
    attributes: RequestAttributes,
    sticky: Sequence[str],
    draw: Callable[[], float],
) -> RuleMatch:
    """A request's position in a rule's share: hashed like a version "" of a split of that name."""
    if rule.share >= 1:
        return RuleMatch(rule)
    source, user = attributes.find_first_source(sticky)
    if not source:
        return RuleMatch(rule, position=draw())
    bucket = compute_bucket(rule.name, "", user)
    return RuleMatch(rule, source, bucket, bucket_to_fraction(bucket))


def _is_same_scalar(value: Scalar | None, expected: Scalar) -> bool:
    """Whether two scalars are equal: 1 is 1.0, but not true."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)
