"""Reads the words with which workers say why a choice ended.

A protocol's table maps the words that the gateway knows; None is a failure of the worker. A word
that no table has never becomes a harmless one: only clients of the worker's own protocol get it, as
it is, and for all others it is an error. A whole answer without any word is an error for all, as is
a stream that ends without one, unless the protocol has no word: else nobody knows whether it is
complete.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.core.errors import UnknownFinishReason, WorkerFailed
from protocols.core.events import FinishReason

_FAILURES: Final = frozenset({"abort", "error"})
"""Words of a worker that stopped a request by itself (vLLM, SGLang, OpenRouter): in no protocol is
the answer complete."""
_FILTER_PREFIX: Final = "content_filter:"
"""Gemini's OpenAI endpoint adds its own word: ``content_filter: PROHIBITED_CONTENT``."""
_MAX_SHOWN: Final = 32


class FinishReasonTable(Struct, frozen=True):
    """The words of the workers of one protocol; ``source`` is that of its own clients' requests."""

    source: str
    words: Mapping[str, FinishReason | None]
    is_optional: bool = False
    """Whether the protocol's answers need not say why they ended."""

    def read_word(self, word: Any, source: str) -> tuple[FinishReason, str | None]:
        """The finish reason, and the word itself if it is unknown.

        ``source`` is the request's; "" if the client's own bytes were sent. Raises WorkerFailed,
        also if a word is missing.
        """
        if word is None or word == "":
            if self.is_optional:
                return "unknown", None
            raise WorkerFailed("The worker's answer has no finish reason.")
        if not isinstance(word, str):
            word = msgspec.json.encode(word).decode()
        shown = word[:_MAX_SHOWN]
        if word.startswith(_FILTER_PREFIX):
            word = _FILTER_PREFIX[:-1]
        reason = None if word in _FAILURES else self.words.get(word, "unknown")
        if reason is None:
            raise WorkerFailed(f"The worker broke off ({shown}).")
        if word in self.words:
            return reason, None
        if source not in ("", self.source):
            raise UnknownFinishReason(f"The worker ended with an unknown reason ({shown}).")
        return "unknown", word
