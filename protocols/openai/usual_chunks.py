"""Chunks that are as nearly all are: a piece of a text, its end or the usage, and nothing unusual.

They are read faster than whatever a chunk may be. Any other is for ``WireAnswer``.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from protocols.openai.incoming import WireUsage
from protocols.openai.wholes import Heading, OnlyChoice, Plain, Reason


class _Delta(Plain, kw_only=True):
    content: str | None = None


class _Choice(OnlyChoice, kw_only=True):
    delta: _Delta | None = None
    text: str | None = None
    message: None = None
    finish_reason: Reason | None = None


class Chunk(Heading, kw_only=True):
    """One of a stream of one choice."""

    choices: Annotated[list[_Choice], Meta(max_length=1)]
    usage: WireUsage | None = None


_read = msgspec.json.Decoder(Chunk).decode


def read_chunk(payload: bytes) -> Chunk | None:
    """What a chunk holds, as far as ``WireAnswer`` does; None where that has to be asked."""
    try:
        return _read(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
