"""What is left to a client, in the headers of every answer.

Source: the headers of OpenAI's API, https://platform.openai.com/docs/guides/rate-limits, "Rate
limits in headers": numbers, and durations such as ``120ms``, ``1s`` and ``6m0s``.
"""

import math

from protocols.core.interfaces import Headers, RateLimitStatus


def format_rate_limit_headers(
    requests: RateLimitStatus | None, tokens: RateLimitStatus | None
) -> Headers:
    """The headers of each limit that there is."""
    found: Headers = ()
    for name, one in (("requests", requests), ("tokens", tokens)):
        if one is not None:
            found += (
                (f"x-ratelimit-limit-{name}", str(one.limit)),
                (f"x-ratelimit-remaining-{name}", str(one.remaining)),
                (f"x-ratelimit-reset-{name}", format_duration(one.reset_after)),
            )
    return found


def format_duration(seconds: float) -> str:
    """Rounded up: to a thousandth of a second below one, and else to a whole one."""
    if 0 < seconds <= 0.999:  # noqa: PLR2004 - what is more rounds up to a whole one
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
