"""OpenAI's response format with the differences between the workers that use it.

Sources: the wire documents of each worker; each difference is an argument.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from tests.cross.script import (
    ALTERNATIVE,
    ARGUMENTS,
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


def encode_compact_json(value: Any) -> bytes:
    """Encode JSON like C++ and Python servers, with minimal escaping."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def format_event(value: Any) -> bytes:
    """Format one event of a stream."""
    return b"data: %b\n\n" % encode_compact_json(value)


class OpenAIResponseFormat(Struct, frozen=True, kw_only=True):
    """One server's format. ``common`` is in every response; the other fields are differences."""

    common: Json
    text_chunk: str = "text_completion"
    """The ``object`` of a completion's events."""
    first_delta: Json | None = field(default_factory=lambda: {"role": "assistant", "content": ""})
    """The delta of the first event."""
    delta_fields: Json = {}
    """Fields of each delta."""
    final_delta: Json | None = {}
    """The delta with the finish reason; None: the last token's own."""
    reasons: Mapping[str, str] = field(default_factory=lambda: REASONS)
    usage: Literal["separate", "last", "each", "unary", "never"] = "separate"
    """Where usage is reported.

    In an event of its own, in the last event, in each choice's last event with that choice's
    tokens, only in unary responses, or nowhere.
    """
    without_logprobs: bool = False
    """Whether the server has no log probabilities."""
    null_usage: bool = False
    """With a separate usage event, all other events have ``"usage": null``."""
    choice_fields: Json = {}
    """Fields of each choice."""
    message_fields: Json = {}
    """Fields of each unary message."""
    keeps_stop: bool = False
    keeps_stop_streamed: bool = False
    """Whether a stop string stays in the text, in unary responses and in streams."""
    call: Json = field(default_factory=lambda: {"id": "call_1", "type": "function"})
    finish_reason_after_calls: bool = True
    """Whether a stream with a tool call has a finish reason."""

    def get_choice(self, options: RequestOptions) -> ScriptedChoice:
        """Return the content of each choice."""
        return script_choice(
            options, keeps_stop=self.keeps_stop or (options.stream and self.keeps_stop_streamed)
        )

    def build_usage(self, options: RequestOptions) -> Json:
        """Build the usage of all choices."""
        token_count = self.get_choice(options).token_count * options.n
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": token_count,
            "total_tokens": PROMPT_TOKENS + token_count,
        }

    # --- unary responses --------------------------------------------------------------------------

    def build_unary(self, options: RequestOptions, *, chat: bool) -> bytes:
        """Build the body of a unary response."""
        kind = "chat.completion" if chat else "text_completion"
        choices = [self._build_choice(i, options, chat=chat) for i in range(options.n)]
        body = {**self.common, "object": kind, "choices": choices}
        return encode_compact_json(
            body if self.usage == "never" else {**body, "usage": self.build_usage(options)}
        )

    def _build_choice(self, index: int, options: RequestOptions, *, chat: bool) -> Json:
        choice = self.get_choice(options)
        content: Json = {"text": choice.text}
        if chat:
            message: Json = {**self.message_fields, "role": "assistant", "content": choice.text}
            if options.tool:
                function = {"name": TOOL, "arguments": "".join(ARGUMENTS)}
                calls = [{**self.call, "function": function}]
                message = {**message, "content": None, "tool_calls": calls}
            content = {"message": message}
        return {
            "index": index,
            **content,
            **self._build_logprobs_field(self._logprobs(choice.tokens, options, 0, chat=chat)),
            **self._build_choice_fields(options),
            "finish_reason": self.reasons[choice.reason],
        }

    def _build_choice_fields(self, options: RequestOptions) -> Json:
        """Build the further fields, with the matched stop string: the script's last one."""
        matches = self.get_choice(options).reason == "stop"
        return {
            key: options.stops[-1] if matches and key in ("stop_reason", "matched_stop") else value
            for key, value in self.choice_fields.items()
        }

    # --- streams ----------------------------------------------------------------------------------

    def build_stream(self, options: RequestOptions, *, chat: bool, usage: bool) -> StreamEvents:
        """Build the events; ``usage`` tells whether they have usage."""
        choice = self.get_choice(options)
        formatter = self if usage else replace(self, usage="never")
        opening: tuple[bytes, ...] = ()
        if self.first_delta is not None:
            first = self.first_delta if chat else {"text": ""}
            opening = tuple(formatter._build_event(i, first, chat=chat) for i in range(options.n))
        if options.tool:
            return formatter._build_call_stream(options, opening)
        tokens = [
            self._build_token_delta(at, choice, options, chat=chat)
            for at in range(len(choice.tokens))
        ]
        if self.final_delta is None:
            rows = [
                b"".join(formatter._build_event(i, one, chat=chat) for i in range(options.n))
                for one in tokens[:-1]
            ]
            ends = formatter._build_final_events(tokens[-1], options, chat=chat)
            return StreamEvents(
                opening, (*rows, ends), formatter._build_closing(options, chat=chat)
            )
        rows = [
            b"".join(formatter._build_event(i, one, chat=chat) for i in range(options.n))
            for one in tokens
        ]
        bare = self.final_delta if chat else {"text": ""}
        ends = formatter._build_final_events(bare, options, chat=chat)
        return StreamEvents(
            opening, tuple(rows), (ends, *formatter._build_closing(options, chat=chat))
        )

    def _build_token_delta(
        self, at: int, choice: ScriptedChoice, options: RequestOptions, *, chat: bool
    ) -> Json:
        token = choice.tokens[at]
        before = len("".join(choice.tokens[:at]))
        delta: Json = {**self.delta_fields, "content": token} if chat else {"text": token}
        if options.top_logprobs is None:
            return delta
        return {**delta, "~": self._logprobs((token,), options, before, chat=chat)}

    def _build_event(
        self,
        index: int,
        delta: Json,
        *,
        chat: bool,
        reason: str | None = None,
        extra_fields: Json | None = None,
        extra: Json | None = None,
    ) -> bytes:
        """Build one event of one choice. ``~`` in a delta has the choice's logprobs."""
        delta = dict(delta)
        logprobs = delta.pop("~", None)
        choice = {
            "index": index,
            **({"delta": delta} if chat else delta),
            **self._build_logprobs_field(logprobs),
            "finish_reason": reason,
            **(extra or self.choice_fields),
        }
        silent = {"usage": None} if self.null_usage and self.usage == "separate" else {}
        return format_event(
            {**self._head(chat=chat), "choices": [choice], **silent, **(extra_fields or {})}
        )

    def _build_final_events(self, delta: Json, options: RequestOptions, *, chat: bool) -> bytes:
        reason = self.reasons[self.get_choice(options).reason]
        extra_fields: list[Json] = [{}] * options.n
        if self.usage == "each":
            extra_fields = [{"usage": self.build_usage(replace(options, n=1))}] * options.n
        if self.usage == "last":
            extra_fields[-1] = {"usage": self.build_usage(options)}
        return b"".join(
            self._build_event(
                i,
                delta,
                chat=chat,
                reason=reason,
                extra_fields=one,
                extra=self._build_choice_fields(options),
            )
            for i, one in enumerate(extra_fields)
        )

    def _build_closing(self, options: RequestOptions, *, chat: bool) -> tuple[bytes, ...]:
        if self.usage != "separate":
            return (DONE,)
        last = {**self._head(chat=chat), "choices": [], "usage": self.build_usage(options)}
        return format_event(last), DONE

    def _build_call_stream(
        self, options: RequestOptions, opening: tuple[bytes, ...]
    ) -> StreamEvents:
        begun = {**self.call, "index": 0, "function": {"name": TOOL, "arguments": ARGUMENTS[0]}}
        next_delta = {"index": 0, "function": {"arguments": ARGUMENTS[1]}}
        tokens = tuple(
            self._build_event(0, {**self.delta_fields, "tool_calls": [one]}, chat=True)
            for one in (begun, next_delta)
        )
        ends = (
            self._build_final_events(self.final_delta or {}, options, chat=True)
            if self.finish_reason_after_calls
            else b""
        )
        return StreamEvents(opening, tokens, (ends, *self._build_closing(options, chat=True)))

    def _head(self, *, chat: bool) -> Json:
        return {**self.common, "object": "chat.completion.chunk" if chat else self.text_chunk}

    # --- log probabilities ------------------------------------------------------------------------

    def _build_logprobs_field(self, logprobs: Json | None) -> Json:
        return {} if self.without_logprobs else {"logprobs": logprobs}

    def _logprobs(
        self, tokens: tuple[str, ...], options: RequestOptions, before: int, *, chat: bool
    ) -> Json | None:
        if options.top_logprobs is None:
            return None
        if chat:
            return {
                "content": [_build_chat_logprob(token, options.top_logprobs) for token in tokens]
            }
        offsets = [before + len("".join(tokens[:i])) for i in range(len(tokens))]
        return {
            "text_offset": offsets,
            "token_logprobs": [get_logprob(token) for token in tokens],
            "tokens": list(tokens),
            "top_logprobs": [
                {token: get_logprob(token), ALTERNATIVE[0]: ALTERNATIVE[1]} for token in tokens
            ],
        }


def _build_chat_logprob(token: str, top: int) -> Json:
    likely = [(token, get_logprob(token)), ALTERNATIVE][:top]
    return {
        **_build_token_logprob(token, get_logprob(token)),
        "top_logprobs": [_build_token_logprob(*one) for one in likely],
    }


def _build_token_logprob(token: str, value: float) -> Json:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def decode_options(body: Json) -> RequestOptions:
    """Decode the fields that all of these servers share."""
    stop = body.get("stop", [])
    chat = "messages" in body
    top = body.get("top_logprobs", 0) if body.get("logprobs") else None
    return RequestOptions(
        stream=body.get("stream", False),
        max_tokens=body.get("max_tokens", body.get("max_completion_tokens")),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        n=body.get("n", 1),
        include_stop=body.get("include_stop_str_in_output", body.get("no_stop_trim", False)),
        top_logprobs=top if chat else body.get("logprobs"),
        tool=bool(body.get("tools")),
    )
