"""The response of every scripted worker, before a protocol encodes it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

PROMPT: Final = "sag hallo"
PROMPT_TOKENS: Final = 7
"""The prompt tokens that workers report; no estimate of the gateway equals them."""
TOKENS: Final = ("Grüße", " aus", " 東京", " 🗼", "!", " Ende")
TEXT: Final = "".join(TOKENS)
STOP: Final = " 🗼!"
"""Two tokens of the text."""
BEFORE_STOP: Final = "Grüße aus 東京"
TOOL: Final = "find"
ARGUMENTS: Final = ('{"city"', ': "東京"}')
"""The tool call's arguments, in two pieces."""

SCENARIOS: Final = (
    "answer", "packets", "refused", "limited", "failed", "busy", "broken", "short", "cut", "slow",
)  # fmt: skip
"""The models of each worker, named after what the worker answers.

    answer   the text                busy     an error: overloaded
    packets  the text, 11 bytes each broken   two tokens, then an error in the stream
    refused  an error: bad request   short    two tokens, then no end mark
    limited  an error: rate limit    cut      two tokens, then a closed connection
    failed   an error: internal      slow     one token, then nothing
"""


class RequestOptions(Struct, frozen=True, kw_only=True):
    """A decoded request. ``top_logprobs`` is None if no logprobs are requested."""

    stream: bool = False
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n: int = 1
    include_stop: bool = False
    """Whether a stop string stays in the text."""
    top_logprobs: int | None = None
    tool: bool = False


class ScriptedChoice(Struct, frozen=True):
    """One choice: the tokens that are sent, and the number that was generated."""

    tokens: tuple[str, ...]
    token_count: int
    reason: str
    """``eos``, ``length``, ``stop`` or ``tool``."""

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def script_choice(options: RequestOptions, *, keeps_stop: bool = False) -> ScriptedChoice:
    """Return the choice for a request; with ``keeps_stop``, the stop string stays in the text."""
    if options.tool:
        return ScriptedChoice((), len(TOKENS), "tool")
    tokens = TOKENS[: options.max_tokens]
    for count in range(1, len(tokens) + 1):
        text = "".join(tokens[:count])
        if at := [text.index(stop) for stop in options.stops if stop in text]:
            sent = (
                tokens[:count]
                if keeps_stop or options.include_stop
                else _truncate_tokens(tokens, min(at))
            )
            return ScriptedChoice(sent, count, "stop")
    return ScriptedChoice(tokens, len(tokens), "eos" if len(tokens) == len(TOKENS) else "length")


def _truncate_tokens(tokens: Sequence[str], length: int) -> tuple[str, ...]:
    out: list[str] = []
    for token in tokens:
        out.append(token[:length])
        length -= len(out[-1])
    return tuple(filter(None, out))


def get_logprob(token: str) -> float:
    """Return the logprob of a token; it is exact as a 32-bit float."""
    return -0.25 * (TOKENS.index(token) + 1)


ALTERNATIVE: Final = ("other", -9.5)
"""The one alternative of each token."""

Json = Mapping[str, Any]
