"""Triton's generate, before models of four families.

Sources: triton-inference-server/server (bytes measured of 2.51), vllm_backend 8de0c14,
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
    OTHER,
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
    **_SAMPLED, "stop": strings(64), "stop_token_ids": lambda got: isinstance(got, list),
    "ignore_eos": is_flag, "skip_special_tokens": is_flag, "include_stop_str_in_output": is_flag,
    "logprobs": integer(-1),
}  # fmt: skip
"""What goes into the tensor of JSON."""
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
    "plain": {"stream": is_flag, "parameters": lambda got: isinstance(got, dict)},
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
_LEAVES: Final = ("trtllm", "plain")


class StreamPiece(Struct, frozen=True):
    """What an event adds to each choice, or a whole answer; the last one has a reason."""

    tokens: tuple[str, ...]
    made: int
    reason: str


def _create_error_response(status: int, told: str) -> ScriptedResponse:
    return ScriptedResponse(status=status, body=encode_compact_json({"error": told}))


class Triton:
    """Models of one family, one for each play."""

    kind = "text/event-stream; charset=utf-8"
    refusals: Final = {
        "refused": _create_error_response(400, "min_tokens must be at most max_tokens"),
        "limited": _create_error_response(429, "Slow down, tenant 77"),
        "failed": _create_error_response(500, "failed to allocate: CUDA at 0x7f00"),
        "busy": _create_error_response(
            503, "[request id: <id_unknown>] Exceeds maximum queue size"
        ),
    }

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def aside(self, asked: ReceivedRequest) -> ScriptedResponse | None:
        """A probe, or a model's configuration, which only one server here lets everybody see."""
        if asked.method != "GET":
            return None
        if not asked.path.endswith("/config"):
            return ScriptedResponse(kind="text/plain")
        if self._profile == "vllm":
            return ScriptedResponse(body=encode_compact_json(_CONFIG))
        return _create_error_response(403, "This API is restricted, expecting header 'admin'")

    def read(self, asked: ReceivedRequest) -> RequestOptions:
        """A prompt."""
        got = asked.fields()
        asked.play = asked.path.split("/")[3] if asked.path.count("/") > 3 else "?"
        way = f"/v2/models/{asked.play}/generate"
        asked.at(way, f"{way}_stream")
        stream = asked.path.endswith("_stream")
        known = {"text_input": equals(PROMPT), **_TENSORS[self._profile]}
        check_fields(asked, got, known, ("text_input", *_MUST[self._profile]))
        if stream is not got.get("streaming" if self._profile == "llmapi" else "stream", False):
            asked.faults.append("what the path asks for and what the flag does are not the same")
        return self._wish(asked, got, stream=stream)

    def _wish(
        self, asked: ReceivedRequest, got: Mapping[str, Any], *, stream: bool
    ) -> RequestOptions:
        match self._profile:
            case "vllm":
                told = json.loads(got.get("sampling_parameters", "{}"))
                check_fields(asked, told, _PACKED, where="sampling_parameters.")
                top = told.get("logprobs") if got.get("return_logprobs") else None
            case "plain":
                told = got.get("parameters", {})
                check_fields(asked, told, {**_SAMPLED, "stop": is_text}, where="parameters.")
                top = None
            case "trtllm":
                told = {**got, "stop": got.get("stop_words"), "n": got.get("num_return_sequences")}
                top = 0 if got.get("return_log_probs") else None
            case _:
                prefix = "sampling_param_"
                told = {name.removeprefix(prefix): value for name, value in got.items()}
                top = None
        stop = told.get("stop") or ()
        return RequestOptions(
            stream=stream,
            most=told.get("max_tokens"),
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            n=told.get("n") or 1,
            keeps=told.get("include_stop_str_in_output", False),
            top=top,
        )

    def lines(self, asked: ReceivedRequest, wish: RequestOptions) -> StreamEvents:
        """One event for each token, and no end beside the last one's finish reason."""
        said = self._say(wish)
        last = len(said.tokens) - 1
        pieces = [
            StreamPiece((token,), 1, said.reason if i == last else "")
            for i, token in enumerate(said.tokens)
        ]
        return StreamEvents(
            (), tuple(_format_event(self._outputs(asked, wish, one)) for one in pieces), ()
        )

    def whole(self, asked: ReceivedRequest, wish: RequestOptions) -> bytes:
        """See ``tests.cross.worker_server.Desk``."""
        said = self._say(wish)
        return encode_compact_json(
            self._outputs(asked, wish, StreamPiece(said.tokens, said.made, said.reason))
        )

    def failure(self, asked: ReceivedRequest) -> bytes:
        """One more event."""
        return _format_event({"error": "engine exploded: CUDA at 0x7f00"})

    def _say(self, wish: RequestOptions) -> ScriptedChoice:
        return script_choice(wish, leaves=self._profile in _LEAVES)

    def _outputs(
        self, asked: ReceivedRequest, wish: RequestOptions, piece: StreamPiece
    ) -> dict[str, Any]:
        """What the model was asked to tell, keys in the server's order, a list for choices."""
        flags = asked.fields()
        reason = {"": "None", "length": "length"}.get(piece.reason, "stop")
        known: dict[str, Any] = {
            "finish_reason": reason,
            "num_output_tokens": piece.made,
            "stop_reason": wish.stops[0] if piece.reason == "stop" else "None",
        }
        told = {name: one for name, one in known.items() if flags.get(f"return_{name}")}
        if wish.top is not None and self._profile == "vllm":
            told["logprobs"] = json.dumps([_build_logprobs_column(token) for token in piece.tokens])
        if wish.top is not None and self._profile == "trtllm":
            values = [get_logprob(token) for token in piece.tokens]
            told["output_log_probs"] = values[0] if len(values) == 1 else values
        told["text_output"] = "".join(piece.tokens)
        if wish.n > 1:
            told = {name: [one] * wish.n for name, one in told.items()}
        if flags.get("return_num_input_tokens"):
            told["num_input_tokens"] = PROMPT_TOKENS
        told |= {"model_name": asked.play, "model_version": "1"}
        return {name: told[name] for name in sorted(told)}


def _format_event(got: Any) -> bytes:
    return b"data: %b\n\n" % encode_compact_json(got)


def _build_logprobs_column(token: str) -> dict[str, Any]:
    """As vLLM tells a token: itself first, then the likeliest."""
    likely = {str(100 + TOKENS.index(token)): (token, get_logprob(token)), "99": OTHER}
    return {
        key: {"logprob": value, "rank": rank, "decoded_token": said}
        for rank, (key, (said, value)) in enumerate(likely.items(), 1)
    }
