"""The answer of every scripted worker, before a protocol encodes it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

PROMPT: Final = "sag hallo"
PROMPT_TOKENS: Final = 7
"""As workers count them that tell; no rule of thumb comes to the same."""
TOKENS: Final = ("Grüße", " aus", " 東京", " 🗼", "!", " Ende")
TEXT: Final = "".join(TOKENS)
STOP: Final = " 🗼!"
"""Two tokens of the text."""
BEFORE_STOP: Final = "Grüße aus 東京"
TOOL: Final = "find"
ARGUMENTS: Final = ('{"city"', ': "東京"}')
"""In two pieces."""

SCENARIOS: Final = (
    "answer", "packets", "refused", "limited", "failed", "busy", "broken", "short", "cut", "slow",
)  # fmt: skip
"""The models of each worker: what happens to the one who asks them.

answer   answers as asked        broken   an error after two tokens of a stream
packets  the same, in splinters  short    a stream without its end
refused  the request is wrong    cut      the connection breaks in the middle
limited  too many requests       slow     one token, then nothing
failed   the worker fails        busy     the worker is overloaded
"""


class RequestOptions(Struct, frozen=True, kw_only=True):
    """What a worker understood of a request. ``top`` is None where no logprobs are wanted."""

    stream: bool = False
    most: int | None = None
    stops: tuple[str, ...] = ()
    n: int = 1
    keeps: bool = False
    """A stop string is to stay in the text."""
    top: int | None = None
    tool: bool = False


class ScriptedChoice(Struct, frozen=True):
    """One choice: ``token_count`` tokens were computed, of which these are sent."""

    tokens: tuple[str, ...]
    token_count: int
    reason: str
    """``eos``, ``length``, ``stop`` or ``tool``."""

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def script_choice(options: RequestOptions, *, keeps_stop: bool = False) -> ScriptedChoice:
    """The answer. ``keeps_stop``: a stop string stays in the text whether or not it was to."""
    if options.tool:
        return ScriptedChoice((), len(TOKENS), "tool")
    tokens = TOKENS[: options.most]
    for count in range(1, len(tokens) + 1):
        text = "".join(tokens[:count])
        if at := [text.index(stop) for stop in options.stops if stop in text]:
            sent = (
                tokens[:count] if keeps_stop or options.keeps else _truncate_tokens(tokens, min(at))
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
    """Of the token that was taken. Exact in 32 bits, as some workers count."""
    return -0.25 * (TOKENS.index(token) + 1)


OTHER: Final = ("other", -9.5)
"""The one alternative to each token."""

Json = Mapping[str, Any]
