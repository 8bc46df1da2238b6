"""Reads the words with which workers say why a choice ended.

A protocol's table maps the words that the gateway knows; None is a failure of the worker. A word
for which there is only an approximate reason reaches clients of the worker's own protocol as it is;
all others get the reason, and the loss of the word is reported. A word that no table has never
becomes a harmless one: it is an error for all but clients of the worker's own protocol. A whole
answer without any word is an error for all, as is a stream that ends without one, unless the
protocol has no word: else nobody knows whether it is complete.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.core.errors import ResponseAborted, UnknownFinishReason
from protocols.core.events import ChoiceEnd, FinishReason

_FAILURES: Final = frozenset({"abort", "error"})
"""Words of a worker that stopped a request by itself (vLLM, SGLang, OpenRouter): in no protocol is
the answer complete."""
_FILTER_PREFIX: Final = "content_filter:"
"""Gemini's OpenAI endpoint adds its own word: ``content_filter: PROHIBITED_CONTENT``."""
_MAX_SHOWN: Final = 32


class FinishWord(Struct, frozen=True, gc=False):
    """What a word means; see ``ChoiceEnd`` for the other two."""

    reason: FinishReason
    own_word: str | None = None
    lost_word: str | None = None

    def build_end(
        self, index: int = 0, matched_stop: str | int | None = None, *, called: bool = False
    ) -> ChoiceEnd:
        """The end of a choice; ``called``: an end without another reason is that of tool calls."""
        reason = self.reason
        if called and reason == "eos" and self.own_word is None:
            reason = "tool_calls"
        return ChoiceEnd(reason, index, matched_stop, self.own_word, self.lost_word)


class FinishReasonTable(Struct, frozen=True):
    """The words of the workers of one protocol; ``source`` is that of its own clients' requests.

    ``approximations`` are those whose reason says less than the word.
    """

    source: str
    words: Mapping[str, FinishReason | None]
    approximations: Mapping[str, FinishReason] = {}
    is_optional: bool = False
    """Whether the protocol's answers need not say why they ended."""

    def read_word(self, word: Any, source: str) -> FinishWord:
        """What a word means to the client of a request.

        ``source`` is the request's; "" if the client's own bytes were sent. Raises ResponseAborted,
        also if a word is missing.
        """
        if type(word) is str and (known := self.words.get(word)) is not None:
            return FinishWord(known)
        if word is None or word == "":
            if self.is_optional:
                return FinishWord("unknown")
            raise ResponseAborted("The worker's answer has no finish reason.")
        if not isinstance(word, str):
            word = msgspec.json.encode(word).decode()
        shown = word[:_MAX_SHOWN]
        if word.startswith(_FILTER_PREFIX):
            return FinishWord("content_filter")
        if word in _FAILURES or word in self.words:
            raise ResponseAborted(f"The worker broke off ({shown}).")
        is_own, reason = source in ("", self.source), self.approximations.get(word)
        if reason is None and not is_own:
            raise UnknownFinishReason(f"The worker ended with an unknown reason ({shown}).")
        own, lost = (word, None) if is_own else (None, word)
        return FinishWord(reason or "unknown", own, lost)
