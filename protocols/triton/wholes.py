"""Answers in one piece that are as nearly all are: one text, and nothing unusual.

They are read far faster than whatever an answer may be. Any other is for ``AnswerDecoder``.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.core.types import Done, End, Event, GenerateRequest, Served, Text, Usage
from protocols.triton.incoming import REASONS, Usual, are_usual


class _Whole(Usual, forbid_unknown_fields=True):
    finish_reason: Literal["stop", "eos", "length", "max_tokens"] | UnsetType | None = UNSET
    stop_reason: UnsetType | None = UNSET


_read = msgspec.json.Decoder(_Whole).decode
_ENDS: Final = {name: End(reason or "unknown") for name, reason in REASONS.items()}
_UNTOLD: Final = End("unknown")
_DONE: Final = Done()


def whole(
    request: GenerateRequest, known: Mapping[str, str], prompt: str | None, body: bytes
) -> Sequence[Event] | None:
    """The events of an answer, the same as ``AnswerDecoder`` gives; None where it must be asked.

    ``known`` and ``prompt`` are as for that.
    """
    if not are_usual(known) or (request.n or 1) > 1 or request.want.usage == "each":
        return None
    try:
        wire = _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    text = wire.text_output
    spent, asked = wire.num_output_tokens, wire.num_input_tokens
    if prompt is not None:
        text = text.removeprefix(prompt)
    events: list[Event] = [] if wire.model_name is None else [Served(wire.model_name)]
    if text:
        events.append(Text(text, 0, -(-len(text) // 4) if spent is UNSET else spent))
    events.append(_ENDS[wire.finish_reason] if wire.finish_reason else _UNTOLD)
    if spent is not UNSET and asked is not None:
        events.append(Usage(asked, spent))
    events.append(_DONE)
    return events
