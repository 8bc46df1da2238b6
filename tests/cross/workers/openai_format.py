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
    keeps_stop: bool = False
    keeps_stop_streamed: bool = False
    """Where a stop string stays in the text."""
    call: Json = field(default_factory=lambda: {"id": "call_1", "type": "function"})
    calls_end: bool = True
    """A stream that calls a tool tells its finish reason."""

    def say(self, options: RequestOptions) -> ScriptedChoice:
        """What each choice says."""
        return script_choice(
            options, keeps_stop=self.keeps_stop or (options.stream and self.keeps_stop_streamed)
        )

    def used(self, options: RequestOptions) -> Json:
        """The usage of all choices."""
        token_count = self.say(options).token_count * options.n
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": token_count,
            "total_tokens": PROMPT_TOKENS + token_count,
        }

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, options: RequestOptions, *, chat: bool) -> bytes:
        """The answer in one piece."""
        kind = "chat.completion" if chat else "text_completion"
        choices = [self._whole_choice(i, options, chat=chat) for i in range(options.n)]
        body = {**self.common, "object": kind, "choices": choices}
        return encode_compact_json(
            body if self.usage == "never" else {**body, "usage": self.used(options)}
        )

    def _whole_choice(self, index: int, options: RequestOptions, *, chat: bool) -> Json:
        choice = self.say(options)
        content: Json = {"text": choice.text}
        if chat:
            message: Json = {**self.message, "role": "assistant", "content": choice.text}
            if options.tool:
                function = {"name": TOOL, "arguments": "".join(ARGUMENTS)}
                calls = [{**self.call, "function": function}]
                message = {**message, "content": None, "tool_calls": calls}
            content = {"message": message}
        return {
            "index": index,
            **content,
            **self._weighed(self._logprobs(choice.tokens, options, 0, chat=chat)),
            **self._matched(options),
            "finish_reason": self.reasons[choice.reason],
        }

    def _matched(self, options: RequestOptions) -> Json:
        """What each choice has beside, with the stop string that matched: the script's last one."""
        matches = self.say(options).reason == "stop"
        return {
            key: options.stops[-1] if matches and key in ("stop_reason", "matched_stop") else value
            for key, value in self.choice.items()
        }

    # --- streams ----------------------------------------------------------------------------------

    def lines(self, options: RequestOptions, *, chat: bool, usage: bool) -> StreamEvents:
        """The events; ``usage``: it was asked for, or comes anyway."""
        choice = self.say(options)
        makes = self if usage else replace(self, usage="never")
        opening: tuple[bytes, ...] = ()
        if self.opening is not None:
            first = self.opening if chat else {"text": ""}
            opening = tuple(makes._piece(i, first, chat=chat) for i in range(options.n))
        if options.tool:
            return makes._called(options, opening)
        tokens = [self._token(at, choice, options, chat=chat) for at in range(len(choice.tokens))]
        if self.last is None:
            rows = [
                b"".join(makes._piece(i, one, chat=chat) for i in range(options.n))
                for one in tokens[:-1]
            ]
            ends = makes._ends(tokens[-1], options, chat=chat)
            return StreamEvents(opening, (*rows, ends), makes._rest(options, chat=chat))
        rows = [
            b"".join(makes._piece(i, one, chat=chat) for i in range(options.n)) for one in tokens
        ]
        bare = self.last if chat else {"text": ""}
        ends = makes._ends(bare, options, chat=chat)
        return StreamEvents(opening, tuple(rows), (ends, *makes._rest(options, chat=chat)))

    def _token(
        self, at: int, choice: ScriptedChoice, options: RequestOptions, *, chat: bool
    ) -> Json:
        token = choice.tokens[at]
        before = len("".join(choice.tokens[:at]))
        delta: Json = {**self.every, "content": token} if chat else {"text": token}
        if options.top is None:
            return delta
        return {**delta, "~": self._logprobs((token,), options, before, chat=chat)}

    def _piece(
        self,
        index: int,
        delta: Json,
        *,
        chat: bool,
        reason: str | None = None,
        more: Json | None = None,
        extra: Json | None = None,
    ) -> bytes:
        """One event of one choice. ``~`` in a delta is the choice's logprobs."""
        delta = dict(delta)
        logprobs = delta.pop("~", None)
        choice = {
            "index": index,
            **({"delta": delta} if chat else delta),
            **self._weighed(logprobs),
            "finish_reason": reason,
            **(extra or self.choice),
        }
        silent = {"usage": None} if self.null_usage and self.usage == "apart" else {}
        return format_event(
            {**self._head(chat=chat), "choices": [choice], **silent, **(more or {})}
        )

    def _ends(self, delta: Json, options: RequestOptions, *, chat: bool) -> bytes:
        reason = self.reasons[self.say(options).reason]
        more: list[Json] = [{}] * options.n
        if self.usage == "each":
            more = [{"usage": self.used(replace(options, n=1))}] * options.n
        if self.usage == "last":
            more[-1] = {"usage": self.used(options)}
        return b"".join(
            self._piece(i, delta, chat=chat, reason=reason, more=one, extra=self._matched(options))
            for i, one in enumerate(more)
        )

    def _rest(self, options: RequestOptions, *, chat: bool) -> tuple[bytes, ...]:
        if self.usage != "apart":
            return (DONE,)
        last = {**self._head(chat=chat), "choices": [], "usage": self.used(options)}
        return format_event(last), DONE

    def _called(self, options: RequestOptions, opening: tuple[bytes, ...]) -> StreamEvents:
        begun = {**self.call, "index": 0, "function": {"name": TOOL, "arguments": ARGUMENTS[0]}}
        more = {"index": 0, "function": {"arguments": ARGUMENTS[1]}}
        tokens = tuple(
            self._piece(0, {**self.every, "tool_calls": [one]}, chat=True) for one in (begun, more)
        )
        ends = self._ends(self.last or {}, options, chat=True) if self.calls_end else b""
        return StreamEvents(opening, tokens, (ends, *self._rest(options, chat=True)))

    def _head(self, *, chat: bool) -> Json:
        return {**self.common, "object": "chat.completion.chunk" if chat else self.text_chunk}

    # --- log probabilities ------------------------------------------------------------------------

    def _weighed(self, logprobs: Json | None) -> Json:
        return {} if self.bare else {"logprobs": logprobs}

    def _logprobs(
        self, tokens: tuple[str, ...], options: RequestOptions, before: int, *, chat: bool
    ) -> Json | None:
        if options.top is None:
            return None
        if chat:
            return {"content": [_build_chat_logprob(token, options.top) for token in tokens]}
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
