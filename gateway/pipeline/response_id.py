"""The id of a response in the client's protocol."""

from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.pipeline.state import RequestState, Stage
from protocols.core.json_text import JsonDecoder
from protocols.json_body import JSON_ERRORS

MAX_ID_LENGTH: Final = 256
"""Characters of the id of a request or a response."""


class _InnerObject(Struct):
    id: Any = ""


class _NestedObject(Struct):
    message: _InnerObject | None = None
    response: _InnerObject | None = None


_decode_id: Final = JsonDecoder(_InnerObject).decode
_decode_nested_id: Final = JsonDecoder(_NestedObject).decode


def find_response_id(body: bytes) -> str:
    """The id in a response, or in the first event of a stream; "" if there is none."""
    if not body.startswith(b"{"):
        _, _, body = body[:_MAX_EVENT].partition(b"data:")
        body = body.partition(b"\n")[0]
    for decode in (_decode_id, _decode_nested_id):
        try:
            found: Any = decode(body)
        except (*JSON_ERRORS, msgspec.ValidationError):
            continue
        inner = found if isinstance(found, _InnerObject) else found.message or found.response
        if inner is not None and isinstance(inner.id, str) and inner.id:
            return str(inner.id) if len(inner.id) <= MAX_ID_LENGTH else ""
    return ""


_MAX_EVENT: Final = 1 << 20


class ResponseIdReader(Stage):
    """Notes the id of one response. An error has none."""

    observes_response = True

    def __init__(self) -> None:
        self._is_first = True

    def on_data(self, request: RequestState, data: bytes, *, is_whole: bool) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        if is_whole:
            if request.record.status == 200:  # noqa: PLR2004 - as above
                request.record.response_id = find_response_id(data)
        elif self._is_first and data:
            self._is_first = data.startswith(b":")  # a comment that keeps the stream alive
            if not self._is_first:
                request.record.response_id = find_response_id(data)
