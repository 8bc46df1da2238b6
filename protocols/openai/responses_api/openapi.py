"""Schemas of the Responses API's requests and responses. See ``protocols.openapi``."""

from collections.abc import Mapping
from typing import Final

from protocols.chat.params import REASONING_EFFORTS
from protocols.chat.requests import METADATA_LIMITS
from protocols.openai.responses_api.params import (
    INCLUDES,
    REASONING_SUMMARIES,
    RESPONSES_PARAMS,
)
from protocols.openapi import (
    NONEMPTY_STRING,
    STRING,
    Schema,
    array_of,
    build_event_data,
    build_operation,
    build_properties,
    build_response,
    enum_of,
    map_of,
    nullable,
    object_of,
    parse_types,
    ref,
)

_REQUEST_TYPES: Final[Mapping[str, Schema]] = parse_types(
    """
    Text = {type: "input_text" | "output_text" | "text", text: string}
    Image = {
        type: "input_image", image_url: string,
        detail?: "auto" | "low" | "high" | "original" | null,
    }
    File = {type: "input_file", file_data: string, filename?: string | null}
    Audio = {type: "input_audio", input_audio: {data: string, format: string}}
    Refusal = {type: "refusal", refusal: string}
    UserPart = Text | Image | File | Audio
    UserMessage = {
        type?: "message" | null, role: "user", content: string | UserPart[],
    }
    SystemMessage = {
        type?: "message" | null, role: "system" | "developer", content: string | Text[],
    }
    AssistantPart = Text | Refusal
    AssistantMessage = {
        type?: "message" | null, role: "assistant", content: string | AssistantPart[],
    }
    FunctionCall = {
        type: "function_call", call_id: string, name: string, arguments: string,
        namespace?: string | null,
    }
    CustomCall = {
        type: "custom_tool_call", call_id: string, name: string, input: string,
        namespace?: string | null,
    }
    OutputPart = Text | Image | File
    CallOutput = {
        type: "function_call_output" | "custom_tool_call_output", call_id: string,
        output: string | OutputPart[],
    }
    Reasoning = {
        type: "reasoning", summary?: {text: string}[] | null, content?: {text: string}[] | null,
        encrypted_content?: string | null,
    }
    Reference = {type: "item_reference", id: string}
    SearchCall = {type: "tool_search_call", call_id: string, arguments: object | string}
    SearchOutput = {type: "tool_search_output", call_id: string, tools: Tool[]}
    AddedTools = {type: "additional_tools", tools: Tool[]}
    item = UserMessage | SystemMessage | AssistantMessage | FunctionCall | CustomCall | CallOutput
        | Reasoning | Reference | SearchCall | SearchOutput | AddedTools
    Function = {
        type: "function", name: NonemptyString, description?: string | null,
        parameters?: object | null, strict?: boolean | null,
    }
    Grammar = {type: "grammar", syntax: string, definition: string}
    Custom = {
        type: "custom", name: NonemptyString, description?: string | null,
        format?: {type: "text"} | Grammar | null,
    }
    Member = Function | Custom
    Namespace = {
        type: "namespace", name: NonemptyString, description?: string | null, tools: Member[],
    }
    Search = {
        type: "tool_search", execution: "client" | "server", description?: string | null,
        parameters?: object | null,
    }
    Web = {type: "web_search" | "web_search_preview"}
    tool = Function | Custom | Namespace | Search | Web
    NamedTool = {type: "function" | "custom", name: string}
    tool_choice = "none" | "auto" | "required" | NamedTool
        | {type: "allowed_tools", mode: "auto" | "required", tools: NamedTool[]} | null
    Format = {type: "text" | "json_object"} | {
        type: "json_schema", name: FormatName, schema: object, description?: string | null,
        strict?: boolean | null,
    }
    text = {format?: Format | null, verbosity?: "low" | "medium" | "high" | null} | null
    stream_options = {include_obfuscation?: boolean | null} | null
    client_metadata = object | null
    """,
    NonemptyString=NONEMPTY_STRING,
    FormatName={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    Tool={"type": "object"},
)
_RESPONSE_TYPES: Final[Mapping[str, Schema]] = parse_types(
    """
    ResponseLogprob = {
        token: string, logprob: number, bytes: integer[],
        top_logprobs: {token: string, logprob: number, bytes: integer[]}[],
    }
    OutputText = {
        type: "output_text", text: string, annotations: object[], logprobs: ResponseLogprob[],
    }
    OutputRefusal = {type: "refusal", refusal: string}
    OutputPart = OutputText | OutputRefusal
    Status = "in_progress" | "completed" | "incomplete"
    OutputMessage = {
        id: string, type: "message", status: Status, role: "assistant", content: OutputPart[],
    }
    OutputReasoning = {
        id: string, type: "reasoning", status: Status,
        summary: {type: "summary_text", text: string}[],
        content?: {type: "reasoning_text", text: string}[], encrypted_content?: string,
    }
    OutputFunctionCall = {
        id: string, type: "function_call", status: Status, call_id: string, name: string,
        namespace?: string, arguments: string,
    }
    OutputCustomCall = {
        id: string, type: "custom_tool_call", status: Status, call_id: string, name: string,
        namespace?: string, input: string,
    }
    OutputSearchCall = {
        id: string, type: "tool_search_call", status: Status, call_id: string,
        execution: "client", arguments: Any,
    }
    OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall
        | OutputSearchCall
    ResponsesUsage = {
        input_tokens: integer,
        input_tokens_details: {cached_tokens: integer, cache_write_tokens: integer},
        output_tokens: integer, output_tokens_details: {reasoning_tokens: integer},
        total_tokens: integer,
    }
    Response = {
        id: string, object: "response", created_at: integer,
        status: "in_progress" | "completed" | "incomplete" | "failed",
        completed_at: integer | null, background: boolean,
        error: {code: string, message: string} | null,
        incomplete_details: {reason: "max_output_tokens" | "content_filter"} | null,
        instructions: string | null, max_output_tokens: number | null,
        max_tool_calls: number | null, model: string, output: OutputItem[],
        parallel_tool_calls: boolean, previous_response_id: string | null,
        prompt_cache_key: string | null,
        reasoning: {effort: string | null, summary: string | null},
        safety_identifier: string | null, service_tier: string | null, store: boolean,
        temperature: number | null, text: {format: Any, verbosity?: string}, tool_choice: Any,
        tools: Any[], top_logprobs: number, top_p: number | null, truncation: string,
        usage: ResponsesUsage | null, user: string | null, metadata: Any,
        presence_penalty?: number, frequency_penalty?: number,
    }
    ResponseEvent = {
        type: string, sequence_number: integer, response?: Response, output_index?: integer,
        item_id?: string, content_index?: integer, summary_index?: integer, item?: OutputItem,
        part?: Any, delta?: string, text?: string, refusal?: string, arguments?: string,
        input?: string, name?: string, logprobs?: ResponseLogprob[],
    }
    InputTokens = {object: "response.input_tokens", input_tokens: integer}
    DeletedResponse = {id: string, object: "response", deleted: boolean}
    InputItems = {
        object: "list", data: Any[], first_id: string | null, last_id: string | null,
        has_more: boolean,
    }
    """,
    Any={},
)
_COMPONENTS: Final = ("Response", "ResponseEvent", "DeletedResponse", "InputItems", "InputTokens")


def build_schemas() -> dict[str, Schema]:
    """The components of the responses."""
    return {name: _RESPONSE_TYPES[name] for name in _COMPONENTS}


def build_operations(
    errors: Mapping[str, Schema], *, allows_unknown_fields: bool
) -> dict[str, Schema]:
    """The operations of this API, without those that are refused.

    ``errors`` are the error responses.
    """
    event = build_event_data(ref("ResponseEvent"))
    request = _build_request(allows_unknown_fields=allows_unknown_fields)
    return {
        "response": build_operation(
            "Create a response.",
            build_response(ref("Response"), event),
            errors,
            request=request,
        ),
        "stored response": build_operation(
            "Retrieve a stored response.", build_response(ref("Response")), errors
        ),
        "response deletion": build_operation(
            "Delete a stored response.", build_response(ref("DeletedResponse")), errors
        ),
        "response items": build_operation(
            "List the input items of a stored response.", build_response(ref("InputItems")), errors
        ),
        "response tokens": build_operation(
            "Count the tokens of a request's input.",
            build_response(ref("InputTokens")),
            errors,
            request=request,
        ),
    }


def _build_request(*, allows_unknown_fields: bool) -> Schema:
    """The body of a request."""
    names = ("tool_choice", "text", "stream_options", "client_metadata")
    most_pairs, longest_key, longest = METADATA_LIMITS
    efforts, summaries = enum_of(*REASONING_EFFORTS), nullable(enum_of(*REASONING_SUMMARIES))
    reasoning = object_of(
        {"effort": nullable(efforts), "summary": summaries, "generate_summary": summaries}
    )
    properties = {
        **build_properties(RESPONSES_PARAMS),
        **{name: _REQUEST_TYPES[name] for name in names},
        "model": {**NONEMPTY_STRING, "description": "A model's name or alias."},
        "input": {"anyOf": [STRING, array_of(_REQUEST_TYPES["item"])]},
        "tools": nullable(array_of(_REQUEST_TYPES["tool"])),
        "reasoning": nullable(reasoning),
        "include": nullable(array_of(enum_of(*INCLUDES))),
        "metadata": nullable(
            map_of(
                {**STRING, "maxLength": longest},
                maxProperties=most_pairs,
                propertyNames={"maxLength": longest_key},
            )
        ),
    }
    return object_of(properties, "model", "input", more=allows_unknown_fields)
