"""What the dialect tells of generate, generate_stream and infer, and of what it says of itself."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from protocols.core.errors import GatewayError, InvalidParameter, MalformedRequest
from protocols.core.interfaces import OpenApiFragment
from protocols.openapi import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    SSE_CONTENT_TYPE,
    STRING,
    Schema,
    array_of,
    build_error_responses,
    build_event_data,
    build_param_schema,
    build_request_body,
    build_response,
    build_struct_schemas,
    enum_of,
    object_of,
    ref,
)
from protocols.triton.errors import ERROR_STATUSES, ErrorBody, StatusMode
from protocols.triton.metadata import ConfigInput, ConfigOutput, ModelMetadata
from protocols.triton.params import Datatype, InputSpec, TritonProfile
from protocols.triton.responses import GenerateResponse
from protocols.triton.tensors import INTEGER_RANGES

_SCALAR_SCHEMA: Schema = {"type": ["string", "number", "boolean"]}
_DATATYPE_SCHEMAS: Mapping[Datatype, Schema] = {"BYTES": STRING, "BOOL": BOOLEAN, "FP32": NUMBER}


def describe_api(profile: TritonProfile, status: StatusMode) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    error = ref("ErrorBody")
    asked = build_request_body(_build_request_schema(profile))
    refused = _describe_errors(status)
    early = {
        **refused["400"],
        "content": {**refused["400"]["content"], SSE_CONTENT_TYPE: _build_event_schema(error)},
    }
    generated = ref("GenerateResponse")
    return OpenApiFragment(
        {
            **_describe_info_endpoints(status),
            "infer": {
                "summary": "Go on from the prompt: tensors in, tensors out.",
                "requestBody": build_request_body(_build_infer_request_schema(profile)),
                "responses": {"200": _build_infer_response(), **refused},
            },
            "generate": {
                "summary": "Go on from the prompt.",
                "requestBody": asked,
                "responses": {"200": build_response(generated), **refused},
            },
            "generate_stream": {
                "summary": "Go on from the prompt, event by event.",
                "requestBody": asked,
                "responses": {
                    "200": build_response(None, build_event_data({"anyOf": [generated, error]})),
                    **refused,
                    "400": early,
                },
            },
        },
        {
            **build_struct_schemas(
                GenerateResponse, ErrorBody, ModelMetadata, ConfigInput, ConfigOutput
            ),
            "Inferred": _INFER_RESPONSE_SCHEMA,
        },
    )


def _describe_errors(status: StatusMode) -> Schema:
    """The refusals; what is wrong with a path is plain text where it is as in the original."""
    return _add_plain_text(
        build_error_responses(_iter_statuses(status), ref("ErrorBody")), status, "404"
    )


def _add_plain_text(responses: Schema, status: StatusMode, *codes: str) -> Schema:
    """The responses, some of which the original labels as plain text."""
    if status != "strict":
        return responses
    found = dict(responses)
    for code in codes:
        content = {**found[code]["content"], "text/plain": {"schema": STRING}}
        found[code] = {**found[code], "content": content}
    return found


def _build_event_schema(schema: Schema) -> dict[str, Any]:
    return {"schema": object_of({"data": build_event_data(schema)}, "data")}


def _iter_statuses(status: StatusMode) -> Iterator[tuple[type[GatewayError], int]]:
    unread = 500 if status == "strict" else 400
    yield MalformedRequest, unread
    yield InvalidParameter, unread
    yield from ERROR_STATUSES


def _build_request_schema(profile: TritonProfile) -> Schema:
    """Inputs and parameters side by side, or within ``parameters``; the first of a name counts."""
    inputs = {one.name: _build_input_schema(one, profile) for one in profile.inputs.values()}
    properties: dict[str, Schema] = {**inputs, **_build_parameter_schemas(profile)}
    nested: Schema = {**object_of(properties), "additionalProperties": _SCALAR_SCHEMA}
    needed = [one.name for one in profile.inputs.values() if not one.optional]
    return {
        **object_of({"id": STRING, **properties, "parameters": nested}, *needed),
        "additionalProperties": _SCALAR_SCHEMA,
    }


def _build_parameter_schemas(profile: TritonProfile) -> dict[str, Schema]:
    """Those that are no inputs, and have one value."""
    return {
        param.wire: STRING
        if param.type == "strings"
        else build_param_schema(replace(param, nullable=False))
        for param in profile.parameters
        if param.wire not in profile.inputs and param.type not in {"ints", "string list"}
    }


def _build_input_schema(spec: InputSpec, profile: TritonProfile) -> Schema:
    element = _build_element_schema(spec)
    if spec.dims != (1,):
        return {"anyOf": [element, array_of(element)]}
    return {
        "anyOf": [element, array_of(element, minItems=1, maxItems=max(profile.max_batch_size, 1))]
    }


def _build_element_schema(spec: InputSpec) -> Schema:
    held = INTEGER_RANGES.get(spec.datatype)
    if held is not None:
        return {**INTEGER, "minimum": held.start, "maximum": held.stop - 1}
    return _DATATYPE_SCHEMAS.get(spec.datatype, INTEGER)


# --- infer ----------------------------------------------------------------------------------------


def _build_infer_request_schema(profile: TritonProfile) -> Schema:
    """Tensors as JSON: what the model insists on, and then any others, each at most once.

    Of one prompt. Of several, every shape begins with their number, where the model knows batches.
    """
    inputs = profile.inputs.values()
    needed = [_build_tensor_schema(one, profile) for one in inputs if not one.optional]
    others = [_build_tensor_schema(one, profile) for one in inputs if one.optional]
    outputs = object_of({"name": enum_of(*(one.name for one in profile.outputs))}, "name")
    return object_of(
        {
            "id": STRING,
            "parameters": _build_infer_parameters_schema(profile),
            "inputs": {
                "type": "array",
                "prefixItems": needed,
                "items": {"anyOf": others} if others else False,
                "minItems": len(needed),
                "description": "In any order.",
            },
            "outputs": array_of(outputs, minItems=1),
        },
        "inputs",
    )


def _build_tensor_schema(spec: InputSpec, profile: TritonProfile) -> Schema:
    shape = [abs(length) for length in profile.build_shape(spec.dims)]
    tensor: dict[str, Schema] = {
        "name": {"const": spec.name},
        "datatype": {"const": spec.datatype},
        "shape": {"const": shape},
        "data": array_of(_build_element_schema(spec), minItems=1, maxItems=1),
    }
    return object_of(tensor, *tensor)


def _build_infer_parameters_schema(profile: TritonProfile) -> Schema:
    """The parameters; those of the protocol's own, and the model's that are no inputs."""
    own: dict[str, Schema] = {
        "priority": {**INTEGER, "minimum": 0},
        "timeout": {**INTEGER, "minimum": 0, "description": "In microseconds."},
        "binary_data_output": {**BOOLEAN, "description": "Whether data come as bytes behind JSON."},
    }
    return {
        **object_of({**_build_parameter_schemas(profile), **own}),
        "additionalProperties": _SCALAR_SCHEMA,
    }


def _build_infer_response() -> Schema:
    """The answer: JSON, or JSON and bytes behind it."""
    found = build_response(ref("Inferred"))
    bytes_: Schema = {"schema": {"type": "string", "format": "binary"}}
    return {**found, "content": {**found["content"], "application/octet-stream": bytes_}}


_INFER_RESPONSE_SCHEMA: Schema = object_of(
    {
        "id": STRING,
        "model_name": STRING,
        "model_version": STRING,
        "outputs": array_of(
            object_of(
                {
                    "name": STRING,
                    "datatype": STRING,
                    "shape": array_of(INTEGER),
                    "data": array_of({}),
                },
                *("name", "datatype", "shape", "data"),
            )
        ),
    },
    *("model_name", "model_version", "outputs"),
)

# --- the state ------------------------------------------------------------------------------------


def _describe_info_endpoints(status: StatusMode) -> dict[str, Any]:
    """What is said of the server and its models."""
    refused = _describe_errors(status)
    operations: dict[str, Any] = {}
    for variant, (summary, schema) in _INFO_OPERATIONS.items():
        responses = {"200": build_response(STRING if schema is None else schema), **refused}
        if schema is None:  # no body: status and label are all there is
            responses = _add_plain_text(responses, status, "200", "400")
        operations[variant] = {"summary": summary, "responses": responses}
    return operations


_SERVER_METADATA_SCHEMA: Schema = object_of(
    {"name": STRING, "version": STRING, "extensions": array_of(STRING)},
    "name",
    "version",
    "extensions",
)
_MODEL_CONFIG_SCHEMA: Schema = object_of(
    {
        "name": STRING,
        "platform": STRING,
        "backend": STRING,
        "max_batch_size": INTEGER,
        "input": array_of(ref("ConfigInput")),
        "output": array_of(ref("ConfigOutput")),
        "model_transaction_policy": object_of({"decoupled": BOOLEAN}, "decoupled"),
    },
    *("name", "platform", "backend", "max_batch_size", "input", "output"),
)
_INFO_OPERATIONS: Mapping[str, tuple[str, Schema | None]] = {
    "server": ("Tell of the server.", _SERVER_METADATA_SCHEMA),
    "live": ("Whether the server lives.", None),
    "ready": ("Whether the server can answer.", None),
    "model": ("Tell what a model takes and gives.", ref("ModelMetadata")),
    "model_ready": ("Whether a model can answer.", None),
    "config": ("Tell how a model is set up.", _MODEL_CONFIG_SCHEMA),
}
