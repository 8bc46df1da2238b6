"""Tool call formats of model families, detected from their chat templates, and their parsers.

If a template does not support tools, the functions are listed in the system message, and calls and
results are written as text in the Hermes format.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from backends.torch.detokenizer import OutputToken, ReadyText, count_overlap
from backends.torch.ipc import ChatTurn, FunctionCall, FunctionDefinition


class ToolCallFormat(Struct, frozen=True):
    """How a model family writes a tool call: ``call_prefix NAME name_separator ARGS call_suffix``.

    ``section_prefix`` precedes the first call, ``call_separator`` is between two calls, and
    ``section_suffix`` follows the last. Calls start at ``trigger``, with which ``section_prefix``
    or a call begins; without a trigger an output consists either of text or of calls.
    """

    template_sign: str
    """Text in the chat templates of this family, but not of those before it in the list."""
    call_prefix: str
    name_separator: str
    call_suffix: str
    call_separator: str
    trigger: str = ""
    section_prefix: str = ""
    section_suffix: str = ""
    id_length: int | None = None
    """The number of letters and digits that its chat templates require in a call id."""

    def format_calls(self, calls: Sequence[FunctionCall]) -> str:
        """The calls as the model writes them."""
        parts = (
            f"{self.call_prefix}{call.name}{self.name_separator}{call.arguments}{self.call_suffix}"
            for call in calls
        )
        return f"{self.section_prefix}{self.call_separator.join(parts)}{self.section_suffix}"


HERMES_FORMAT: Final = ToolCallFormat(
    template_sign="<tool_call>",
    trigger="<tool_call>",
    call_prefix='<tool_call>\n{"name": "',
    name_separator='", "arguments": ',
    call_suffix="}\n</tool_call>",
    call_separator="\n",
)
TOOL_CALL_FORMATS: Final = (
    ToolCallFormat(
        template_sign="[ARGS]",
        trigger="[TOOL_CALLS]",
        call_prefix="[TOOL_CALLS]",
        name_separator="[ARGS]",
        call_suffix="",
        call_separator="",
        id_length=9,
    ),
    ToolCallFormat(
        template_sign="[TOOL_CALLS] [",
        trigger="[TOOL_CALLS]",
        section_prefix="[TOOL_CALLS] [",
        call_prefix='{"name": "',
        name_separator='", "arguments": ',
        call_suffix="}",
        call_separator=", ",
        section_suffix="]",
        id_length=9,
    ),
    ToolCallFormat(
        template_sign="[TOOL_CALLS]",
        trigger="[TOOL_CALLS]",
        section_prefix="[TOOL_CALLS][",
        call_prefix='{"name": "',
        name_separator='", "arguments": ',
        call_suffix="}",
        call_separator=", ",
        section_suffix="]",
        id_length=9,
    ),
    ToolCallFormat(
        template_sign='"parameters": dictionary',
        call_prefix='{"name": "',
        name_separator='", "parameters": ',
        call_suffix="}",
        call_separator="; ",
    ),
    HERMES_FORMAT,
)
"""Mistral (three generations), Llama 3, Hermes and Qwen, from the templates on model cards."""


def detect_tool_call_format(template: str) -> ToolCallFormat:
    """The tool call format of a chat template; Hermes if it is none of the others."""
    return next(
        (candidate for candidate in TOOL_CALL_FORMATS if candidate.template_sign in template),
        HERMES_FORMAT,
    )


def supports_functions(template: str) -> bool:
    """Whether a chat template supports tools."""
    return "tools" in template


# --- conversations ------------------------------------------------------------------------------


def build_function_schema(function: FunctionDefinition) -> dict[str, Any]:
    """A function definition for chat templates."""
    schema: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        schema["description"] = function.description
    return {**schema, "parameters": msgspec.json.decode(function.parameters)}


def build_messages(
    turns: Sequence[ChatTurn], call_format: ToolCallFormat
) -> Iterator[dict[str, Any]]:
    """The messages for a chat template that supports tools."""
    for turn in turns:
        message = _build_message(turn)
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": _make_call_id(call.id, call_format),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
                }
                for call in turn.calls
            ]
        if turn.call_id is not None:
            message["tool_call_id"] = _make_call_id(turn.call_id, call_format)
        yield message


def build_plain_messages(
    turns: Sequence[ChatTurn], functions: Sequence[FunctionDefinition], call_format: ToolCallFormat
) -> Iterator[dict[str, Any]]:
    """The messages for a chat template without tool support: calls and results become text."""
    messages = list(turns)
    if functions:
        description = _describe_functions(functions, call_format)
        first = (
            messages.pop(0).content + "\n\n" if messages and messages[0].role == "system" else ""
        )
        yield {"role": "system", "content": first + description}
    for turn in messages:
        if turn.role == "tool":
            content = f"<tool_response>\n{turn.content}\n</tool_response>"
            yield {"role": "user", "content": content}
        elif turn.calls:
            calls_text = call_format.format_calls(turn.calls)
            yield {
                **_build_message(turn),
                "content": "\n".join(filter(None, (turn.content, calls_text))),
            }
        else:
            yield _build_message(turn)


def _describe_functions(
    functions: Sequence[FunctionDefinition], call_format: ToolCallFormat
) -> str:
    definitions = "\n".join(
        msgspec.json.encode(build_function_schema(function)).decode() for function in functions
    )
    example = call_format.format_calls([FunctionCall("", "NAME", "{ARGUMENTS}")])
    return f"You can call these functions:\n{definitions}\nTo call one, write:\n{example}"


def _build_message(turn: ChatTurn) -> dict[str, Any]:
    message = {"role": turn.role, "content": turn.content}
    return message if turn.name is None else {**message, "name": turn.name}


def _parse_arguments(text: str) -> Any:
    """The arguments as an object, which chat templates format; unchanged if not valid JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _make_call_id(call_id: str, call_format: ToolCallFormat) -> str:
    """A call id that the chat template accepts, the same for a call and its result."""
    if call_format.id_length is None:
        return call_id
    plain_id = "".join(c for c in call_id if c.isascii() and c.isalnum())
    return plain_id[-call_format.id_length :].rjust(call_format.id_length, "0")


# Parsing of a choice's output into text, reasoning and tool calls, as tokens arrive.
#
# The markers around calls are not part of the output: text that may become a marker is held back,
# and so is the white space before it.


class ParsedCallStart(NamedTuple):
    """The start of a tool call; ``tokens``: tokens since the previous output."""

    call: int
    id: str
    name: str
    tokens: int


class ParsedCallArguments(NamedTuple):
    """A fragment of the current call's arguments; ``tokens``: tokens since the previous output."""

    call: int
    text: str
    tokens: int


class ParsedReasoning(NamedTuple):
    """A fragment of reasoning; ``tokens``: tokens since the previous output."""

    text: str
    tokens: int


ParsedOutput = ReadyText | ParsedCallStart | ParsedCallArguments | ParsedReasoning


class ToolCallParser:
    """Parses the output of one choice into text and tool calls.

    ``anywhere``: calls may follow text; otherwise they must start the output.
    """

    def __init__(
        self, call_format: ToolCallFormat, names: Sequence[str], *, anywhere: bool
    ) -> None:
        heads = {
            f"{call_format.call_prefix}{name}{call_format.name_separator}": name for name in names
        }
        self._first_call_heads = {
            call_format.section_prefix + head: name for head, name in heads.items()
        }
        self._next_call_heads = {
            call_format.call_suffix + call_format.call_separator + head: name
            for head, name in heads.items()
        }
        self._trigger = call_format.trigger
        self._anywhere = anywhere
        self._text = ""
        self._pending_tokens: list[OutputToken] = []
        self._json_scanner = _JsonScanner()
        self._has_emitted = False
        """Whether text was returned."""
        self.calls = 0
        """The number of calls that have started."""

    def feed(self, ready: ReadyText) -> Iterator[ParsedOutput]:
        """Add text; return what can be parsed so far."""
        self._text += ready.text
        self._pending_tokens += ready.tokens
        previous = ""
        while self._text not in ("", previous):
            previous = self._text
            yield from (
                self._find_next_call()
                if not self.calls or self._json_scanner.complete
                else self._emit_arguments()
            )

    def close(self) -> Iterator[ParsedOutput]:
        """The rest at the end of the output; an incomplete call is dropped."""
        if self.calls:
            return
        text = self._text
        if (
            self._trigger
            and (position := text.find(self._trigger)) >= 0
            and self._may_begin_head(text[position:])
        ):
            text = text[:position].rstrip()
        if text or self._pending_tokens:
            yield self._make_ready_text(text)

    def _find_next_call(self) -> Iterator[ParsedOutput]:
        """Look for the next call; return the text before it and its start."""
        heads = self._next_call_heads if self.calls else self._first_call_heads
        match = self._find_head(heads)
        if match is not None:
            position, head = match
            text = self._text[:position].rstrip()
            self._text = self._text[position + len(head) :]
            if text and not self.calls:
                yield self._make_ready_text(text)
            yield ParsedCallStart(self.calls, make_call_id(), heads[head], self._pop_token_count())
            self.calls += 1
            self._json_scanner = _JsonScanner()
        elif not self.calls and (count := len(self._text) - self._count_uncertain()) > 0:
            text, self._text = self._text[:count], self._text[count:]
            yield self._make_ready_text(text)

    def _find_head(self, heads: dict[str, str]) -> tuple[int, str] | None:
        """The position of the first call head and the head itself."""
        if self._anywhere and not self.calls:
            matches = [(self._text.find(head), head) for head in heads]
            return min((match for match in matches if match[0] >= 0), default=None)
        return next(((0, head) for head in heads if self._text.startswith(head)), None)

    def _count_uncertain(self) -> int:
        """Characters at the end that may be part of a call head, or white space before one."""
        if not self._anywhere:
            return (
                len(self._text) if not self._has_emitted and self._may_begin_head(self._text) else 0
            )
        size = max(count_overlap(self._text, head) for head in self._first_call_heads)
        text = self._text[: len(self._text) - size]
        return len(self._text) - len(text.rstrip())

    def _may_begin_head(self, text: str) -> bool:
        return any(head.startswith(text) for head in self._first_call_heads)

    def _emit_arguments(self) -> Iterator[ParsedOutput]:
        size = self._json_scanner.scan(self._text)
        text, self._text = self._text[:size], self._text[size:]
        yield ParsedCallArguments(self.calls - 1, text, self._pop_token_count())

    def _make_ready_text(self, text: str) -> ReadyText:
        tokens, self._pending_tokens = self._pending_tokens, []
        self._has_emitted = True
        return ReadyText(text, tokens)

    def _pop_token_count(self) -> int:
        """The number of tokens since the previous output; it resets the count."""
        tokens, self._pending_tokens = self._pending_tokens, []
        return len(tokens)


class ToolCallRules(Struct, frozen=True):
    """The functions that a request's choices may call, and their format."""

    call_format: ToolCallFormat
    names: tuple[str, ...]
    anywhere: bool
    marker_tokens: frozenset[int]
    """Special tokens in tool calls; they must be decoded, so that the parser sees them."""

    def make_parser(self) -> ToolCallParser:
        """A parser for one choice."""
        return ToolCallParser(self.call_format, self.names, anywhere=self.anywhere)


class _JsonScanner:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """How many of these characters belong to the object."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return index + 1
        return len(text)


def make_call_id() -> str:
    """A random id for a call."""
    return f"call_{secrets.token_hex(12)}"


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

    def close(self) -> Iterator[ParsedOutput]:
        """The rest at the end of the output."""
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
