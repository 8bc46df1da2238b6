"""OpenVINO Model Server: the current and the early release.

Sources: openvinotoolkit/model_server 7e4df0c, src/llm and src/http_rest_api_handler.cpp; for 2024
its documentation, model_server_rest_api_chat.md.
"""

from collections.abc import Mapping
from typing import Final

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
    REASONS,
    OpenAIResponseFormat,
    decode_options,
    encode_compact_json,
)

_EARLY: Final[Fields] = {
    "model": is_text,
    "stream": is_flag,
    "max_tokens": integer(1, 2**32 - 1),
    "ignore_eos": is_flag,
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": integer(0),
    "seed": integer(0, 2**32 - 1),
    "best_of": integer(1, 19),
    "n": integer(1, 19),
    "repetition_penalty": number(0),
    "diversity_penalty": number(0),
    "length_penalty": number(0),
}
_LATE: Final[Fields] = {
    **{name: check for name, check in _EARLY.items() if name != "diversity_penalty"},
    "stream_options": equals({"include_usage": True}),
    "stop": string_or(strings(16)),
    "include_stop_str_in_output": is_flag,
    "min_p": number(0, 0.999999),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "skip_special_tokens": is_flag,
}
_KINDS: Final[Mapping[tuple[str, bool], Fields]] = {
    ("2026", True): {
        **_LATE,
        "messages": is_message_list,
        "max_completion_tokens": integer(1, 2**32 - 1),
        "logprobs": is_flag,
        "tools": functions,
        "tool_choice": ALWAYS,
        "response_format": ALWAYS,
        "chat_template_kwargs": ALWAYS,
    },
    ("2026", False): {**_LATE, "prompt": equals(PROMPT), "logprobs": equals(1), "echo": is_flag},
    ("2024", True): {**_EARLY, "messages": is_message_list},
    ("2024", False): {**_EARLY, "prompt": equals(PROMPT)},
}
_COMMON: Final[Json] = {"created": 1716825108, "model": "llama3"}
_MANNERS: Final = {
    "2026": OpenAIResponseFormat(
        common=_COMMON,
        text_chunk="text_completion.chunk",
        first_delta={"role": "assistant", "content": None},
        final_delta=None,
        null_usage=True,
        message_fields={"tool_calls": []},
        keeps_stop_streamed=True,
    ),
    "2024": OpenAIResponseFormat(
        common=_COMMON,
        first_delta=None,
        final_delta=None,
        usage="never",
        reasons={**REASONS, "length": "stop"},
    ),
}
_SENTENCE: Final = (
    "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: "
    '\nCalculator::Process() for node "LLMExecutor" failed: '
)


def _create_error_response(status: int, message: str, **headers: str) -> ScriptedResponse:
    return ScriptedResponse(
        status=status, body=encode_compact_json({"error": message}), headers=headers
    )


class OVMS:
    """One release."""

    content_type = "text/event-stream"
    error_responses: Final = {
        "refused": _create_error_response(400, f"{_SENTENCE}min_tokens must be at most max_tokens"),
        "limited": _create_error_response(429, "Slow down, tenant 77", retry_after="7"),
        "failed": _create_error_response(500, "CUDA error at 0x7f00"),
        "busy": _create_error_response(503, "Server is not ready"),
    }

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._format = _MANNERS[profile]

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe."""
        return ScriptedResponse(body=b"") if request.method == "GET" else None

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation or a prompt."""
        body = request.fields()
        request.scenario = body["model"]
        request.check_path("/v3/chat/completions", "/v3/completions")
        must = "messages" if _is_chat(request) else "prompt"
        check_fields(request, body, _KINDS[self._profile, _is_chat(request)], ("model", must))
        stream = body.get("stream", False)
        if stream and ("logprobs" in body or "best_of" in body):
            request.faults.append("not with a stream")
        if "stream_options" in body and not stream:
            request.faults.append("stream_options provided, but stream not set to true")
        if body.get("n", 1) > body.get("best_of", 1):
            request.faults.append("n value cannot be greater than best_of")
        return decode_options({**body, "top_logprobs": 1})

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        usage = "stream_options" in request.fields()
        return self._format.build_stream(options, chat=_is_chat(request), usage=usage)

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        return self._format.build_unary(options, chat=_is_chat(request))

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build a plain JSON object outside any event."""
        return encode_compact_json({"error": f"{_SENTENCE}CUDA at 0x7f00"})


def _is_chat(request: ReceivedRequest) -> bool:
    return request.path == "/v3/chat/completions"
