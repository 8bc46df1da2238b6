"""Reads the words with which workers say why a choice ended.

A protocol's table maps the words that the gateway knows; None is a failure of the worker. A word
that no table has never becomes a harmless one: only clients of the worker's own protocol get it, as
it is, and for all others it is an error.
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
_MAX_SHOWN: Final = 32


class FinishReasonTable(Struct, frozen=True):
    """The words of the workers of one protocol; ``source`` is that of its own clients' requests."""

    source: str
    words: Mapping[str, FinishReason | None]

    def read_word(self, word: Any, source: str) -> tuple[FinishReason, str | None]:
        """The finish reason, and the word itself if it is unknown.

        ``source`` is the request's; "" if the client's own bytes were sent. Raises WorkerFailed.
        """
        if word is None or word == "":
            return "unknown", None
        if not isinstance(word, str):
            word = msgspec.json.encode(word).decode()
        shown = word[:_MAX_SHOWN]
        reason = None if word in _FAILURES else self.words.get(word, "unknown")
        if reason is None:
            raise WorkerFailed(f"The worker broke off ({shown}).")
        if word in self.words:
            return reason, None
        if source not in ("", self.source):
            raise UnknownFinishReason(f"The worker ended with an unknown reason ({shown}).")
        return "unknown", word
