"""Stored responses: references to them in requests, and the endpoints that read them."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw, Struct

from protocols.core.errors import InvalidParameter, UnsupportedFeature
from protocols.core.interfaces import ClientRequest, HttpResponse, StoredResponse
from protocols.core.json_text import JsonDecoder
from protocols.json_body import JSON_ERRORS
from protocols.openai.responses_api.items import read_reference
from protocols.openai.responses_api.requests import NO_REFERENCES, References

_encode = msgspec.json.Encoder().encode

_CACHE_KEY: Final = "responses_references"
MAX_REFERENCES: Final = 1024
"""The largest number of item references that are looked up for a request."""
_DEFAULT_PAGE: Final = 20
_MAX_PAGE: Final = 100


class _StoredOutput(Struct):
    output: list[Raw] = []


class _StoredItems(Struct):
    """``StoredResponse.body``, with undecoded items."""

    response: _StoredOutput
    input: list[Raw] = []
    history: list[Raw] = []
    sealed: dict[str, str] = {}
    """What clients did not ask for: reasoning with its signature, by the id of its item."""


class _ItemId(Struct):
    id: Any = None


class _StoredBody(Struct):
    """``StoredResponse.body``."""

    response: Raw
    input: list[dict[str, Any]] = []


class _ReferenceFields(Struct):
    previous_response_id: Any = None
    input: Any = None


_decode_reference_fields = JsonDecoder(_ReferenceFields).decode
_decode_body = JsonDecoder(_StoredBody).decode
_decode_items = JsonDecoder(_StoredItems).decode
_decode_id = JsonDecoder(_ItemId).decode
_decode_part = JsonDecoder(list[dict[str, Any]] | dict[str, Any]).decode


def count_references(body: bytes) -> Mapping[str, int]:
    """How often the previous response and each item are named, by id.

    Of ids beyond ``MAX_REFERENCES``, one is listed.
    """
    try:
        fields = _decode_reference_fields(body)
    except JSON_ERRORS:
        return {}
    names: list[str | None] = [
        read_reference(item)
        for item in (fields.input if isinstance(fields.input, list) else ())
        if isinstance(item, dict)
    ]
    if isinstance(fields.previous_response_id, str):
        names.insert(0, fields.previous_response_id)
    counts = Counter(name for name in names if name is not None)
    return dict(islice(counts.items(), MAX_REFERENCES + 1))


def read_parts(stored: StoredResponse, names: Container[str]) -> Mapping[str, bytes]:
    """The items with these ids, and all items of the response if it is named itself.

    Nothing is decoded but the ids, and reasoning that has a signature.
    """
    record = _decode_items(stored.body)
    own = (*record.input, *(_add_sealed(item, record.sealed) for item in record.response.output))
    parts: dict[str, bytes] = {}
    if stored.id in names:
        parts[stored.id] = _encode([*record.history, *own])
    for item in own:
        name = _decode_id(item).id
        if isinstance(name, str) and name in names:
            parts[name] = bytes(item)
    return parts


def _add_sealed(item: Raw, sealed: Mapping[str, str]) -> Raw:
    """An item of the output, with its reasoning as it was signed."""
    if not sealed or not isinstance(name := _decode_id(item).id, str) or name not in sealed:
        return item
    fields = _decode_part(item)
    return Raw(_encode({**fields, "encrypted_content": sealed[name]}))


def set_references(call: ClientRequest, parts: Mapping[str, bytes] | None) -> None:
    """Keep what the request refers to; ``get_references`` returns it."""
    if parts is None:
        call.__dict__[_CACHE_KEY] = NO_REFERENCES
        return
    history: Sequence[Mapping[str, Any]] | None = None
    items: dict[str, Mapping[str, Any]] = {}
    for name, part in parts.items():
        value = _decode_part(part)
        if isinstance(value, list):
            history = value
        else:
            items[name] = value
    call.__dict__[_CACHE_KEY] = References(history, items, enabled=True)


def copy_references(call: ClientRequest, target: ClientRequest) -> None:
    """Let ``target``, a copy of a request, refer to the same."""
    target.__dict__[_CACHE_KEY] = get_references(call)


def get_references(call: ClientRequest) -> References:
    """What ``set_references`` kept."""
    references: References = call.__dict__.get(_CACHE_KEY, NO_REFERENCES)
    return references


# --- endpoints ------------------------------------------------------------------------------------


def encode_stored(call: ClientRequest, stored: StoredResponse) -> HttpResponse:
    """Answer GET or DELETE of a response, or GET of its input items.

    Raises UnsupportedFeature for a cancellation: no stored response runs in the background.
    """
    if call.endpoint.operation == "response cancellation":
        raise UnsupportedFeature("Cannot cancel a synchronous response.")
    if call.endpoint.operation == "response items":
        return _list_input_items(call.query, stored)
    if call.endpoint.method == "DELETE":
        body = {"id": stored.id, "object": "response", "deleted": True}
        return HttpResponse(200, _encode(body))
    if "true" in parse_qs(call.query).get("stream", ()):
        text = "Only background responses can be streamed again, which are not supported."
        raise UnsupportedFeature(text, param="stream")
    return HttpResponse(200, bytes(_decode_body(stored.body).response))


def _list_input_items(query: str, stored: StoredResponse) -> HttpResponse:
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    limit = _read_limit(options.get("limit"))
    order = options.get("order", "desc")
    if order not in ("asc", "desc"):
        text = f"Invalid value: '{order[:64]}'. Supported values are: 'asc', 'desc'."
        raise InvalidParameter(text, param="order", problem="value", got=order)
    items = _decode_body(stored.body).input
    if order == "desc":
        items.reverse()
    if "after" in options:
        names = [item.get("id") for item in items]
        if options["after"] not in names:
            text = f"Item with id '{options['after'][:128]}' not found."
            raise InvalidParameter(text, param="after", problem="value", got=options["after"])
        items = items[names.index(options["after"]) + 1 :]
    page = items[:limit]
    body = {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": len(items) > limit,
    }
    return HttpResponse(200, _encode(body))


def _read_limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_PAGE
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else 0  # noqa: PLR2004
    if not 1 <= limit <= _MAX_PAGE:
        message = f"Invalid 'limit': expected an integer from 1 to {_MAX_PAGE}."
        problem = "above" if limit > _MAX_PAGE else "below"
        raise InvalidParameter(message, param="limit", problem=problem, got=limit)  # type: ignore[arg-type]
    return limit
