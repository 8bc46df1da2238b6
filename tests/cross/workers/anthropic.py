"""Anthropic's Messages API.

Sources: the types of anthropic (Python) 2.12, and the vendor's documentation of errors and streams.
"""

from typing import Any, Final

from tests.cross.checks import (
    ALWAYS,
    Fields,
    check_fields,
    equals,
    integer,
    is_message_list,
    is_text,
    number,
    strings,
)
from tests.cross.script import ARGUMENTS, PROMPT_TOKENS, TOOL, Json, RequestOptions, script_choice
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import encode_compact_json


def _is_tool_list(value: Any) -> bool:
    """Accept tools, each with a name and a schema."""
    return isinstance(value, list) and value != [] and all(
        is_text(one["name"]) and one["input_schema"]["type"] == "object" for one in value
    )  # fmt: skip


_FIELDS: Final[Fields] = {
    "model": is_text,
    "messages": is_message_list,
    "max_tokens": integer(1),
    "stream": equals(True),
    "stop_sequences": strings(8191),
    "temperature": number(0, 1),
    "tools": _is_tool_list,
    "tool_choice": ALWAYS,
}
_REASONS: Final = {
    "eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "tool": "tool_use",
}  # fmt: skip


def _create_error_response(
    status: int, kind: str, message: str, **headers: str
) -> ScriptedResponse:
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return ScriptedResponse(status=status, body=encode_compact_json(error), headers=headers)


def _format_event(data: Json) -> bytes:
    return f"event: {data['type']}\n".encode() + b"data: " + encode_compact_json(data) + b"\n\n"


class Anthropic:
    """Anthropic's service, or a server with its protocol."""

    content_type = "text/event-stream; charset=utf-8"
    error_responses: Final = {
        "refused": _create_error_response(
            400, "invalid_request_error", "max_tokens: must be at most 8192"
        ),
        "limited": _create_error_response(
            429, "rate_limit_error", "Slow down, tenant 77", retry_after="7"
        ),
        "failed": _create_error_response(500, "api_error", "CUDA error at 0x7f00"),
        "busy": _create_error_response(529, "overloaded_error", "Overloaded, 12 in the queue"),
    }

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe."""
        return ScriptedResponse(body=b"{}") if request.method == "GET" else None

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation."""
        body = request.fields()
        request.scenario = body["model"]
        request.check_path("/v1/messages")
        if request.headers.get("anthropic-version") not in ("2023-06-01", "2026-10-21"):
            request.faults.append("no version")
        check_fields(request, body, _FIELDS, ("model", "messages", "max_tokens"))
        return RequestOptions(
            stream=body.get("stream", False),
            max_tokens=body["max_tokens"],
            stops=tuple(body.get("stop_sequences", ())),
            tool=bool(body.get("tools")),
        )

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        del request
        choice = script_choice(options)
        empty = {**_build_head(), "content": [], "stop_reason": None, "stop_sequence": None}
        start = {"type": "message_start", "message": {**empty, "usage": _build_usage(0)}}
        block: Json = {"type": "text", "text": ""}
        deltas: list[Json] = [{"type": "text_delta", "text": token} for token in choice.tokens]
        if options.tool:
            block = {"type": "tool_use", "id": "toolu_01ab", "name": TOOL, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ARGUMENTS]
        opening = (
            _format_event(start),
            _format_event({"type": "content_block_start", "index": 0, "content_block": block}),
            _format_event({"type": "ping"}),
        )
        tokens = tuple(
            _format_event({"type": "content_block_delta", "index": 0, "delta": delta})
            for delta in deltas
        )
        closing = (
            _format_event({"type": "content_block_stop", "index": 0}),
            _format_event(
                {
                    "type": "message_delta",
                    "delta": _build_end(options, choice.reason),
                    "usage": {"output_tokens": choice.token_count},
                }
            ),
            _format_event({"type": "message_stop"}),
        )
        return StreamEvents(opening, tokens, closing)

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        del request
        choice = script_choice(options)
        content: list[Json] = [{"type": "text", "text": choice.text}]
        if options.tool:
            arguments = {"city": "東京"}
            content = [{"type": "tool_use", "id": "toolu_01ab", "name": TOOL, "input": arguments}]
        body = {**_build_head(), "content": content, **_build_end(options, choice.reason)}
        return encode_compact_json({**body, "usage": _build_usage(choice.token_count)})

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build an error event."""
        del request
        error = {"type": "api_error", "message": "CUDA error at 0x7f00"}
        return _format_event({"type": "error", "error": error})


def _build_head() -> Json:
    return {"id": "msg_01ab", "type": "message", "role": "assistant", "model": "claude"}


def _build_usage(token_count: int) -> Json:
    return {
        "input_tokens": PROMPT_TOKENS,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": token_count,
    }


def _build_end(options: RequestOptions, reason: str) -> Json:
    """Build the stop reason and the stop sequence that matched, the request's second one."""
    stop = options.stops[-1] if reason == "stop" else None
    return {"stop_reason": _REASONS[reason], "stop_sequence": stop}
