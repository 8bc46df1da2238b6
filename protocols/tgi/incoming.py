"""What TGI sends for a prompt: any key may be missing or null.

``/generate`` answers with one object, its kin with an array of one; each event of
``/generate_stream`` holds one token, the last one also the whole text and the details. Source:
text-generation-inference 3.3, ``router/src/lib.rs``.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from protocols.core.events import TokenLogprob, TopLogprob


class TgiToken(Struct):
    """A token of the answer or, without ``special``, of the prompt. Its kin give a list of ids."""

    id: int | list[int] | None = None
    text: str | None = None
    logprob: float | None = None
    special: bool | None = None

    @property
    def text_or_empty(self) -> str:
        """Its text."""
        return self.text or ""

    @property
    def ids(self) -> tuple[int, ...]:
        """Its ids, mostly one."""
        match self.id:
            case None:
                return ()
            case int(one):
                return (one,)
            case several:
                return tuple(several)


class TgiDetails(Struct):
    """Of a whole answer, or of a stream's end. ``prompt_tokens`` is its kin's ``input_length``."""

    finish_reason: str | None = None
    generated_tokens: int | None = None
    input_length: int | None = None
    prompt_tokens: int | None = None
    prefill: list[TgiToken] | None = None
    tokens: list[TgiToken] | None = None
    top_tokens: list[list[TgiToken]] | None = None

    @property
    def prompt_length(self) -> int | None:
        """How long the prompt was; a whole answer tells only where it was asked for its tokens."""
        if self.input_length is not None:
            return self.input_length
        return len(self.prefill) if self.prefill else self.prompt_tokens


class TgiResponse(Struct):
    """A whole answer, or an event of a stream."""

    token: TgiToken | None = None
    top_tokens: list[TgiToken] | None = None
    generated_text: str | None = None
    details: TgiDetails | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(TgiResponse).decode
_decode_unary_json = msgspec.json.Decoder(TgiResponse | list[TgiResponse]).decode


def decode_unary(body: bytes) -> TgiResponse:
    """A whole answer; of an array, the first. Raises what msgspec raises."""
    found = _decode_unary_json(body)
    if isinstance(found, TgiResponse):
        return found
    return found[0] if found else TgiResponse()


def build_token_logprob(token: TgiToken, top: Sequence[TgiToken] = ()) -> TokenLogprob:
    """A token and the alternatives to it, as ours."""
    alternatives = tuple(
        TopLogprob(
            one.text_or_empty,
            float("-inf") if one.logprob is None else one.logprob,
            _get_first_id(one),
        )
        for one in top
    )
    return TokenLogprob(token.text_or_empty, token.logprob, alternatives, _get_first_id(token))


def _get_first_id(token: TgiToken) -> int | None:
    return next(iter(token.ids), None)
