"""The last explanations, and the stage that records those of requests that ask for one."""

from collections.abc import Callable, Collection
from typing import Final

from gateway.auth.api_keys import may_explain
from gateway.explain.recorder import EXPLAIN_HEADER, ExplanationRecorder
from gateway.explain.report import Explanation
from gateway.observability.record import RequestRecord
from gateway.pipeline.services import HandlerSettings
from gateway.pipeline.state import RequestState, Stage
from gateway.routing.router import Router
from protocols.core.interfaces import Clock

MAX_EXPLANATIONS: Final = 100
"""How many explanations are kept, each for as long as it is among the last."""


class ExplanationStore:
    """The last recorded requests in memory, by id; of two with the same id the last one.

    ``draw`` returns the requests' random numbers.
    """

    def __init__(self, clock: Clock, draw: Callable[[], float]) -> None:
        self._clock = clock
        self._random = draw
        self._recorders: dict[str, ExplanationRecorder] = {}

    def create_recorder(
        self, record: RequestRecord, names: Collection[str], max_body_size: int
    ) -> ExplanationRecorder:
        """The recorder of a request, which is kept as long as it is among the last."""
        recorder = ExplanationRecorder(
            record, self._clock, self._random, names=names, max_body_size=max_body_size
        )
        self._recorders.pop(record.id, None)
        self._recorders[record.id] = recorder
        if len(self._recorders) > MAX_EXPLANATIONS:
            del self._recorders[next(iter(self._recorders))]
        return recorder

    def find_explanation(self, id: str) -> Explanation | None:  # noqa: A002 - the field's name
        """The explanation so far of the request with this id."""
        recorder = self._recorders.get(id)
        return None if recorder is None else recorder.build_explanation()


class ExplainStage(Stage):
    """Records the requests of a listener whose explanation is requested by a header.

    The store keeps the explanations of the last ``MAX_EXPLANATIONS`` requests.
    """

    header = EXPLAIN_HEADER

    def __init__(self, store: ExplanationStore, router: Router, settings: HandlerSettings) -> None:
        self._store = store
        self._router = router
        self._settings = settings

    def on_read(self, request: RequestState) -> None:
        """See ``gateway.pipeline.state.Stage``."""
        settings = self._settings
        if not may_explain(request.principal, open_to_all=settings.explain_without_key):
            return
        names = list_model_names(self._router)
        recorder = self._store.create_recorder(request.record, names, settings.max_body_size)
        request.add_stage(recorder)
        recorder.on_read(request)


def list_model_names(router: Router) -> Collection[str]:
    """The public names of the models."""
    return {info.name for info in router.list_models()}
