"""OpenAPI of requests and responses."""

from typing import Final

from protocols.core.interfaces import OpenApiFragment
from protocols.ollama.errors import ERROR_STATUSES, OllamaError
from protocols.ollama.params import EMBEDDING_PARAMS, OPTION_PARAMS, REQUEST_PARAMS
from protocols.ollama.responses import EmbedAnswer, EmbeddingsAnswer
from protocols.openapi import (
    NONEMPTY_STRING,
    Schema,
    build_error_responses,
    build_operation,
    build_param_schema,
    build_properties,
    build_response,
    build_struct_schemas,
    nullable,
    object_of,
    parse_types,
    ref,
)
from protocols.prompt_form import PromptForm, SdkExample, find_parameters

_PARAMS: Final = {row.wire: build_param_schema(row) for row in REQUEST_PARAMS}
_TYPES: Final = parse_types(
    """
    Function = {name: NonemptyString, description?: string | null, parameters?: object | null}
    Tool = {type: "function", function: Function}
    FunctionCall = {index?: integer, name: NonemptyString, arguments?: object | null}
    ToolCall = {id?: string | null, function: FunctionCall}
    Message = {
        role: "system" | "user" | "assistant" | "tool", content?: string | null,
        images?: Image[] | null, thinking?: string | null, tool_calls?: ToolCall[] | null,
        tool_name?: string | null, tool_call_id?: string | null,
    }
    Think = boolean | "low" | "medium" | "high" | "max" | null
    Format = "" | "json" | object | null
    KeepAlive = integer | Duration | null
    Common = {
        model: NonemptyString, stream?: stream, format?: Format, options?: Options, think?: Think,
        keep_alive?: KeepAlive, logprobs?: logprobs, top_logprobs?: top_logprobs,
        truncate?: truncate,
    }
    ChatRequest = {...Common, messages?: Message[] | null, tools?: Tool[] | null}
    GenerateRequest = {
        ...Common, prompt?: string | null, system?: string | null, suffix?: string | null,
        images?: Image[] | null, template?: string | null, context?: integer[] | null, raw?: raw,
    }
    EmbedRequest = {
        model: NonemptyString, input?: string | string[] | null, truncate?: boolean | null,
        dimensions?: Dimensions, options?: object | null, keep_alive?: KeepAlive,
    }
    EmbeddingsRequest = {
        model: NonemptyString, prompt?: string | null, options?: object | null,
        keep_alive?: KeepAlive,
    }
    NamedRequest = {model: NonemptyString}
    """,
    NonemptyString=NONEMPTY_STRING,
    Image={"type": "string", "contentEncoding": "base64"},
    Duration={"type": "string", "pattern": "^-?([0-9]+(ns|us|ms|s|m|h))+$"},
    Options=nullable(object_of(build_properties(OPTION_PARAMS))),
    Dimensions=build_param_schema(EMBEDDING_PARAMS.by_wire["dimensions"][0][1]),
    **_PARAMS,
)
_RESPONSE_TYPES: Final = parse_types(
    """
    Metrics = {
        done_reason?: "stop" | "length" | "load" | "unload", total_duration?: integer,
        load_duration?: integer, prompt_eval_count?: integer, prompt_eval_duration?: integer,
        eval_count?: integer, eval_duration?: integer, logprobs?: Logprob[],
    }
    TopLogprob = {token: string, logprob: Number, bytes?: integer[]}
    Logprob = {...TopLogprob, top_logprobs?: TopLogprob[]}
    FunctionCall = {index: integer, name: string, arguments: object}
    ToolCall = {id: string, function: FunctionCall}
    Message = {
        role: "assistant", content: string, thinking?: string, tool_calls?: ToolCall[],
    }
    Head = {model: string, created_at: string}
    ChatAnswer = {...Head, message: Message, done: boolean, ...Metrics}
    GenerateAnswer = {
        ...Head, response: string, thinking?: string, tool_calls?: ToolCall[], done: boolean,
        ...Metrics,
    }
    Details = {
        parent_model: string, format: string, family: string, families: string[],
        parameter_size: string, quantization_level: string,
    }
    Model = {name: string, model: string, digest: string, size: integer, details: Details}
    ListedModel = {...Model, modified_at: string, capabilities: string[]}
    RunningModel = {
        ...Model, expires_at: string, size_vram: integer, context_length?: integer,
    }
    ModelList = {models: ListedModel[]}
    RunningList = {models: RunningModel[]}
    ModelDescription = {
        modelfile: string, parameters: string, template: string, license: string,
        details: Details, model_info: object, capabilities: string[], modified_at: string,
    }
    Version = {version: string}
    """,
    Number={"type": "number"},
    Logprob={},
)
_ANSWER_NAMES: Final = (
    "ChatAnswer",
    "GenerateAnswer",
    "ModelList",
    "RunningList",
    "ModelDescription",
    "Version",
)


def _build_form(method: str, content: Schema, text: str) -> PromptForm:
    """The form of an operation; ``text``: that of a response, and of a part of a stream."""
    authorization = """{"Authorization": f"Bearer {os.environ['API_KEY']}"}"""
    return PromptForm(
        label=method,
        body={"model": "$model", **content},
        parameters=find_parameters(OPTION_PARAMS, "options."),
        stream_flag="stream",
        sdk=SdkExample(
            imports="from ollama import Client",
            client=f"Client(host={{url}}, headers={authorization})",
            keyless_client="Client(host={url})",
            method=method,
            path=f"/api/{method}",
            streamed=(
                "for part in response:",
                f'    print(part.{text} or "", end="", flush=True)',
                "print()",
            ),
            whole=(f"print(response.{text})",),
        ),
    )


_CHAT_FORM: Final = _build_form("chat", {"messages": "$messages"}, "message.content")
_GENERATE_FORM: Final = _build_form("generate", {"prompt": "$prompt"}, "response")


def describe_api() -> OpenApiFragment:
    """See ``protocols.core.interfaces.OpenApiProvider``."""
    failures = build_error_responses(ERROR_STATUSES, ref("OllamaError"))
    chat, generate = ref("ChatAnswer"), ref("GenerateAnswer")

    def describe(summary: str, answer: str, request: str = "") -> Schema:
        body = _TYPES[request] if request else None
        return build_operation(summary, build_response(ref(answer)), failures, request=body)

    def describe_stream(summary: str, answer: Schema, request: str) -> Schema:
        line = {"anyOf": [answer, ref("OllamaError")]}
        response = build_response(answer, line=line)
        return build_operation(summary, response, failures, request=_TYPES[request])

    return OpenApiFragment(
        {
            "chat": describe_stream("Answer a conversation.", chat, "ChatRequest")
            | _CHAT_FORM.describe(),
            "generate": describe_stream("Answer a prompt.", generate, "GenerateRequest")
            | _GENERATE_FORM.describe(),
            "embed": describe("Create embeddings.", "EmbedAnswer", "EmbedRequest"),
            "embeddings": describe("Create an embedding.", "EmbeddingsAnswer", "EmbeddingsRequest"),
            "tags": describe("List the models.", "ModelList"),
            "ps": describe("List the models that can answer.", "RunningList"),
            "show": describe("Describe one model.", "ModelDescription", "NamedRequest"),
            "version": describe("The version of the API.", "Version"),
        },
        {
            **build_struct_schemas(EmbedAnswer, EmbeddingsAnswer, OllamaError),
            **{name: _RESPONSE_TYPES[name] for name in _ANSWER_NAMES},
        },
    )
