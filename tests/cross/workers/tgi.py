"""Hugging Face's Text Generation Inference: its own words for prompts, OpenAI's for conversations.

Its requests name no model, so the play stands in the worker's URL. Source:
text-generation-inference 3.3, router/src/{lib,server,validation}.rs.
"""

from typing import Final

from tests.cross.checks import (
    ALWAYS,
    Fields,
    exactly,
    flag,
    hold,
    number,
    strings,
    text,
    turns,
    whole,
)
from tests.cross.checks import tools as functions
from tests.cross.script import OTHER, PROMPT, PROMPT_TOKENS, TOKENS, Json, Said, Wish, logprob, say
from tests.cross.stage import Answer, Asked, Lines
from tests.cross.workers.manner import Manner, compact, wished

_PARAMETERS: Final[Fields] = {
    "best_of": whole(1, 2),
    "temperature": number(0, above=True),
    "repetition_penalty": number(0, above=True),
    "frequency_penalty": number(-2, 2),
    "top_k": whole(1),
    "top_p": lambda got: type(got) is float and 0 < got < 1,
    "typical_p": lambda got: type(got) is float and 0 < got < 1,
    "do_sample": flag,
    "max_new_tokens": whole(1),
    "return_full_text": exactly(False),
    "stop": strings(4),
    "truncate": whole(1),
    "watermark": flag,
    "details": exactly(True),
    "decoder_input_details": flag,
    "seed": whole(0, 2**64 - 1),
    "top_n_tokens": whole(1, 5),
    "grammar": ALWAYS,
    "adapter_id": text,
}
_CHAT: Final[Fields] = {
    "model": text,
    "messages": turns,
    "frequency_penalty": number(-2, 2),
    "logprobs": flag,
    "top_logprobs": whole(0, 5),
    "max_tokens": whole(1),
    "presence_penalty": number(-2, 2),
    "stop": strings(4),
    "stream": flag,
    "seed": whole(0, 2**64 - 1),
    "temperature": number(0),
    "top_p": lambda got: type(got) is float and 0 < got < 1,
    "tools": functions,
    "tool_choice": ALWAYS,
    "response_format": ALWAYS,
    "stream_options": exactly({"include_usage": True}),
}
_MANNER: Final = Manner(
    common={"id": "", "created": 1716825108, "model": "llama3", "system_fingerprint": "3.3-sha"},
    opening=None,
    every={"role": "assistant"},
    last=None,
    null_usage=True,
    leaves=True,
    call={"id": "0", "type": "function"},
    calls_end=False,
)
_REASONS: Final = {"eos": "eos_token", "stop": "stop_sequence", "length": "length"}


def _refusal(status: int, told: str, kind: str, **headers: str) -> Answer:
    body = compact({"error": told, "error_type": kind})
    return Answer(status=status, body=body, headers=headers)


class TGI:
    """One server; its first segment of a path is the play."""

    kind = "text/event-stream"
    refusals: Final = {
        "refused": _refusal(
            422, "Input validation error: `min_tokens` must be at most 5", "validation"
        ),
        "limited": _refusal(429, "Model is overloaded", "overloaded", retry_after="7"),
        "failed": _refusal(424, "Request failed during generation: CUDA at 0x7f00", "generation"),
        "busy": _refusal(503, "unhealthy 12", "healthcheck"),
    }

    def aside(self, asked: Asked) -> Answer | None:
        """A probe, or what the server says of itself."""
        if asked.method != "GET":
            return None
        info = b'{"max_concurrent_requests":128,"max_best_of":2,"max_stop_sequences":4}'
        return Answer(body=info)

    def read(self, asked: Asked) -> Wish:
        """A conversation, or a prompt."""
        got = asked.fields()
        asked.play = asked.path.split("/")[1]
        top = f"/{asked.play}"
        asked.at(f"{top}/generate", f"{top}/generate_stream", f"{top}/v1/chat/completions")
        if _is_chat(asked):
            hold(asked, got, _CHAT, ("messages",))
            return wished(got)
        known: Fields = {"inputs": exactly(PROMPT), "parameters": ALWAYS}
        hold(asked, got, known, known)
        told = got["parameters"]
        hold(asked, told, _PARAMETERS, ("details", "return_full_text"), "parameters.")
        return Wish(
            stream=asked.path.endswith("/generate_stream"),
            most=told.get("max_new_tokens"),
            stops=tuple(told.get("stop", ())),
            top=told.get("top_n_tokens", 0),
        )

    def lines(self, asked: Asked, wish: Wish) -> Lines:
        """One event for each token; the last has it all."""
        if _is_chat(asked):
            usage = "stream_options" in asked.fields()
            return _MANNER.lines(wish, chat=True, usage=usage)
        said = say(wish, leaves=True)
        rows = [_row(i, token, wish) for i, token in enumerate(said.tokens)]
        ends = {**rows[-1], **_ended(said, {"input_length": PROMPT_TOKENS})}
        silent = {"generated_text": None, "details": None}
        tokens = [*({**row, **silent} for row in rows[:-1]), ends]
        return Lines((), tuple(b"data:%b\n\n" % compact(one) for one in tokens), ())

    def whole(self, asked: Asked, wish: Wish) -> bytes:
        """See ``tests.cross.stage.Desk``."""
        if _is_chat(asked):
            return _MANNER.whole(wish, chat=True)
        said = say(wish, leaves=True)
        rows = [_row(i, token, wish) for i, token in enumerate(said.tokens)]
        told = {
            "prefill": [],
            "tokens": [row["token"] for row in rows],
            "top_tokens": [row.get("top_tokens", []) for row in rows],
        }
        return compact(_ended(said, told))

    def failure(self, asked: Asked) -> bytes:
        """An event that holds the error."""
        told = "Request failed during generation: CUDA at 0x7f00"
        if _is_chat(asked):
            error = {"message": told, "http_status_code": 422}
            return b"data: %b\n\n" % compact({"error": error})
        return b"data:%b\n\n" % compact({"error": told, "error_type": "generation"})


def _is_chat(asked: Asked) -> bool:
    return asked.path.endswith("/v1/chat/completions")


def _row(at: int, token: str, wish: Wish) -> dict[str, Json | list[Json] | int]:
    own = _token(token, logprob(token), 100 + TOKENS.index(token))
    row: dict[str, Json | list[Json] | int] = {"index": at + 1, "token": own}
    if wish.top:
        row["top_tokens"] = [own, _token(*OTHER, 99)][: wish.top]
    return row


def _token(token: str, value: float, number: int) -> Json:
    return {"id": number, "text": token, "logprob": value, "special": False}


def _ended(said: Said, more: Json) -> Json:
    details = {
        "finish_reason": _REASONS[said.reason],
        "generated_tokens": said.made,
        "seed": None,
        **more,
    }
    return {"generated_text": said.text, "details": details}
