"""Endpoints that are forwarded without translation: audio, images and moderations.

Source: OpenAI's API reference, "Audio", "Images" and "Moderations". Bodies are JSON, or forms with
files. Only the model's name is read of them, and replaced if the worker has another one. Workers
get a body that is written anew, so that they can't read another model in it. Files and batches are
refused: their ids belong to one worker.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocols.chat.params import invalid_type_error
from protocols.core.errors import InvalidParameter
from protocols.core.events import Usage
from protocols.core.interfaces import ClientRequest, Endpoint, ProxiedModel
from protocols.core.json_text import JsonDecoder, JsonSyntaxError, JsonTooDeep, decode_pairs
from protocols.core.token_counts import MAX_TOKENS, read_integer
from protocols.json_body import decode_value, read_object
from protocols.openai.forms import MULTIPART, Form, read_form

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
_TEXTS: Final = frozenset({"prompt", "input"})
"""Fields of forms that are text, whatever they look like."""
_UNPRINTABLE: Final = bytes({*range(256)} - {*range(ord("!"), ord("~") + 1)})
"""What servers may take off around JSON: blanks, NUL, byte order marks."""
_MAX_JSON: Final = 256 << 10
"""Bytes of JSON in the fields of a form, all together, that are read: 20 ms on the event loop."""
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


def find_model(call: ClientRequest, deployment: str | None = None) -> ProxiedModel:
    """See ``protocols.core.interfaces.SupportsProxy``.

    ``deployment`` is the model that the path names, which counts instead of the body's.
    """
    content_type = call.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == MULTIPART:
        form = read_form(call.body, content_type)
        found = ProxiedModel(
            form.model,
            lambda model: (form.content_type, form.write(model)),
            partial(_read_form_fields, form),
        )
    else:  # whatever the client calls it: the worker gets it as JSON
        found = _find_json_model(call.body)
    return found if deployment is None else replace(found, name=deployment)


_USAGE_NAME: Final = b'"usage"'
_USAGE_START: Final = re.compile(rb'"usage"\s*:\s*(?={)')


class _ProxiedUsage(Struct):
    """The tokens of a response; transcriptions by the second have none."""

    input_tokens: Any = None
    output_tokens: Any = None


_decode_usage = JsonDecoder(_ProxiedUsage).decode


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

    def write(name: str) -> tuple[str, bytes]:
        return "application/json", msgspec.json.encode(fields | {"model": name} if name else fields)

    return ProxiedModel(model or "", write, fields.items)


def _read_form_fields(form: Form) -> Iterator[tuple[str, bytes]]:
    """Raises InvalidParameter for more JSON than any server would need."""
    left = _MAX_JSON
    for field in form.fields:
        # With an empty name, or one that is only written as ``filename*``, some read no file.
        is_file = bool(field.params.get("filename"))
        value = b"" if is_file else form.body[field.start : field.end]
        text = value.strip(_UNPRINTABLE)
        is_framed = text.startswith((b"{", b"[")) and text.endswith((b"}", b"]"))
        if is_framed and field.name not in _TEXTS:
            left -= len(text)
            if left < 0:
                what = f"the fields of a form may have {_MAX_JSON >> 10} KiB of JSON"
                raise InvalidParameter(what, param=field.name, problem="value")
            if _may_decode(text):
                yield field.name, text
                continue
        yield field.name, msgspec.json.encode(value.decode(errors="replace"))


def _may_decode(value: bytes) -> bool:
    """Whether a server may read a text as JSON: of any depth, number or encoding."""
    try:
        decode_pairs(value)
    except JsonSyntaxError:
        return False
    except (JsonTooDeep, ValueError):
        return True
    return True
