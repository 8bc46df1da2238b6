"""Triton's generate endpoints with models of four backends.

Sources: triton-inference-server/server (bytes recorded from 2.51), vllm_backend 8de0c14,
tensorrtllm_backend 0b9d7d5 (the ensemble, and llmapi).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from tests.cross.checks import (
    Fields,
    check_fields,
    equals,
    integer,
    is_flag,
    is_text,
    number,
    strings,
)
from tests.cross.script import (
    ALTERNATIVE,
    PROMPT,
    PROMPT_TOKENS,
    TOKENS,
    RequestOptions,
    ScriptedChoice,
    get_logprob,
    script_choice,
)
from tests.cross.worker_server import ReceivedRequest, ScriptedResponse, StreamEvents
from tests.cross.workers.openai_format import encode_compact_json

_INT32: Final = 2**31 - 1
_FLOAT: Final = number(-3e38)
_TRUE: Final = equals(True)
_SAMPLED: Final[Fields] = {
    "max_tokens": integer(0),
    "min_tokens": integer(0),
    "temperature": number(0),
    "top_p": number(0, 1, above=True),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "seed": integer(-(2**63)),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, above=True),
    "n": integer(1),
}
_PACKED: Final[Fields] = {
    **_SAMPLED, "stop": strings(64), "stop_token_ids": lambda body: isinstance(body, list),
    "ignore_eos": is_flag, "skip_special_tokens": is_flag, "include_stop_str_in_output": is_flag,
    "logprobs": integer(-1),
}  # fmt: skip
"""The parameters inside the JSON tensor."""
_TENSORS: Final[Mapping[str, Fields]] = {
    "vllm": {
        "stream": is_flag, "sampling_parameters": is_text, "exclude_input_in_output": _TRUE,
        "return_finish_reason": is_flag, "return_num_output_tokens": is_flag,
        "return_num_input_tokens": is_flag, "return_logprobs": is_flag,
        "return_cumulative_logprob": is_flag,
    },
    "trtllm": {
        "stream": is_flag, "max_tokens": integer(1, _INT32), "min_tokens": integer(0, _INT32),
        "num_return_sequences": integer(1, _INT32), "stop_words": strings(64),
        "bad_words": strings(64), "exclude_input_in_output": _TRUE, "top_k": integer(0, _INT32),
        "top_p": _FLOAT, "temperature": _FLOAT, "repetition_penalty": _FLOAT,
        "presence_penalty": _FLOAT, "frequency_penalty": _FLOAT, "seed": integer(0, 2**64 - 1),
        "return_log_probs": is_flag, "return_num_input_tokens": is_flag,
        "return_num_output_tokens": is_flag,
    },
    "llmapi": {
        "streaming": is_flag, "sampling_param_exclude_input_from_output": _TRUE,
        "sampling_param_max_tokens": integer(1, _INT32), "sampling_param_stop": strings(64),
        "sampling_param_temperature": _FLOAT, "sampling_param_top_p": _FLOAT,
        "sampling_param_top_k": integer(0, _INT32), "sampling_param_seed": integer(0, 2**64 - 1),
        "return_finish_reason": is_flag, "return_stop_reason": is_flag,
        "return_cumulative_logprob": is_flag,
    },
    "plain": {"stream": is_flag, "parameters": lambda body: isinstance(body, dict)},
}  # fmt: skip
_MUST: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("exclude_input_in_output",),
    "trtllm": ("max_tokens", "exclude_input_in_output"),
    "llmapi": ("sampling_param_exclude_input_from_output",),
    "plain": (),
}
_CONFIG: Final = {
    "name": "vllm_like",
    "input": [
        {"name": name, "data_type": f"TYPE_{kind}", "dims": [1], "optional": name != "text_input"}
        for name, kind in {
            "text_input": "STRING", "stream": "BOOL", "sampling_parameters": "STRING",
            "exclude_input_in_output": "BOOL", "return_finish_reason": "BOOL",
            "return_cumulative_logprob": "BOOL", "return_logprobs": "BOOL",
            "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
        }.items()
    ],
    "output": [
        {"name": name}
        for name in ("text_output", "finish_reason", "cumulative_logprob", "logprobs",
                     "num_input_tokens", "num_output_tokens")
    ],
    "model_transaction_policy": {"decoupled": True},
}  # fmt: skip
_KEEPS_STOP: Final = ("trtllm", "plain")


class StreamPiece(Struct, frozen=True):
    """What an event adds to each choice, or a unary response; the last one has a reason."""

    tokens: tuple[str, ...]
    token_count: int
    reason: str


def _create_error_response(status: int, message: str) -> ScriptedResponse:
    return ScriptedResponse(status=status, body=encode_compact_json({"error": message}))


class Triton:
    """Models of one backend, one for each scenario."""

    content_type = "text/event-stream; charset=utf-8"
    error_responses: Final = {
        "refused": _create_error_response(400, "min_tokens must be at most max_tokens"),
        "limited": _create_error_response(429, "Slow down, tenant 77"),
        "failed": _create_error_response(500, "failed to allocate: CUDA at 0x7f00"),
        "busy": _create_error_response(
            503, "[request id: <id_unknown>] Exceeds maximum queue size"
        ),
    }

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def respond_to_probe(self, request: ReceivedRequest) -> ScriptedResponse | None:
        """Answer a health probe, or a model's configuration, which only one server publishes."""
        if request.method != "GET":
            return None
        if not request.path.endswith("/config"):
            return ScriptedResponse(content_type="text/plain")
        if self._profile == "vllm":
            return ScriptedResponse(body=encode_compact_json(_CONFIG))
        return _create_error_response(403, "This API is restricted, expecting header 'admin'")

    def parse_request(self, request: ReceivedRequest) -> RequestOptions:
        """Decode a prompt."""
        body = request.fields()
        request.scenario = request.path.split("/")[3] if request.path.count("/") > 3 else "?"
        endpoint = f"/v2/models/{request.scenario}/generate"
        request.check_path(endpoint, f"{endpoint}_stream")
        stream = request.path.endswith("_stream")
        known_fields = {"text_input": equals(PROMPT), **_TENSORS[self._profile]}
        check_fields(request, body, known_fields, ("text_input", *_MUST[self._profile]))
        if stream is not body.get("streaming" if self._profile == "llmapi" else "stream", False):
            request.faults.append("what the path asks for and what the flag does are not the same")
        return self._read_options(request, body, stream=stream)

    def _read_options(
        self, request: ReceivedRequest, body: Mapping[str, Any], *, stream: bool
    ) -> RequestOptions:
        match self._profile:
            case "vllm":
                sampling = json.loads(body.get("sampling_parameters", "{}"))
                check_fields(request, sampling, _PACKED, where="sampling_parameters.")
                top = sampling.get("logprobs") if body.get("return_logprobs") else None
            case "plain":
                sampling = body.get("parameters", {})
                check_fields(request, sampling, {**_SAMPLED, "stop": is_text}, where="parameters.")
                top = None
            case "trtllm":
                sampling = {
                    **body,
                    "stop": body.get("stop_words"),
                    "n": body.get("num_return_sequences"),
                }
                top = 0 if body.get("return_log_probs") else None
            case _:
                prefix = "sampling_param_"
                sampling = {name.removeprefix(prefix): value for name, value in body.items()}
                top = None
        stop = sampling.get("stop") or ()
        return RequestOptions(
            stream=stream,
            max_tokens=sampling.get("max_tokens"),
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            n=sampling.get("n") or 1,
            include_stop=sampling.get("include_stop_str_in_output", False),
            top_logprobs=top,
        )

    def build_stream(self, request: ReceivedRequest, options: RequestOptions) -> StreamEvents:
        """Build one event for each token; the last finish reason is the only end."""
        choice = self._say(options)
        last = len(choice.tokens) - 1
        pieces = [
            StreamPiece((token,), 1, choice.reason if i == last else "")
            for i, token in enumerate(choice.tokens)
        ]
        return StreamEvents(
            (), tuple(_format_event(self._outputs(request, options, one)) for one in pieces), ()
        )

    def build_unary(self, request: ReceivedRequest, options: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.WorkerScript``."""
        choice = self._say(options)
        return encode_compact_json(
            self._outputs(
                request, options, StreamPiece(choice.tokens, choice.token_count, choice.reason)
            )
        )

    def build_error_event(self, request: ReceivedRequest) -> bytes:
        """Build an error event."""
        return _format_event({"error": "engine exploded: CUDA at 0x7f00"})

    def _say(self, options: RequestOptions) -> ScriptedChoice:
        return script_choice(options, keeps_stop=self._profile in _KEEPS_STOP)

    def _outputs(
        self, request: ReceivedRequest, options: RequestOptions, piece: StreamPiece
    ) -> dict[str, Any]:
        """Build the requested outputs, keys in the server's order, with a list for choices."""
        flags = request.fields()
        reason = {"": "None", "length": "length"}.get(piece.reason, "stop")
        outputs: dict[str, Any] = {
            "finish_reason": reason,
            "num_output_tokens": piece.token_count,
            "stop_reason": options.stops[0] if piece.reason == "stop" else "None",
        }
        requested = {name: one for name, one in outputs.items() if flags.get(f"return_{name}")}
        if options.top_logprobs is not None and self._profile == "vllm":
            requested["logprobs"] = json.dumps(
                [_build_logprobs_column(token) for token in piece.tokens]
            )
        if options.top_logprobs is not None and self._profile == "trtllm":
            values = [get_logprob(token) for token in piece.tokens]
            requested["output_log_probs"] = values[0] if len(values) == 1 else values
        requested["text_output"] = "".join(piece.tokens)
        if options.n > 1:
            requested = {name: [one] * options.n for name, one in requested.items()}
        if flags.get("return_num_input_tokens"):
            requested["num_input_tokens"] = PROMPT_TOKENS
        requested |= {"model_name": request.scenario, "model_version": "1"}
        return {name: requested[name] for name in sorted(requested)}


def _format_event(value: Any) -> bytes:
    return b"data: %b\n\n" % encode_compact_json(value)


def _build_logprobs_column(token: str) -> dict[str, Any]:
    """Build vLLM's logprobs of a token: itself first, then the likeliest."""
    likely = {str(100 + TOKENS.index(token)): (token, get_logprob(token)), "99": ALTERNATIVE}
    return {
        key: {"logprob": value, "rank": rank, "decoded_token": token}
        for rank, (key, (token, value)) in enumerate(likely.items(), 1)
    }
