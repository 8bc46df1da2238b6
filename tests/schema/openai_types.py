"""An OpenAPI document of OpenAI's four families of endpoints, from its own client's types.

The types have no ranges; ``LIMITS`` adds them from the published specification, so that most
generated requests are valid.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from openai.pagination import SyncPage
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types import completion_create_params as completion
from openai.types import embedding_create_params as embedding
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

Schema = dict[str, Any]

_JSON: Final = "application/json"
_PENALTY: Final = {"minimum": -2, "maximum": 2}
_SHARED: Final[Mapping[str, Schema]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": 8},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "max_tokens": {"minimum": 1},
    "stop": {"maxItems": 4, "items": {"type": "string", "minLength": 1}},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,6}$"},
        "additionalProperties": {"type": "integer", "minimum": -100, "maximum": 100},
    },
}
LIMITS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "/v1/chat/completions": {
        **_SHARED,
        "messages": {"minItems": 1},
        "max_completion_tokens": {"minimum": 1},
        "top_logprobs": {"minimum": 0, "maximum": 20},
        "tools": {"minItems": 1},
        "functions": {"minItems": 1},
    },
    "/v1/completions": {
        **_SHARED,
        "prompt": {"minItems": 1},
        "best_of": {"minimum": 0, "maximum": 20},
        "logprobs": {"minimum": 0, "maximum": 5},
    },
    "/v1/embeddings": {
        "input": {"minLength": 1, "minItems": 1},
        "dimensions": {"minimum": 1},
    },
}


def build_document(models: Mapping[str, str]) -> Schema:
    """Build the OpenAPI 3.1 document. ``models`` has the model for each path."""
    schemas: dict[str, Schema] = {}

    def schema(type_: Any) -> Schema:
        space = f"{len(schemas)}."  # a chunk's Choice differs from a response's
        template = f"#/components/schemas/{space}{{model}}"
        document = TypeAdapter(type_).json_schema(ref_template=template)
        schemas.update({space + name: one for name, one in document.pop("$defs", {}).items()})
        return document

    refused = {"type": "object", "properties": {"error": schema(ErrorObject)}}
    refused["required"] = ["error"]

    def ask(path: str, whole: Any, chunk: Any, *bodies: Any) -> Schema:
        limited_schemas = [apply_limits(schema(one), LIMITS[path], models[path]) for one in bodies]
        content = {_JSON: {"schema": schema(whole)}}
        if chunk is not None:
            before = set(schemas)
            content["text/event-stream"] = {"schema": build_event_schema(schema(chunk))}
            allow_null_finish_reason({name: schemas[name] for name in schemas.keys() - before})
        body = {"required": True, "content": {_JSON: {"schema": {"anyOf": limited_schemas}}}}
        return {"post": {"requestBody": body, "responses": build_responses(content, refused)}}

    def describe_type(type_: Any) -> Schema:
        return {"get": {"responses": build_responses({_JSON: {"schema": schema(type_)}}, refused)}}

    paths = {
        "/v1/chat/completions": ask(
            "/v1/chat/completions", ChatCompletion, ChatCompletionChunk, *list_body_types(chat)
        ),
        "/v1/completions": ask(
            "/v1/completions", Completion, Completion, *list_body_types(completion)
        ),
        "/v1/embeddings": ask(
            "/v1/embeddings", CreateEmbeddingResponse, None, embedding.EmbeddingCreateParams
        ),
        "/v1/models": describe_type(SyncPage[Model]),
        "/v1/models/{model}": {
            **describe_type(Model),
            "parameters": [build_path_parameter("model")],
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "The client's types", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def list_body_types(module: Any) -> Iterable[Any]:
    return module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming


def apply_limits(body: Schema, limits: Mapping[str, Schema], model: str) -> Schema:
    """Return the body's schema with its model, and with limits where the type fits."""
    properties = body["properties"]
    properties["model"] = {"const": model}
    for name, limit in limits.items():
        properties[name] = {"allOf": [properties[name], limit]}
    return body


def build_event_schema(chunk: Schema) -> Schema:
    """Build the schema of one event of a stream."""
    data_schema = {"type": "string", "contentMediaType": _JSON, "contentSchema": chunk}
    data = {"anyOf": [{"const": "[DONE]"}, data_schema]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def allow_null_finish_reason(schemas: Mapping[str, Schema]) -> None:
    """Completion chunks have no finish reason before the last, unlike their type."""
    for name, schema in schemas.items():
        if name.endswith(".CompletionChoice"):
            reason = schema["properties"]["finish_reason"]
            schema["properties"]["finish_reason"] = {"anyOf": [reason, {"type": "null"}]}


def build_responses(content: Schema, refused: Schema) -> Schema:
    refusal = {"description": "Refused.", "content": {_JSON: {"schema": refused}}}
    return {"200": {"description": "Answered.", "content": content}, "400": refusal, "404": refusal}


def build_path_parameter(name: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}
