"""OpenAPI of the parameters and responses."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from msgspec.structs import replace

from protocols.chat.openapi import CHAT_FORM, COMPLETION_FORM
from protocols.chat.responses import GenerationUsage
from protocols.core.interfaces import OpenApiFragment
from protocols.openapi import (
    BOOLEAN,
    CONDITION_RESPONSE,
    INTEGER,
    NONEMPTY_STRING,
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
    map_of,
    nullable,
    object_of,
    parse_type,
    parse_types,
    ref,
)
from protocols.ovms import errors, params, requests
from protocols.ovms.responses import (
    EmbeddingList,
    KserveServerMetadata,
    ModelList,
    RerankResults,
)
from protocols.params import Param

# --- requests -------------------------------------------------------------------------------------

_MODEL_SCHEMA: Final[Schema] = {
    **NONEMPTY_STRING,
    "description": "A model's name; the list of models has all.",
}
_INPUT_LIMITS: Final = {"minItems": 1, "maxItems": requests.MAX_INPUTS}
_TOKENS_SCHEMA: Final = array_of(INTEGER, minItems=1)
_FIELD_TYPES: Final = parse_types(
    """
    Part = {type: "text", text: string}
        | {type: "image_url", image_url: {url: string}}
        | {type: "input_audio", input_audio: {data: string, format?: string}}
    FunctionCall = {name?: string, arguments?: string | object}
    Message = {
        role: "system" | "developer" | "user" | "assistant" | "tool" | "function",
        content?: string | Part[] | null, name?: string | null, reasoning_content?: string | null,
        tool_calls?: {id?: string, type?: "function", function: FunctionCall}[] | null,
        tool_call_id?: string | null,
    }
    messages = Message[1..]
    prompt = NonemptyString
    Function = {
        name: string, description?: string | null, parameters?: object, strict?: boolean | null,
    }
    Tool = {type?: "function", function: Function} | {...Function, type: "function"}
    tools = Tool[] | null
    tool_choice = "none" | "auto" | "required" | {function: {name: string}}
        | {type: "function", name: string} | null
    JsonSchema = {
        schema: object, name?: string | null, description?: string | null, strict?: boolean | null,
    }
    response_format = {type: "text" | "json_object"}
        | {type: "json_schema", json_schema: JsonSchema} | null
    chat_template_kwargs = object | null
    stream_options = StreamOptions
    user = string | null
    input = string | Tokens | Texts | TokenLists
    encoding_format = "float" | "base64"
    """,
    NonemptyString=NONEMPTY_STRING,
    Tokens=_TOKENS_SCHEMA,
    Texts=array_of(STRING, **_INPUT_LIMITS),
    TokenLists=array_of(_TOKENS_SCHEMA, **_INPUT_LIMITS),
    StreamOptions={
        **nullable(object_of({"include_usage": BOOLEAN}, more=False)),
        "description": "Of a stream only.",
    },
)
_INTEGER_RANGES: Final = {row.param.wire: row.integer_range for row in params.ALL_PARAMS}
_CHAT_FIELDS: Final = ("tools", "tool_choice", "response_format", "chat_template_kwargs")
_LATER_FIELDS: Final = ("stream_options", "user")
"""Fields that the first release ignores."""


def _build_request(content: str, table: tuple[Param, ...], *fields: str) -> Schema:
    """The body with a model's name and ``content``, a parameter table and further fields."""
    count = nullable({**INTEGER, "minimum": 1, "maximum": requests.BEST_OF_LIMIT - 1})
    properties = {
        "model": _MODEL_SCHEMA,
        "stream": {**BOOLEAN, "default": False},
        **{param.wire: _build_param_schema(param) for param in table},
        "best_of": {**count, "description": "Beams; not in a stream."},
        "n": {**count, "description": "Not more than best_of."},
        **{name: _FIELD_TYPES[name] for name in (content, *fields)},
    }
    return object_of(properties, "model", content)


def _build_param_schema(param: Param) -> Schema:
    """The row's schema, limited to what the server's JSON library accepts."""
    if param.type not in ("strict int", "float"):
        return build_param_schema(param)
    low, high = _INTEGER_RANGES[param.wire]
    return build_param_schema(
        replace(
            param,
            minimum=low if param.minimum is None else param.minimum,
            maximum=high if param.maximum is None else param.maximum,
        )
    )


# --- responses ------------------------------------------------------------------------------------

_RESPONSE_TYPES: Final = """
    Body = {created: integer, model: string}
    Reason = "stop" | "length" | "tool_calls" | "unknown"
    ToolCall = {id?: string, type?: "function", function?: {name: string, arguments: string}}
    Message = {
        content: string, role: "assistant", reasoning_content?: string, tool_calls: ToolCall[],
    }
    ToolCallDelta = {
        index: integer, id?: string, type?: "function",
        function: {name?: string, arguments?: string},
    }
    Delta = {
        role?: "assistant", content?: string | null, reasoning_content?: string,
        tool_calls?: ToolCallDelta[],
    }
    ChatToken = {
        token?: string, logprob?: number | null, bytes?: integer[], top_logprobs?: object[..0],
    }
    ChatLogprobs = {content: ChatToken[]}
    TextLogprobs = {
        tokens?: string[], token_logprobs?: (number | null)[], top_logprobs?: Scores[],
        text_offset?: integer[],
    }
    ChatChoice = {
        index: integer, finish_reason: Reason, logprobs: ChatLogprobs | null, message: Message,
    }
    TextChoice = {
        index: integer, finish_reason: Reason, logprobs: TextLogprobs | null, text: string,
    }
    ChatPiece = {index: integer, finish_reason: Reason | null, logprobs?: null, delta: Delta}
    TextPiece = {index: integer, finish_reason: Reason | null, logprobs?: null, text?: string}
    ChatAnswer = {
        ...Body, object: "chat.completion",
        choices: ChatChoice[], usage?: GenerationUsage
    }
    ChatChunk = {
        ...Body, object: "chat.completion.chunk",
        choices: ChatPiece[], usage?: GenerationUsage | null,
    }
    TextAnswer = {
        ...Body, object: "text_completion",
        choices: TextChoice[], usage?: GenerationUsage
    }
    TextChunk = {
        ...Body, object: "text_completion.chunk",
        choices: TextPiece[], usage?: GenerationUsage | null,
    }
"""
_EARLY_RESPONSE_TYPES: Final = """
    Body = {created: integer, model: string}
    Choice = {index: integer, finish_reason: "stop", logprobs: null}
    Piece = {index: integer, finish_reason: "stop" | null, logprobs?: null}
    ChatChoice = {...Choice, message: {content: string, role: "assistant"}}
    ChatAnswer = {
        ...Body, object: "chat.completion", choices: ChatChoice[]}
    ChatPiece = {...Piece, delta: {content?: string}}
    ChatChunk = {...Body, object: "chat.completion.chunk", choices: ChatPiece[]}
    TextChoice = {...Choice, text: string}
    TextAnswer = {
        ...Body, object: "text_completion", choices: TextChoice[]}
    TextPiece = {...Piece, text?: string}
    TextChunk = {...Body, object: "text_completion.chunk", choices: TextPiece[]}
"""
_RESPONSE_NAMES: Final = ("ChatAnswer", "ChatChunk", "TextAnswer", "TextChunk")
_INFO_OPERATIONS: Final[Mapping[str, tuple[str, Schema | None]]] = {
    "models": ("List the models that can answer.", ref("ModelList")),
    "model": ("Describe one model.", ref("ModelCard")),
    "server": ("Name the server.", ref("KserveServerMetadata")),
    "live": ("Whether the server listens.", None),
    "ready": ("Whether the server can answer.", None),
    "model ready": ("Whether a model can answer.", None),
}

# --- operations -----------------------------------------------------------------------------------


def _describe_rerank(failures: Mapping[str, Schema]) -> Schema:
    return build_operation(
        "Sort documents by their relevance to a query.",
        build_response(ref("RerankResults")),
        failures,
        request=parse_type(
            "{model: Model, query: string, documents: string[1..], top_n?: integer | null, "
            "return_documents?: boolean | null, rank_fields?: string[] | null}",
            Model=_MODEL_SCHEMA,
        ),
    )


def describe_api(
    operations: AbstractSet[str], tables: Mapping[str, tuple[Param, ...]], *, early: bool
) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``. ``operations``: those with an endpoint."""
    failures = build_error_responses(errors.ERROR_STATUSES, ref("ErrorBody"))
    content = failures["400"]["content"] | {SSE_CONTENT_TYPE: _UNFRAMED_ERROR_SCHEMA}
    streaming_failures = {**failures, "400": {**failures["400"], "content": content}}
    chat_fields, fields = ((), ()) if early else (_CHAT_FIELDS, _LATER_FIELDS)
    described = {
        "chat": build_operation(
            "Answer a conversation.",
            build_response(ref("ChatAnswer"), build_event_data(ref("ChatChunk"), "[DONE]")),
            streaming_failures,
            request=_build_request("messages", tables["chat"], *chat_fields, *fields),
        )
        | CHAT_FORM.describe(),
        "completion": build_operation(
            "Complete a prompt.",
            build_response(ref("TextAnswer"), build_event_data(ref("TextChunk"), "[DONE]")),
            streaming_failures,
            request=_build_request("prompt", tables["completion"], *fields),
        )
        | COMPLETION_FORM.describe(),
        "embedding": build_operation(
            "Create embeddings.",
            build_response(ref("EmbeddingList")),
            failures,
            request=parse_type(
                "{model: Model, input: input, encoding_format?: encoding_format, user?: user}",
                Model=_MODEL_SCHEMA,
                **_FIELD_TYPES,
            ),
        ),
        "rerank": _describe_rerank(failures),
    }
    for name in operations & _INFO_OPERATIONS.keys():
        summary, schema = _INFO_OPERATIONS[name]
        response = build_response(schema) if schema else CONDITION_RESPONSE
        described[name] = build_operation(summary, response, failures)
    types = parse_types(
        _EARLY_RESPONSE_TYPES if early else _RESPONSE_TYPES, Scores=map_of(nullable(NUMBER))
    )
    return OpenApiFragment(
        described,
        {
            **build_struct_schemas(
                EmbeddingList,
                RerankResults,
                KserveServerMetadata,
                ModelList,
                GenerationUsage,
                errors.ErrorBody,
            ),
            **{name: types[name] for name in _RESPONSE_NAMES},
        },
    )


_UNFRAMED_ERROR_SCHEMA: Final[Schema] = {
    "schema": {"description": "An error alone, which is not framed."}
}
