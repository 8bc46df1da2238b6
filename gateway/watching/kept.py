"""Who may have requests explained, and the last that were."""

from collections.abc import Callable
from typing import Final, Protocol

from gateway.auth.api_keys import Principal
from gateway.observability.record import RequestRecord
from gateway.watching.account import Explanation
from gateway.watching.watch import ExplainRecorder
from protocols.core.interfaces import Clock

MAX_EXPLANATIONS: Final = 100
"""How many explanations are kept, each for as long as it is among the last."""


class ExplainPolicy(Protocol):
    """Gives what looks on while a request is served that asks for it."""

    def __call__(
        self, record: RequestRecord, principal: Principal | None, *, open_to_all: bool
    ) -> ExplainRecorder | None:
        """None where ``principal`` may not; ``open_to_all``: may who has no key."""


def explain_nothing(
    record: RequestRecord, principal: Principal | None, *, open_to_all: bool
) -> ExplainRecorder | None:
    """Explains nothing: an ``Explain``."""
    del record, principal, open_to_all
    return None


class ExplanationStore:
    """The requests that were explained last, in memory, by their ids; of two with one id the last.

    ``draw`` is the luck that requests have.
    """

    def __init__(self, clock: Clock, draw: Callable[[], float]) -> None:
        self._clock = clock
        self._random = draw
        self._recorders: dict[str, ExplainRecorder] = {}

    def create_recorder(
        self, record: RequestRecord, principal: Principal | None, *, open_to_all: bool
    ) -> ExplainRecorder | None:
        """See Explain."""
        if not (open_to_all if principal is None else principal.explain):
            return None
        watch = ExplainRecorder(record, self._clock, self._random)
        self._recorders.pop(record.id, None)
        self._recorders[record.id] = watch
        if len(self._recorders) > MAX_EXPLANATIONS:
            del self._recorders[next(iter(self._recorders))]
        return watch

    def find_explanation(self, id: str) -> Explanation | None:  # noqa: A002 - what it is called everywhere
        """What was found out about the request of this id, so far."""
        watch = self._recorders.get(id)
        return None if watch is None else watch.build_explanation()
