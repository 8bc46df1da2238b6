"""Workers that speak OpenAI's protocol: its own, vLLM, SGLang and llama.cpp.

Sources: OpenAI's specification 2.3.0; vLLM 0.32's and SGLang's protocol modules and errors;
llama.cpp's tools/server.
"""

from collections.abc import Mapping
from typing import Any, Final

from tests.cross.checks import (
    ALWAYS,
    Fields,
    exactly,
    flag,
    hold,
    number,
    one_or,
    strings,
    text,
    turns,
    whole,
)
from tests.cross.checks import tools as functions
from tests.cross.script import PROMPT, Json, Wish
from tests.cross.stage import Answer, Asked, Lines
from tests.cross.workers.manner import Manner, compact, event, wished

_BOTH: Final[Fields] = {
    "model": text,
    "stream": flag,
    "stream_options": exactly({"include_usage": True}),
    "max_tokens": whole(1),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "n": whole(1, 128),
    "stop": one_or(strings(4)),
    "seed": whole(-(2**63)),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": ALWAYS,
    "user": text,
}
_CHAT: Final[Fields] = {
    **_BOTH,
    "messages": turns,
    "max_completion_tokens": whole(1),
    "logprobs": flag,
    "top_logprobs": whole(0, 20),
    "tools": functions,
    "tool_choice": ALWAYS,
    "parallel_tool_calls": flag,
    "response_format": ALWAYS,
    "reasoning_effort": text,
}
_TEXT: Final[Fields] = {
    **_BOTH,
    "prompt": exactly(PROMPT),
    "logprobs": whole(0, 5),
    "echo": flag,
    "best_of": whole(1, 20),
    "suffix": text,
}
_MORE: Final[Fields] = {
    "top_k": whole(-1), "min_p": number(0, 1), "ignore_eos": flag, "repetition_penalty": number(0),
    "min_tokens": whole(0), "skip_special_tokens": flag, "stop_token_ids": ALWAYS,
}  # fmt: skip
_MANY: Final = one_or(strings(64))
_FIELDS: Final[Mapping[str, Fields]] = {
    "openai": {},
    "vllm": {**_MORE, "stop": _MANY, "include_stop_str_in_output": flag},
    "sglang": {**_MORE, "stop": _MANY, "no_stop_trim": flag},
    "llamacpp": {"stop": _MANY, "repeat_penalty": number(0), "top_k": whole(0)},
}
_HEAD: Final[Json] = {"id": "chatcmpl-7", "created": 1716825108, "model": "real-name"}
_MANNERS: Final[Mapping[str, Manner]] = {
    "openai": Manner(
        common={**_HEAD, "service_tier": "default", "system_fingerprint": "fp_44709d6fcb"},
        opening={"role": "assistant", "content": "", "refusal": None},
        message={"refusal": None, "annotations": []},
        null_usage=True,
    ),
    "vllm": Manner(
        common=_HEAD,
        last=None,
        choice={"stop_reason": None, "token_ids": None},
        message={"reasoning": None, "tool_calls": []},
    ),
    "sglang": Manner(
        common=_HEAD,
        last={"content": None, "reasoning_content": None, "tool_calls": None},
        choice={"matched_stop": None},
        message={"reasoning_content": None, "tool_calls": None},
    ),
    "llamacpp": Manner(
        common={**_HEAD, "system_fingerprint": "b6000-1a2b3c"},
        opening={"role": "assistant", "content": None},
    ),
}


def _error(profile: str, status: int, kind: str, told: str) -> Json:
    match profile:
        case "openai":
            code = "rate_limit_exceeded" if status == 429 else None
            return {"error": {"message": told, "type": kind, "param": None, "code": code}}
        case "sglang":
            return {"object": "error", "message": told, "type": kind, "param": None, "code": status}
        case "vllm":
            return {"error": {"message": told, "type": kind, "param": None, "code": status}}
        case _:
            return {"error": {"code": status, "message": told, "type": kind}}


class OpenAI:
    """One of them."""

    kind = "text/event-stream; charset=utf-8"

    def __init__(self, profile: str) -> None:
        self._profile = profile
        self._manner = _MANNERS[profile]

        def refused(status: int, kind: str, told: str, **headers: str) -> Answer:
            body = compact(_error(profile, status, kind, told))
            return Answer(status=status, body=body, headers=headers)

        self.refusals = {
            "refused": refused(400, "BadRequestError", "min_tokens must be at most max_tokens"),
            "limited": refused(429, "requests", "Slow down, tenant 77", retry_after="7"),
            "failed": refused(500, "InternalServerError", "CUDA error at 0x7f00"),
            "busy": refused(503, "ServiceUnavailableError", "engine 12 is full", retry_after="7"),
        }

    def aside(self, asked: Asked) -> Answer | None:
        """A probe."""
        return Answer() if asked.method == "GET" else None

    def read(self, asked: Asked) -> Wish:
        """A conversation, or a prompt."""
        got = asked.fields()
        asked.play = got["model"]
        asked.at("/v1/chat/completions", "/v1/completions")
        chat = _is_chat(asked)
        known = {**(_CHAT if chat else _TEXT), **_FIELDS[self._profile]}
        hold(asked, got, known, ("model", "messages" if chat else "prompt"))
        if chat and PROMPT not in str(got["messages"]):
            asked.faults.append("the conversation is not the client's")
        if "stream_options" in got and not got.get("stream"):
            asked.faults.append("stream_options without stream")
        return wished(got)

    def lines(self, asked: Asked, wish: Wish) -> Lines:
        """See ``tests.cross.stage.Desk``."""
        usage = "stream_options" in asked.fields()
        return self._manner.lines(wish, chat=_is_chat(asked), usage=usage)

    def whole(self, asked: Asked, wish: Wish) -> bytes:
        """See ``tests.cross.stage.Desk``."""
        return self._manner.whole(wish, chat=_is_chat(asked))

    def failure(self, asked: Asked) -> bytes:
        """An event that holds the error."""
        told: dict[str, Any] = dict(_error(self._profile, 500, "server_error", "CUDA at 0x7f00"))
        return event(told if "error" in told else {"error": told})


def _is_chat(asked: Asked) -> bool:
    return asked.path == "/v1/chat/completions"
