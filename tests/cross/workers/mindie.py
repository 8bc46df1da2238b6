"""MindIE: Triton's generate and OpenAI's chat, of three releases.

Sources: MindIE-LLM 0695772, src/server/endpoint; the published pages of 1.0.RC1 and 1.0.0.
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
from tests.cross.script import PROMPT, Json, RequestOptions, script_choice
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import (
    OpenAIResponseFormat,
    decode_options,
    encode_compact_json,
)

_INT32: Final = 2**31 - 1
_PARAMETERS: Final[Fields] = {
    "details": equals(True),
    "do_sample": is_flag,
    "max_new_tokens": integer(1, _INT32),
    "repetition_penalty": number(0, above=True),
    "seed": integer(0),
    "temperature": number(0, above=True),
    "top_k": integer(0, _INT32),
    "top_p": number(0, 1, above=True),
    "typical_p": number(0, 1, above=True),
    "batch_size": integer(1, _INT32),
    "watermark": is_flag,
    "perf_stat": is_flag,
    "priority": integer(1, 5),
    "timeout": integer(1, 65535),
}
_FIRST: Final[Fields] = {
    "model": is_text,
    "messages": is_message_list,
    "stream": is_flag,
    "max_tokens": integer(1, _INT32),
    "temperature": number(0, 2, above=True),
    "top_p": number(0, 1, above=True),
    "seed": integer(1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "stream_options": ALWAYS,  # unknown, and ignored like every unknown field
}
_LATER: Final[Fields] = {
    **_FIRST,
    "temperature": number(0),
    "top_k": integer(-1, _INT32),
    "seed": integer(0),
    "repetition_penalty": number(0, above=True),
    "stop": string_or(strings(1024)),
    "stop_token_ids": ALWAYS,
    "include_stop_str_in_output": is_flag,
    "skip_special_tokens": is_flag,
    "ignore_eos": is_flag,
    "n": integer(1, 8192),
    "best_of": integer(1, 128),
    "use_beam_search": is_flag,
    "logprobs": is_flag,
    "top_logprobs": integer(0, 20),
    "tools": functions,
    "tool_choice": ALWAYS,
    "parallel_tool_calls": is_flag,
    "response_format": ALWAYS,
    "chat_template_kwargs": ALWAYS,
}
_COMPLETION: Final[Fields] = {
    **{name: check for name, check in _LATER.items() if name not in ("messages", "tools")},
    "prompt": equals(PROMPT),
    "logprobs": integer(0, 5),
}
_LATE: Final = OpenAIResponseFormat(
    common={"id": "endpoint_common_8", "created": 1716825108, "model": "real-name"},
    delta_fields={"role": "assistant"},
    final_delta={"role": "assistant", "content": ""},
    usage="each",
    message_fields={"tool_calls": []},
)
_MANNERS: Final[Mapping[str, OpenAIResponseFormat]] = {
    "2x": _LATE,
    "1x": _LATE,
    "rc1": OpenAIResponseFormat(
        common={"id": "1", "created": 1707275960, "model": "baichuan"},
        first_delta=None,
        delta_fields={"role": "assistant"},
        final_delta={},
        usage="unary",
        without_logprobs=True,
        reasons={"eos": "eos_token", "length": "length"},
    ),
}
_REASONS: Final = {"eos": "eos_token", "length": "length"}


def _create_error_response(status: int, message: str, kind: str) -> ScriptedResponse:
    body = encode_compact_json({"error": message, "error_type": kind})
    return ScriptedResponse(
        status=status, body=body, headers={"RequestUUID": "1", "startTime": "2"}
    )


class MindIE:
    """One release of MindIE."""

    content_type = "text/event-stream"
    error_responses: Final = {
        "refused": _create_error_response(
            422, "min_tokens must be at most 5", "Input Validation Error"
        ),
        "limited": ScriptedResponse(
            status=429, body=b'{"error":"Memory limit exceeded, tenant 77","code":429}'
        ),
        "failed": _create_error_response(
            500, "Failed to get engine response. 0x7f00", "Incomplete Generation"
        ),
        "busy": _create_error_response(
            503, "The service 12 has been stopped.", "Service Unavailable"
        ),
    }

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._format = _MANNERS[profile]

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe, a metadata request, or a request to stop another."""
        if request.path.endswith("/stopInfer"):
            return ScriptedResponse(body=request.body)
        if request.method != "GET":
            return None
        if request.path == "/v2":
            return ScriptedResponse(
                body=b'{"name":"MindIE Server","extensions":{"max_iter_times":512}}'
            )
        if request.path.endswith("/getSlotCount"):
            return ScriptedResponse(
                body=b'{"total_slots":200,"free_slots":200,"available_tokens_length":9}'
            )
        return ScriptedResponse()

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a text, a conversation or a prompt."""
        body = request.fields()
        if "text_input" in body:
            return self._read_text(request, body)
        request.scenario = body["model"]
        late = ("/v1/completions",) if self._profile == "2x" else ()
        request.check_path("/v1/chat/completions", *late)
        chat = _is_chat(request)
        known_fields = (_FIRST if self._profile == "rc1" else _LATER) if chat else _COMPLETION
        check_fields(request, body, known_fields, ("model", "messages" if chat else "prompt"))
        options = decode_options(body)
        if options.n > 1 and not body.get("temperature"):
            request.faults.append("n without a temperature")
        return options

    def _read_text(self, request: ReceivedRequest, body: Json) -> RequestOptions:
        request.scenario = request.path.split("/")[3]
        endpoint = f"/v2/models/{request.scenario}/generate"
        request.check_path(endpoint, f"{endpoint}_stream")
        known_fields: Fields = {"id": is_text, "text_input": equals(PROMPT), "parameters": ALWAYS}
        check_fields(request, body, known_fields, ("text_input", "parameters"))
        parameters = body["parameters"]
        check_fields(request, parameters, _PARAMETERS, ("details", "max_new_tokens"), "parameters.")
        return RequestOptions(
            stream=request.path.endswith("_stream"), max_tokens=parameters["max_new_tokens"]
        )

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """See ``tests.cross.worker_server.WorkerScript``."""
        if not request.path.startswith("/v2"):
            return self._format.build_stream(options, chat=_is_chat(request), usage=True)
        choice = script_choice(options)
        rows = []
        for i, token in enumerate(choice.tokens, 1):
            reason = _REASONS[choice.reason] if i == len(choice.tokens) else ""
            event = self._text(request, token, i, reason, batch=1, queue=5067)
            if self._profile != "rc1":
                times = ("prefill_time", "decode_time")
                event = {**event, times[i > 1]: 7, times[i == 1]: None}
            rows.append(b"data:%b\n\n" % encode_compact_json(event))
        return StreamEvents((), tuple(rows), ())

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        if not request.path.startswith("/v2"):
            return self._format.build_unary(options, chat=_is_chat(request))
        choice = script_choice(options)
        batch, queue = [1] * choice.token_count, [5067] * choice.token_count
        body = self._text(
            request,
            choice.text,
            choice.token_count,
            _REASONS[choice.reason],
            batch=batch,
            queue=queue,
        )
        return encode_compact_json(body)

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build a plain text outside any event."""
        return b"Failed to get engine response"

    def _text(
        self,
        request: ReceivedRequest,
        text: str,
        token_count: int,
        reason: str,
        *,
        batch: object,
        queue: object,
    ) -> Json:
        details = {
            **({"finish_reason": reason} if reason else {}),
            "generated_tokens": token_count,
            "first_token_cost": None,
            "decode_cost": None,
            "batch_size": batch,
            "queue_wait_time": queue,
        }
        return {
            "id": request.fields().get("id", "endpoint_common_8"),
            "model_name": "llama_65b",
            "model_version": None,
            "text_output": text,
            "details": details,
        }


def _is_chat(request: ReceivedRequest) -> bool:
    return request.path == "/v1/chat/completions"
