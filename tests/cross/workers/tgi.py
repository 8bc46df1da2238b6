"""Hugging Face's Text Generation Inference: its own API for prompts, OpenAI's for chat.

Its requests name no model, so the scenario is part of the worker's URL. Source:
text-generation-inference 3.3, router/src/{lib,server,validation}.rs.
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
    strings,
)
from tests.cross.checks import is_tool_list as functions
from tests.cross.script import (
    ALTERNATIVE,
    PROMPT,
    PROMPT_TOKENS,
    TOKENS,
    Json,
    RequestOptions,
    ScriptedChoice,
    get_logprob,
    script_choice,
)
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import (
    OpenAIResponseFormat,
    decode_options,
    encode_compact_json,
)

_PARAMETERS: Final[Fields] = {
    "best_of": integer(1, 2),
    "temperature": number(0, above=True),
    "repetition_penalty": number(0, above=True),
    "frequency_penalty": number(-2, 2),
    "top_k": integer(1),
    "top_p": lambda body: type(body) is float and 0 < body < 1,
    "typical_p": lambda body: type(body) is float and 0 < body < 1,
    "do_sample": is_flag,
    "max_new_tokens": integer(1),
    "return_full_text": equals(False),
    "stop": strings(4),
    "truncate": integer(1),
    "watermark": is_flag,
    "details": equals(True),
    "decoder_input_details": is_flag,
    "seed": integer(0, 2**64 - 1),
    "top_n_tokens": integer(1, 5),
    "grammar": ALWAYS,
    "adapter_id": is_text,
}
_CHAT: Final[Fields] = {
    "model": is_text,
    "messages": is_message_list,
    "frequency_penalty": number(-2, 2),
    "logprobs": is_flag,
    "top_logprobs": integer(0, 5),
    "max_tokens": integer(1),
    "presence_penalty": number(-2, 2),
    "stop": strings(4),
    "stream": is_flag,
    "seed": integer(0, 2**64 - 1),
    "temperature": number(0),
    "top_p": lambda body: type(body) is float and 0 < body < 1,
    "tools": functions,
    "tool_choice": ALWAYS,
    "response_format": ALWAYS,
    "stream_options": equals({"include_usage": True}),
}
_FORMAT: Final = OpenAIResponseFormat(
    common={"id": "", "created": 1716825108, "model": "llama3", "system_fingerprint": "3.3-sha"},
    first_delta=None,
    delta_fields={"role": "assistant"},
    final_delta=None,
    null_usage=True,
    keeps_stop=True,
    call={"id": "0", "type": "function"},
    finish_reason_after_calls=False,
)
_REASONS: Final = {"eos": "eos_token", "stop": "stop_sequence", "length": "length"}


def _create_error_response(
    status: int, message: str, kind: str, **headers: str
) -> ScriptedResponse:
    body = encode_compact_json({"error": message, "error_type": kind})
    return ScriptedResponse(status=status, body=body, headers=headers)


class TGI:
    """One server; the first segment of a path is the scenario."""

    content_type = "text/event-stream"
    error_responses: Final = {
        "refused": _create_error_response(
            422, "Input validation error: `min_tokens` must be at most 5", "validation"
        ),
        "limited": _create_error_response(
            429, "Model is overloaded", "overloaded", retry_after="7"
        ),
        "failed": _create_error_response(
            424, "Request failed during generation: CUDA at 0x7f00", "generation"
        ),
        "busy": _create_error_response(503, "unhealthy 12", "healthcheck"),
    }

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe or a metadata request."""
        if request.method != "GET":
            return None
        info = b'{"max_concurrent_requests":128,"max_best_of":2,"max_stop_sequences":4}'
        return ScriptedResponse(body=info)

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a conversation or a prompt."""
        body = request.fields()
        request.scenario = request.path.split("/")[1]
        top = f"/{request.scenario}"
        request.check_path(
            f"{top}/generate", f"{top}/generate_stream", f"{top}/v1/chat/completions"
        )
        if _is_chat(request):
            check_fields(request, body, _CHAT, ("messages",))
            return decode_options(body)
        known_fields: Fields = {"inputs": equals(PROMPT), "parameters": ALWAYS}
        check_fields(request, body, known_fields, known_fields)
        parameters = body["parameters"]
        check_fields(request, parameters, _PARAMETERS, ("details",), "parameters.")
        return RequestOptions(
            stream=request.path.endswith("/generate_stream"),
            max_tokens=parameters.get("max_new_tokens"),
            stops=tuple(parameters.get("stop", ())),
            top_logprobs=parameters.get("top_n_tokens", 0),
        )

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """Build one event for each token; the last has the details."""
        if _is_chat(request):
            usage = "stream_options" in request.fields()
            return _FORMAT.build_stream(options, chat=True, usage=usage)
        choice = script_choice(options, keeps_stop=True)
        rows = [_build_token_row(i, token, options) for i, token in enumerate(choice.tokens)]
        ends = {**rows[-1], **_build_final_fields(choice, {"input_length": PROMPT_TOKENS})}
        silent = {"generated_text": None, "details": None}
        tokens = [*({**row, **silent} for row in rows[:-1]), ends]
        return StreamEvents(
            (), tuple(b"data:%b\n\n" % encode_compact_json(one) for one in tokens), ()
        )

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        if _is_chat(request):
            return _FORMAT.build_unary(options, chat=True)
        choice = script_choice(options, keeps_stop=True)
        rows = [_build_token_row(i, token, options) for i, token in enumerate(choice.tokens)]
        details = {
            "prefill": [],
            "tokens": [row["token"] for row in rows],
            "top_tokens": [row.get("top_tokens", []) for row in rows],
        }
        return encode_compact_json(_build_final_fields(choice, details))

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build an event with the error."""
        message = "Request failed during generation: CUDA at 0x7f00"
        if _is_chat(request):
            error = {"message": message, "http_status_code": 422}
            return b"data: %b\n\n" % encode_compact_json({"error": error})
        return b"data:%b\n\n" % encode_compact_json({"error": message, "error_type": "generation"})


def _is_chat(request: ReceivedRequest) -> bool:
    return request.path.endswith("/v1/chat/completions")


def _build_token_row(
    at: int, token: str, options: RequestOptions
) -> dict[str, Json | list[Json] | int]:
    own = _build_token(token, get_logprob(token), 100 + TOKENS.index(token))
    row: dict[str, Json | list[Json] | int] = {"index": at + 1, "token": own}
    if options.top_logprobs:
        row["top_tokens"] = [own, _build_token(*ALTERNATIVE, 99)][: options.top_logprobs]
    return row


def _build_token(token: str, value: float, number: int) -> Json:
    return {"id": number, "text": token, "logprob": value, "special": False}


def _build_final_fields(choice: ScriptedChoice, extra_details: Json) -> Json:
    details = {
        "finish_reason": _REASONS[choice.reason],
        "generated_tokens": choice.token_count,
        "seed": None,
        **extra_details,
    }
    return {"generated_text": choice.text, "details": details}
