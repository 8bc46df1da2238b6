"""What the dialect tells of itself."""

from collections.abc import Mapping

from gateway.core.ports import Description
from protocols.databricks import errors, listing, tables
from protocols.databricks.answers import STYLE
from protocols.databricks.requests import READING, STRICT, Task
from protocols.openai import described
from protocols.openai.errors import ErrorBody
from protocols.schema import (
    NONEMPTY,
    TEXT,
    Schema,
    answer,
    array,
    body,
    data,
    mapping,
    optional,
    record,
    ref,
    refusals,
    row,
    structs,
)

_TEXTS: Schema = {"anyOf": [TEXT, array(TEXT, minItems=1)]}
_INPUTS: Schema = {"anyOf": [NONEMPTY, array(NONEMPTY, minItems=1, maxItems=READING.max_inputs)]}
_THINKING: Schema = {
    "anyOf": [
        record({"type": {"const": "disabled"}}, "type"),
        record(
            {
                "type": {"const": "enabled"},
                "budget_tokens": {"type": "integer", "minimum": 1},
            },
            "type",
            "budget_tokens",
        ),
    ]
}
_BESIDE: Mapping[str, Schema] = {
    "extra_params": {
        **optional({"type": "object"}),
        "description": "Further parameters; a field of the request's own wins.",
    },
    "usage_context": optional(mapping(TEXT)),
}
_OWN: Mapping[Task, Mapping[str, Schema]] = {
    "chat": {"thinking": optional(_THINKING)},
    "completion": {"prompt": _TEXTS, "use_raw_prompt": row(tables.USE_RAW_PROMPT)},
    "embedding": {"input": _INPUTS},
}
_ANSWERS: Mapping[Task, str] = {
    "chat": "ChatAnswer",
    "completion": "TextAnswer",
    "embedding": "VectorList",
}


def describe() -> Description:
    """See ``gateway.core.ports.Described``."""
    refused = refusals(errors.STATUSES, ref("Body"))
    failed = ref("StreamFailed")
    operations = described.operations(READING, refused, failed)
    bodies: dict[Task, Schema] = {
        "chat": described.chat(READING, kinds=("function",)),
        "completion": described.completion(READING),
        "embedding": described.embedding(READING),
    }
    for task, schema in bodies.items():
        schema["properties"] |= {**_OWN[task], **_BESIDE}
        operations[task] = {**operations[task], "requestBody": body(schema)}
    chunk: Schema = {"anyOf": [ref("ChatChunk"), ref("TextChunk"), failed]}
    whole: Schema = {"anyOf": [ref(name) for name in _ANSWERS.values()]}
    operations["invocations"] = {
        "summary": "Ask one endpoint: a conversation, a completion or vectors, by the fields.",
        "requestBody": body({"anyOf": [_strict(bodies[task], task) for task in bodies]}),
        "responses": {"200": answer(whole, data(chunk, "[DONE]")), **refused},
    }
    for variant, (summary, schema) in _TOLD.items():
        responses = {"200": answer(schema), **refused}
        operations[variant] = {"summary": summary, "responses": responses}
    return Description(
        operations,
        {
            **described.answers(STYLE),
            **structs(listing.ServingEndpoint, listing.Endpoints, listing.Models, errors.Body),
            **structs(ErrorBody),
            "StreamFailed": record({"error": ref("ErrorBody")}, "error"),
        },
    )


_TOLD: Mapping[str, tuple[str, Schema]] = {
    "endpoints": ("List the endpoints.", ref("Endpoints")),
    "endpoint": ("Tell of one endpoint.", ref("ServingEndpoint")),
    "models": ("List the endpoints as models.", ref("Models")),
    "config": ("Tell of the host; every field is optional, and a gateway has none.", record({})),
}


def _strict(schema: Schema, task: Task) -> Schema:
    """The body where the path names the model and no other field is taken."""
    known = STRICT[task]
    properties = {name: one for name, one in schema["properties"].items() if name in known}
    properties["model"] = {"description": "Says nothing here: the path names the endpoint."}
    needed = [name for name in schema["required"] if name != "model"]
    return record(properties, *needed, more=False)
