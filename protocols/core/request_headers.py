"""Headers of requests that have a meaning for the servers of a protocol.

Each client adapter has a ``RequestHeaders``. A header with the protocol's prefix that the table
does not list is reported, so a new one is never dropped silently. Headers that no protocol claims
(of connections, caches, tracing, client libraries) say nothing to a model and are no loss.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

from protocols.core.name_cache import NameCache

HeaderDecision = Literal["forwarded", "reported", "handled"]
"""``forwarded``: workers of the same protocol get it, and it is reported for others. ``reported``:
no worker gets it. ``handled``: the gateway does what it asks for, or it says nothing to a model."""

_VALUE: Final = re.compile(r"[ -~]{1,2048}")
"""A value that may be sent to a worker: printable, and not too long."""


class RequestHeaders:
    """The headers that only requests of one protocol have, by name in lower case.

    ``prefixes`` begin all names that belong to the protocol.
    """

    def __init__(
        self, prefixes: tuple[str, ...] = (), decisions: Mapping[str, HeaderDecision] | None = None
    ) -> None:
        self.prefixes = prefixes
        self.decisions: Mapping[str, HeaderDecision] = decisions or {}
        self.forwarded = frozenset(
            name for name, one in self.decisions.items() if one == "forwarded"
        )
        """The names that workers of the same protocol get."""
        self.has_meaning = NameCache(self._is_meaningful).__getitem__
        """Whether a header of this name is lost unless a worker gets it."""

    def select_forwarded(self, headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """The headers of a request that workers of the same protocol get."""
        forwarded = self.forwarded
        if forwarded.isdisjoint(headers):
            return ()
        return tuple(
            (name, value)
            for name, value in headers.items()
            if name in forwarded and _VALUE.fullmatch(value)
        )

    def _is_meaningful(self, name: str) -> bool:
        decision = self.decisions.get(name)
        return decision != "handled" and (decision is not None or name.startswith(self.prefixes))


NO_REQUEST_HEADERS: Final = RequestHeaders()
