"""Databricks' model serving: one path, where the body's fields determine the task.

Sources: the reference of the Foundation Model REST API; databricks-sdk-py; mlflow 3.17.
"""

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
from tests.cross.script import PROMPT, RequestOptions
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import (
    OpenAIResponseFormat,
    decode_options,
    encode_compact_json,
    format_event,
)

_BOTH: Final[Fields] = {
    "max_tokens": integer(1),
    "stream": is_flag,
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": integer(1),
    "stop": string_or(strings(64)),
    "n": integer(1, 5),
    "extra_params": ALWAYS,
    "client_request_id": is_text,
    "usage_context": ALWAYS,
}
_CHAT: Final[Fields] = {
    **_BOTH,
    "messages": is_message_list,
    "tools": functions,
    "tool_choice": ALWAYS,
    "response_format": ALWAYS,
    "logprobs": is_flag,
    "top_logprobs": integer(0, 20),
    "reasoning_effort": is_text,
    "thinking": ALWAYS,
}
_TEXT: Final[Fields] = {
    **_BOTH,
    "prompt": equals(PROMPT),
    "error_behavior": is_text,
    "echo": is_flag,
    "suffix": is_text,
    "use_raw_prompt": is_flag,
}
_FORMAT: Final = OpenAIResponseFormat(
    common={"id": "c1", "created": 1716825108, "model": "meta-llama-3.1-70b-instruct-121024"},
    first_delta=None,
    delta_fields={"role": "assistant"},
    usage="last",
)


def _create_error_response(status: int, code: str, message: str) -> ScriptedResponse:
    headers = {"retry_after": "7"} if status in (429, 503) else {}
    body = encode_compact_json({"error_code": code, "message": message})
    return ScriptedResponse(status=status, body=body, headers=headers)


class Databricks:
    """A serving endpoint for each scenario."""

    content_type = "text/event-stream"
    error_responses: Final = {
        "refused": _create_error_response(
            400, "INVALID_PARAMETER_VALUE", "min_tokens must be at most 5"
        ),
        "limited": _create_error_response(429, "REQUEST_LIMIT_EXCEEDED", "Slow down, tenant 77"),
        "failed": _create_error_response(500, "INTERNAL_ERROR", "CUDA error at 0x7f00"),
        "busy": _create_error_response(503, "TEMPORARILY_UNAVAILABLE", "engine 12 is full"),
    }

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe."""
        listed = b'{"endpoints":[]}'
        return ScriptedResponse(body=listed) if request.method == "GET" else None

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation or a prompt."""
        body = request.fields()
        request.scenario = request.path.removeprefix("/serving-endpoints/").removesuffix(
            "/invocations"
        )
        request.check_path(f"/serving-endpoints/{request.scenario}/invocations")
        chat = "messages" in body
        check_fields(request, body, _CHAT if chat else _TEXT, () if chat else ("prompt",))
        return decode_options(body)

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        return _FORMAT.build_stream(options, chat="messages" in request.fields(), usage=True)

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        return _FORMAT.build_unary(options, chat="messages" in request.fields())

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build OpenAI's error event, which its clients require."""
        return format_event(
            {"error": {"message": "CUDA at 0x7f00", "type": "server_error", "code": None}}
        )
