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
    """One way to write calls: ``opens`` NAME ``middle`` ARGUMENTS ``closes``.

    ``before`` stands before the first, ``between`` two of them, and ``after`` the last. A text
    goes over to calls where it comes upon ``mark``, with which a call or ``before`` begins; without
    a mark only the whole text may be calls.
    """

    template_sign: str
    """What its chat templates hold, and no earlier family's."""
    call_prefix: str
    name_separator: str
    call_suffix: str
    call_separator: str
    trigger: str = ""
    section_prefix: str = ""
    section_suffix: str = ""
    id_length: int | None = None
    """Letters and digits that its templates insist on in the id of a call."""

    def format_calls(self, calls: Sequence[FunctionCall]) -> str:
        """These calls as text."""
        each = (
            f"{self.call_prefix}{c.name}{self.name_separator}{c.arguments}{self.call_suffix}"
            for c in calls
        )
        return f"{self.section_prefix}{self.call_separator.join(each)}{self.section_suffix}"


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
"""Mistral (three ages), Llama 3, Hermes and Qwen; the templates on their model cards."""


def detect_tool_call_format(template: str) -> ToolCallFormat:
    """The family of a chat template; Hermes where it has no sign of any."""
    return next((one for one in TOOL_CALL_FORMATS if one.template_sign in template), HERMES_FORMAT)


def supports_functions(template: str) -> bool:
    """Whether a chat template has a place for functions."""
    return "tools" in template


# --- conversations ------------------------------------------------------------------------------


def build_function_schema(function: FunctionDefinition) -> dict[str, Any]:
    """A function as chat templates want it."""
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    return {**found, "parameters": msgspec.json.decode(function.parameters)}


def build_messages(turns: Sequence[ChatTurn], family: ToolCallFormat) -> Iterator[dict[str, Any]]:
    """A conversation for a template that knows functions."""
    for turn in turns:
        message = _build_message(turn)
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": _make_call_id(call.id, family),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
                }
                for call in turn.calls
            ]
        if turn.call_id is not None:
            message["tool_call_id"] = _make_call_id(turn.call_id, family)
        yield message


def build_plain_messages(
    turns: Sequence[ChatTurn], functions: Sequence[FunctionDefinition], family: ToolCallFormat
) -> Iterator[dict[str, Any]]:
    """A conversation for a template that knows no functions."""
    rest = list(turns)
    if functions:
        offer = _describe_functions(functions, family)
        first = rest.pop(0).content + "\n\n" if rest and rest[0].role == "system" else ""
        yield {"role": "system", "content": first + offer}
    for turn in rest:
        if turn.role == "tool":
            said = f"<tool_response>\n{turn.content}\n</tool_response>"
            yield {"role": "user", "content": said}
        elif turn.calls:
            written = family.format_calls(turn.calls)
            yield {
                **_build_message(turn),
                "content": "\n".join(filter(None, (turn.content, written))),
            }
        else:
            yield _build_message(turn)


def _describe_functions(functions: Sequence[FunctionDefinition], family: ToolCallFormat) -> str:
    each = "\n".join(msgspec.json.encode(build_function_schema(one)).decode() for one in functions)
    form = family.format_calls([FunctionCall("", "NAME", "{ARGUMENTS}")])
    return f"You can call these functions:\n{each}\nTo call one, write:\n{form}"


def _build_message(turn: ChatTurn) -> dict[str, Any]:
    message = {"role": turn.role, "content": turn.content}
    return message if turn.name is None else {**message, "name": turn.name}


def _parse_arguments(text: str) -> Any:
    """As an object, which templates write out themselves; as it is where it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _make_call_id(given: str, family: ToolCallFormat) -> str:
    """An id that the family's templates take, the same for a call and its result."""
    if family.id_length is None:
        return given
    plain_id = "".join(letter for letter in given if letter.isascii() and letter.isalnum())
    return plain_id[-family.id_length :].rjust(family.id_length, "0")


# Parsing of a choice's output into text, reasoning and tool calls, as tokens arrive.
#
# The markers around calls are never sent: text that may become a marker is held back, and so is the
# white space before it.


class ParsedCallStart(NamedTuple):
    """A call begins, and the tokens that it took."""

    call: int
    id: str
    name: str
    tokens: int


class ParsedCallArguments(NamedTuple):
    """A piece of the arguments of the call that began last, and the tokens that it took."""

    call: int
    text: str
    tokens: int


class ParsedReasoning(NamedTuple):
    """A piece of what the model thinks, and the tokens that it took."""

    text: str
    tokens: int


ParsedOutput = ReadyText | ParsedCallStart | ParsedCallArguments | ParsedReasoning


class ToolCallParser:
    """One choice, whose text may go over to calls.

    ``anywhere``: behind some text, too, and not only where it begins.
    """

    def __init__(self, family: ToolCallFormat, names: Sequence[str], *, anywhere: bool) -> None:
        rest = {f"{family.call_prefix}{name}{family.name_separator}": name for name in names}
        self._first_call_heads = {family.section_prefix + head: name for head, name in rest.items()}
        self._next_call_heads = {
            family.call_suffix + family.call_separator + head: name for head, name in rest.items()
        }
        self._trigger = family.trigger
        self._anywhere = anywhere
        self._text = ""
        self._pending_tokens: list[OutputToken] = []
        self._json_scanner = _JsonScanner()
        self._has_emitted = False
        """Some text was sent."""
        self.calls = 0
        """How many have begun."""

    def feed(self, release: ReadyText) -> Iterator[ParsedOutput]:
        """What may be told of it."""
        self._text += release.text
        self._pending_tokens += release.tokens
        before = ""
        while self._text not in ("", before):
            before = self._text
            yield from (
                self._find_next_call()
                if not self.calls or self._json_scanner.complete
                else self._emit_arguments()
            )

    def close(self) -> Iterator[ParsedOutput]:
        """What is left when nothing follows: of text, the part that did not become a call."""
        if self.calls:
            return
        text = self._text
        if (
            self._trigger
            and (at := text.find(self._trigger)) >= 0
            and self._may_begin_head(text[at:])
        ):
            text = text[:at].rstrip()
        if text or self._pending_tokens:
            yield self._make_ready_text(text)

    def _find_next_call(self) -> Iterator[ParsedOutput]:
        """For the next call."""
        heads = self._next_call_heads if self.calls else self._first_call_heads
        found = self._find_head(heads)
        if found is not None:
            at, head = found
            text = self._text[:at].rstrip()
            self._text = self._text[at + len(head) :]
            if text and not self.calls:
                yield self._make_ready_text(text)
            yield ParsedCallStart(self.calls, make_call_id(), heads[head], self._pop_token_count())
            self.calls += 1
            self._json_scanner = _JsonScanner()
        elif not self.calls and (free := len(self._text) - self._count_uncertain()) > 0:
            text, self._text = self._text[:free], self._text[free:]
            yield self._make_ready_text(text)

    def _find_head(self, heads: dict[str, str]) -> tuple[int, str] | None:
        """Where a call's head stands, and which."""
        if self._anywhere and not self.calls:
            places = [(self._text.find(head), head) for head in heads]
            return min((place for place in places if place[0] >= 0), default=None)
        return next(((0, head) for head in heads if self._text.startswith(head)), None)

    def _count_uncertain(self) -> int:
        """How many letters at the end may yet belong to a head, or stand in front of one."""
        if not self._anywhere:
            return (
                len(self._text) if not self._has_emitted and self._may_begin_head(self._text) else 0
            )
        size = max(count_overlap(self._text, head) for head in self._first_call_heads)
        before = self._text[: len(self._text) - size]
        return len(self._text) - len(before.rstrip())

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
        """The tokens since anything was told; nothing else is told of them."""
        tokens, self._pending_tokens = self._pending_tokens, []
        return len(tokens)


class ToolCallRules(Struct, frozen=True):
    """What the choices of a request may call, and how."""

    call_format: ToolCallFormat
    names: tuple[str, ...]
    anywhere: bool
    marker_tokens: frozenset[int]
    """Special tokens that are a part of calls: as text they are there to be read."""

    def make_parser(self) -> ToolCallParser:
        """For one choice."""
        return ToolCallParser(self.call_format, self.names, anywhere=self.anywhere)


class _JsonScanner:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """How many of these letters belong to it."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return at + 1
        return len(text)


def make_call_id() -> str:
    """For a call."""
    return f"call_{secrets.token_hex(12)}"


# Calls read by the response template that comes with some tokenizers, in the model's own form.
#
# Such a template says how the model writes what it thinks, says and calls. It is for reading only:
# nothing keeps the model to it, and what can't be read is told as it was written.

_log = logging.getLogger(__name__)
_PARSE_ERRORS = (LookupError, TypeError, ValueError)


def get_response_template(tokenizer: Any) -> Any:
    """The tokenizer's own response template, if it has one that is one."""
    found = getattr(tokenizer, "response_template", None)
    if found is None:
        return None
    try:
        from transformers.utils.chat_parsing.response_templates import (  # noqa: PLC0415 - some have none
            load_response_template,
        )

        return load_response_template(found)
    except (ImportError, *_PARSE_ERRORS) as error:
        _log.warning("the tokenizer's response template can't be used: %s", error)
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
