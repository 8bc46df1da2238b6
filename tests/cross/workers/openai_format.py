"""Answers in OpenAI's manner, as the workers that have it write them: alike, and never the same.

Sources: the wire documents of each; what differs is an argument.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from tests.cross.script import (
    ARGUMENTS,
    OTHER,
    PROMPT_TOKENS,
    TOOL,
    Json,
    RequestOptions,
    ScriptedChoice,
    get_logprob,
    script_choice,
)
from tests.cross.worker_server import StreamEvents

DONE: Final = b"data: [DONE]\n\n"
REASONS: Final = {"eos": "stop", "stop": "stop", "length": "length", "tool": "tool_calls"}


def encode_compact_json(got: Any) -> bytes:
    """JSON as a C++ or Python server writes it, not escaped beyond need."""
    return json.dumps(got, ensure_ascii=False, separators=(",", ":")).encode()


def format_event(got: Any) -> bytes:
    """One event of a stream."""
    return b"data: %b\n\n" % encode_compact_json(got)


class OpenAIResponseFormat(Struct, frozen=True, kw_only=True):
    """One server's way. ``common`` stands in every answer; the rest is what it may leave out."""

    common: Json
    text_chunk: str = "text_completion"
    """The ``object`` of a completion's events."""
    opening: Json | None = field(default_factory=lambda: {"role": "assistant", "content": ""})
    """The first event's delta."""
    every: Json = {}
    """In each delta."""
    last: Json | None = {}
    """The delta that bears the finish reason; None: the last token's own."""
    reasons: Mapping[str, str] = field(default_factory=lambda: REASONS)
    usage: Literal["apart", "last", "each", "whole", "never"] = "apart"
    """In an event of its own, in the last one, in each choice's last one with what that choice
    took, only in whole answers, or nowhere."""
    bare: bool = False
    """Nobody has heard of log probabilities."""
    null_usage: bool = False
    """Where usage comes apart, every other event says that it has none."""
    choice: Json = {}
    """In each choice."""
    message: Json = {}
    """In each whole message."""
    leaves: bool = False
    leaves_streamed: bool = False
    """Where a stop string stays in the text."""
    call: Json = field(default_factory=lambda: {"id": "call_1", "type": "function"})
    calls_end: bool = True
    """A stream that calls a tool tells its finish reason."""

    def say(self, wish: RequestOptions) -> ScriptedChoice:
        """What each choice says."""
        return script_choice(wish, leaves=self.leaves or (wish.stream and self.leaves_streamed))

    def used(self, wish: RequestOptions) -> Json:
        """The usage of all choices."""
        made = self.say(wish).made * wish.n
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": made,
            "total_tokens": PROMPT_TOKENS + made,
        }

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, wish: RequestOptions, *, chat: bool) -> bytes:
        """The answer in one piece."""
        kind = "chat.completion" if chat else "text_completion"
        choices = [self._whole_choice(i, wish, chat=chat) for i in range(wish.n)]
        body = {**self.common, "object": kind, "choices": choices}
        return encode_compact_json(
            body if self.usage == "never" else {**body, "usage": self.used(wish)}
        )

    def _whole_choice(self, index: int, wish: RequestOptions, *, chat: bool) -> Json:
        said = self.say(wish)
        content: Json = {"text": said.text}
        if chat:
            message: Json = {**self.message, "role": "assistant", "content": said.text}
            if wish.tool:
                function = {"name": TOOL, "arguments": "".join(ARGUMENTS)}
                calls = [{**self.call, "function": function}]
                message = {**message, "content": None, "tool_calls": calls}
            content = {"message": message}
        return {
            "index": index,
            **content,
            **self._weighed(self._logprobs(said.tokens, wish, 0, chat=chat)),
            **self._matched(wish),
            "finish_reason": self.reasons[said.reason],
        }

    def _matched(self, wish: RequestOptions) -> Json:
        """What each choice has beside, with the stop string that matched: the script's last one."""
        matches = self.say(wish).reason == "stop"
        return {
            key: wish.stops[-1] if matches and key in ("stop_reason", "matched_stop") else value
            for key, value in self.choice.items()
        }

    # --- streams ----------------------------------------------------------------------------------

    def lines(self, wish: RequestOptions, *, chat: bool, usage: bool) -> StreamEvents:
        """The events; ``usage``: it was asked for, or comes anyway."""
        said = self.say(wish)
        makes = self if usage else replace(self, usage="never")
        opening: tuple[bytes, ...] = ()
        if self.opening is not None:
            first = self.opening if chat else {"text": ""}
            opening = tuple(makes._piece(i, first, chat=chat) for i in range(wish.n))
        if wish.tool:
            return makes._called(wish, opening)
        tokens = [self._token(at, said, wish, chat=chat) for at in range(len(said.tokens))]
        if self.last is None:
            rows = [
                b"".join(makes._piece(i, one, chat=chat) for i in range(wish.n))
                for one in tokens[:-1]
            ]
            ends = makes._ends(tokens[-1], wish, chat=chat)
            return StreamEvents(opening, (*rows, ends), makes._rest(wish, chat=chat))
        rows = [b"".join(makes._piece(i, one, chat=chat) for i in range(wish.n)) for one in tokens]
        bare = self.last if chat else {"text": ""}
        ends = makes._ends(bare, wish, chat=chat)
        return StreamEvents(opening, tuple(rows), (ends, *makes._rest(wish, chat=chat)))

    def _token(self, at: int, said: ScriptedChoice, wish: RequestOptions, *, chat: bool) -> Json:
        token = said.tokens[at]
        before = len("".join(said.tokens[:at]))
        delta: Json = {**self.every, "content": token} if chat else {"text": token}
        if wish.top is None:
            return delta
        return {**delta, "~": self._logprobs((token,), wish, before, chat=chat)}

    def _piece(
        self,
        index: int,
        delta: Json,
        *,
        chat: bool,
        reason: str | None = None,
        more: Json | None = None,
        beside: Json | None = None,
    ) -> bytes:
        """One event of one choice. ``~`` in a delta is the choice's logprobs."""
        delta = dict(delta)
        logprobs = delta.pop("~", None)
        choice = {
            "index": index,
            **({"delta": delta} if chat else delta),
            **self._weighed(logprobs),
            "finish_reason": reason,
            **(beside or self.choice),
        }
        silent = {"usage": None} if self.null_usage and self.usage == "apart" else {}
        return format_event(
            {**self._head(chat=chat), "choices": [choice], **silent, **(more or {})}
        )

    def _ends(self, delta: Json, wish: RequestOptions, *, chat: bool) -> bytes:
        reason = self.reasons[self.say(wish).reason]
        more: list[Json] = [{}] * wish.n
        if self.usage == "each":
            more = [{"usage": self.used(replace(wish, n=1))}] * wish.n
        if self.usage == "last":
            more[-1] = {"usage": self.used(wish)}
        return b"".join(
            self._piece(i, delta, chat=chat, reason=reason, more=one, beside=self._matched(wish))
            for i, one in enumerate(more)
        )

    def _rest(self, wish: RequestOptions, *, chat: bool) -> tuple[bytes, ...]:
        if self.usage != "apart":
            return (DONE,)
        told = {**self._head(chat=chat), "choices": [], "usage": self.used(wish)}
        return format_event(told), DONE

    def _called(self, wish: RequestOptions, opening: tuple[bytes, ...]) -> StreamEvents:
        begun = {**self.call, "index": 0, "function": {"name": TOOL, "arguments": ARGUMENTS[0]}}
        more = {"index": 0, "function": {"arguments": ARGUMENTS[1]}}
        tokens = tuple(
            self._piece(0, {**self.every, "tool_calls": [one]}, chat=True) for one in (begun, more)
        )
        ends = self._ends(self.last or {}, wish, chat=True) if self.calls_end else b""
        return StreamEvents(opening, tokens, (ends, *self._rest(wish, chat=True)))

    def _head(self, *, chat: bool) -> Json:
        return {**self.common, "object": "chat.completion.chunk" if chat else self.text_chunk}

    # --- log probabilities ------------------------------------------------------------------------

    def _weighed(self, logprobs: Json | None) -> Json:
        return {} if self.bare else {"logprobs": logprobs}

    def _logprobs(
        self, tokens: tuple[str, ...], wish: RequestOptions, before: int, *, chat: bool
    ) -> Json | None:
        if wish.top is None:
            return None
        if chat:
            return {"content": [_build_chat_logprob(token, wish.top) for token in tokens]}
        offsets = [before + len("".join(tokens[:i])) for i in range(len(tokens))]
        return {
            "text_offset": offsets,
            "token_logprobs": [get_logprob(token) for token in tokens],
            "tokens": list(tokens),
            "top_logprobs": [{token: get_logprob(token), OTHER[0]: OTHER[1]} for token in tokens],
        }


def _build_chat_logprob(token: str, top: int) -> Json:
    likely = [(token, get_logprob(token)), OTHER][:top]
    return {
        **_build_token_logprob(token, get_logprob(token)),
        "top_logprobs": [_build_token_logprob(*one) for one in likely],
    }


def _build_token_logprob(token: str, value: float) -> Json:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def decode_options(got: Json) -> RequestOptions:
    """What the fields mean that all of them share."""
    stop = got.get("stop", [])
    chat = "messages" in got
    top = got.get("top_logprobs", 0) if got.get("logprobs") else None
    return RequestOptions(
        stream=got.get("stream", False),
        most=got.get("max_tokens", got.get("max_completion_tokens")),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        n=got.get("n", 1),
        keeps=got.get("include_stop_str_in_output", got.get("no_stop_trim", False)),
        top=top if chat else got.get("logprobs"),
        tool=bool(got.get("tools")),
    )
