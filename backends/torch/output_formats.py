"""How model families mark reasoning in their output, and the parser of reasoning, text and calls.

The marks are detected from the chat template. What can't be parsed stays text. The formats of calls
are in ``call_formats``.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from backends.torch.call_formats import CallFormat, FunctionSchemas, ParsedCall, has_sign
from backends.torch.detokenizer import OutputToken, ReadyText, count_overlap
from backends.torch.parsed_output import (
    ParsedCallArguments,
    ParsedCallStart,
    ParsedOutput,
    ParsedReasoning,
    make_call_id,
)

MAX_SECTION: Final = 1 << 20
"""Characters after which a section of calls without an end is text."""
MAX_CLOSINGS: Final = 8
"""Closing marks after which a section of calls that can't be parsed is text."""


class ReasoningMark(Struct, frozen=True):
    """The marks of reasoning, which starts the output.

    ``answer_marks`` are around the answer. ``preambles``: in an output of several messages, each
    with a mark, those of messages before the answer; ``answer_opening`` is then the answer's.
    """

    family: str
    template_sign: str
    """Text in the chat templates of these families."""
    opening: str
    closing: str
    answer_marks: tuple[str, ...] = ()
    preambles: tuple[str, ...] = ()
    answer_opening: str = ""

    @property
    def texts(self) -> str:
        """All marks, one after another; they may be special tokens."""
        return self.opening + self.closing + "".join(self.answer_marks)


# --- the families -------------------------------------------------------------------------------

REASONING_MARKS: Final = (
    ReasoningMark(
        "gpt-oss", "<|channel|>", "<|channel|>analysis<|message|>", "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>",
         "<|channel|>final <|constrain|>json<|message|>", "<|channel|>commentary<|message|>",
         "<|channel|>commentary to=assistant", "<|end|>", "<|return|>"),
        ("<|channel|>commentary<|message|>",), "<|channel|>final<|message|>",
    ),
    ReasoningMark("MiniMax M3", "<mm:think>", "<mm:think>", "</mm:think>"),
    ReasoningMark("Kimi K3", "<|open|>", "<|open|>think<|sep|>", "<|close|>think<|sep|>",
                  ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>",
                   "<|end_of_msg|>")),
    ReasoningMark("Gemma 4", "<|channel>", "<|channel>thought\n", "<channel|>"),
    ReasoningMark("Hunyuan 3", "<think:opensource>", "<think:opensource>", "</think:opensource>"),
    ReasoningMark("Apriel", "Here are my reasoning steps:", "Here are my reasoning steps:",
                  "[BEGIN FINAL RESPONSE]"),
    ReasoningMark("Magistral, Mistral", "[THINK]", "[THINK]", "[/THINK]"),
    ReasoningMark("Seed-OSS", "<seed:think>", "<seed:think>", "</seed:think>"),
    ReasoningMark(
        "Command A", "<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningMark(
        "Granite 3.3", "<response> + <|start_of_role|>", "<think>", "</think>",
        ("<response>", "</response>"),
    ),
    ReasoningMark(
        "Granite 3.2", "Here is my thought process:",
        "Here is my thought process:", "Here is my response:",
    ),
    ReasoningMark(
        "Qwen3, QwQ, DeepSeek, SmolLM3, GLM-4.5, Kimi, MiniMax, Nemotron",
        "</think>", "<think>", "</think>",
    ),
)  # fmt: skip
"""The first one whose sign is in a chat template describes its reasoning."""


@functools.lru_cache(64)
def detect_reasoning_mark(template: str) -> ReasoningMark | None:
    """The marks of reasoning of a chat template, if it has some."""
    return next((one for one in REASONING_MARKS if has_sign(template, one.template_sign)), None)


# --- the parser ---------------------------------------------------------------------------------


class OutputRules(Struct, frozen=True):
    """The marks in a request's output. ``is_open``: the prompt ends with the start of reasoning."""

    reasoning: ReasoningMark | None
    calls: CallFormat | None
    schemas: FunctionSchemas
    is_open: bool
    marker_tokens: frozenset[int]
    """Special tokens in the output; they must be decoded, so that the parser sees them."""
    is_enforced: bool = False
    """A grammar enforces calls: a section has exactly the marks of its format."""
    is_either: bool = False
    """The output consists of calls, or it has none."""

    def make_parser(self) -> "OutputParser":
        """A parser for one choice."""
        return OutputParser(self)


class OutputParser:
    """Parses the output of one choice into reasoning, text and tool calls, as tokens arrive.

    Marks are not part of the output: text that may become a mark is held back, and so is the white
    space before it. A section is parsed when it is complete; of an enforced one, arguments in JSON
    are returned as they arrive. A section with calls ends reasoning that has not been closed.
    """

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._reasoning = rules.reasoning
        self._format = rules.calls
        self._heads = _CallHeads(rules) if rules.is_enforced and rules.schemas else None
        self._state = "start" if rules.reasoning is not None else "text"
        if rules.is_open:
            self._state = "reasoning"
        self._outer_state = "text"
        """The state in which the section has started: in text or in reasoning."""
        self._text = ""
        self._strips = self._state == "reasoning"
        """Whether white space at the start of ``_text`` belongs to the mark before it."""
        self._space = ""
        """White space before the section."""
        self._failed_ends = 0
        """Closing marks in the section that did not end it; the first and the last are at:"""
        self._first_end = self._last_end = -1
        self._ignored = 0
        """Characters at the start of the text in which no section starts."""
        self._has_text = False
        self._pending_tokens: list[OutputToken] = []
        self._json_scanner = _JsonScanner()
        self.calls = 0
        """The number of calls that have started."""
        self._has_cut = False
        """Whether the output has ended where the model would have gone on."""
        self._is_cut_off = False
        """Whether the output has ended in a section, or before the arguments of a further call."""

    @property
    def is_in_call(self) -> bool:
        """Whether a call has started and is not complete."""
        return self._state == "arguments" or self._is_cut_off

    def feed(self, ready: ReadyText) -> Iterator[ParsedOutput]:
        """Add text; return what can be parsed so far."""
        self._text += ready.text
        self._pending_tokens += ready.tokens
        yield from self._advance(ended=False)

    def close(self, *, is_cut: bool = False) -> Iterator[ParsedOutput]:
        """The rest at the end of the output. ``is_cut``: the model has not ended it."""
        self._has_cut = is_cut
        yield from self._advance(ended=True)
        if self._pending_tokens:
            yield ReadyText("", self._pop_tokens())

    def _advance(self, *, ended: bool) -> Iterator[ParsedOutput]:
        steps = {
            "start": self._read_start,
            "reasoning": self._read_reasoning,
            "text": self._read_text,
            "section": self._read_section,
            "arguments": self._read_arguments,
            "next": self._read_next_call,
        }
        before = None
        while before != (self._state, self._text):
            before = self._state, self._text
            yield from steps[self._state](ended)

    # --- reasoning ------------------------------------------------------------------------------

    def _read_start(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        """Find out whether the output starts with reasoning."""
        if self._reasoning is None:
            return
        text = self._text.lstrip()
        opening, closing = self._reasoning.opening, self._reasoning.closing
        if text.startswith(opening):
            self._text, self._state, self._strips = text[len(opening) :], "reasoning", True
        elif text.startswith(closing):
            # Some templates close reasoning before it has been opened.
            self._text, self._state, self._strips = text[len(closing) :], "text", True
        elif ended or not (opening.startswith(text) or closing.startswith(text)):
            self._state = "text"
        yield from ()

    def _read_reasoning(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        closing = "" if self._reasoning is None else self._reasoning.closing
        if self._strips:
            self._text = self._text.lstrip()
            self._strips = not self._text
        position = self._text.find(closing)
        section, opening = self._find_section()
        if section >= 0 and not 0 <= position < section:
            text = self._start_section(section, opening)
        elif position >= 0:
            text, self._text = self._text[:position].rstrip(), self._text[position + len(closing) :]
            self._state, self._strips, self._ignored = "text", True, 0
        else:
            size = 0 if ended else self._count_overlap([closing, *self._list_triggers()])
            kept = self._text[: len(self._text) - size]
            text = kept if ended else kept.rstrip()
            self._drop(len(text))
        if text:
            yield ParsedReasoning(text, len(self._pop_tokens()))

    # --- text -----------------------------------------------------------------------------------

    def _read_text(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        position, opening = self._find_section()
        reasoning = self._find_further_reasoning()
        if reasoning >= 0 and not 0 <= position < reasoning:
            text = self._text[:reasoning].rstrip()
            mark = "" if self._reasoning is None else self._reasoning.opening
            self._text, self._state = self._text[reasoning + len(mark) :], "reasoning"
        elif position >= 0:
            text = self._start_section(position, opening)
        else:
            size = len(self._text) - (0 if ended else self._count_uncertain())
            text = self._text[:size]
            self._drop(size)
        for answer_mark in self._get_answer_marks():
            text = re.sub(rf"\s*{re.escape(answer_mark)}", "", text)
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if self._state != "text":
            self._strips = self._state == "reasoning"
        yield from self._emit_text(text)

    def _find_section(self) -> tuple[int, str]:
        """Where the next section starts, and with what; -1: nowhere."""
        if self._format is None or not self._allows_section():
            return -1, ""
        found = [
            (at, mark)
            for mark in self._list_triggers()
            if (at := self._text.find(mark, self._ignored)) >= 0
        ]
        position, mark = min(found, default=(-1, ""))
        if self._is_at_start and self._text[: max(position, 0)].strip():
            return -1, ""
        return position, mark

    @property
    def _is_at_start(self) -> bool:
        return self._rules.is_either or (self._format is not None and self._format.at_start)

    def _allows_section(self) -> bool:
        return not (self._is_at_start and self._has_text)

    def _list_triggers(self) -> list[str]:
        if self._format is None or not self._allows_section():
            return []
        return [self._format.opening, *self._format.other_triggers]

    def _start_section(self, position: int, opening: str) -> str:
        """Start the section at ``position``; returns the text before it."""
        before = self._text[:position]
        text = before.rstrip()
        self._space, self._text = before[len(text) :], self._text[position:]
        self._outer_state, self._state = self._state, "section"
        self._failed_ends, self._first_end = 0, -1
        self._last_end = len(opening)
        return text

    def _find_further_reasoning(self) -> int:
        """Where reasoning starts again, in an output of several messages; -1: nowhere."""
        if self._reasoning is None or not self._reasoning.answer_opening:
            return -1
        return self._text.find(self._reasoning.opening)

    def _get_answer_marks(self) -> tuple[str, ...]:
        return () if self._reasoning is None else self._reasoning.answer_marks

    def _count_uncertain(self) -> int:
        """Characters at the end that may begin a mark, and white space before it."""
        marks = [*self._get_answer_marks(), *self._list_triggers()]
        if self._reasoning is not None and self._reasoning.answer_opening:
            marks.append(self._reasoning.opening)
        if not marks:
            return 0
        size = self._count_overlap(marks)
        text = self._text[: len(self._text) - size]
        return len(self._text) - len(text.rstrip())

    def _count_overlap(self, marks: Sequence[str]) -> int:
        return max(count_overlap(self._text, mark) for mark in marks)

    def _drop(self, size: int) -> None:
        self._text = self._text[size:]
        self._ignored = max(0, self._ignored - size)

    # --- sections -------------------------------------------------------------------------------

    def _read_section(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        """Wait for the end of the section; return its calls, or its text if it is malformed."""
        if self._format is None:
            return
        if self._heads is not None and self._heads.first:
            head = self._heads.find(self._heads.first, self._text)
            if head is not None:
                yield self._start_call(head, self._heads.first[head])
            elif not self._heads.is_start(self._heads.first, self._text):
                yield from self._leave_section(self._last_end, ended=False)
            elif ended:
                self._text = ""
            return
        end, found = self._find_section_end(self._format, ended=ended)
        if end < 0:
            closing = "" if self._reasoning is None else self._reasoning.closing
            closed = self._text.find(closing) if self._outer_state == "reasoning" else -1
            if closed >= 0:
                yield from self._leave_section(closed, ended=False)
            return
        if not found:
            yield from self._leave_section(end, ended=ended)
            return
        self._text, self._state, self._strips, self._ignored = self._text[end:], "text", True, 0
        self._is_cut_off = self._has_cut and not self._text and isinstance(found[-1], str)
        for one in found:
            if isinstance(one, ParsedCall):
                yield ParsedCallStart(self.calls, make_call_id(), one.name, len(self._pop_tokens()))
                yield ParsedCallArguments(self.calls, one.arguments, 0)
                self.calls += 1
            elif not (self._is_cut_off and self._rules.is_enforced):
                yield from self._emit_text(one.strip())

    def _leave_section(self, end: int, *, ended: bool) -> Iterator[ParsedOutput]:
        """Go on with the section's text, which has no calls."""
        self._is_cut_off = ended
        if ended and self._rules.is_enforced:
            self._text = ""
            return
        self._state = self._outer_state
        whole = self._space + self._text[:end]
        if self._state == "reasoning":
            self._text, self._ignored = self._space + self._text, len(whole)
            return
        self._text = self._text[end:]
        yield from self._emit_text(whole)

    def _find_section_end(
        self, mark: CallFormat, *, ended: bool
    ) -> tuple[int, list[ParsedCall | str]]:
        """Where the section ends, and what it consists of; -1: not there yet.

        A string of the arguments may contain the closing mark.
        """
        if not mark.closing:
            end = len(self._text) if ended else mark.find_end(self._text)
            if end < 0 and len(self._text) > MAX_SECTION:
                return len(self._text), []
            return (end, self._read_calls(mark, end)) if end >= 0 else (-1, [])
        while self._failed_ends < MAX_CLOSINGS:
            position = self._text.find(mark.closing, self._last_end)
            if position < 0:
                break
            end = position + len(mark.closing)
            if calls := mark.read_calls(self._text[:end], self._rules.schemas):
                return end, calls
            self._failed_ends, self._last_end = self._failed_ends + 1, end
            self._first_end = end if self._first_end < 0 else self._first_end
        if self._failed_ends == MAX_CLOSINGS or (ended and self._first_end >= 0):
            return self._first_end, []
        if ended or len(self._text) > MAX_SECTION:
            return len(self._text), self._read_calls(mark, len(self._text))
        return -1, []

    def _read_calls(self, mark: CallFormat, end: int) -> list[ParsedCall | str]:
        is_cut = self._has_cut and end == len(self._text)
        return mark.read_calls(self._text[:end], self._rules.schemas, is_cut=is_cut)

    # --- arguments as they arrive ---------------------------------------------------------------

    def _start_call(self, head: str, name: str) -> ParsedCallStart:
        self._text, self._state = self._text[len(head) :], "arguments"
        self._json_scanner = _JsonScanner()
        start = ParsedCallStart(self.calls, make_call_id(), name, len(self._pop_tokens()))
        self.calls += 1
        return start

    def _read_arguments(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        del ended
        size = self._json_scanner.scan(self._text)
        text, self._text = self._text[:size], self._text[size:]
        if text:
            yield ParsedCallArguments(self.calls - 1, text, len(self._pop_tokens()))
        if self._json_scanner.complete:
            self._state = "next"

    def _read_next_call(self, ended: bool) -> Iterator[ParsedOutput]:  # noqa: FBT001 - one table
        """Look for a further call; the end of the section has no content."""
        if self._heads is None:
            return
        head = self._heads.find(self._heads.next, self._text)
        if head is not None:
            yield self._start_call(head, self._heads.next[head])
        elif ended and self._text:
            self._is_cut_off = self._heads.is_in_next(self._text)
            self._text = ""

    def _emit_text(self, text: str) -> Iterator[ParsedOutput]:
        if text:
            self._has_text = True
            yield ReadyText(text, self._pop_tokens())

    def _pop_tokens(self) -> list[OutputToken]:
        tokens, self._pending_tokens = self._pending_tokens, []
        return tokens


class _CallHeads:
    """The texts before the arguments of an enforced call, with the function's name."""

    def __init__(self, rules: OutputRules) -> None:
        self.first: dict[str, str] = {}
        self.next: dict[str, str] = {}
        self._between = ""
        mark = rules.calls
        if mark is None or not mark.streams_arguments:
            return
        self._between = mark.call_suffix + mark.call_separator
        for name in rules.schemas:
            head = f"{mark.call_prefix}{name}{mark.name_separator}"
            self.first[mark.section_prefix + head] = name
            self.next[self._between + head] = name

    def is_in_next(self, text: str) -> bool:
        """Whether the text after a call holds a part of a further one."""
        return len(text) > len(self._between) and self.is_start(self.next, text)

    @staticmethod
    def find(heads: dict[str, str], text: str) -> str | None:
        """The head with which the text starts."""
        return next((head for head in heads if text.startswith(head)), None)

    @staticmethod
    def is_start(heads: dict[str, str], text: str) -> bool:
        """Whether the text may become a head."""
        return any(head.startswith(text) for head in heads)


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
