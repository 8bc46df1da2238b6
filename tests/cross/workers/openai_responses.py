"""A worker that answers conversations in OpenAI's Responses API, and prompts as completions.

Source: the types of openai-python 3.54; vLLM 0.32, which ends every stream with
``response.completed`` and sends an error in a stream as a flat event.
"""

from typing import Any, Final

from tests.cross.checks import (
    ALWAYS,
    Fields,
    check_fields,
    equals,
    integer,
    is_flag,
    is_text,
    number,
    string_or,
    strings,
)
from tests.cross.script import (
    ALTERNATIVE,
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
from tests.cross.workers.openai import OpenAI
from tests.cross.workers.openai_format import encode_compact_json

_PATH: Final = "/v1/responses"
_FIELDS: Final[Fields] = {
    "model": is_text,
    "input": ALWAYS,
    "stream": is_flag,
    "store": equals(wanted=False),
    "max_output_tokens": integer(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_logprobs": integer(0, 20),
    "include": ALWAYS,
    "tools": ALWAYS,
    "tool_choice": ALWAYS,
    "parallel_tool_calls": is_flag,
    "text": ALWAYS,
    "reasoning": ALWAYS,
}


_OPEN_FIELDS: Final[Fields] = {
    "stop": string_or(strings(64)),
    "include_stop_str_in_output": is_flag,
    "top_k": integer(-1),
}
"""Further fields of vLLM."""


class OpenAIResponses:
    """See ``tests.cross.worker_server.WorkerScript``."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, profile: str) -> None:
        self._completions = OpenAI(profile)
        self._fields = {**_FIELDS, **(_OPEN_FIELDS if profile == "vllm" else {})}
        self.error_responses = self._completions.error_responses

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe."""
        return self._completions.respond_to_probe(request)

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation or a prompt."""
        if request.path != _PATH:
            return self._completions.parse_request(request)
        body = request.fields()
        request.scenario = body["model"]
        request.check_path(_PATH)
        check_fields(request, body, self._fields, ("model", "input", "store"))
        if PROMPT not in str(body["input"]):
            request.faults.append("the conversation is not the client's")
        for tool in body.get("tools", ()):
            if tool["type"] != "function" or tool["name"] != TOOL:
                request.faults.append(f"an odd tool: {tool}")
        return RequestOptions(
            stream=body.get("stream", False),
            max_tokens=body.get("max_output_tokens"),
            stops=tuple(body.get("stop", ())),
            include_stop=body.get("include_stop_str_in_output", False),
            top_logprobs=body.get("top_logprobs") if "include" in body else None,
            tool="tools" in body,
        )

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        if request.path != _PATH:
            return self._completions.build_stream(request, options)
        final = _build_response(options)
        created = {"type": "response.created", "response": final | {"output": [], "usage": None}}
        opening = [_format_event(created)]
        closing = [_format_event({"type": "response.completed", "response": final})]
        [item] = final["output"]
        done = _format_event({"type": "response.output_item.done", "output_index": 0, "item": item})
        place = {"item_id": item["id"], "output_index": 0}
        empty: Json = {"arguments": ""} if options.tool else {"content": []}
        begun = {**item, **empty}
        added = {"type": "response.output_item.added", "output_index": 0, "item": begun}
        opening.append(_format_event(added))
        if options.tool:
            kind = "response.function_call_arguments.delta"
            pieces = [{"type": kind, **place, "delta": piece} for piece in ARGUMENTS]
        else:
            kind = "response.output_text.delta"
            pieces = [
                {"type": kind, **place, "content_index": 0, "delta": token,
                 "logprobs": [_build_logprob(token)] if options.top_logprobs is not None else []}
                for token in script_choice(options).tokens
            ]  # fmt: skip
        return StreamEvents(tuple(opening), tuple(map(_format_event, pieces)), (done, *closing))

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        if request.path != _PATH:
            return self._completions.build_unary(request, options)
        return encode_compact_json(_build_response(options))

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build an event with the error."""
        if request.path != _PATH:
            return self._completions.build_error_event(request)
        error = {"type": "error", "code": "server_error", "message": "CUDA at 0x7f00"}
        return _format_event(error)


def _build_response(options: RequestOptions) -> dict[str, Any]:
    choice = script_choice(options)
    is_cut = choice.reason == "length"
    item: dict[str, Any] = {"id": "msg_7", "type": "message", "role": "assistant"}
    logprobs = (
        [_build_logprob(token) for token in choice.tokens]
        if options.top_logprobs is not None
        else []
    )
    part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": logprobs}
    item |= {"status": "incomplete" if is_cut else "completed", "content": [part]}
    if options.tool:
        item = {"id": "fc_7", "type": "function_call", "call_id": "call_7", "name": TOOL}
        item |= {"arguments": "".join(ARGUMENTS), "status": "completed"}
    return {
        "id": "resp_7",
        "object": "response",
        "created_at": 1716825108,
        "model": "real-name",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": [item],
        "usage": {
            "input_tokens": PROMPT_TOKENS,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": choice.token_count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": PROMPT_TOKENS + choice.token_count,
        },
    }


def _build_logprob(token: str) -> Json:
    return {"token": token, "logprob": get_logprob(token), "bytes": list(token.encode()),
            "top_logprobs": [{"token": ALTERNATIVE[0], "logprob": ALTERNATIVE[1]}]}  # fmt: skip


def _format_event(event: Json) -> bytes:
    return (
        b"event: "
        + str(event["type"]).encode()
        + b"\ndata: "
        + encode_compact_json(event)
        + b"\n\n"
    )
