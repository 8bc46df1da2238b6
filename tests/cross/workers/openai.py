"""Workers with OpenAI's protocol: OpenAI itself, vLLM, SGLang and llama.cpp.

Sources: OpenAI's specification 2.3.0; vLLM 0.32's and SGLang's protocol modules and errors;
llama.cpp's tools/server.
"""

from collections.abc import Mapping
from typing import Any, Final

from tests.cross.checks import (
    ALWAYS,
    Fields,
    check_fields,
    equals,
    integer,
    is_flag,
    is_message_list,
    is_text,
    number,
    string_or,
    strings,
)
from tests.cross.checks import is_tool_list as functions
from tests.cross.script import PROMPT, Json, RequestOptions
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import (
    OpenAIResponseFormat,
    decode_options,
    encode_compact_json,
    format_event,
)

_BOTH: Final[Fields] = {
    "model": is_text,
    "stream": is_flag,
    "stream_options": equals({"include_usage": True}),
    "max_tokens": integer(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "n": integer(1, 128),
    "stop": string_or(strings(4)),
    "seed": integer(-(2**63)),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": ALWAYS,
    "user": is_text,
}
_CHAT: Final[Fields] = {
    **_BOTH,
    "messages": is_message_list,
    "max_completion_tokens": integer(1),
    "logprobs": is_flag,
    "top_logprobs": integer(0, 20),
    "tools": functions,
    "tool_choice": ALWAYS,
    "parallel_tool_calls": is_flag,
    "response_format": ALWAYS,
    "reasoning_effort": is_text,
}
_TEXT: Final[Fields] = {
    **_BOTH,
    "prompt": equals(PROMPT),
    "logprobs": integer(0, 5),
    "echo": is_flag,
    "best_of": integer(1, 20),
    "suffix": is_text,
}
_MORE: Final[Fields] = {
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "ignore_eos": is_flag,
    "repetition_penalty": number(0),
    "min_tokens": integer(0),
    "skip_special_tokens": is_flag,
    "stop_token_ids": ALWAYS,
}
_MANY: Final = string_or(strings(64))
_FIELDS: Final[Mapping[str, Fields]] = {
    "openai": {},
    "vllm": {
        **_MORE,
        "stop": _MANY,
        "include_stop_str_in_output": is_flag,
        "max_tokens": lambda body: (
            body is None or integer(1)(body)
        ),  # None: the rest of the context
    },
    "sglang": {**_MORE, "stop": _MANY, "no_stop_trim": is_flag},
    "llamacpp": {"stop": _MANY, "repeat_penalty": number(0), "top_k": integer(0)},
}
_HEAD: Final[Json] = {"id": "chatcmpl-7", "created": 1716825108, "model": "real-name"}
_MANNERS: Final[Mapping[str, OpenAIResponseFormat]] = {
    "openai": OpenAIResponseFormat(
        common={**_HEAD, "service_tier": "default", "system_fingerprint": "fp_44709d6fcb"},
        first_delta={"role": "assistant", "content": "", "refusal": None},
        message_fields={"refusal": None, "annotations": []},
        null_usage=True,
    ),
    "vllm": OpenAIResponseFormat(
        common=_HEAD,
        final_delta=None,
        choice_fields={"stop_reason": None, "token_ids": None},
        message_fields={"reasoning": None, "tool_calls": []},
    ),
    "sglang": OpenAIResponseFormat(
        common=_HEAD,
        final_delta={"content": None, "reasoning_content": None, "tool_calls": None},
        choice_fields={"matched_stop": None},
        message_fields={"reasoning_content": None, "tool_calls": None},
    ),
    "llamacpp": OpenAIResponseFormat(
        common={**_HEAD, "system_fingerprint": "b6000-1a2b3c"},
        first_delta={"role": "assistant", "content": None},
    ),
}


def _build_error_body(profile: str, status: int, kind: str, message: str) -> Json:
    match profile:
        case "openai":
            code = "rate_limit_exceeded" if status == 429 else None
            return {"error": {"message": message, "type": kind, "param": None, "code": code}}
        case "sglang":
            return {
                "object": "error",
                "message": message,
                "type": kind,
                "param": None,
                "code": status,
            }
        case "vllm":
            return {"error": {"message": message, "type": kind, "param": None, "code": status}}
        case _:
            return {"error": {"code": status, "message": message, "type": kind}}


class OpenAI:
    """One of these servers."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._format = _MANNERS[profile]

        def refused(status: int, kind: str, message: str, **headers: str) -> ScriptedResponse:
            body = encode_compact_json(_build_error_body(profile, status, kind, message))
            return ScriptedResponse(status=status, body=body, headers=headers)

        self.error_responses = {
            "refused": refused(400, "BadRequestError", "min_tokens must be at most max_tokens"),
            "limited": refused(429, "requests", "Slow down, tenant 77", retry_after="7"),
            "failed": refused(500, "InternalServerError", "CUDA error at 0x7f00"),
            "busy": refused(503, "ServiceUnavailableError", "engine 12 is full", retry_after="7"),
        }

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe."""
        return ScriptedResponse() if request.method == "GET" else None

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation or a prompt."""
        body = request.fields()
        request.scenario = body["model"]
        request.check_path("/v1/chat/completions", "/v1/completions")
        chat = _is_chat(request)
        known_fields = {**(_CHAT if chat else _TEXT), **_FIELDS[self._profile]}
        check_fields(request, body, known_fields, ("model", "messages" if chat else "prompt"))
        if chat and PROMPT not in str(body["messages"]):
            request.faults.append("the conversation is not the client's")
        if "stream_options" in body and not body.get("stream"):
            request.faults.append("stream_options without stream")
        return decode_options(body)

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        usage = "stream_options" in request.fields()
        return self._format.build_stream(options, chat=_is_chat(request), usage=usage)

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        return self._format.build_unary(options, chat=_is_chat(request))

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build an event with the error."""
        error: dict[str, Any] = dict(
            _build_error_body(self._profile, 500, "server_error", "CUDA at 0x7f00")
        )
        return format_event(error if "error" in error else {"error": error})


def _is_chat(request: ReceivedRequest) -> bool:
    return request.path == "/v1/chat/completions"
