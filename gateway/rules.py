"""Exceptions from the splits: which requests go elsewhere, and where. Pure.

They are tried in their order before the split, and the first that holds is followed. A version that
a client pinned is not theirs to change.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gateway.splits import bucket, part
from gateway.traits import Scalar, Traits


class When(Struct, frozen=True):
    """What has to hold, all of it. What is not said holds for every request."""

    dialect: str | None = None
    headers: Mapping[str, str] = {}
    """By lower-case name."""
    body: Mapping[str, Scalar] = {}
    """Scalars of the body's top level."""
    key: str | None = None
    tag: str | None = None
    """One that the key has."""
    share: float = 1.0
    """How many of those for whom the rest holds, from 0 to 1."""

    def holds(self, traits: Traits) -> bool:
        """Whether it does for a request, its share left aside. The body comes last."""
        return (
            self.dialect in (None, traits.dialect)
            and self.key in (None, traits.key)
            and (self.tag is None or self.tag in traits.tags)
            and all(traits.headers.get(name) == text for name, text in self.headers.items())
            and all(_same(traits.field(name), value) for name, value in self.body.items())
        )


class Rule(Struct, frozen=True):
    """One exception. ``to`` is a model's name, and None the one asked for."""

    name: str
    model: str | None = None
    """Whose requests it is for; None means every model's."""
    when: When = When()
    to: str | None = None
    version: str | None = None
    """None leaves it to the split of the model it goes to."""


class Match(Struct, frozen=True):
    """A rule that holds, and what its share was taken by, if it has one."""

    rule: Rule
    sticky: str = ""
    bucket: int | None = None


def first(
    rules: Sequence[Rule], traits: Traits, sticky: Sequence[str], draw: Callable[[], float]
) -> Match | None:
    """The first rule that holds.

    A share is taken of those who ask, told apart by the first present of ``sticky``, so that the
    same are taken each time; or else by luck.
    """
    for rule in rules:
        if rule.when.holds(traits) and (found := _within(rule, traits, sticky, draw)):
            return found
    return None


def _within(
    rule: Rule, traits: Traits, sticky: Sequence[str], draw: Callable[[], float]
) -> Match | None:
    """Whether a request is of the rule's share: as an arm of no name, in a split of the rule's."""
    if rule.when.share >= 1:
        return Match(rule)
    source, who = traits.first(sticky)
    number = bucket(rule.name, "", who) if source else None
    lies = draw() if number is None else part(number)
    return Match(rule, source, number) if lies < rule.when.share else None


def _same(found: Scalar | None, wanted: Scalar) -> bool:
    """Whether two values are one: 1 is 1.0, and is not true."""
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
