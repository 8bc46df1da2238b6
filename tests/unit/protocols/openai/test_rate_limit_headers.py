"""Headers tell clients their remaining requests and tokens."""

import pytest

from protocols.core.interfaces import RateLimitHeaders, RateLimitStatus
from protocols.openai.endpoints import OpenAI, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9991, "1s"),
        (1, "1s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3599.5, "1h0m0s"),
        (86399, "23h59m59s"),
    ],
)
def test_duration_is_formatted_and_rounded_up(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rate_limit_headers_include_each_configured_limit() -> None:
    adapter: RateLimitHeaders = OpenAI()
    requests, tokens = RateLimitStatus(60, 59, 1.0), RateLimitStatus(150_000, 149_984, 0.0064)

    assert adapter.rate_limit_headers(None, None) == ()
    assert [name for name, _ in adapter.rate_limit_headers(requests, None)] == [
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
    ]
    assert adapter.rate_limit_headers(None, tokens) == (
        ("x-ratelimit-limit-tokens", "150000"),
        ("x-ratelimit-remaining-tokens", "149984"),
        ("x-ratelimit-reset-tokens", "7ms"),
    )
