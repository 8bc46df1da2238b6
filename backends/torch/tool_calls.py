"""Tool calls in conversations, and what is parsed from an output.

What a chat template does not show is written as text: functions are listed in the system message,
and calls are part of their message, in the family's format if it has one, else in that of Hermes.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from backends.torch.call_formats import HERMES_FORMAT, PARSE_ERRORS, CallFormat
from backends.torch.detokenizer import OutputToken, ReadyText
from backends.torch.ipc import ChatTurn, FunctionCall, FunctionDefinition
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
    make_call_id,
)
from backends.torch.template_features import TemplateFeatures
from protocols.core.call_arguments import read_arguments
from protocols.core.json_text import decode_json

# --- conversations ------------------------------------------------------------------------------


def build_function_schema(
    function: FunctionDefinition, *, needs_description: bool = False
) -> dict[str, Any]:
    """A function definition for chat templates."""
    schema: dict[str, Any] = {"name": function.name}
    if function.description is not None or needs_description:
        schema["description"] = function.description or ""
    return {**schema, "parameters": decode_json(function.parameters)}


def build_messages(
    turns: Sequence[ChatTurn],
    functions: Sequence[FunctionDefinition],
    features: TemplateFeatures,
) -> Iterator[dict[str, Any]]:
    """The messages for a chat template; what it would not show of tools becomes text."""
    messages = list(turns)
    call_format = features.call_format or HERMES_FORMAT
    if functions and not features.shows_functions:
        is_first = bool(messages) and messages[0].role == "system"
        first = messages.pop(0).content + "\n\n" if is_first else ""
        yield {"role": "system", "content": first + _describe_functions(functions, call_format)}
    for turn in messages:
        message = _build_message(turn, features)
        if turn.role == "tool" and not features.shows_results:
            content = f"<tool_response>\n{turn.content}\n</tool_response>"
            message = {"role": "user", "content": content}
        elif turn.calls and features.writes_calls:
            message["tool_calls"] = [
                _build_call(call, call_format, as_text=features.text_arguments)
                for call in turn.calls
            ]
        elif turn.calls:
            calls_text = _format_calls(turn.calls, call_format)
            message["content"] = "\n".join(filter(None, (turn.content, calls_text)))
        if turn.call_id is not None and message["role"] == "tool":
            message["tool_call_id"] = _make_call_id(turn.call_id, call_format)
        yield message


def _build_call(call: FunctionCall, call_format: CallFormat, *, as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if as_text else read_arguments(call.arguments)
    return {
        "id": _make_call_id(call.id, call_format),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _format_calls(calls: Sequence[FunctionCall], call_format: CallFormat) -> str:
    """The calls as the model writes them; in Hermes' format if their arguments are no object."""
    try:
        return call_format.format_calls(calls)
    except PARSE_ERRORS:
        return HERMES_FORMAT.format_calls(calls)


def _describe_functions(functions: Sequence[FunctionDefinition], call_format: CallFormat) -> str:
    definitions = "\n".join(
        msgspec.json.encode(build_function_schema(function)).decode() for function in functions
    )
    example = call_format.describe_call()
    return f"You can call these functions:\n{definitions}\nTo call one, write:\n{example}"


def _build_message(turn: ChatTurn, features: TemplateFeatures) -> dict[str, Any]:
    message = {"role": turn.role, "content": turn.content}
    if turn.reasoning and features.reasoning_key is not None:
        message[features.reasoning_key] = turn.reasoning
    return message if turn.name is None else {**message, "name": turn.name}


def _make_call_id(call_id: str, call_format: CallFormat) -> str:
    """A call id that the chat template accepts, the same for a call and its result."""
    if call_format.id_length is None:
        return call_id
    plain_id = "".join(c for c in call_id if c.isascii() and c.isalnum())
    return plain_id[-call_format.id_length :].rjust(call_format.id_length, "0")


# Output parsing with the response template of a tokenizer, which describes the model's own format.
#
# The template describes how the model writes reasoning, content and tool calls. It only parses:
# nothing constrains the model to it, and output that can't be parsed is returned as text.

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
