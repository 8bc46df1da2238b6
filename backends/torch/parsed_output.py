"""What is parsed from a choice's output: text, reasoning and tool calls."""

import secrets
from typing import NamedTuple

from backends.torch.detokenizer import ReadyText


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


def make_call_id() -> str:
    """A random id for a call."""
    return f"call_{secrets.token_hex(12)}"
