"""OpenAPI descriptions of chat, completion and embeddings requests and responses.

Each protocol adds its ``RequestRules``, ``ResponseStyle`` and errors::

    errors = build_error_responses(ERROR_STATUSES, ref("Error"))
    OpenApiFragment(build_operations(RULES, errors, ref("Error")), build_response_schemas(STYLE))
"""

from collections.abc import Collection, Mapping
from typing import Final

from protocols.chat.classification import CLASSIFY_PARAMS, ClassificationResponse
from protocols.chat.embeddings import EmbeddingList
from protocols.chat.messages import MessageRules
from protocols.chat.params import CHAT_PARAMS, COMPLETION_PARAMS
from protocols.chat.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DEFAULT_REQUEST_RULES,
    MAX_IDENTIFIER_LENGTH,
    MAX_INPUTS,
    METADATA_LIMITS,
    RequestRules,
)
from protocols.chat.rerank import (
    RERANK_PARAMS,
    SCORE_FIELD_PAIRS,
    SCORE_PARAMS,
    RankingResponse,
    RerankResponse,
    ScoreResponse,
)
from protocols.chat.responses import (
    CHAT_CHUNK_OBJECT,
    CHAT_OBJECT,
    TEXT_OBJECT,
    ChatLogprobs,
    CompletionLogprobs,
    GenerationUsage,
    ResponseStyle,
    ToolCallItem,
)
from protocols.chat.tokenization import TOKENIZE_PARAMS, DetokenizeResponse, TokenizeResponse
from protocols.openapi import (
    NONEMPTY_STRING,
    NUMBER,
    STRING,
    Schema,
    array_of,
    build_event_data,
    build_operation,
    build_properties,
    build_response,
    build_struct_schemas,
    enum_of,
    map_of,
    nullable,
    object_of,
    parse_type,
    parse_types,
    ref,
)
from protocols.params import Param
from protocols.prompt_form import PromptForm, SdkExample, find_parameters

# Fields of requests that are no scalars, as their readers accept them.
#
# JSON Schema cannot express rules between fields or between messages (a tool message needs a call);
# a request that breaks one is rejected.

_MODEL_SCHEMA: Final[Schema] = {
    **NONEMPTY_STRING,
    "description": "A model's name or alias; the list of models has all.",
}
_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0}
_INPUT: Final = parse_type(
    "Text | Token[1..{0}] | Text[1..{0}] | Token[1..{0}][1..{0}]".replace("{0}", str(MAX_INPUTS)),
    Text=NONEMPTY_STRING,
    Token=_TOKEN,
)
"""The inputs of embeddings and of classification; one limit for them, and for their tokens."""

PART_SCHEMAS: Final[Mapping[str, Schema]] = parse_types(
    """
    text = {type: "text", text: string}
    image_url = {
        type: "image_url",
        image_url: {url: string, detail?: "auto" | "low" | "high" | null},
    }
    input_audio = {type: "input_audio", input_audio: {data: string, format: string}}
    file = {
        type: "file",
        file: {file_id: string, file_data?: string | null, filename?: string | null}
            | {file_data: string, file_id?: string | null, filename?: string | null},
    }
    audio_url = {type: "audio_url", audio_url: {url: string}}
    video_url = {type: "video_url", video_url: {url: string}}
    refusal = {type: "refusal", refusal: string}
    reasoning = {type: "reasoning", summary: {text: string, signature?: string | null}[]}
    """
)
_MESSAGE_TYPES: Final = """
    system = {role: "system", content: string | TextPart[1..], name?: string | null}
    developer = {...system, role: "developer"}
    user = {role: "user", content: string | UserPart[1..], name?: string | null}
    tool = {...system, role: "tool", tool_call_id: string}
    function = {role: "function", name: string, content: string | null}
    FunctionCall = {id: string, type: "function", function: {name: string, arguments: Arguments}}
    CustomCall = {id: string, type: "custom", custom: {name: string, input: string}}
    ToolCall = FunctionCall | CustomCall
    Content = string | AssistantPart[1..]
    Properties = {
        role: "assistant", name?: string | null, refusal?: string | null, content?: Content | null,
        reasoning_content?: string | null, reasoning?: string | null, audio?: null,
        tool_calls?: ToolCall[] | null, function_call?: {name: string, arguments: string} | null,
    }
    assistant = {...Properties, content: Content}
        | {...Properties, refusal: NonemptyString}
        | {...Properties, tool_calls: ToolCall[1..]}
        | {...Properties, function_call: {name: string, arguments: string}}
"""


def build_messages(rules: MessageRules) -> Schema:
    """The messages that these rules accept."""
    messages = parse_types(
        _MESSAGE_TYPES,
        NonemptyString=NONEMPTY_STRING,
        TextPart=PART_SCHEMAS["text"],
        UserPart={"anyOf": [PART_SCHEMAS[kind] for kind in rules.user_parts]},
        AssistantPart={"anyOf": [PART_SCHEMAS[kind] for kind in rules.assistant_parts]},
        Arguments=parse_type("string | object" if rules.accepts_argument_objects else "string"),
    )
    return array_of({"anyOf": [messages[role] for role in rules.roles]}, minItems=1)


# --- requests -------------------------------------------------------------------------------------

_FIELD_TYPES: Final[Mapping[str, Schema]] = parse_types(
    """
    prompt = string | Token[1..] | string[1..] | Token[1..][1..]
    Function = {
        name: NonemptyString, description?: string | null, parameters?: object | null,
        strict?: boolean | null,
    }
    FunctionTool = {type: "function", function: Function}
    CustomTool = {
        type: "custom",
        custom: {name: NonemptyString, description?: string | null, format?: object | null},
    }
    NamedTool = {type: "function", function: {name: string}}
        | {type: "custom", custom: {name: string}}
    AllowedTools = {mode: "auto" | "required", tools: NamedTool[]}
    tool_choice = "none" | "auto" | "required" | NamedTool
        | {type: "allowed_tools", allowed_tools: AllowedTools} | null
    functions = Function[1..128] | null
    function_call = "none" | "auto" | {name: string} | null
    modalities = string[] | null
    chat_template_kwargs = object | null
    JsonSchema = {
        name: SchemaName, description?: string | null, schema?: object | null,
        strict?: boolean | null,
    }
    response_format = {type: "text" | "json_object"}
        | {type: "json_schema", json_schema: JsonSchema} | null
    guided_json = object | string | null
    guided_regex = string | null
    guided_choice = string[1..] | null
    guided_grammar = string | null
    structured_outputs = {
        json?: guided_json, regex?: guided_regex, choice?: guided_choice, grammar?: guided_grammar,
        json_object?: boolean | null,
    } | null
    stream_options = {
        include_usage?: boolean | null, continuous_usage_stats?: boolean | null,
        include_obfuscation?: boolean | null,
    } | null
    logit_bias = Biases | null
    metadata = Metadata | null
    """,
    NonemptyString=NONEMPTY_STRING,
    SchemaName={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    Token=_TOKEN,
    Biases=map_of(
        {**NUMBER, "minimum": -100, "maximum": 100}, propertyNames={"pattern": "^[0-9]{1,10}$"}
    ),
    Metadata=map_of(
        {**STRING, "maxLength": METADATA_LIMITS[2]},
        maxProperties=METADATA_LIMITS[0],
        propertyNames={"maxLength": METADATA_LIMITS[1]},
    ),
)
"""The fields that are read by functions, by wire name, and the types that they are made of."""


def build_chat_request(
    rules: RequestRules, *, tool_types: tuple[str, ...] = ("FunctionTool", "CustomTool")
) -> Schema:
    """The body of a chat request."""
    tool = {"anyOf": [_FIELD_TYPES[name] for name in tool_types]}
    properties = {
        **_build_properties(rules.chat, CHAT_FIELDS | {"modalities"}),
        "tools": nullable(array_of(tool, minItems=1, maxItems=rules.max_tools)),
    }
    return _build_request(rules, properties, messages=build_messages(rules.message_rules))


def build_completion_request(rules: RequestRules) -> Schema:
    """The body of a completion request."""
    properties = _build_properties(rules.completion, COMPLETION_FIELDS)
    return _build_request(rules, properties, prompt=_FIELD_TYPES["prompt"])


def build_embedding_request(rules: RequestRules) -> Schema:
    """The body of an embeddings request."""
    return _build_request(rules, build_properties(rules.embedding), input=_INPUT)


def _build_request(
    rules: RequestRules, properties: Mapping[str, Schema], **content: Schema
) -> Schema:
    """The body of a request with a model's name and this required content."""
    required = {"model": _MODEL_SCHEMA, **content}
    allows_unknown_fields = rules.unknown_fields != "reject"
    return object_of({**properties, **required}, *required, more=allows_unknown_fields)


def _build_properties(table: tuple[Param, ...], fields: Collection[str]) -> dict[str, Schema]:
    """The properties of the rows, with the further checks of their reader, and of other fields."""
    properties = build_properties(table)
    for param in table:
        if param.wire == "stop":
            most = {} if param.max_items is None else {"maxItems": param.max_items}
            texts = array_of(NONEMPTY_STRING, **most)
            properties["stop"] = nullable({"anyOf": [NONEMPTY_STRING, texts]})
        elif param.wire == "safety_identifier":
            properties[param.wire] = nullable({**STRING, "maxLength": MAX_IDENTIFIER_LENGTH})
    return properties | {name: one for name, one in _FIELD_TYPES.items() if name in fields}


# --- responses ------------------------------------------------------------------------------------

_PROPERTIES: Final[Mapping[str, Schema]] = parse_types(
    """
    id = string
    created = integer
    model = string
    system_fingerprint = string
    index = integer
    token_ids = integer[]
    stop_reason = string | integer
    text = string
    role = "assistant"
    content = string | null
    refusal = string | null
    reasoning_content = string
    tool_calls = ToolCallItem[]
    function_call = FunctionCallItem
    """
)
_OPTIONAL_KEYS: Final = frozenset({"usage", "system_fingerprint"})
_CHOICE_KEYS: Final = frozenset({"index", "finish_reason", "message", "delta", "text"})
"""Keys that every choice has."""


def build_response_schemas(style: ResponseStyle) -> dict[str, Schema]:
    """The unary responses and chunks of this style, and all objects within them."""
    reasons = tuple(dict.fromkeys(style.finish_reasons.values()))
    chat = {
        "logprobs": nullable(ref("ChatLogprobs")),
        "finish_reason": enum_of(*reasons, "function_call"),
        "message": _select_properties(
            style.message_keys, {"role", "content", *style.default_values}
        ),
        "delta": _select_properties(style.message_keys, ()),
    }
    text = {"logprobs": nullable(ref("CompletionLogprobs")), "finish_reason": enum_of(*reasons)}
    return {
        **build_struct_schemas(
            GenerationUsage, ToolCallItem, ChatLogprobs, CompletionLogprobs, EmbeddingList
        ),
        "ChatAnswer": _build_unary_response(style, CHAT_OBJECT, style.chat_choice_keys, chat),
        "TextAnswer": _build_unary_response(style, TEXT_OBJECT, style.text_choice_keys, text),
        "ChatChunk": _build_chunk(style, CHAT_CHUNK_OBJECT, style.chat_chunk_keys, chat),
        "TextChunk": _build_chunk(style, TEXT_OBJECT, style.text_chunk_keys, text),
    }


def _build_unary_response(
    style: ResponseStyle, name: str, keys: Collection[str], properties: Mapping[str, Schema]
) -> Schema:
    choice = _select_properties(keys, {*_CHOICE_KEYS, *style.default_values}, **properties)
    return _build_body(style.unary_keys, name, choice, ref("GenerationUsage"))


def _build_chunk(
    style: ResponseStyle, name: str, keys: Collection[str], properties: Mapping[str, Schema]
) -> Schema:
    reason = nullable(properties["finish_reason"])
    choice = _select_properties(keys, _CHOICE_KEYS, **{**properties, "finish_reason": reason})
    return _build_body(style.chunk_keys, name, choice, nullable(ref("GenerationUsage")))


def _build_body(keys: Collection[str], name: str, choice: Schema, usage: Schema) -> Schema:
    return _select_properties(
        keys,
        {*keys} - _OPTIONAL_KEYS,
        object={"const": name},
        choices=array_of(choice),
        usage=usage,
    )


def _select_properties(
    keys: Collection[str], required: Collection[str], **others: Schema
) -> Schema:
    """An object of these keys."""
    values = {**_PROPERTIES, **others}
    return object_of({key: values[key] for key in keys}, *(key for key in keys if key in required))


# --- operations -----------------------------------------------------------------------------------


def _build_form(
    label: str, method: str, content: Schema, table: tuple[Param, ...], text: str
) -> PromptForm:
    """A form whose example uses the openai package; ``text``: that of a choice, and of a chunk."""
    whole, chunk = text.split()
    return PromptForm(
        label=label,
        body={"model": "$model", **content},
        parameters=find_parameters(table),
        stream_flag="stream",
        sdk=SdkExample(
            imports="from openai import OpenAI",
            client="OpenAI(base_url={url}, api_key={key})",
            keyless_client='OpenAI(base_url={url}, api_key="unused")',
            method=method,
            path="/" + method.removesuffix(".create").replace(".", "/"),
            streamed=(
                "for chunk in response:",
                "    if chunk.choices:",
                f'        print(chunk.choices[0].{chunk} or "", end="", flush=True)',
                "print()",
            ),
            whole=(f"print(response.choices[0].{whole})",),
        ),
    )


CHAT_FORM: Final = _build_form(
    "chat",
    "chat.completions.create",
    {"messages": "$messages"},
    CHAT_PARAMS,
    "message.content delta.content",
)
COMPLETION_FORM: Final = _build_form(
    "completion", "completions.create", {"prompt": "$prompt"}, COMPLETION_PARAMS, "text text"
)


def build_operations(
    rules: RequestRules, errors: Mapping[str, Schema], error: Schema
) -> dict[str, Schema]:
    """The operations ``chat``, ``completion`` and ``embedding``.

    ``errors`` are the error responses; ``error`` is the schema of an error in a stream.
    """

    def build_generation_response(name: str) -> Schema:
        chunk = build_event_data({"anyOf": [ref(f"{name}Chunk"), error]}, "[DONE]")
        return build_response(ref(f"{name}Answer"), chunk)

    return {
        "chat": build_operation(
            "Create a chat completion.",
            build_generation_response("Chat"),
            errors,
            request=build_chat_request(rules),
        )
        | CHAT_FORM.describe(),
        "completion": build_operation(
            "Create a completion of each prompt.",
            build_generation_response("Text"),
            errors,
            request=build_completion_request(rules),
        )
        | COMPLETION_FORM.describe(),
        "embedding": build_operation(
            "Create embeddings.",
            build_response(ref("EmbeddingList")),
            errors,
            request=build_embedding_request(rules),
        ),
    }


# --- reranking and tokenization -------------------------------------------------------------------

_RERANK_CONTENT: Final[Mapping[str, Schema]] = parse_types(
    """
    query = string | {text: string}
    documents = (string | object)[1..10000] | string
    rank_fields = string[] | null
    ranking_query = {text: string}
    passages = {text: string}[1..10000]
    texts = string | string[1..10000]
    prompt = string
    tokens = TokenId[]
    """,
    TokenId={"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
)
RERANK_RESPONSE_TYPES: Final = (
    RerankResponse,
    RankingResponse,
    ScoreResponse,
    ClassificationResponse,
    TokenizeResponse,
    DetokenizeResponse,
)
"""The responses of these operations, which refer to them by name."""


def build_rerank_request(rules: RequestRules = DEFAULT_REQUEST_RULES) -> Schema:
    """The body of a request to sort documents."""
    content = _RERANK_CONTENT
    query = {"query": content["query"], "documents": content["documents"]}
    rank_fields = {"rank_fields": content["rank_fields"]}
    return _build_request(rules, {**build_properties(RERANK_PARAMS), **rank_fields}, **query)


def build_rerank_operations(
    rules: RequestRules, errors: Mapping[str, Schema], cohere_errors: Mapping[str, Schema]
) -> dict[str, Schema]:
    """The operations that OpenAI's API does not have.

    See ``rerank``, ``classification`` and ``tokenization``.

    ``cohere_errors`` are the error responses of the path that clients of Cohere's first API use.
    """
    content = _RERANK_CONTENT
    rerank = build_rerank_request(rules)
    ranking = _build_request(
        rules,
        build_properties(SCORE_PARAMS),
        query=content["ranking_query"],
        passages=content["passages"],
    )
    pairs = {name: content["texts"] for pair in SCORE_FIELD_PAIRS for name in pair}
    score = _build_request(rules, {**build_properties(SCORE_PARAMS), **pairs})
    chat = {
        "prompt": content["prompt"],
        "messages": build_messages(rules.message_rules),
        "tools": nullable(array_of(_FIELD_TYPES["FunctionTool"], maxItems=rules.max_tools)),
        "chat_template_kwargs": _FIELD_TYPES["chat_template_kwargs"],
    }
    tokenize = _build_request(rules, {**build_properties(TOKENIZE_PARAMS), **chat})
    detokenize = _build_request(rules, {}, tokens=content["tokens"])
    classify = _build_request(rules, build_properties(CLASSIFY_PARAMS), input=_INPUT)
    rerank_text = "Sort documents by their relevance to a query."
    rows = {
        **dict.fromkeys(("rerank", "rerank_v1"), (rerank_text, rerank, "RerankResponse")),
        "ranking": (rerank_text, ranking, "RankingResponse"),
        "score": ("Score the similarity of texts.", score, "ScoreResponse"),
        "classify": ("Classify texts.", classify, "ClassificationResponse"),
        "tokenize": ("Tokenize a text or a conversation.", tokenize, "TokenizeResponse"),
        "detokenize": ("Convert tokens to text.", detokenize, "DetokenizeResponse"),
    }
    not_implemented = {**errors["400"], "description": "The model has no tokenizer."}
    tokenizer_errors = {**errors, "501": not_implemented}
    other_errors = {
        "rerank_v1": cohere_errors,
        **dict.fromkeys(("tokenize", "detokenize"), tokenizer_errors),
    }
    return {
        name: build_operation(
            text, build_response(ref(answer)), other_errors.get(name, errors), request=request
        )
        for name, (text, request, answer) in rows.items()
    }
