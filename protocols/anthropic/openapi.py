"""OpenAPI of requests and responses."""

from typing import Final

from protocols.anthropic import errors
from protocols.anthropic.params import (
    EFFORTS,
    MAX_MODEL_LENGTH,
    MAX_TOOL_NAME_LENGTH,
    MAX_USER_ID_LENGTH,
    MESSAGE_PARAMS,
    MIN_THINKING_BUDGET,
    SERVICE_TIERS,
)
from protocols.anthropic.responses import STOP_REASONS
from protocols.core.interfaces import OpenApiFragment
from protocols.openapi import (
    CONDITION_RESPONSE,
    STRING,
    Schema,
    build_error_responses,
    build_event_data,
    build_operation,
    build_properties,
    build_response,
    enum_of,
    object_of,
    parse_types,
    ref,
)
from protocols.prompt_form import PromptForm, SdkExample, find_parameters

_REQUEST_TYPES: Final = parse_types(
    """
    Hint = object | null
    Text = {type: "text", text: string, cache_control?: Hint}
    ImageSource = {type: "base64", media_type: MediaType, data: string}
        | {type: "url", url: Url}
    Image = {type: "image", source: ImageSource, cache_control?: Hint}
    DocumentSource = {type: "text", data: string}
        | {type: "base64", media_type: "application/pdf", data: string}
        | {type: "content", content: string | (Text | Image)[]}
    Document = {
        type: "document", source: DocumentSource, title?: string | null, context?: string | null,
        cache_control?: Hint,
    }
    SearchResult = {
        type: "search_result", source: string, title: string, content: Text[], cache_control?: Hint,
    }
    ToolReference = {type: "tool_reference", tool_name: string}
    UserBlock = Text | Image | Document | SearchResult
    ToolResult = {
        type: "tool_result", tool_use_id: string, is_error?: boolean | null,
        content?: string | (UserBlock | ToolReference)[] | null, cache_control?: Hint,
    }
    ToolUse = {type: "tool_use", id: string, name: string, input: object, cache_control?: Hint}
    Thinking = {type: "thinking", thinking: string, signature?: string | null}
    RedactedThinking = {type: "redacted_thinking", data: string}
    AssistantBlock = Text | ToolUse | Thinking | RedactedThinking
    Message = {role: "user", content: string | (UserBlock | ToolResult)[]}
        | {role: "assistant", content: string | AssistantBlock[]}
        | {role: "system", content: string | Text[]}
    messages = Message[1..]
    system = string | Text[] | null
    Tool = {
        name: ToolName, input_schema: object, type?: "custom" | null, description?: string | null,
        strict?: boolean | null, cache_control?: Hint,
    }
    tools = Tool[] | null
    Single = boolean | null
    tool_choice = {type: "auto" | "any", disable_parallel_tool_use?: Single}
        | {type: "tool", name: string, disable_parallel_tool_use?: Single}
        | {type: "none"} | null
    Display = "summarized" | "omitted" | null
    thinking = {type: "enabled", budget_tokens: Budget, display?: Display}
        | {type: "adaptive" | "between_tools", display?: Display} | {type: "disabled"} | null
    Format = {type: "json_schema", schema: object}
    output_config = {effort?: Effort | null, format?: Format | null} | null
    metadata = {user_id?: UserId | null} | null
    service_tier = ServiceTier | null
    """,
    MediaType=enum_of("image/jpeg", "image/png", "image/gif", "image/webp"),
    Url={**STRING, "pattern": "^https?://"},
    ToolName={**STRING, "pattern": f"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_LENGTH}}}$"},
    Budget={"type": "integer", "minimum": MIN_THINKING_BUDGET},
    Effort=enum_of(*EFFORTS),
    UserId={**STRING, "maxLength": MAX_USER_ID_LENGTH},
    ServiceTier=enum_of(*SERVICE_TIERS),
)
_REQUEST_FIELDS: Final = (
    "system", "tools", "tool_choice", "thinking", "output_config", "metadata", "service_tier",
)  # fmt: skip
_MODEL: Final[Schema] = {
    **STRING,
    "minLength": 1,
    "maxLength": MAX_MODEL_LENGTH,
    "description": "A model's name or alias; the list of models has all.",
}

_RESPONSE_TYPES: Final = """
    MessageUsage = {
        input_tokens: integer, cache_creation_input_tokens: integer,
        cache_read_input_tokens: integer, output_tokens: integer,
        output_tokens_details?: {thinking_tokens: integer},
    }
    ThinkingBlock = {type: "thinking", thinking: string, signature: string}
    RedactedThinkingBlock = {type: "redacted_thinking", data: string}
    TextBlock = {type: "text", text: string}
    ToolUseBlock = {type: "tool_use", id: string, name: string, input: object}
    ContentBlock = ThinkingBlock | RedactedThinkingBlock | TextBlock | ToolUseBlock
    Message = {
        id: string, type: "message", role: "assistant", model: string, content: ContentBlock[],
        stop_reason: StopReason | null, stop_sequence: string | null, usage: MessageUsage,
    }
    Delta = {type: "text_delta", text: string} | {type: "thinking_delta", thinking: string}
        | {type: "signature_delta", signature: string}
        | {type: "input_json_delta", partial_json: string}
    ErrorDetail = {type: string, message: string}
    ErrorBody = {type: "error", error: ErrorDetail, request_id?: string}
    StreamEvent = {type: "message_start", message: Message} | {type: "ping" | "message_stop"}
        | {type: "content_block_start", index: integer, content_block: ContentBlock}
        | {type: "content_block_delta", index: integer, delta: Delta}
        | {type: "content_block_stop", index: integer}
        | {
            type: "message_delta", usage: MessageUsage,
            delta: {stop_reason: StopReason, stop_sequence: string | null},
        }
        | ErrorBody
    ModelItem = {
        type: "model", id: string, display_name: string, created_at: string, lifecycle: string,
        max_input_tokens?: integer, max_tokens?: integer,
    }
    ModelPage = {
        data: ModelItem[], has_more: boolean, first_id: string | null, last_id: string | null,
    }
    TokenCount = {input_tokens: integer}
"""
_RESPONSE_NAMES: Final = ("Message", "StreamEvent", "ErrorBody", "ModelItem", "ModelPage")


_FORM: Final = PromptForm(
    label="messages",
    body={"model": "$model", "max_tokens": 1024, "system": "$system", "messages": "$turns"},
    parameters=find_parameters(MESSAGE_PARAMS),
    stream_flag="stream",
    sdk=SdkExample(
        imports="from anthropic import Anthropic",
        client="Anthropic(base_url={url}, api_key={key})",
        keyless_client='Anthropic(base_url={url}, api_key="unused")',
        method="messages.create",
        path="/v1/messages",
        streamed=(
            "for event in response:",
            '    if event.type == "content_block_delta" and event.delta.type == "text_delta":',
            '        print(event.delta.text, end="", flush=True)',
            "print()",
        ),
        whole=('print("".join(block.text for block in response.content if block.type == "text"))',),
    ),
)


def describe_api() -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    failures = build_error_responses(errors.ERROR_STATUSES, ref("ErrorBody"))
    types = parse_types(_RESPONSE_TYPES, StopReason=enum_of(*STOP_REASONS))
    parameters = build_properties(MESSAGE_PARAMS)
    fields = {name: _REQUEST_TYPES[name] for name in _REQUEST_FIELDS}
    shared = {"model": _MODEL, "messages": _REQUEST_TYPES["messages"], **fields}
    request = object_of({**shared, **parameters}, "model", "messages", "max_tokens")
    return OpenApiFragment(
        {
            "messages": build_operation(
                "Answer a conversation.",
                build_response(ref("Message"), build_event_data(ref("StreamEvent"))),
                failures,
                request=request,
            )
            | _FORM.describe(),
            "count_tokens": build_operation(
                "Count the tokens of a conversation.",
                build_response(types["TokenCount"]),
                failures,
                request=object_of(shared, "model", "messages"),
            ),
            "models": build_operation(
                "List the models.", build_response(ref("ModelPage")), failures
            ),
            "model": build_operation(
                "Describe one model.", build_response(ref("ModelItem")), failures
            ),
            "root": build_operation("Whether the server listens.", CONDITION_RESPONSE, failures),
        },
        {name: types[name] for name in _RESPONSE_NAMES},
    )
