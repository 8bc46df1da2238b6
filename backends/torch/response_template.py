"""Parses output with the response template of a tokenizer, in the model's own format.

The template describes how the model writes reasoning, content and tool calls. It only parses:
nothing constrains the model to it, and output that can't be parsed is returned as text.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from backends.torch.detokenizer import OutputToken, ReadyText
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
    make_call_id,
)

_log = logging.getLogger(__name__)
_PARSE_ERRORS = (LookupError, TypeError, ValueError)


def get_response_template(tokenizer: Any) -> Any:
    """The tokenizer's response template; None if it has none or an invalid one."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    try:
        from transformers.utils.chat_parsing.response_templates import (  # noqa: PLC0415 - not in every release
            load_response_template,
        )

        return load_response_template(template)
    except (ImportError, *_PARSE_ERRORS) as error:
        _log.warning("the tokenizer's response template can't be used: %s", error)
        return None


class ResponseTemplateRules(Struct, frozen=True):
    """The response template, prompt and tools for parsing a request's choices."""

    template: Any
    prompt: str
    tools: Sequence[dict[str, Any]]
    marker_tokens: frozenset[int]
    """Special tokens in the output; they must be decoded, so that the parser sees them."""

    def make_parser(self) -> "ResponseTemplateParser":
        """A parser for one choice."""
        from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415 - not in every release

        return ResponseTemplateParser(
            ResponseParser(self.template, self.prompt, tools=list(self.tools))
        )


class ResponseTemplateParser:
    """Parses the output of one choice with a response template."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._pending_raw = ""
        """Unparsed text of the open region."""
        self._pending_whitespace = ""
        """White space held back, since it may end the region."""
        self._has_emitted = False
        """Whether text of the open region was returned."""
        self._pending_tokens: list[OutputToken] = []
        self._has_cut = False
        self.is_in_call = False
        """Whether the output was cut off in a call; calls are returned when they are complete."""
        self.calls = 0
        """The number of calls that have started."""

    def feed(self, ready: ReadyText) -> Iterator[ParsedOutput]:
        """Add text; return what can be parsed so far."""
        self._pending_tokens += ready.tokens
        if self._parser is None:
            yield self._make_ready_text(ready.text)
            return
        try:
            for event in self._parser.feed(ready.text):
                yield from self._read_event(event)
        except _PARSE_ERRORS:
            self._parser = None
            yield self._make_ready_text(self._pending_raw + ready.text)

    def close(self, *, is_cut: bool = False) -> Iterator[ParsedOutput]:
        """The rest at the end of the output. ``is_cut``: the model has not ended it."""
        self._has_cut = is_cut
        if self._parser is None:
            return
        try:
            for event in self._parser.finalize()[1]:
                yield from self._read_event(event)
        except _PARSE_ERRORS:
            self.is_in_call = self._has_cut
            yield self._make_ready_text(self._pending_raw)

    def _read_event(self, event: Mapping[str, Any]) -> Iterator[ParsedOutput]:
        field = event["field"]
        if event["type"] == "region_chunk":
            self._pending_raw += event["text"]
            if field != "tool_calls":
                yield from self._emit_text(field, event["text"])
            return
        if event["type"] == "region_close" and field == "tool_calls" and self._has_cut:
            self.is_in_call = True
            yield self._make_ready_text(self._pending_raw)
        elif event["type"] == "region_close" and field == "tool_calls":
            calls = event["value"]
            for call in calls if isinstance(calls, list) else [calls]:
                yield from self._emit_call(call["function"])
        self._pending_raw = self._pending_whitespace = ""
        self._has_emitted = False

    def _emit_text(self, field: str, text: str) -> Iterator[ParsedOutput]:
        """Return a region's text without white space at its start and end."""
        text = self._pending_whitespace + text if self._has_emitted else text.lstrip()
        body = text.rstrip()
        self._pending_whitespace = text[len(body) :]
        if body:
            self._has_emitted = True
            ready = self._make_ready_text(body)
            yield ready if field == "content" else ParsedReasoning(body, len(ready.tokens))

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
