"""OpenAPI of requests and responses."""

from typing import Final

from protocols.chat.openapi import build_rerank_request
from protocols.chat.rerank import RerankResponse
from protocols.cohere import errors
from protocols.cohere.params import (
    CHAT_PARAMS,
    CITATION_MODES,
    MAX_DOCUMENTS,
    SAFETY_MODES,
    THINKING_TYPES,
    TOOL_CHOICES,
)
from protocols.cohere.responses import FINISH_REASONS
from protocols.core.interfaces import OpenApiFragment
from protocols.openapi import (
    NONEMPTY_STRING,
    STRING,
    array_of,
    build_error_responses,
    build_event_data,
    build_operation,
    build_properties,
    build_response,
    build_struct_schemas,
    enum_of,
    object_of,
    parse_types,
    ref,
)
from protocols.prompt_form import PromptForm, find_parameters

_REQUEST_TYPES: Final = parse_types(
    """
    Text = {type: "text", text: string}
    Image = {type: "image_url", image_url: {url: string, detail?: Detail | null}}
    Thinking = {type: "thinking", thinking: string}
    Document = {data: object | string, id?: string | null}
    DocumentPart = {type: "document", document: Document}
    Call = {id: string, type?: "function", function: {name: string, arguments: string}}
    Message = {role: "system", content: string | Text[1..]}
        | {role: "user", content: string | (Text | Image)[1..]}
        | {
            role: "assistant", content?: string | (Text | Thinking)[1..] | null,
            tool_plan?: string | null, tool_calls?: Call[] | null,
        }
        | {role: "tool", tool_call_id: string, content: string | (Text | DocumentPart)[1..]}
    messages = Message[1..]
    Tool = {
        type: "function",
        function: {
            name: Name, description?: string | null, parameters?: object | null,
            strict?: boolean | null,
        },
    }
    tools = Tool[1..] | null
    tool_choice = ToolChoice | null
    documents = Documents | null
    citation_options = {mode?: CitationMode | null} | null
    response_format = {type: "json_object", json_schema?: object | null} | {type: "text"} | null
    safety_mode = SafetyMode | null
    thinking = {type: ThinkingType, token_budget?: Budget | null} | null
    """,
    Detail=enum_of("auto", "low", "high"),
    Name=NONEMPTY_STRING,
    ToolChoice=enum_of(*TOOL_CHOICES),
    Documents=array_of({"anyOf": [STRING, {"type": "object"}]}, maxItems=MAX_DOCUMENTS),
    CitationMode=enum_of(*CITATION_MODES),
    SafetyMode=enum_of(*SAFETY_MODES),
    ThinkingType=enum_of(*THINKING_TYPES),
    Budget={"type": "integer", "minimum": 1},
)
_REQUEST_FIELDS: Final = (
    "messages", "tools", "tool_choice", "documents", "citation_options", "response_format",
    "safety_mode", "thinking",
)  # fmt: skip

_RESPONSE_TYPES: Final = """
    Counts = {input_tokens: integer, output_tokens: integer}
    Usage = {billed_units: Counts, tokens: Counts, cached_tokens?: integer}
    Logprobs = {text: string, token_ids: integer[], logprobs: number[]}
    TextBlock = {type: "text", text: string}
    ThinkingBlock = {type: "thinking", thinking: string}
    ToolCall = {id: string, type: "function", function: {name: string, arguments: string}}
    Message = {role: "assistant", content?: (TextBlock | ThinkingBlock)[], tool_calls?: ToolCall[]}
    ChatAnswer = {
        id: string, finish_reason: FinishReason, message: Message, usage?: Usage,
        logprobs?: Logprobs[],
    }
    StreamEvent = {id: string, type: "message-start", delta: {message: object}}
        | {
            type: "content-start" | "tool-call-start" | "tool-call-delta", index: integer,
            delta: {message: object},
        }
        | {type: "content-delta", index: integer, delta: {message: object}, logprobs?: Logprobs}
        | {type: "content-end" | "tool-call-end", index: integer}
        | {
            type: "message-end",
            delta: {finish_reason: FinishReason | "TIMEOUT", usage?: Usage, error?: string},
        }
    CohereError = {id?: string, message: string}
    CohereModel = {name: string, endpoints: string[], finetuned: boolean, context_length?: integer}
    CohereModels = {models: CohereModel[]}
"""
_RESPONSE_NAMES: Final = ("ChatAnswer", "StreamEvent", "CohereError", "CohereModel")


_CHAT_FORM: Final = PromptForm(
    label="chat",
    body={"model": "$model", "messages": "$messages"},
    parameters=find_parameters(CHAT_PARAMS),
    stream_flag="stream",
)


def describe_api() -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    failures = build_error_responses(errors.ERROR_STATUSES, ref("CohereError"))
    reasons = tuple(dict.fromkeys(FINISH_REASONS.values()))
    types = parse_types(_RESPONSE_TYPES, FinishReason=enum_of(*reasons))
    fields = {name: _REQUEST_TYPES[name] for name in _REQUEST_FIELDS}
    chat = object_of(
        {"model": NONEMPTY_STRING, **fields, **build_properties(CHAT_PARAMS)}, "model", "messages"
    )
    return OpenApiFragment(
        {
            "chat": build_operation(
                "Answer a conversation.",
                build_response(ref("ChatAnswer"), build_event_data(ref("StreamEvent"), "[DONE]")),
                failures,
                request=chat,
            )
            | _CHAT_FORM.describe(),
            "rerank": build_operation(
                "Sort documents by their relevance to a query.",
                build_response(ref("RerankResponse")),
                failures,
                request=build_rerank_request(),
            ),
            "models": build_operation(
                "List the models.", build_response(types["CohereModels"]), failures
            ),
            "model": build_operation(
                "Describe one model.", build_response(ref("CohereModel")), failures
            ),
        },
        {
            **{name: types[name] for name in _RESPONSE_NAMES},
            **build_struct_schemas(RerankResponse),
        },
    )
