"""The state of rollouts in Redis, for gateways that each have an SQLite file of usage rows.

Every gateway publishes the requests of its file in the current step; whoever decides adds them up.
Processes with one file publish the same requests in the same field of a hash.
"""

import hashlib
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config.schema import RolloutConfig, SharedStateConfig
from gateway.evidence.rollout import RolloutState, StepSamples, hash_plan, merge_samples
from gateway.evidence.rollout_gateways import GatewaySettings
from gateway.evidence.rollout_sqlite import SqliteRolloutStore, decode_state, encode_state
from protocols.core.json_text import decode_json

_TIMEOUT: Final = 5.0
"""Seconds for one command."""
_RETENTION: Final = 90 * 86400
"""Seconds after which a rollout that no gateway follows is forgotten."""
_TAKE_LEASE: Final = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_REPLACE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""


class _PublishedSamples(Struct, frozen=True):
    since: float
    """The beginning of the step that they are of."""
    samples: StepSamples


class RedisRolloutStore:
    """The rollouts of gateways with the same server and prefix: a ``RolloutStore``."""

    def __init__(self, config: SharedStateConfig, file: SqliteRolloutStore) -> None:
        """``file`` has the requests of this gateway."""
        from redis import Redis  # noqa: PLC0415 - it need not be installed
        from redis.backoff import NoBackoff  # noqa: PLC0415 - as above
        from redis.exceptions import RedisError  # noqa: PLC0415 - as above
        from redis.retry import Retry  # noqa: PLC0415 - as above

        more: Any = {} if config.tls is None else {"ssl_ca_certs": config.tls.ca}
        self.errors = (RedisError, *file.errors)
        self._redis: Any = Redis.from_url(
            config.redis.reveal(),
            protocol=2,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            **more,
        )
        self._prefix = config.prefix
        self._file = file

    def load(
        self,
        model: str,
        plan: str,
        now: float,
        step: int = 0,
        last_read: RolloutState | None = None,
    ) -> RolloutState:
        """See ``RolloutStore``."""
        key = self._get_key("state", model, plan)
        state = last_read or RolloutState(step=step, step_at=now)
        self._redis.set(key, encode_state(state), nx=True)
        self._redis.expire(key, _RETENTION)
        return self.read(model, plan) or state

    def read(self, model: str, plan: str) -> RolloutState | None:
        """See ``RolloutStore``."""
        found = self._redis.get(self._get_key("state", model, plan))
        return None if found is None else decode_state(found)

    def take_lease(self, model: str, plan: str, owner: str, now: float, seconds: float) -> bool:
        """See ``RolloutStore``. The lease runs out by the clock of the server."""
        del now
        key = self._get_key("lease", model, plan)
        return bool(self._redis.eval(_TAKE_LEASE, 1, key, owner, round(1000 * seconds)))

    def save(self, model: str, plan: str, before: RolloutState, after: RolloutState) -> bool:
        """See ``RolloutStore``."""
        key = self._get_key("state", model, plan)
        states = encode_state(before), encode_state(after)
        return bool(self._redis.eval(_REPLACE, 1, key, *states, _RETENTION))

    def read_samples(
        self, rollout: RolloutConfig, model: str, split: str, state: RolloutState
    ) -> StepSamples:
        """See ``RolloutStore``."""
        own, own_id = self._file.read_samples(rollout, model, split, state), self._file.find_id()
        found = self._redis.hgetall(self._get_key("step", model, hash_plan(rollout)))
        published = [
            decode_json(one, kind=_PublishedSamples)
            for name, one in found.items()
            if name.decode() != own_id
        ]
        others = (one.samples for one in published if one.since == state.step_at)
        return merge_samples([own, *others])

    def publish_samples(
        self, rollout: RolloutConfig, model: str, split: str, state: RolloutState
    ) -> None:
        """See ``RolloutStore``."""
        samples = self._file.read_samples(rollout, model, split, state)
        key = self._get_key("step", model, hash_plan(rollout))
        text = msgspec.json.encode(_PublishedSamples(state.step_at, samples))
        self._redis.hset(key, self._file.create_id(), text)
        self._redis.expire(key, _RETENTION)

    def list_gateways(self, model: str) -> dict[str, GatewaySettings]:
        """See ``RolloutStore``."""
        found = self._redis.hgetall(self._get_key("gateways", model))
        return {
            owner.decode(): decode_json(text, kind=GatewaySettings) for owner, text in found.items()
        }

    def put_gateway(self, model: str, owner: str, settings: GatewaySettings) -> None:
        """See ``RolloutStore``."""
        key = self._get_key("gateways", model)
        self._redis.hset(key, owner, msgspec.json.encode(settings))
        self._redis.expire(key, _RETENTION)

    def remove_gateway(self, model: str, owner: str) -> None:
        """See ``RolloutStore``."""
        self._redis.hdel(self._get_key("gateways", model), owner)

    def close(self) -> None:
        """See ``RolloutStore``."""
        self._redis.close()

    def _get_key(self, kind: str, *names: str) -> str:
        """Names may hold anything, so their digest is used."""
        digest = hashlib.sha256(msgspec.json.encode(names)).hexdigest()[:32]
        return f"{self._prefix}:rollout:{kind}:{digest}"
