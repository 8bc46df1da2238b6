"""OpenAPI of requests and responses."""

from typing import Final

from protocols.chat import openapi as chat_openapi
from protocols.chat.responses import ResponseStyle
from protocols.core.interfaces import OpenApiFragment
from protocols.openapi import (
    CONDITION_RESPONSE,
    NONEMPTY_STRING,
    Schema,
    build_error_responses,
    build_event_data,
    build_operation,
    build_properties,
    build_response,
    build_struct_schemas,
    nullable,
    object_of,
    parse_type,
    parse_types,
    ref,
)
from protocols.params import ParamTable
from protocols.prompt_form import PromptForm, find_parameters
from protocols.tgi.errors import ERROR_STATUSES, TgiError
from protocols.tgi.requests import CHAT_RULES
from protocols.tgi.responses import GenerateResponse, StreamResponse

_GRAMMAR: Final = parse_type(
    """
    {type: "json" | "json_object" | "json_schema" | "regex", value?: object | string} | null
    """
)
_ANSWER_TYPES: Final = parse_types(
    """
    Info = {
        model_id: string, model_sha: null, model_pipeline_tag: string,
        max_concurrent_requests: null, max_best_of: integer, max_stop_sequences: integer,
        max_input_tokens: integer | null, max_total_tokens: integer | null,
        validation_workers: integer, max_client_batch_size: integer, router: string,
        version: string, sha: null, docker_label: null,
    }
    TokenOffsets = {id: integer, text: string, start: integer, stop: integer}
    TokenList = TokenOffsets[]
    """
)


def describe_api(table: ParamTable, *, v1: bool) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    error = ref("TgiError")
    failures = build_error_responses(ERROR_STATUSES, error)
    event = build_event_data({"anyOf": [ref("StreamResponse"), error]})
    answer = ref("GenerateResponse")
    parameters = nullable(object_of({**build_properties(table), "grammar": _GRAMMAR}))
    body = object_of(
        {
            "inputs": NONEMPTY_STRING,
            "parameters": parameters,
            "model": {
                **nullable({"type": "string"}),
                "description": "A model's name, if the listener has no model of its own.",
            },
        },
        "inputs",
    )
    form = PromptForm(
        label="generate",
        body={"model": "$model", "inputs": "$prompt"},
        parameters=find_parameters(table, "parameters."),
        stream_suffix="_stream",
    )
    root = {**body, "properties": {**body["properties"], "stream": nullable({"type": "boolean"})}}
    listed = parse_type("Answer[1..1] | Vectors", Answer=answer, Vectors=_VECTORS)
    schemas = build_struct_schemas(GenerateResponse, StreamResponse, TgiError)
    operations = {
        "root": build_operation(
            "Complete a prompt.", build_response(listed, event), failures, request=root
        ),
        "generate": build_operation(
            "Complete a prompt.", build_response(answer), failures, request=body
        )
        | form.describe(),
        "generate_stream": build_operation(
            "Complete a prompt, as a stream.", build_response(None, event), failures, request=body
        ),
        "info": build_operation("Describe the model.", build_response(ref("Info")), failures),
        "health": build_operation("Whether the server can answer.", CONDITION_RESPONSE, failures),
        "tokenize": build_operation(
            "List the tokens of a text.",
            build_response(ref("TokenList")),
            failures,
            request=body,
        ),
    }
    schemas |= _ANSWER_TYPES
    if v1:
        operations |= _describe_v1(failures, error)
        schemas |= chat_openapi.build_response_schemas(ResponseStyle())
    return OpenApiFragment(operations, schemas)


_VECTORS: Final[Schema] = parse_type(
    "Vector[]", Vector={"type": "array", "items": {"type": "number"}}
)


def _describe_v1(failures: Schema, error: Schema) -> dict[str, Schema]:
    described = chat_openapi.build_operations(CHAT_RULES, failures, error)
    return {name: described[name] for name in ("chat", "completion")}
