"""Metrics of guarded rollouts, read whenever the page is rendered."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observability.metrics.definition import MetricDefinition

_LABELS: Final = ("model", "version")
ROLLOUT_STEP: Final = MetricDefinition(
    "interlingua_rollout_step",
    "gauge",
    "Current step of a rollout, from 1; 0 while shadow traffic decides.",
    _LABELS,
    "largest",
)
ROLLOUT_WEIGHT: Final = MetricDefinition(
    "interlingua_rollout_weight",
    "gauge",
    "Share of the traffic split that a rollout gives to its version, in percent.",
    _LABELS,
    "largest",
)
ROLLOUT_STATE: Final = MetricDefinition(
    "interlingua_rollout_state",
    "gauge",
    "State of a rollout: 1 for running, paused, holding, rolled_back or completed.",
    (*_LABELS, "state"),
    "largest",
)
ROLLOUT_METRICS: Final = (ROLLOUT_STEP, ROLLOUT_WEIGHT, ROLLOUT_STATE)


class RolloutProgress(Protocol):
    """How far a rollout is."""

    @property
    def model(self) -> str:
        """The model."""

    @property
    def to(self) -> str:
        """The version that is rolled out."""

    @property
    def step(self) -> int:
        """The current step, from 1."""

    @property
    def share(self) -> int:
        """The version's share of the split, in percent."""

    @property
    def state_label(self) -> str:
        """The state, as a label."""


class RolloutCollector(Collector):
    """Reads the rollouts of the current configuration."""

    def __init__(self, list_rollouts: Callable[[], Iterable[RolloutProgress]]) -> None:
        self._list_rollouts = list_rollouts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's Collector."""
        rollouts = [((one.model, one.to), one) for one in self._list_rollouts()]
        yield ROLLOUT_STEP.build_family((labels, one.step) for labels, one in rollouts)
        yield ROLLOUT_WEIGHT.build_family((labels, one.share) for labels, one in rollouts)
        yield ROLLOUT_STATE.build_family(
            ((*labels, one.state_label), 1) for labels, one in rollouts
        )
