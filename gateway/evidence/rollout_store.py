"""The state of rollouts: shared by gateways and processes, and kept over restarts.

It is in the PostgreSQL database of the usage rows; or in the Redis server of ``state``; or in the
SQLite file of the usage rows. One gateway decides at a time: whoever holds the lease. A decision is
written only if the state is still the one that it was made from, so that no command of an operator
is lost. Each plan of a model has a state of its own; all gateways follow one plan, also if their
configurations differ (``gateway.evidence.rollout_gateways``).
"""

from typing import Protocol

from gateway.config.schema import Config, RolloutConfig
from gateway.evidence.rollout import RolloutState, StepSamples
from gateway.evidence.rollout_gateways import GatewaySettings
from gateway.evidence.rollout_sqlite import SqliteRolloutStore


class RolloutStore(Protocol):
    """The states of rollouts, and the requests that decide on them.

    Its methods block, and raise one of ``errors``.
    """

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What means that the store can't be used now."""

    def load(
        self,
        model: str,
        plan: str,
        now: float,
        step: int = 0,
        last_read: RolloutState | None = None,
    ) -> RolloutState:
        """The state of a rollout; without one it begins with this ``step``.

        Unless it was read before, as ``last_read``: then the store has lost it, and gets it back.
        """

    def read(self, model: str, plan: str) -> RolloutState | None:
        """The state of a rollout; None if it has not begun. Nothing is written."""

    def take_lease(self, model: str, plan: str, owner: str, now: float, seconds: float) -> bool:
        """Whether this process decides now. It is asked more often than every ``seconds``."""

    def save(self, model: str, plan: str, before: RolloutState, after: RolloutState) -> bool:
        """Replace a state; False if it has changed meanwhile."""

    def read_samples(
        self, rollout: RolloutConfig, model: str, split: str, state: RolloutState
    ) -> StepSamples:
        """The requests of the current step that the split sent, those of all gateways."""

    def publish_samples(
        self, rollout: RolloutConfig, model: str, split: str, state: RolloutState
    ) -> None:
        """Let whoever decides know the requests of this gateway."""

    def list_gateways(self, model: str) -> dict[str, GatewaySettings]:
        """What the processes have told of their settings, by their names. Nothing is written."""

    def put_gateway(self, model: str, owner: str, settings: GatewaySettings) -> None:
        """Tell the others the settings of this process."""

    def remove_gateway(self, model: str, owner: str) -> None:
        """Forget a process."""

    def close(self) -> None:
        """Close its connections."""


def open_rollout_store(config: Config) -> RolloutStore:
    """The store of a configuration with rollouts, which has usage rows."""
    usage = config.observe.usage
    assert usage is not None  # noqa: S101 - check says so
    if usage.postgres is not None:
        from gateway.evidence.rollout_postgres import PostgresRolloutStore  # noqa: PLC0415 - optional

        return PostgresRolloutStore(usage.postgres.reveal())
    assert usage.sqlite is not None  # noqa: S101 - as above
    file = SqliteRolloutStore(usage.sqlite)
    if config.state is not None:
        from gateway.evidence.rollout_redis import RedisRolloutStore  # noqa: PLC0415 - optional

        return RedisRolloutStore(config.state, file)
    return file
