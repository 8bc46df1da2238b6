"""How many examples properties get that draw from the same space."""

from hypothesis import settings


def share_examples(cases: int) -> settings:
    """Return settings in which so many tests share the profile's examples.

    They are the parametrised cases of a test, or tests beside each other, which draw from the same
    space: ``make properties`` draws 2,000 for all of them. Each has 100 at least, unless the
    profile has fewer.
    """
    examples = settings.default.max_examples if settings.default else 100
    return settings(max_examples=max(min(examples, 100), examples // cases))
