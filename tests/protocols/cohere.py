"""What Cohere's API v2 brings to the shared tests. See ``tests.protocols``."""

import json
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
from tests.cross.client import Client, DecodedResponse
from tests.cross.script import (
    ARGUMENTS,
    PROMPT,
    PROMPT_TOKENS,
    TOOL,
    Json,
    RequestOptions,
    get_logprob,
    script_choice,
)
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import encode_compact_json
from tests.cross.workers.worker import EMULATED, Worker, map_modes

MOUNT: Final = {"name": "cohere", "models": False}
TURNS: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "hi"}]}
CONVERSATION: Final = ("/v2/chat", TURNS)
BODIES: Final = {"chat": TURNS, "rerank": {"query": "q", "documents": ["a", "b"]}}

# --- requests -------------------------------------------------------------------------------------

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL: Final[Json] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}
TOOLS: Final = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
]
CHAT: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
            ],
        },
        {"role": "assistant", "tool_plan": "I ask f.", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [
                {"type": "text", "text": "1"},
                {"type": "document", "document": {"id": "d1", "data": {"t": "2"}}},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "3"}],
        },
        {"role": "user", "content": "so?"},
    ],
    "tools": TOOLS,
    "documents": [{"id": "d2", "data": {"t": "4"}}],
    "citation_options": {"mode": "FAST"},
    "thinking": {"type": "enabled"},
}
REQUESTS: Final = (
    ("/v2/chat", CHAT),
    ("/v2/chat", {"model": "m", **TURNS, "response_format": {"type": "json_object"}}),
)
KNOWN_FIELDS: Final = {"chat": ("/v2/chat", {"model": "m", **TURNS, "tools": TOOLS})}
RELATED_FIELDS: Final = {"strict_tools": "tools"}

# --- responses ------------------------------------------------------------------------------------

USAGE: Final = {
    "billed_units": {"input_tokens": 1, "output_tokens": 2},
    "tokens": {"input_tokens": 1, "output_tokens": 2},
    "cached_tokens": 1,
}
ANSWER: Final[dict[str, Any]] = {
    "id": "a",
    "finish_reason": "TOOL_CALL",
    "message": {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "some text"},
        ],
        "tool_plan": "I ask f.",
        "tool_calls": [CALL],
    },
    "usage": USAGE,
    "logprobs": [{"text": "a", "token_ids": [1], "logprobs": [-1.0]}],
}


def _make_event(kind: str, index: int | None = None, **message: Any) -> dict[str, Any]:
    place = {} if index is None else {"index": index}
    return {"type": kind, **place, "delta": {"message": message}}


EVENTS: Final[list[dict[str, Any]]] = [
    {"id": "a", **_make_event("message-start", role="assistant")},
    _make_event("content-start", 0, content={"type": "text", "text": ""}),
    {
        **_make_event("content-delta", 0, content={"text": "some text"}),
        "logprobs": {"text": "a", "token_ids": [1], "logprobs": [-1.0]},
    },
    {"type": "content-end", "index": 0},
    _make_event("tool-plan-delta", tool_plan="I ask f."),
    _make_event("tool-call-start", 0, tool_calls=CALL),
    _make_event("tool-call-delta", 0, tool_calls={"function": {"arguments": " "}}),
    {"type": "tool-call-end", "index": 0},
    {"type": "message-end", "delta": {"finish_reason": "TOOL_CALL", "usage": USAGE}},
]

# --- clients of the cross product -----------------------------------------------------------------


def _build_body(model: str, options: RequestOptions) -> Json:
    fields: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
    if options.stream:
        fields["stream"] = True
    if options.max_tokens is not None:
        fields["max_tokens"] = options.max_tokens
    if options.stops:
        fields["stop_sequences"] = list(options.stops)
    if options.top_logprobs is not None:
        fields["logprobs"] = True
    if options.tool:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": TOOL, "description": "looks up", "parameters": schema}
        fields["tools"] = [{"type": "function", "function": function}]
    return fields


def _read(response: DecodedResponse, body: Any) -> None:
    """Read a unary response or an event."""
    response.add_text(0, "")
    kind = body.get("type", "")
    message = body["message"] if not kind else body.get("delta", {}).get("message", {})
    end = body if not kind else body["delta"] if kind == "message-end" else {}
    response.error += end.get("error", "")
    if "finish_reason" in end and "error" not in end:
        response.reasons[0] = end["finish_reason"]
    if "usage" in end:
        counts = end["usage"]["tokens"]
        response.usage = counts["input_tokens"], counts["output_tokens"]
    content = message.get("content") or []
    for block in content if isinstance(content, list) else [content]:
        response.add_text(0, block.get("text"))
    calls = message.get("tool_calls") or []
    for place, call in enumerate(calls if isinstance(calls, list) else [calls]):
        index = body.get("index", place)
        name, arguments = response.calls.get(index, ["", ""])
        function = call["function"]
        response.calls[index] = [function.get("name", name), arguments + function["arguments"]]
    chunks = body.get("logprobs") or []
    for chunk in chunks if isinstance(chunks, list) else [chunks]:
        response.logprobs.append((chunk["text"], chunk["logprobs"][0]))


CROSS_CLIENTS: Final = (
    Client(
        name="cohere",
        kind="chat",
        path="/v2/chat",
        fields=_build_body,
        read=_read,
        finish_reasons={
            "eos": "COMPLETE",
            "stop": "STOP_SEQUENCE",
            "length": "MAX_TOKENS",
            "tool_calls": "TOOL_CALL",
            "unknown": "COMPLETE",
        },
        statuses={"refused": 400, "limited": 429, "failed": 502, "busy": 503},
        read_error=lambda body: str(body["message"]),
        names_stop=True,
        can=frozenset({"stop", "logprobs", "tools"}),
        can_stream=frozenset({"stop", "logprobs", "tools"}),
    ),
)

# --- workers of the cross product -----------------------------------------------------------------


def _is_tool_list(body: Any) -> bool:
    """Accept tools, each with a name and a schema."""
    return isinstance(body, list) and body != [] and all(
        is_text(one["function"]["name"]) and one["function"]["parameters"]["type"] == "object"
        for one in body
    )  # fmt: skip


_FIELDS: Final[Fields] = {
    "model": is_text,
    "messages": is_message_list,
    "max_tokens": integer(1),
    "stream": equals(True),
    "stop_sequences": strings(5),
    "temperature": number(0, 1),
    "seed": integer(0),
    "logprobs": equals(True),
    "tools": _is_tool_list,
    "tool_choice": ALWAYS,
}
_REASONS: Final = {
    "eos": "COMPLETE",
    "stop": "STOP_SEQUENCE",
    "length": "MAX_TOKENS",
    "tool": "TOOL_CALL",
}


def _create_error_response(status: int, message: str, **headers: str) -> ScriptedResponse:
    body = encode_compact_json({"id": "9f", "message": message})
    return ScriptedResponse(status=status, body=body, headers=headers)


def _format_event(data: Json) -> bytes:
    return f"event: {data['type']}\n".encode() + b"data: " + encode_compact_json(data) + b"\n\n"


class CohereScript:
    """Cohere's service, or a server with its protocol."""

    content_type = "text/event-stream"
    error_responses: Final = {
        "refused": _create_error_response(400, "max_tokens must be at most 8192"),
        "limited": _create_error_response(429, "Slow down, tenant 77", retry_after="7"),
        "failed": _create_error_response(500, "CUDA error at 0x7f00"),
        "busy": _create_error_response(503, "Overloaded, 12 in the queue"),
    }

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe."""
        return ScriptedResponse(body=b"{}") if request.method == "GET" else None

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation."""
        body = request.fields()
        request.scenario = body["model"]
        request.check_path("/v2/chat")
        check_fields(request, body, _FIELDS, ("model", "messages"))
        return RequestOptions(
            stream=body.get("stream", False),
            max_tokens=body.get("max_tokens"),
            stops=tuple(body.get("stop_sequences", ())),
            top_logprobs=0 if body.get("logprobs") else None,
            tool=bool(body.get("tools")),
        )

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        del request
        choice = script_choice(options)
        opening = [{"id": "9f", **_make_event("message-start", role="assistant", content=[])}]
        if options.tool:
            call = {
                "id": "find_01",
                "type": "function",
                "function": {"name": TOOL, "arguments": ""},
            }
            opening.append(_make_event("tool-plan-delta", tool_plan=""))
            opening.append(_make_event("tool-call-start", 0, tool_calls=call))
            tokens = [
                _make_event("tool-call-delta", 0, tool_calls={"function": {"arguments": piece}})
                for piece in ARGUMENTS
            ]
            end = "tool-call-end"
        else:
            opening.append(_make_event("content-start", 0, content={"type": "text", "text": ""}))
            tokens = [
                {
                    **_make_event("content-delta", 0, content={"text": token}),
                    **_build_logprobs(options, token),
                }
                for token in choice.tokens
            ]
            end = "content-end"
        delta = {
            "finish_reason": _REASONS[choice.reason],
            "usage": _build_usage(choice.token_count),
        }
        return StreamEvents(
            tuple(map(_format_event, opening)),
            tuple(map(_format_event, tokens)),
            (
                _format_event({"type": end, "index": 0}),
                _format_event({"type": "message-end", "delta": delta}),
                b"data: [DONE]\n\n",
            ),
        )

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        del request
        choice = script_choice(options)
        message: dict[str, Any] = {"role": "assistant"}
        if options.tool:
            function = {"name": TOOL, "arguments": json.dumps({"city": "東京"})}
            message["tool_calls"] = [{"id": "find_01", "type": "function", "function": function}]
        else:
            message["content"] = [{"type": "text", "text": choice.text}]
        body = {
            "id": "9f",
            "message": message,
            "finish_reason": _REASONS[choice.reason],
            "usage": _build_usage(choice.token_count),
        }
        if options.top_logprobs is not None:
            body["logprobs"] = [_build_logprobs(options, one)["logprobs"] for one in choice.tokens]
        return encode_compact_json(body)

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build the end of a stream that failed."""
        del request
        delta = {"finish_reason": "ERROR", "error": "CUDA error at 0x7f00"}
        return _format_event({"type": "message-end", "delta": delta})


def _build_logprobs(options: RequestOptions, token: str) -> dict[str, Any]:
    if options.top_logprobs is None:
        return {}
    return {"logprobs": {"text": token, "token_ids": [7], "logprobs": [get_logprob(token)]}}


def _build_usage(token_count: int) -> Json:
    counts = {"input_tokens": PROMPT_TOKENS, "output_tokens": token_count}
    return {"billed_units": counts, "tokens": counts}


CROSS_WORKERS: Final = {
    "cohere": Worker(
        protocol="cohere",
        script=CohereScript(),
        passthrough_client="cohere",
        n=map_modes(EMULATED),
        alternatives="clamped",
        prompt_loss="approximated",
    ),
}
