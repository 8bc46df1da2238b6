"""OpenAPI description of the endpoints."""

from collections.abc import Mapping
from typing import Final

from protocols.chat import openapi
from protocols.chat.errors import ErrorBody
from protocols.chat.requests import MAX_INPUTS
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
    build_operation,
    build_param_schema,
    build_request_body,
    build_response,
    build_struct_schemas,
    map_of,
    nullable,
    object_of,
    parse_types,
    ref,
)
from protocols.prompt_form import PromptForm

_FIELD_TYPES: Final = parse_types(
    """
    prompt = string | string[1..]
    input = NonemptyString | Inputs
    thinking = {type: "disabled"} | {type: "enabled", budget_tokens: Budget} | null
    usage_context = Context | null
    """,
    NonemptyString=NONEMPTY_STRING,
    Inputs=array_of(NONEMPTY_STRING, minItems=1, maxItems=MAX_INPUTS),
    Budget={"type": "integer", "minimum": 1},
    Context=map_of(STRING),
)
_SHARED_PROPERTIES: Final[Mapping[str, Schema]] = {
    "extra_params": {
        **nullable({"type": "object"}),
        "description": "Further parameters; a field of the request's own wins.",
    },
    "usage_context": _FIELD_TYPES["usage_context"],
}
_TASK_PROPERTIES: Final[Mapping[RequestTask, Mapping[str, Schema]]] = {
    "chat": {"thinking": _FIELD_TYPES["thinking"]},
    "completion": {
        "prompt": _FIELD_TYPES["prompt"],
        "use_raw_prompt": build_param_schema(params.USE_RAW_PROMPT),
    },
    "embedding": {"input": _FIELD_TYPES["input"]},
}
_LISTING_OPERATIONS: Final[Mapping[str, tuple[str, Schema]]] = {
    "endpoints": ("List the endpoints.", ref("ServingEndpointList")),
    "endpoint": ("Describe one endpoint.", ref("ServingEndpoint")),
    "models": ("List the endpoints as models.", ref("DatabricksModelList")),
    "config": ("Describe the host; every field is optional, a gateway has none.", object_of({})),
}


_INVOCATIONS_FORM: Final = PromptForm(
    label="invocations",
    body={"messages": "$messages"},
    parameters=openapi.CHAT_FORM.parameters,
    stream_flag="stream",
)


def describe_api() -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    failures = build_error_responses(errors.ERROR_STATUSES, ref("DatabricksErrorBody"))
    failure = ref("StreamFailed")
    operations = openapi.build_operations(REQUEST_RULES, failures, failure)
    bodies: dict[RequestTask, Schema] = {
        "chat": openapi.build_chat_request(REQUEST_RULES, tool_types=("FunctionTool",)),
        "completion": openapi.build_completion_request(REQUEST_RULES),
        "embedding": openapi.build_embedding_request(REQUEST_RULES),
    }
    for task, schema in bodies.items():
        schema["properties"] |= {**_TASK_PROPERTIES[task], **_SHARED_PROPERTIES}
        operations[task]["requestBody"] = build_request_body(schema)
    types = parse_types(
        """
        Response = ChatAnswer | TextAnswer | EmbeddingList
        Chunk = ChatChunk | TextChunk | StreamFailed
        StreamFailed = {error: ErrorBody}
        """
    )
    operations["invocations"] = (
        build_operation(
            "Query one endpoint; the fields decide: chat, completion or embeddings.",
            build_response(types["Response"], build_event_data(types["Chunk"], "[DONE]")),
            failures,
            request={"anyOf": [_restrict_properties(bodies[task], task) for task in bodies]},
        )
        | _INVOCATIONS_FORM.describe()
    )
    for name, (summary, schema) in _LISTING_OPERATIONS.items():
        operations[name] = build_operation(summary, build_response(schema), failures)
    return OpenApiFragment(
        operations,
        {
            **openapi.build_response_schemas(RESPONSE_STYLE),
            **build_struct_schemas(
                listing.ServingEndpoint,
                listing.ServingEndpointList,
                listing.DatabricksModelList,
                errors.DatabricksErrorBody,
                ErrorBody,
            ),
            "StreamFailed": types["StreamFailed"],
        },
    )


def _restrict_properties(schema: Schema, task: RequestTask) -> Schema:
    """The body where the path names the model and other fields are rejected."""
    properties = {
        name: value for name, value in schema["properties"].items() if name in STRICT_FIELDS[task]
    }
    properties["model"] = {"description": "Ignored: the path names the endpoint."}
    required = [name for name in schema["required"] if name != "model"]
    return object_of(properties, *required, more=False)
