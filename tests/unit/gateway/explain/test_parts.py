"""Headers and bodies in explanations."""

import pytest

from gateway.explain.parts import explain_upstream_request, mask_headers
from protocols.core.interfaces import UpstreamRequest


def test_secret_headers_are_masked_in_any_letter_case() -> None:
    headers = (("Authorization", "a"), ("X-API-Key", "b"), ("api-key", "c"), ("X-More", "d"))

    assert [value for _, value in mask_headers(headers)] == ["***", "***", "***", "d"]


@pytest.mark.parametrize(
    ("body", "most", "shown", "base64"),
    [
        (b"abc", None, "abc", False),
        (b"abc", 2, "ab", False),
        ("aé".encode(), 2, "a", False),
        (b"\xff\x00", None, "/wA=", True),
        (b"a\xc3", None, "a", False),
    ],
)
def test_upstream_body_is_shown_as_text_or_base64(
    body: bytes, most: int | None, shown: str, *, base64: bool
) -> None:
    explained = explain_upstream_request("http://a", UpstreamRequest("/p", body), most)

    assert (explained.body, explained.base64, explained.size) == (shown, base64, len(body))
