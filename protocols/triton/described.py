"""What the dialect tells of generate and generate_stream."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from gateway.core.errors import GatewayError, InvalidParameter, Malformed
from gateway.core.ports import Description
from protocols.schema import (
    EVENTS,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Schema,
    answer,
    array,
    body,
    data,
    record,
    ref,
    refusals,
    row,
    structs,
)
from protocols.triton.answer import Generated
from protocols.triton.refusal import STATUSES, ErrorBody, Status
from protocols.triton.tensors import RANGES
from protocols.triton.vocabulary import Datatype, Input, Profile

_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_PLAIN: Mapping[Datatype, Schema] = {"BYTES": TEXT, "BOOL": FLAG, "FP32": NUMBER}


def describe(profile: Profile, status: Status) -> Description:
    """See ``gateway.core.ports.Described``."""
    error = ref("ErrorBody")
    asked = body(_request(profile))
    refused = refusals(_statuses(status), error)
    early = {**refused["400"], "content": {**refused["400"]["content"], EVENTS: _event(error)}}
    generated = ref("Generated")
    return Description(
        {
            "generate": {
                "summary": "Go on from the prompt.",
                "requestBody": asked,
                "responses": {"200": answer(generated), **refused},
            },
            "generate_stream": {
                "summary": "Go on from the prompt, event by event.",
                "requestBody": asked,
                "responses": {
                    "200": answer(None, data({"anyOf": [generated, error]})),
                    **refused,
                    "400": early,
                },
            },
        },
        structs(Generated, ErrorBody),
    )


def _event(schema: Schema) -> dict[str, Any]:
    return {"schema": record({"data": data(schema)}, "data")}


def _statuses(status: Status) -> Iterator[tuple[type[GatewayError], int]]:
    unread = 500 if status == "strict" else 400
    yield Malformed, unread
    yield InvalidParameter, unread
    yield from STATUSES


def _request(profile: Profile) -> Schema:
    """Inputs and parameters side by side, or within ``parameters``; the first of a name counts."""
    inputs = {one.name: _input(one, profile) for one in profile.inputs.values()}
    others = {
        param.wire: TEXT if param.type == "strings" else row(replace(param, null=False))
        for param in profile.parameters
        if param.wire not in inputs and param.type not in {"ints", "string list"}
    }
    properties: dict[str, Schema] = {**inputs, **others}
    nested: Schema = {**record(properties), "additionalProperties": _SCALAR}
    needed = [one.name for one in profile.inputs.values() if not one.optional]
    return {
        **record({"id": TEXT, **properties, "parameters": nested}, *needed),
        "additionalProperties": _SCALAR,
    }


def _input(spec: Input, profile: Profile) -> Schema:
    element = _PLAIN.get(spec.datatype, WHOLE)
    if (held := RANGES.get(spec.datatype)) is not None:
        element = {**WHOLE, "minimum": held.start, "maximum": held.stop - 1}
    if spec.dims != (1,):
        return {"anyOf": [element, array(element)]}
    return {"anyOf": [element, array(element, minItems=1, maxItems=max(profile.batch, 1))]}
