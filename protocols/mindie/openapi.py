"""OpenAPI of generate, chat, completions and the state endpoints.

The endpoints in the style of other servers (``/generate``, ``/infer`` and the like) are left out.
"""

from collections.abc import Mapping
from typing import Final

from protocols.chat.openapi import CHAT_FORM
from protocols.core import errors
from protocols.core.interfaces import OpenApiFragment
from protocols.mindie.params import INT32_MAX, MAX_STOP_STRINGS, MindieConfig
from protocols.openapi import (
    CONDITION_RESPONSE,
    JSON_CONTENT_TYPE,
    NONEMPTY_STRING,
    NUMBER,
    Schema,
    build_error_responses,
    build_event_data,
    build_operation,
    build_properties,
    build_response,
    map_of,
    nullable,
    object_of,
    parse_type,
    parse_types,
    ref,
)
from protocols.params import Param
from protocols.prompt_form import PromptForm, find_parameters

TablesByOperation = Mapping[str, tuple[Param, ...]]

# --- requests -------------------------------------------------------------------------------------

_MODEL_SCHEMA: Final[Schema] = {
    **NONEMPTY_STRING,
    "description": "A model's name; the list of models has all.",
}
_FIELD_TYPES: Final = parse_types(
    """
    TextPart = {type: "text", text: string}
    Part = TextPart | {type: "image_url", image_url: NonemptyString}
        | {type: "video_url", video_url: NonemptyString}
        | {type: "audio_url", audio_url: NonemptyString}
    Parts = Part[1..20]
    Content = string | Part[..20]
    ToolCall = {id: string, type: "function", function: {name: FunctionName, arguments: string}}
    Message = {role: "system" | "user", content: Content, name?: string | null}
        | {role: "assistant", content: NonemptyString}
        | {role: "assistant", content?: string | null, tool_calls: ToolCall[1..]}
        | {role: "tool", content: Content, tool_call_id: NonemptyString}
    messages = Message[1..]
    EarlyMessage = {role: "system" | "user" | "assistant", content: NonemptyString}
    early_messages = EarlyMessage[1..]
    Function = {
        name: FunctionName, description?: string | null, parameters?: object | null,
        strict?: boolean | null,
    }
    tools = {type: "function", function: Function}[] | null
    tool_choice = "none" | "auto" | "required" | null
    JsonSchema = {name: FunctionName, schema: object, strict?: boolean | null}
    response_format = {type: "text" | "json_object"}
        | {type: "json_schema", json_schema: JsonSchema} | null
    chat_template = NonemptyString | null
    chat_template_kwargs = {enable_thinking?: boolean, thinking_budget?: Budget | null}
    stop = Stop | Stop[..16] | null
    """,
    NonemptyString=NONEMPTY_STRING,
    FunctionName={"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
    Budget={"type": "integer", "minimum": 1, "maximum": INT32_MAX},
    # Lengths are counted in UTF-16 units; a character has at most two.
    Stop={"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRINGS // 2},
)
_CHAT_FIELDS: Final = (
    *("tools", "tool_choice", "response_format", "chat_template", "chat_template_kwargs"),
)


def _build_generate_request(setup: MindieConfig, table: tuple[Param, ...]) -> Schema:
    text = _build_text_schema(setup)
    parameters = object_of(build_properties(table) | {"perf_stat": parse_type("boolean | null")})
    early = setup.profile.early
    return parse_type(
        "{id?: Id | null, text_input: Input, parameters?: Parameters | null}",
        Id=NONEMPTY_STRING if early else _REQUEST_ID_SCHEMA,
        Input=text if early else {"anyOf": [text, _FIELD_TYPES["Parts"]]},
        Parameters=parameters,
    )


def _build_chat_request(setup: MindieConfig, table: tuple[Param, ...]) -> Schema:
    early = setup.profile.early
    messages = _FIELD_TYPES["early_messages" if early else "messages"]
    fields = {} if early else {name: _FIELD_TYPES[name] for name in _CHAT_FIELDS}
    return _build_openai_request(table, {"messages": messages}, fields)


def _build_completion_request(setup: MindieConfig, table: tuple[Param, ...]) -> Schema:
    prompt = parse_type(
        "Text | Token[1..]",
        Text=_build_text_schema(setup),
        Token={"type": "integer", "minimum": 0},
    )
    fields = {"response_format": _FIELD_TYPES["response_format"]}
    return _build_openai_request(table, {"prompt": prompt}, fields)


def _build_openai_request(
    table: tuple[Param, ...], content: Mapping[str, Schema], fields: Mapping[str, Schema]
) -> Schema:
    """The body with a model's name, this content, the rows and further fields."""
    properties = {"model": _MODEL_SCHEMA, **content, **build_properties(table), **fields}
    if "stop" in properties:
        properties["stop"] = _FIELD_TYPES["stop"]
    return object_of(properties, "model", *content)


def _build_tokenizer_request(setup: MindieConfig) -> Schema:
    properties = {
        "inputs": _build_text_schema(setup),
        "do_decode": parse_type("boolean | null"),
        "model": _MODEL_SCHEMA,
    }
    return object_of(properties, "inputs", *(() if setup.default_model else ("model",)))


def _build_text_schema(setup: MindieConfig) -> Schema:
    return {**NONEMPTY_STRING, "maxLength": setup.profile.max_text_length // 2}


# --- responses ------------------------------------------------------------------------------------

_RESPONSE_TYPES: Final = """
    Head = {id: string, model_name: string, model_version: null, text_output: string}
    Details = {
        finish_reason?: string, generated_tokens: integer, first_token_cost: null,
        decode_cost: null, batch_size: integer, queue_wait_time: integer,
    }
    Lists = {batch_size: integer[], queue_wait_time: integer[]}
    Generated = {...Head, details?: {...Details, ...Lists}}
    GeneratedPiece = {
        ...Head, details?: Details, prefill_time?: integer | null, decode_time?: integer | null,
    }
    Usage = {
        prompt_tokens: integer,
        prompt_tokens_details?: {cached_tokens?: integer, cache_write_tokens?: integer},
        completion_tokens: integer, completion_tokens_details?: {reasoning_tokens?: integer},
        total_tokens: integer,
    }
    Reason = "stop" | "length" | "tool_calls"
    Token = {token?: string, logprob?: number | null, bytes?: integer[]}
    ChatLogprobs = {content?: {...Token, top_logprobs?: Token[]}[]} | null
    TextLogprobs = {
        text_offset?: integer[], token_logprobs?: (number | null)[], tokens?: string[],
        top_logprobs?: Scores[],
    } | null
    ToolCall = {
        index?: integer, id?: string, type?: "function",
        function?: {name?: string, arguments?: string},
    }
    Message = {
        role: "assistant", content: string, reasoning_content?: string, tool_calls: ToolCall[],
    }
    Delta = {
        role: "assistant", content?: string, reasoning_content?: string, tool_calls?: ToolCall[],
    }
    ChatChoice = {index: integer, message: Message, logprobs: ChatLogprobs, finish_reason: Reason}
    ChatPiece = {
        index: integer, delta: Delta, logprobs: ChatLogprobs, finish_reason: Reason | null,
    }
    TextChoice = {
        index: integer, text: string, logprobs: TextLogprobs, stop_reason: null,
        finish_reason: Reason,
    }
    TextPiece = {...TextChoice, finish_reason: Reason | null}
    Body = {id: string, created: integer, model: string, usage?: Usage}
    ChatAnswer = {...Body, object: "chat.completion", choices: ChatChoice[]}
    ChatChunk = {...Body, object: "chat.completion.chunk", choices: ChatPiece[]}
    TextAnswer = {...Body, object: "text_completion", choices: TextChoice[]}
    TextChunk = {...Body, object: "text_completion", choices: TextPiece[]}
    ModelCard = {id: string, object: "model", created: integer, owned_by: string}
    Error = {error: string, error_type: string}
"""
_EARLY_RESPONSE_TYPES: Final = """
    GeneratedPiece = {...Head, details?: Details}
    EarlyReason = "eos_token" | "length" | "stop_sequence" | "invalid flag"
    EarlyMessage = {role: "assistant", content: string}
    EarlyDelta = {role?: "assistant", content?: string}
    ChatChoice = {index: integer, message: EarlyMessage, finish_reason: EarlyReason}
    ChatPiece = {index: integer, delta: EarlyDelta, finish_reason: EarlyReason | null}
    EarlyBody = {id: string, created: integer, model: string}
    ChatAnswer = {...Body, object: "chat.completion", choices: ChatChoice[]}
    ChatChunk = {...EarlyBody, object: "chat.completion.chunk", choices: ChatPiece[]}
"""
"""Instead of those of the same name."""
_COMPONENT_NAMES: Final = (
    *("Generated", "GeneratedPiece", "ChatAnswer", "ChatChunk", "TextAnswer", "TextChunk"),
    *("ModelCard", "Error"),
)
_STATE_TYPES: Final = parse_types(
    """
    server = {
        name: string, version: string,
        extensions: {
            max_iter_times: integer, prefill_policy_type: integer, decode_policy_type: integer,
            max_prefill_batch_size: integer, max_prefill_tokens: integer,
        },
    }
    Tensor = {name: string, shape: integer[], datatype: string}
    metadata = {name: string, platform: string, inputs: Tensor[], outputs: Tensor[]}
    config = {
        model_name: string, input_datatype: string, output_datatype: string, max_seq_len: integer,
        npu_mem_size: integer, cpu_mem_size: integer, world_size: integer,
        model_weight_path: string, model_instance_type: string,
    }
    slots = {total_slots: integer, free_slots: integer, available_tokens_length: integer}
    Model = {
        model_device_type: string, model_dtype: string, model_id: string,
        model_pipeline_tag: string, model_sha: null, max_total_tokens: integer,
    }
    info = {
        docker_label: null, max_stop_sequences: null, max_waiting_tokens: null, sha: null,
        validation_workers: null, waiting_served_ratio: null, max_batch_total_tokens: integer,
        max_best_of: integer, max_concurrent_requests: integer, max_input_length: integer,
        version: string, models: Model[],
    }
    models = {object: "list", data: ModelCard[]}
    model = ModelCard
    timed_health = {status: "healthy"}
    """
)
_STATE_SUMMARIES: Final[Mapping[str, str]] = {
    "server": "Describe the server.",
    "metadata": "List the inputs and outputs of a model.",
    "config": "Show the configuration of a model.",
    "slots": "Count the requests that a model can take now.",
    "info": "Describe the server and its models.",
    "models": "List the models.",
    "model": "Describe one model.",
    "live": "Whether the server is alive.",
    "ready": "Whether some model can answer.",
    "timed_health": "Whether some model can answer within the seconds of timed-N.",
    "model_ready": "Whether a model can answer.",
}

# --- operations -----------------------------------------------------------------------------------

_ERROR_STATUSES: Final[tuple[tuple[type[errors.GatewayError], int], ...]] = (
    (errors.MalformedRequest, 422),
    (errors.InvalidParameter, 422),
    (errors.UnsupportedFeature, 422),
    (errors.ContextTooLong, 424),
    (errors.ContentFiltered, 400),
    (errors.ClientError, 400),
    (errors.Unauthorized, 401),
    (errors.RequestTooLarge, 413),
    (errors.UnsupportedEncoding, 415),
    (errors.RateLimitExceeded, 429),
    (errors.QuotaExceeded, 429),
    (errors.Overloaded, 503),
    (errors.WorkerUnreachable, 503),
    (errors.DeadlineExceeded, 500),
    (errors.GatewayError, 500),
)
_REQUEST_ID_SCHEMA: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,256}$"}


def describe_api(setup: MindieConfig, tables: TablesByOperation) -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``. ``tables``: the adapter's parameters."""
    early = setup.profile.early
    types = parse_types(
        _RESPONSE_TYPES + _EARLY_RESPONSE_TYPES * early, Scores=map_of(nullable(NUMBER))
    )
    failures = _describe_errors((errors.ModelNotFound, 404))
    openai_failures = _describe_errors((errors.ModelNotFound, 422))
    generate = _build_generate_request(setup, tables["text"])
    form = PromptForm(
        label="generate",
        body={"text_input": "$prompt"},
        parameters=find_parameters(tables["text"], "parameters."),
        stream_suffix="_stream",
    )
    text_stream = build_response(None, build_event_data(ref("GeneratedPiece")))
    chat = build_response(ref("ChatAnswer"), build_event_data(ref("ChatChunk"), "[DONE]"))
    completion = build_response(ref("TextAnswer"), build_event_data(ref("TextChunk"), "[DONE]"))
    operations = {
        "text": build_operation(
            "Complete a prompt.", build_response(ref("Generated")), failures, request=generate
        )
        | form.describe(),
        "text_stream": build_operation(
            "Complete a prompt, event by event.", text_stream, failures, request=generate
        ),
        "chat": build_operation(
            "Answer a conversation.",
            chat,
            openai_failures,
            request=_build_chat_request(setup, tables["chat"]),
        )
        | CHAT_FORM.describe(),
        "completion": build_operation(
            "Complete a prompt.",
            completion,
            openai_failures,
            request=_build_completion_request(setup, tables["completion"]),
        ),
        "stop": build_operation(
            "Stop a running request; the response repeats the body.",
            build_response({"type": "object"}),
            _describe_errors((errors.ModelNotFound, 404), (errors.RequestNotFound, 404)),
            request=object_of({"id": _REQUEST_ID_SCHEMA}, "id"),
        ),
        "tokenizer": build_operation(
            "Split a text into tokens.",
            build_response(parse_type("{token_number: integer, tokens: string[]}")),
            failures,
            request=_build_tokenizer_request(setup),
        ),
        **{
            name: build_operation(summary, *_describe_state(name, failures))
            for name, summary in _STATE_SUMMARIES.items()
        },
    }
    return OpenApiFragment(operations, {name: types[name] for name in _COMPONENT_NAMES})


def _describe_state(name: str, failures: Mapping[str, Schema]) -> tuple[Schema, dict[str, Schema]]:
    """The response and the error responses of a state endpoint."""
    if name in _STATE_TYPES:
        return build_response(_STATE_TYPES[name]), {**failures}
    unavailable = {"description": failures["503"]["description"]}
    return CONDITION_RESPONSE, {**failures, "503": unavailable}


def _describe_errors(*more: tuple[type[errors.GatewayError], int]) -> dict[str, Schema]:
    """The error responses of an operation. If the path names the model, 404 may have no body."""
    responses = build_error_responses((*_ERROR_STATUSES, *more), ref("Error"))
    if "404" in responses:
        responses["404"] = {"description": responses["404"]["description"]}
    for status, body in (("413", "{message: string}"), ("429", "{error?: string | object}")):
        responses[status]["content"][JSON_CONTENT_TYPE]["schema"] = parse_type(body)
    return responses
