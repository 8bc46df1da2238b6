"""Every error as a response, byte for byte, with its HTTP status."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocols.core.errors import (
    ClientDisconnected,
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    InternalError,
    InvalidParameter,
    MalformedRequest,
    MemoryExhausted,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PathNotFound,
    QuotaExceeded,
    RateLimitExceeded,
    RequestNotFound,
    RequestTooLarge,
    ResponseAborted,
    RetriesExhausted,
    StoredObjectNotFound,
    StreamBroken,
    Unauthorized,
    UnknownFinishReason,
    UnsupportedEncoding,
    UnsupportedEndpoint,
    UnsupportedFeature,
    VersionNotFound,
    WorkerFailed,
    WorkerModelNotFound,
    WorkerUnreachable,
)
from protocols.triton.formats import CHUNKED_EVENT_HEADERS, JSON_HEADERS

QUEUE = "[request id: 7] Exceeds maximum queue size"

ERRORS: list[tuple[GatewayError, int, int, str]] = [
    (MalformedRequest("no JSON"), 500, 400, "no JSON"),
    (InvalidParameter("a type", param="x", problem="type"), 500, 400, "a type"),
    (InvalidParameter("a value", param="x"), 400, 400, "a value"),
    (ModelNotFound("-", model="m"), 404, 404, "Request for unknown model: 'm' is not found"),
    (VersionNotFound("-", model="m", version="9"), 404, 404,
     "Request for unknown model: 'm' version 9 is not found"),
    (PathNotFound("-"), 404, 404, "Not Found"),
    (MethodNotAllowed("-", allowed=("GET",)), 405, 405, "Method Not Allowed"),
    (RequestTooLarge("-", limit=67108864), 400, 400,
     "request size exceeds the maximum allowed input size of 67108864 bytes."),
    (Unauthorized("-", missing=True), 403, 403,
     "This API is restricted, expecting header 'Authorization'"),
    (Forbidden("-", model="m"), 404, 404, "Request for unknown model: 'm' is not found"),
    (RateLimitExceeded("slowly"), 429, 429, "slowly"),
    (QuotaExceeded("all spent"), 429, 429, "all spent"),
    (ContextTooLong("too long"), 400, 400, "too long"),
    (ContentFiltered("not this"), 400, 400, "not this"),
    (RequestNotFound("not running", id="7"), 400, 400, "not running"),
    (StoredObjectNotFound("not stored", id="7"), 400, 400, "not stored"),
    (UnsupportedFeature("can't"), 400, 400, "can't"),
    (UnsupportedEndpoint("not there"), 400, 400, "not there"),
    (UnsupportedEncoding("not br"), 400, 400, "not br"),
    (ClientDisconnected("gone"), 400, 400, "gone"),
    (Overloaded("-"), 503, 503, QUEUE),
    (RetriesExhausted("-"), 503, 503, QUEUE),
    (MemoryExhausted("-"), 503, 503, QUEUE),
    (DeadlineExceeded("-"), 503, 503, "Request timeout expired"),
    (WorkerUnreachable("nobody there"), 503, 503, "nobody there"),
    (WorkerFailed("exploded"), 400, 400, "exploded"),
    (WorkerModelNotFound("not that one"), 400, 400, "not that one"),
    (ResponseAborted("cut short"), 502, 502, "cut short"),
    (UnknownFinishReason("who knows"), 502, 502, "who knows"),
    (StreamBroken("broken"), 400, 400, "broken"),
    (InternalError("our fault"), 500, 500, "our fault"),
]  # fmt: skip


def list_error_classes(kind: type[GatewayError]) -> set[type[GatewayError]]:
    classes = {kind}
    for one in kind.__subclasses__():
        if one.__module__ == GatewayError.__module__:  # errors outside this module reach no client
            classes |= list_error_classes(one)
    return classes


def test_error_table_covers_every_gateway_error() -> None:
    groups = {"GatewayError", "ClientError", "WorkerError", "UnknownParameter"}
    assert {kind.__name__ for kind in list_error_classes(GatewayError)} - groups == {
        type(error).__name__ for error, *_ in ERRORS
    }


@pytest.mark.parametrize(("error", "strict", "sane", "text"), ERRORS)
def test_error_status_and_text_for_strict_and_sane(
    client_of: Callable[..., Any], error: GatewayError, strict: int, sane: int, text: str
) -> None:
    for status, code in (("strict", strict), ("sane", sane)):
        client = client_of(status=status)
        call = client.call("/v2/models/m/generate", b'{"id":"7"}', method="POST")
        reply = client.adapter.encode_error(error, call)
        assert (reply.status, reply.body) == (code, b'{"error":"%s"}' % text.encode())
        plain = isinstance(error, PathNotFound) and status == "strict"
        assert reply.headers[0] == ("Content-Type", "text/plain" if plain else "application/json")


@pytest.mark.parametrize(("error", "strict", "sane", "text"), ERRORS)
def test_error_without_a_client_request(
    client: Any, error: GatewayError, strict: int, sane: int, text: str
) -> None:
    reply = client.adapter.encode_error(error, None)
    assert reply.status == strict
    assert reply.body == b'{"error":"%s"}' % text.replace("id: 7", "id: <id_unknown>").encode()


@pytest.mark.parametrize("error", [WorkerFailed("x"), StreamBroken("x")])
def test_strict_worker_error_on_a_stream_path_is_an_sse_event(
    client_of: Callable[..., Any], error: GatewayError
) -> None:
    for status, body, headers in (
        ("strict", b'data: {"error":"x"}\n\n', CHUNKED_EVENT_HEADERS),
        ("sane", b'{"error":"x"}', JSON_HEADERS),
    ):
        client = client_of(status=status)
        call = client.call("/v2/models/m/generate_stream", b"{}", method="POST")
        reply = client.adapter.encode_error(error, call)
        assert (reply.status, reply.body) == (400, body)
        assert reply.headers == headers


def test_unavailable_worker_error_on_a_stream_path_is_json(client: Any) -> None:
    call = client.call("/v2/models/m/generate_stream", b"{}", method="POST")
    for error in (WorkerUnreachable("x"), Overloaded("x"), ContextTooLong("x")):
        assert client.adapter.encode_error(error, call).headers[0][1] == "application/json"


@pytest.mark.parametrize("body", [b"{", b'{"id":5}', b"[]", b"{}"])
def test_queue_full_error_of_request_without_id(client: Any, body: bytes) -> None:
    call = client.call("/v2/models/m/generate", body, method="POST")
    reply = client.adapter.encode_error(Overloaded("-"), call)
    assert reply.body == b'{"error":"[request id: <id_unknown>] Exceeds maximum queue size"}'


def test_queue_full_error_of_infer_has_no_request_id(client: Any) -> None:
    call = client.call("/v2/models/m/infer", b'{"id":"7"}', method="POST")
    reply = client.adapter.encode_error(Overloaded("-"), call)
    assert reply.body == b'{"error":"[request id: <id_unknown>] Exceeds maximum queue size"}'


def test_retry_after_header_is_rounded_up(client: Any) -> None:
    error = RateLimitExceeded("slowly")
    error.retry_after = 1.2
    assert client.adapter.encode_error(error, None).headers[1:] == (("Retry-After", "2"),)


def test_allow_header_is_sent_only_with_sane_status(client_of: Callable[..., Any]) -> None:
    error = MethodNotAllowed("-", allowed=("GET", "POST"))
    assert client_of(status="sane").adapter.encode_error(error, None).headers[1:] == (
        ("Allow", "GET, POST"),
    )
    assert client_of().adapter.encode_error(error, None).headers[1:] == ()


PLAIN = [
    ("POST", "/v2/models/nope/infer", b"{", True),
    ("POST", "/v2/models/vllm_like/versions/9/infer", b"{", True),
    ("POST", "/v2/models/vllm_like/versions/99999999999999999999/infer", b"{", True),
    ("GET", "/v2/models/vllm_like/versions/99999999999999999999/ready", b"", True),
    ("POST", "/v2/models/vllm_like/infer", b"{", False),
    ("POST", "/v2/models/nope/generate", b"{", False),
    ("GET", "/nope", b"", True),
    ("POST", "/v2/health/live", b"", True),
    ("PUT", "/v2/models/vllm_like/ready", b"", True),
    ("GET", "/v2/models/nope/infer", b"", True),
    ("GET", "/v2/models/nope/generate", b"", False),
]


@pytest.mark.parametrize(("method", "path", "body", "plain"), PLAIN)
def test_strict_errors_have_content_type_text_plain(
    client_of: Callable[..., Any], method: str, path: str, body: bytes, plain: bool
) -> None:
    strict, sane = (
        client_of().ask(method, path, body),
        client_of(status="sane").ask(method, path, body),
    )

    assert strict.kind == ("text/plain" if plain else "application/json")
    assert sane.kind == "application/json"
    assert strict.error == sane.error


NOT_GZIP = MalformedRequest("the body is not gzip", problem="encoding")
NOT_READ = UnsupportedEncoding("the body's content encoding is not one that is read here")
IDENTITY = "Unsupported content-encoding, only 'identity' is supported."
PACKED: list[tuple[str, str, GatewayError, tuple[int, str]]] = [
    ("models/m/generate", "gzip", NOT_GZIP, (400, IDENTITY)),
    ("models/m/generate_stream", "br", NOT_READ, (400, IDENTITY)),
    ("models/m/generate", "identity", NOT_READ, (400, NOT_READ.message)),
    ("models/m/infer", "gzip", NOT_GZIP, (500, NOT_GZIP.message)),
    ("models/m/infer", "br", NOT_READ, (501, "Unsupported compression type")),
    ("repository/index", "br", NOT_READ, (400, NOT_READ.message)),
]


@pytest.mark.parametrize(("path", "encoding", "error", "expected"), PACKED)
def test_content_encoding_error_status_and_text(
    client: Any, path: str, encoding: str, error: GatewayError, expected: tuple[int, str]
) -> None:
    call = client.call(f"/v2/{path}", b"", {"content-encoding": encoding}, method="POST")
    reply = client.adapter.encode_error(error, call)
    assert (reply.status, msgspec.json.decode(reply.body)["error"]) == expected
