"""Endpoints that are forwarded without translation: audio, images and moderations.

Source: OpenAI's API reference, "Audio", "Images" and "Moderations". Bodies are JSON, or forms with
files (multipart/form-data, RFC 7578). Only the model's name is read of them, and replaced if the
worker has another one. Files and batches are refused: their ids belong to one worker.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocols.chat.params import invalid_type_error
from protocols.core.errors import InvalidParameter, MalformedRequest
from protocols.core.events import Usage
from protocols.core.interfaces import ClientRequest, Endpoint, ProxiedModel
from protocols.core.token_counts import MAX_TOKENS, read_integer
from protocols.json_body import decode_value, read_object

PATHS: Final[Mapping[str, str]] = {
    "speech": "/audio/speech",
    "transcription": "/audio/transcriptions",
    "translation": "/audio/translations",
    "image_generation": "/images/generations",
    "image_edit": "/images/edits",
    "image_variation": "/images/variations",
    "moderation": "/moderations",
}
"""The path of each operation, below the prefix."""
DEPLOYMENT_OPERATIONS: Final = (
    "speech",
    "transcription",
    "translation",
    "image_generation",
    "image_edit",
)
"""Those that Azure has below a deployment. Source: openai-python's AzureOpenAI."""

REFUSED_OPERATIONS: Final[Mapping[str, str]] = {
    "files": "the Files API is not supported: its ids belong to one worker",
    "batches": "the Batch API is not supported: its ids belong to one worker",
}
_REFUSED_PATHS: Final = (
    ("files", ("GET", "POST"), ""),
    ("files", ("GET", "DELETE"), "/{id}"),
    ("files", ("GET",), "/{id}/content"),
    ("batches", ("GET", "POST"), ""),
    ("batches", ("GET",), "/{id}"),
    ("batches", ("POST",), "/{id}/cancel"),
)
_MULTIPART: Final = "multipart/form-data"
_BOUNDARY: Final = re.compile(
    r';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))\s*(?:;|$)', re.IGNORECASE
)
_FIELD_NAME: Final = re.compile(
    rb'^content-disposition:\s*form-data\s*;(?:[^\r\n]*;)?\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))',
    re.IGNORECASE | re.MULTILINE,
)
_MAX_PART_HEADERS: Final = 16 << 10
_MAX_MODEL_NAME: Final = 1024
_MAX_USAGE_DEPTH: Final = 8
"""How many objects a usage may consist of."""


def build_proxied_endpoints(prefix: str) -> tuple[Endpoint, ...]:
    """The endpoints under ``prefix``, such as ``/v1``, and those that are refused."""
    return (
        *(Endpoint("POST", prefix + path, "proxy", operation) for operation, path in PATHS.items()),
        *(
            Endpoint(method, f"{prefix}/{operation}{path}", "inform", operation)
            for operation, methods, path in _REFUSED_PATHS
            for method in methods
        ),
    )


def find_model(
    call: ClientRequest, *, is_complete: bool, name: str | None = None
) -> ProxiedModel | None:
    """See ``protocols.core.interfaces.SupportsProxy``. JSON must be complete.

    ``name`` is the model that the path names, which counts instead of the body's.
    """
    content_type = call.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() == _MULTIPART:
        found = _find_form_model(call.body, content_type, is_complete=is_complete)
    else:
        found = _find_json_model(call.body) if is_complete else None
    if name is None or found is None:
        return found
    if not found.name and (boundary := _BOUNDARY.search(content_type)) is not None:
        return ProxiedModel(name, partial(_insert_field, boundary), is_in_body=False)
    return replace(found, name=name, is_in_body=found.name == name)


_USAGE_NAME: Final = b'"usage"'
_USAGE_START: Final = re.compile(rb'"usage"\s*:\s*(?={)')


class _ProxiedUsage(Struct):
    """The tokens of a response; transcriptions by the second have none."""

    input_tokens: Any = None
    output_tokens: Any = None


_decode_usage = msgspec.json.Decoder(_ProxiedUsage).decode


def read_usage(tail: bytes) -> Usage | None:
    """See ``protocols.core.interfaces.SupportsProxy``. Quotes within texts are escaped in JSON."""
    start = _USAGE_START.match(tail, max(tail.rfind(_USAGE_NAME), 0))
    if start is None:
        return None
    end = start.end()
    for _ in range(_MAX_USAGE_DEPTH):
        end = tail.find(b"}", end) + 1
        if not end:
            break
        try:
            usage = _decode_usage(tail[start.end() : end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        tokens = read_integer(usage.input_tokens, MAX_TOKENS)
        if tokens is not None:
            return Usage(tokens, read_integer(usage.output_tokens, MAX_TOKENS) or 0)
        break
    return None


def _find_json_model(body: bytes) -> ProxiedModel:
    fields = read_object(body)
    model = decode_value(fields["model"]) if "model" in fields else None
    if not isinstance(model, str | None):
        raise invalid_type_error("model", "a string", model)

    def rename(body: bytes, name: str) -> bytes:
        return msgspec.json.encode(read_object(body) | {"model": name})

    return ProxiedModel(model or "", rename)


def _find_form_model(body: bytes, content_type: str, *, is_complete: bool) -> ProxiedModel | None:
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise MalformedRequest("the content type of the form has no boundary", problem="encoding")
    field = _find_field(body, (match[1] or match[2]).encode(), b"model")
    if field is None:
        return ProxiedModel("", lambda body, _: body) if is_complete else None
    try:
        name = body[field.start : field.end].decode()
    except UnicodeDecodeError:
        name = ""
    if not 0 < len(name) <= _MAX_MODEL_NAME:
        text = "'model' must be the name of a model in UTF-8"
        raise InvalidParameter(text, param="model", problem="value")
    start, end = field.start, field.end
    return ProxiedModel(name, lambda body, name: body[:start] + name.encode() + body[end:])


def _insert_field(boundary: re.Match[str], body: bytes, name: str) -> bytes:
    """The form with the model's name as its first field."""
    delimiter = b"--" + (boundary[1] or boundary[2]).encode()
    head = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
    return delimiter + head + name.encode() + b"\r\n" + body


class _FormField(Struct, frozen=True):
    """Where the value of a form's field stands in the body."""

    start: int
    end: int


def _find_field(body: bytes, boundary: bytes, name: bytes) -> _FormField | None:
    """The field of this name, if it is complete. Raises MalformedRequest for another form."""
    delimiter = b"\r\n--" + boundary
    if not (body.startswith(delimiter[2:]) or delimiter.startswith(b"\r\n" + body)):
        raise MalformedRequest("the form does not begin with its boundary", problem="encoding")
    at = len(delimiter) - 2
    while body[at : at + 2] != b"--":
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_PART_HEADERS)
        if head_end < 0:
            if len(body) - at > _MAX_PART_HEADERS:
                raise MalformedRequest("the headers of a form's field are too large")
            return None
        start = head_end + 4
        end = body.find(delimiter, start)
        if end < 0:
            return None
        match = _FIELD_NAME.search(body[at:head_end])
        if match is not None and (match[1] if match[1] is not None else match[2]) == name:
            return _FormField(start, end)
        at = end + len(delimiter)
    return None
