"""The request of a dry run."""

from typing import Any

import pytest
from msgspec import Raw

from gateway.explain.report import (
    ExplainRequest,
)


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, b""),
        ({"body": Raw(b'{"a": 1.50}')}, b'{"a": 1.50}'),
        ({"body": Raw(b'"a\\u00e9"')}, "aé".encode()),
        ({"base64": b"\xff"}, b"\xff"),
    ],
)
def test_request_body_is_json_text_or_base64(fields: dict[str, Any], content: bytes) -> None:
    assert ExplainRequest(path="/", **fields).body_bytes == content
