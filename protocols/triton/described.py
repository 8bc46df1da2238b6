"""What the dialect tells of generate, generate_stream and infer, and of what it says of itself."""

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
    one_of,
    record,
    ref,
    refusals,
    row,
    structs,
)
from protocols.triton.answer import Generated
from protocols.triton.models import ConfigInput, ConfigOutput, Metadata
from protocols.triton.refusal import STATUSES, ErrorBody, Status
from protocols.triton.tensors import RANGES
from protocols.triton.vocabulary import Datatype, Input, Profile

_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_PLAIN: Mapping[Datatype, Schema] = {"BYTES": TEXT, "BOOL": FLAG, "FP32": NUMBER}


def describe(profile: Profile, status: Status) -> Description:
    """See ``gateway.core.ports.Described``."""
    error = ref("ErrorBody")
    asked = body(_request(profile))
    refused = _refused(status)
    early = {**refused["400"], "content": {**refused["400"]["content"], EVENTS: _event(error)}}
    generated = ref("Generated")
    return Description(
        {
            **_state(status),
            "infer": {
                "summary": "Go on from the prompt: tensors in, tensors out.",
                "requestBody": body(_tensors(profile)),
                "responses": {"200": _inferred(), **refused},
            },
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
        {
            **structs(Generated, ErrorBody, Metadata, ConfigInput, ConfigOutput),
            "Inferred": _INFERRED,
        },
    )


def _refused(status: Status) -> Schema:
    """The refusals; what is wrong with a path is plain text where it is as in the original."""
    return _plain(refusals(_statuses(status), ref("ErrorBody")), status, "404")


def _plain(responses: Schema, status: Status, *codes: str) -> Schema:
    """The responses, some of which the original labels as plain text."""
    if status != "strict":
        return responses
    found = dict(responses)
    for code in codes:
        content = {**found[code]["content"], "text/plain": {"schema": TEXT}}
        found[code] = {**found[code], "content": content}
    return found


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
    properties: dict[str, Schema] = {**inputs, **_parameters(profile)}
    nested: Schema = {**record(properties), "additionalProperties": _SCALAR}
    needed = [one.name for one in profile.inputs.values() if not one.optional]
    return {
        **record({"id": TEXT, **properties, "parameters": nested}, *needed),
        "additionalProperties": _SCALAR,
    }


def _parameters(profile: Profile) -> dict[str, Schema]:
    """Those that are no inputs, and have one value."""
    return {
        param.wire: TEXT if param.type == "strings" else row(replace(param, null=False))
        for param in profile.parameters
        if param.wire not in profile.inputs and param.type not in {"ints", "string list"}
    }


def _input(spec: Input, profile: Profile) -> Schema:
    element = _element(spec)
    if spec.dims != (1,):
        return {"anyOf": [element, array(element)]}
    return {"anyOf": [element, array(element, minItems=1, maxItems=max(profile.max_batch_size, 1))]}


def _element(spec: Input) -> Schema:
    held = RANGES.get(spec.datatype)
    if held is not None:
        return {**WHOLE, "minimum": held.start, "maximum": held.stop - 1}
    return _PLAIN.get(spec.datatype, WHOLE)


# --- infer ----------------------------------------------------------------------------------------


def _tensors(profile: Profile) -> Schema:
    """Tensors as JSON: what the model insists on, and then any others, each at most once.

    Of one prompt. Of several, every shape begins with their number, where the model knows batches.
    """
    inputs = profile.inputs.values()
    needed = [_tensor(one, profile) for one in inputs if not one.optional]
    others = [_tensor(one, profile) for one in inputs if one.optional]
    outputs = record({"name": one_of(*(one.name for one in profile.outputs))}, "name")
    return record(
        {
            "id": TEXT,
            "parameters": _beside(profile),
            "inputs": {
                "type": "array",
                "prefixItems": needed,
                "items": {"anyOf": others} if others else False,
                "minItems": len(needed),
                "description": "In any order.",
            },
            "outputs": array(outputs, minItems=1),
        },
        "inputs",
    )


def _tensor(spec: Input, profile: Profile) -> Schema:
    shape = [abs(length) for length in profile.build_shape(spec.dims)]
    tensor: dict[str, Schema] = {
        "name": {"const": spec.name},
        "datatype": {"const": spec.datatype},
        "shape": {"const": shape},
        "data": array(_element(spec), minItems=1, maxItems=1),
    }
    return record(tensor, *tensor)


def _beside(profile: Profile) -> Schema:
    """The parameters; those of the protocol's own, and the model's that are no inputs."""
    own: dict[str, Schema] = {
        "priority": {**WHOLE, "minimum": 0},
        "timeout": {**WHOLE, "minimum": 0, "description": "In microseconds."},
        "binary_data_output": {**FLAG, "description": "Whether data come as bytes behind JSON."},
    }
    return {**record({**_parameters(profile), **own}), "additionalProperties": _SCALAR}


def _inferred() -> Schema:
    """The answer: JSON, or JSON and bytes behind it."""
    found = answer(ref("Inferred"))
    bytes_: Schema = {"schema": {"type": "string", "format": "binary"}}
    return {**found, "content": {**found["content"], "application/octet-stream": bytes_}}


_INFERRED: Schema = record(
    {
        "id": TEXT,
        "model_name": TEXT,
        "model_version": TEXT,
        "outputs": array(
            record(
                {
                    "name": TEXT,
                    "datatype": TEXT,
                    "shape": array(WHOLE),
                    "data": array({}),
                },
                *("name", "datatype", "shape", "data"),
            )
        ),
    },
    *("model_name", "model_version", "outputs"),
)

# --- the state ------------------------------------------------------------------------------------


def _state(status: Status) -> dict[str, Any]:
    """What is said of the server and its models."""
    refused = _refused(status)
    operations: dict[str, Any] = {}
    for variant, (summary, schema) in _TOLD.items():
        responses = {"200": answer(TEXT if schema is None else schema), **refused}
        if schema is None:  # no body: status and label are all there is
            responses = _plain(responses, status, "200", "400")
        operations[variant] = {"summary": summary, "responses": responses}
    return operations


_SERVER: Schema = record(
    {"name": TEXT, "version": TEXT, "extensions": array(TEXT)}, "name", "version", "extensions"
)
_CONFIG: Schema = record(
    {
        "name": TEXT,
        "platform": TEXT,
        "backend": TEXT,
        "max_batch_size": WHOLE,
        "input": array(ref("ConfigInput")),
        "output": array(ref("ConfigOutput")),
        "model_transaction_policy": record({"decoupled": FLAG}, "decoupled"),
    },
    *("name", "platform", "backend", "max_batch_size", "input", "output"),
)
_TOLD: Mapping[str, tuple[str, Schema | None]] = {
    "server": ("Tell of the server.", _SERVER),
    "live": ("Whether the server lives.", None),
    "ready": ("Whether the server can answer.", None),
    "model": ("Tell what a model takes and gives.", ref("Metadata")),
    "model_ready": ("Whether a model can answer.", None),
    "config": ("Tell how a model is set up.", _CONFIG),
}
