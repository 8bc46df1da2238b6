"""Databricks' model serving: one path, on which the body's fields tell the task.

Sources: the reference of the Foundation Model REST API; databricks-sdk-py; mlflow 3.17.
"""

from typing import Final

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
from tests.cross.script import PROMPT, Wish
from tests.cross.stage import Answer, Asked, Lines
from tests.cross.workers.manner import Manner, compact, event, wished

_BOTH: Final[Fields] = {
    "max_tokens": whole(1),
    "stream": flag,
    "temperature": number(0, 2),
    "top_p": number(0, 1, above=True),
    "top_k": whole(1),
    "stop": one_or(strings(64)),
    "n": whole(1, 5),
    "extra_params": ALWAYS,
    "client_request_id": text,
    "usage_context": ALWAYS,
}
_CHAT: Final[Fields] = {
    **_BOTH,
    "messages": turns,
    "tools": functions,
    "tool_choice": ALWAYS,
    "response_format": ALWAYS,
    "logprobs": flag,
    "top_logprobs": whole(0, 20),
    "reasoning_effort": text,
    "thinking": ALWAYS,
}
_TEXT: Final[Fields] = {
    **_BOTH,
    "prompt": exactly(PROMPT),
    "error_behavior": text,
    "echo": flag,
    "suffix": text,
    "use_raw_prompt": flag,
}
_MANNER: Final = Manner(
    common={"id": "c1", "created": 1716825108, "model": "meta-llama-3.1-70b-instruct-121024"},
    opening=None,
    every={"role": "assistant"},
    usage="last",
)


def _refusal(status: int, code: str, told: str) -> Answer:
    headers = {"retry_after": "7"} if status in (429, 503) else {}
    body = compact({"error_code": code, "message": told})
    return Answer(status=status, body=body, headers=headers)


class Databricks:
    """A serving endpoint for each play."""

    kind = "text/event-stream"
    refusals: Final = {
        "refused": _refusal(400, "INVALID_PARAMETER_VALUE", "min_tokens must be at most 5"),
        "limited": _refusal(429, "REQUEST_LIMIT_EXCEEDED", "Slow down, tenant 77"),
        "failed": _refusal(500, "INTERNAL_ERROR", "CUDA error at 0x7f00"),
        "busy": _refusal(503, "TEMPORARILY_UNAVAILABLE", "engine 12 is full"),
    }

    def aside(self, asked: Asked) -> Answer | None:
        """A probe."""
        listed = b'{"endpoints":[]}'
        return Answer(body=listed) if asked.method == "GET" else None

    def read(self, asked: Asked) -> Wish:
        """A conversation, or a prompt."""
        got = asked.fields()
        asked.play = asked.path.removeprefix("/serving-endpoints/").removesuffix("/invocations")
        asked.at(f"/serving-endpoints/{asked.play}/invocations")
        chat = "messages" in got
        hold(asked, got, _CHAT if chat else _TEXT, () if chat else ("prompt",))
        return wished(got)

    def lines(self, asked: Asked, wish: Wish) -> Lines:
        """See ``tests.cross.stage.Desk``."""
        return _MANNER.lines(wish, chat="messages" in asked.fields(), usage=True)

    def whole(self, asked: Asked, wish: Wish) -> bytes:
        """See ``tests.cross.stage.Desk``."""
        return _MANNER.whole(wish, chat="messages" in asked.fields())

    def failure(self, asked: Asked) -> bytes:
        """In OpenAI's manner, as its clients insist."""
        return event({"error": {"message": "CUDA at 0x7f00", "type": "server_error", "code": None}})
