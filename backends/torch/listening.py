"""Calls read by the response template that comes with some tokenizers, in the model's own form.

Such a template says how the model writes what it thinks, says and calls. It is for reading only:
nothing keeps the model to it, and what can't be read is told as it was written.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from backends.torch.speech import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
    make_call_id,
)
from backends.torch.text import OutputToken, ReadyText

_log = logging.getLogger(__name__)
_PARSE_ERRORS = (LookupError, TypeError, ValueError)


def get_response_template(tokenizer: Any) -> Any:
    """The tokenizer's own response template, if it has one that is one."""
    found = getattr(tokenizer, "response_template", None)
    if found is None:
        return None
    try:
        # Not every transformers has it.
        from transformers.utils.chat_parsing.response_templates import load_response_template

        return load_response_template(found)
    except (ImportError, *_PARSE_ERRORS) as error:
        _log.warning("the tokenizer's response template is of no use: %s", error)
        return None


class ResponseTemplateRules(Struct, frozen=True):
    """What the choices of a request are read by, after ``prompt``."""

    template: Any
    prompt: str
    tools: Sequence[dict[str, Any]]
    marker_tokens: frozenset[int]
    """See ``speech.Voice``."""

    def make_parser(self) -> "ResponseTemplateParser":
        """For one choice."""
        from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415 - as above

        return ResponseTemplateParser(
            ResponseParser(self.template, self.prompt, tools=list(self.tools))
        )


class ResponseTemplateParser:
    """One choice, as its template reads it."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._pending_raw = ""
        """Of the region that is open."""
        self._pending_blanks = ""
        """Held back: they may be the region's last."""
        self._has_emitted = False
        """Something of the region that is open was sent."""
        self._pending_tokens: list[OutputToken] = []
        self.calls = 0
        """How many have begun."""

    def feed(self, release: ReadyText) -> Iterator[ParsedOutput]:
        """What may be told of it."""
        self._pending_tokens += release.tokens
        if self._parser is None:
            yield self._make_ready_text(release.text)
            return
        try:
            for event in self._parser.feed(release.text):
                yield from self._read_event(event)
        except _PARSE_ERRORS:
            self._parser = None
            yield self._make_ready_text(self._pending_raw + release.text)

    def close(self) -> Iterator[ParsedOutput]:
        """What is left when nothing follows."""
        if self._parser is None:
            return
        try:
            for event in self._parser.finalize()[1]:
                yield from self._read_event(event)
        except _PARSE_ERRORS:
            yield self._make_ready_text(self._pending_raw)

    def _read_event(self, event: Mapping[str, Any]) -> Iterator[ParsedOutput]:
        field = event["field"]
        if event["type"] == "region_chunk":
            self._pending_raw += event["text"]
            if field != "tool_calls":
                yield from self._emit_text(field, event["text"])
            return
        if event["type"] == "region_close" and field == "tool_calls":
            found = event["value"]
            for call in found if isinstance(found, list) else [found]:
                yield from self._emit_call(call["function"])
        self._pending_raw = self._pending_blanks = ""
        self._has_emitted = False

    def _emit_text(self, field: str, text: str) -> Iterator[ParsedOutput]:
        """Without the blanks at a region's beginning and end."""
        text = self._pending_blanks + text if self._has_emitted else text.lstrip()
        body = text.rstrip()
        self._pending_blanks = text[len(body) :]
        if body:
            self._has_emitted = True
            release = self._make_ready_text(body)
            yield release if field == "content" else ParsedReasoning(body, len(release.tokens))

    def _emit_call(self, function: Mapping[str, Any]) -> Iterator[ParsedOutput]:
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        yield ParsedCallStart(
            self.calls, make_call_id(), str(function["name"]), len(self._make_ready_text("").tokens)
        )
        yield ParsedCallArguments(self.calls, text, 0)
        self.calls += 1

    def _make_ready_text(self, text: str) -> ReadyText:
        tokens, self._pending_tokens = self._pending_tokens, []
        return ReadyText(text, tokens)
