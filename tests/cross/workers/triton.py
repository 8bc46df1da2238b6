"""Triton's generate, before models of four families.

Sources: triton-inference-server/server (bytes measured of 2.51), vllm_backend 8de0c14,
tensorrtllm_backend 0b9d7d5 (the ensemble, and llmapi).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from tests.cross.checks import Fields, exactly, flag, hold, number, strings, text, whole
from tests.cross.script import OTHER, PROMPT, PROMPT_TOKENS, TOKENS, Said, Wish, logprob, say
from tests.cross.stage import Answer, Asked, Lines
from tests.cross.workers.manner import compact

_INT32: Final = 2**31 - 1
_FLOAT: Final = number(-3e38)
_TRUE: Final = exactly(True)
_SAMPLED: Final[Fields] = {
    "max_tokens": whole(0), "min_tokens": whole(0), "temperature": number(0),
    "top_p": number(0, 1, above=True), "top_k": whole(-1), "min_p": number(0, 1),
    "seed": whole(-(2**63)), "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, above=True), "n": whole(1),
}  # fmt: skip
_PACKED: Final[Fields] = {
    **_SAMPLED, "stop": strings(64), "stop_token_ids": lambda got: isinstance(got, list),
    "ignore_eos": flag, "skip_special_tokens": flag, "include_stop_str_in_output": flag,
    "logprobs": whole(-1),
}  # fmt: skip
"""What goes into the tensor of JSON."""
_TENSORS: Final[Mapping[str, Fields]] = {
    "vllm": {
        "stream": flag, "sampling_parameters": text, "exclude_input_in_output": _TRUE,
        "return_finish_reason": flag, "return_num_output_tokens": flag,
        "return_num_input_tokens": flag, "return_logprobs": flag,
        "return_cumulative_logprob": flag,
    },
    "trtllm": {
        "stream": flag, "max_tokens": whole(1, _INT32), "min_tokens": whole(0, _INT32),
        "num_return_sequences": whole(1, _INT32), "stop_words": strings(64),
        "bad_words": strings(64), "exclude_input_in_output": _TRUE, "top_k": whole(0, _INT32),
        "top_p": _FLOAT, "temperature": _FLOAT, "repetition_penalty": _FLOAT,
        "presence_penalty": _FLOAT, "frequency_penalty": _FLOAT, "seed": whole(0, 2**64 - 1),
        "return_log_probs": flag, "return_num_input_tokens": flag,
        "return_num_output_tokens": flag,
    },
    "llmapi": {
        "streaming": flag, "sampling_param_exclude_input_from_output": _TRUE,
        "sampling_param_max_tokens": whole(1, _INT32), "sampling_param_stop": strings(64),
        "sampling_param_temperature": _FLOAT, "sampling_param_top_p": _FLOAT,
        "sampling_param_top_k": whole(0, _INT32), "sampling_param_seed": whole(0, 2**64 - 1),
        "return_finish_reason": flag, "return_stop_reason": flag,
        "return_cumulative_logprob": flag,
    },
    "plain": {"stream": flag, "parameters": lambda got: isinstance(got, dict)},
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


class Piece(Struct, frozen=True):
    """What an event adds to each choice, or a whole answer; the last one has a reason."""

    tokens: tuple[str, ...]
    made: int
    reason: str


def _error(status: int, told: str) -> Answer:
    return Answer(status=status, body=compact({"error": told}))


class Triton:
    """Models of one family, one for each play."""

    kind = "text/event-stream; charset=utf-8"
    refusals: Final = {
        "refused": _error(400, "min_tokens must be at most max_tokens"),
        "limited": _error(429, "Slow down, tenant 77"),
        "failed": _error(500, "failed to allocate: CUDA at 0x7f00"),
        "busy": _error(503, "[request id: <id_unknown>] Exceeds maximum queue size"),
    }

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def aside(self, asked: Asked) -> Answer | None:
        """A probe, or a model's configuration, which only one server here lets everybody see."""
        if asked.method != "GET":
            return None
        if not asked.path.endswith("/config"):
            return Answer(kind="text/plain")
        if self._profile == "vllm":
            return Answer(body=compact(_CONFIG))
        return _error(403, "This API is restricted, expecting header 'admin'")

    def read(self, asked: Asked) -> Wish:
        """A prompt."""
        got = asked.fields()
        asked.play = asked.path.split("/")[3] if asked.path.count("/") > 3 else "?"
        way = f"/v2/models/{asked.play}/generate"
        asked.at(way, f"{way}_stream")
        stream = asked.path.endswith("_stream")
        known = {"text_input": exactly(PROMPT), **_TENSORS[self._profile]}
        hold(asked, got, known, ("text_input", *_MUST[self._profile]))
        if stream is not got.get("streaming" if self._profile == "llmapi" else "stream", False):
            asked.faults.append("what the path asks for and what the flag does are not the same")
        return self._wish(asked, got, stream=stream)

    def _wish(self, asked: Asked, got: Mapping[str, Any], *, stream: bool) -> Wish:
        match self._profile:
            case "vllm":
                told = json.loads(got.get("sampling_parameters", "{}"))
                hold(asked, told, _PACKED, where="sampling_parameters.")
                top = told.get("logprobs") if got.get("return_logprobs") else None
            case "plain":
                told = got.get("parameters", {})
                hold(asked, told, {**_SAMPLED, "stop": text}, where="parameters.")
                top = None
            case "trtllm":
                told = {**got, "stop": got.get("stop_words"), "n": got.get("num_return_sequences")}
                top = 0 if got.get("return_log_probs") else None
            case _:
                prefix = "sampling_param_"
                told = {name.removeprefix(prefix): value for name, value in got.items()}
                top = None
        stop = told.get("stop") or ()
        return Wish(
            stream=stream,
            most=told.get("max_tokens"),
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            n=told.get("n") or 1,
            keeps=told.get("include_stop_str_in_output", False),
            top=top,
        )

    def lines(self, asked: Asked, wish: Wish) -> Lines:
        """One event for each token, and no end beside the last one's finish reason."""
        said = self._say(wish)
        last = len(said.tokens) - 1
        pieces = [
            Piece((token,), 1, said.reason if i == last else "")
            for i, token in enumerate(said.tokens)
        ]
        return Lines((), tuple(_event(self._outputs(asked, wish, one)) for one in pieces), ())

    def whole(self, asked: Asked, wish: Wish) -> bytes:
        """See ``tests.cross.stage.Desk``."""
        said = self._say(wish)
        return compact(self._outputs(asked, wish, Piece(said.tokens, said.made, said.reason)))

    def failure(self, asked: Asked) -> bytes:
        """One more event."""
        return _event({"error": "engine exploded: CUDA at 0x7f00"})

    def _say(self, wish: Wish) -> Said:
        return say(wish, leaves=self._profile in _LEAVES)

    def _outputs(self, asked: Asked, wish: Wish, piece: Piece) -> dict[str, Any]:
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
            told["logprobs"] = json.dumps([_column(token) for token in piece.tokens])
        if wish.top is not None and self._profile == "trtllm":
            values = [logprob(token) for token in piece.tokens]
            told["output_log_probs"] = values[0] if len(values) == 1 else values
        told["text_output"] = "".join(piece.tokens)
        if wish.n > 1:
            told = {name: [one] * wish.n for name, one in told.items()}
        if flags.get("return_num_input_tokens"):
            told["num_input_tokens"] = PROMPT_TOKENS
        told |= {"model_name": asked.play, "model_version": "1"}
        return {name: told[name] for name in sorted(told)}


def _event(got: Any) -> bytes:
    return b"data: %b\n\n" % compact(got)


def _column(token: str) -> dict[str, Any]:
    """As vLLM tells a token: itself first, then the likeliest."""
    likely = {str(100 + TOKENS.index(token)): (token, logprob(token)), "99": OTHER}
    return {
        key: {"logprob": value, "rank": rank, "decoded_token": said}
        for rank, (key, (said, value)) in enumerate(likely.items(), 1)
    }
