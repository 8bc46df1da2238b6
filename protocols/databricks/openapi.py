"""OpenAPI description of the endpoints."""

from collections.abc import Mapping

from protocols.chat import openapi
from protocols.chat.errors import ErrorBody
from protocols.core.interfaces import OpenApiFragment
from protocols.databricks import errors, listing, params
from protocols.databricks.requests import REQUEST_RULES, STRICT_FIELDS, RequestTask
from protocols.databricks.responses import RESPONSE_STYLE
from protocols.openapi import (
    NONEMPTY_STRING,
    STRING,
    Schema,
    array_of,
    build_error_responses,
    build_event_data,
    build_param_schema,
    build_request_body,
    build_response,
    build_struct_schemas,
    map_of,
    nullable,
    object_of,
    ref,
)

_STRING_OR_STRINGS: Schema = {"anyOf": [STRING, array_of(STRING, minItems=1)]}
_INPUT_SCHEMA: Schema = {
    "anyOf": [
        NONEMPTY_STRING,
        array_of(NONEMPTY_STRING, minItems=1, maxItems=REQUEST_RULES.max_inputs),
    ]
}
_THINKING_SCHEMA: Schema = {
    "anyOf": [
        object_of({"type": {"const": "disabled"}}, "type"),
        object_of(
            {
                "type": {"const": "enabled"},
                "budget_tokens": {"type": "integer", "minimum": 1},
            },
            "type",
            "budget_tokens",
        ),
    ]
}
_EXTRA_PROPERTIES: Mapping[str, Schema] = {
    "extra_params": {
        **nullable({"type": "object"}),
        "description": "Further parameters; a field of the request's own wins.",
    },
    "usage_context": nullable(map_of(STRING)),
}
_TASK_PROPERTIES: Mapping[RequestTask, Mapping[str, Schema]] = {
    "chat": {"thinking": nullable(_THINKING_SCHEMA)},
    "completion": {
        "prompt": _STRING_OR_STRINGS,
        "use_raw_prompt": build_param_schema(params.USE_RAW_PROMPT),
    },
    "embedding": {"input": _INPUT_SCHEMA},
}
_RESPONSE_NAMES: Mapping[RequestTask, str] = {
    "chat": "ChatAnswer",
    "completion": "TextAnswer",
    "embedding": "EmbeddingList",
}


def describe_api() -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    refused = build_error_responses(errors.ERROR_STATUSES, ref("DatabricksErrorBody"))
    failed = ref("StreamFailed")
    operations = openapi.build_operations(REQUEST_RULES, refused, failed)
    bodies: dict[RequestTask, Schema] = {
        "chat": openapi.build_chat_request(REQUEST_RULES, kinds=("function",)),
        "completion": openapi.build_completion_request(REQUEST_RULES),
        "embedding": openapi.build_embedding_request(REQUEST_RULES),
    }
    for task, schema in bodies.items():
        schema["properties"] |= {**_TASK_PROPERTIES[task], **_EXTRA_PROPERTIES}
        operations[task] = {**operations[task], "requestBody": build_request_body(schema)}
    chunk: Schema = {"anyOf": [ref("ChatChunk"), ref("TextChunk"), failed]}
    whole: Schema = {"anyOf": [ref(name) for name in _RESPONSE_NAMES.values()]}
    operations["invocations"] = {
        "summary": "Query one endpoint; the fields decide: chat, completion or embeddings.",
        "requestBody": build_request_body(
            {"anyOf": [_restrict_properties(bodies[task], task) for task in bodies]}
        ),
        "responses": {"200": build_response(whole, build_event_data(chunk, "[DONE]")), **refused},
    }
    for variant, (summary, schema) in _LISTING_OPERATIONS.items():
        responses = {"200": build_response(schema), **refused}
        operations[variant] = {"summary": summary, "responses": responses}
    return OpenApiFragment(
        operations,
        {
            **openapi.build_response_schemas(RESPONSE_STYLE),
            **build_struct_schemas(
                listing.ServingEndpoint,
                listing.ServingEndpointList,
                listing.DatabricksModelList,
                errors.DatabricksErrorBody,
            ),
            **build_struct_schemas(ErrorBody),
            "StreamFailed": object_of({"error": ref("ErrorBody")}, "error"),
        },
    )


_LISTING_OPERATIONS: Mapping[str, tuple[str, Schema]] = {
    "endpoints": ("List the endpoints.", ref("ServingEndpointList")),
    "endpoint": ("Tell of one endpoint.", ref("ServingEndpoint")),
    "models": ("List the endpoints as models.", ref("DatabricksModelList")),
    "config": ("Tell of the host; every field is optional, and a gateway has none.", object_of({})),
}


def _restrict_properties(schema: Schema, task: RequestTask) -> Schema:
    """The body where the path names the model and other fields are rejected."""
    known = STRICT_FIELDS[task]
    properties = {name: one for name, one in schema["properties"].items() if name in known}
    properties["model"] = {"description": "Ignored: the path names the endpoint."}
    needed = [name for name in schema["required"] if name != "model"]
    return object_of(properties, *needed, more=False)
