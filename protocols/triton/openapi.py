"""OpenAPI of generate, generate_stream, infer and the metadata endpoints."""

from collections.abc import Iterator, Mapping
from typing import Final

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
    build_operation,
    build_param_schema,
    build_response,
    build_struct_schemas,
    enum_of,
    object_of,
    parse_type,
    parse_types,
    ref,
)
from protocols.prompt_form import PromptForm, find_parameters
from protocols.triton.errors import ERROR_STATUSES, ErrorBody, StatusMode
from protocols.triton.metadata import ConfigInput, ConfigOutput, ModelMetadata
from protocols.triton.params import PROMPT_INPUT, Datatype, InputSpec, TritonProfile
from protocols.triton.responses import GenerateResponse
from protocols.triton.tensors import INTEGER_RANGES

_SCALAR_SCHEMA: Schema = {"type": ["string", "number", "boolean"]}
_DATATYPE_SCHEMAS: Mapping[Datatype, Schema] = {"BYTES": STRING, "BOOL": BOOLEAN, "FP32": NUMBER}


def _build_form(profile: TritonProfile) -> PromptForm:
    return PromptForm(
        label="generate",
        body={PROMPT_INPUT: "$prompt", **dict.fromkeys(profile.exclude_prompt_flags[:1], True)},
        parameters=find_parameters(profile.parameters),
        stream_flag=profile.stream_flags[0],
        stream_suffix="_stream",
    )


def describe_api(profile: TritonProfile, status: StatusMode) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    request = _build_request_schema(profile)
    failures = _describe_errors(status)
    event = build_event_data(parse_type("GenerateResponse | ErrorBody"))
    early_event = {"schema": object_of({"data": build_event_data(ref("ErrorBody"))}, "data")}
    content = failures["400"]["content"] | {SSE_CONTENT_TYPE: early_event}
    return OpenApiFragment(
        {
            **_describe_info_endpoints(status, failures),
            "infer": build_operation(
                "Complete a prompt: tensors in, tensors out.",
                _build_infer_response(),
                failures,
                request=_build_infer_request_schema(profile),
            ),
            "generate": build_operation(
                "Complete a prompt.",
                build_response(ref("GenerateResponse")),
                failures,
                request=request,
            )
            | _build_form(profile).describe(),
            "generate_stream": build_operation(
                "Complete a prompt, event by event.",
                build_response(None, event),
                {**failures, "400": {**failures["400"], "content": content}},
                request=request,
            ),
        },
        {
            **build_struct_schemas(
                GenerateResponse, ErrorBody, ModelMetadata, ConfigInput, ConfigOutput
            ),
            **_COMPONENTS,
        },
    )


def _describe_errors(status: StatusMode) -> Schema:
    """Error responses; for path errors plain text, as in Triton."""
    return _add_plain_text(
        build_error_responses(_iter_statuses(status), ref("ErrorBody")), status, "404"
    )


def _add_plain_text(responses: Schema, status: StatusMode, *codes: str) -> Schema:
    """Build the responses, some of which Triton labels as plain text."""
    if status != "strict":
        return responses
    labelled = dict(responses)
    for code in codes:
        content = {**labelled[code]["content"], "text/plain": {"schema": STRING}}
        labelled[code] = {**labelled[code], "content": content}
    return labelled


def _iter_statuses(status: StatusMode) -> Iterator[tuple[type[GatewayError], int]]:
    unread = 500 if status == "strict" else 400
    yield MalformedRequest, unread
    yield InvalidParameter, unread
    yield from ERROR_STATUSES


def _build_request_schema(profile: TritonProfile) -> Schema:
    """Inputs and parameters, at the top level or in ``parameters``; the first of a name counts."""
    inputs = {one.name: _build_input_schema(one, profile) for one in profile.inputs.values()}
    properties: dict[str, Schema] = {**inputs, **_build_parameter_schemas(profile)}
    nested: Schema = {**object_of(properties), "additionalProperties": _SCALAR_SCHEMA}
    needed = [one.name for one in profile.inputs.values() if not one.optional]
    return {
        **object_of({"id": STRING, **properties, "parameters": nested}, *needed),
        "additionalProperties": _SCALAR_SCHEMA,
    }


def _build_parameter_schemas(profile: TritonProfile) -> dict[str, Schema]:
    """The parameters that are not inputs, and have one value."""
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
    values = INTEGER_RANGES.get(spec.datatype)
    if values is not None:
        return {**INTEGER, "minimum": values.start, "maximum": values.stop - 1}
    return _DATATYPE_SCHEMAS.get(spec.datatype, INTEGER)


# --- infer ----------------------------------------------------------------------------------------


def _build_infer_request_schema(profile: TritonProfile) -> Schema:
    """The schema of JSON tensors: the required ones, then any others, each at most once.

    Shapes are for one prompt; with several, each shape starts with the batch size, if supported.
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
    """The schema of the parameters: the protocol's own, and those of the model."""
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
    """The schema of a response: JSON, or JSON followed by binary data."""
    response = build_response(ref("InferResponse"))
    binary: Schema = {"schema": {"type": "string", "format": "binary"}}
    return {**response, "content": {**response["content"], "application/octet-stream": binary}}


# --- metadata -------------------------------------------------------------------------------------

_COMPONENTS: Final = parse_types(
    """
    InferOutput = {name: string, datatype: string, shape: integer[], data: any[]}
    InferResponse = {
        id?: string, model_name: string, model_version: string, outputs: InferOutput[],
    }
    ServerMetadata = {name: string, version: string, extensions: string[]}
    ModelConfig = {
        name: string, platform: string, backend: string, max_batch_size: integer,
        input: ConfigInput[], output: ConfigOutput[],
        model_transaction_policy?: {decoupled: boolean},
    }
    """
)
_INFO_OPERATIONS: Final[Mapping[str, tuple[str, Schema | None]]] = {
    "server": ("Describe the server.", ref("ServerMetadata")),
    "live": ("Whether the server is alive.", None),
    "ready": ("Whether the server can answer.", None),
    "model": ("List the inputs and outputs of a model.", ref("ModelMetadata")),
    "model_ready": ("Whether a model can answer.", None),
    "config": ("Show the configuration of a model.", ref("ModelConfig")),
}


def _describe_info_endpoints(
    status: StatusMode, failures: Mapping[str, Schema]
) -> dict[str, Schema]:
    """The metadata endpoints."""
    operations = {}
    for name, (summary, schema) in _INFO_OPERATIONS.items():
        operation = build_operation(summary, build_response(schema or STRING), failures)
        if schema is None:  # no body: only status and content type
            operation["responses"] = _add_plain_text(operation["responses"], status, "200", "400")
        operations[name] = operation
    return operations
