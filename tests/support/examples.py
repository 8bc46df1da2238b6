"""How many examples a property gets that is tested for several parameters."""

from hypothesis import settings


def share_examples(cases: int) -> settings:
    """Return settings in which ``cases`` parametrised tests share the profile's examples.

    Each has 100 at least, unless the profile has fewer: ``make properties`` draws 2,000 for all of
    them together, since all draw from the same space.
    """
    examples = settings.default.max_examples if settings.default else 100
    return settings(max_examples=max(min(examples, 100), examples // cases))
