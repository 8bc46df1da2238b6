"""What a choice says and what it calls: text as it comes, taken apart.

No letter of the marks around calls is ever sent: text is held back while it may yet become one, as
are blanks in front of it.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from backends.torch.families import ToolCallFormat
from backends.torch.text import OutputToken, ReadyText, count_overlap


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
