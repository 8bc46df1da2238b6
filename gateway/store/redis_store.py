"""Stores responses in Redis, which several gateways share."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.config.schema import ResponseStoreConfig
from gateway.observability.log_rate import RareWarnings
from gateway.store.response_store import (
    UNAVAILABLE_MESSAGE,
    StoredLocation,
    StoreLimits,
    StoreUnavailable,
    count_stored_bytes,
)
from protocols.core.interfaces import StoredResponse

log = logging.getLogger("interlingua")

_TIMEOUT: Final = 2.0
"""Seconds for one command."""

_ADD: Final = """
local index, now, retention = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local count, bytes, prefix = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
redis.call('ZREMRANGEBYSCORE', index, '-inf', now - retention)
redis.call('ZADD', index, now, ARGV[6])
redis.call('EXPIRE', index, retention)
local members = redis.call('ZRANGE', index, 0, -1)
local total = 0
for i = #members, 1, -1 do
  local id, size = string.match(members[i], '^(.*)|(%d+)$')
  total = total + tonumber(size)
  if #members - i + 1 > count or total > bytes then
    redis.call('ZREM', index, members[i])
    redis.call('DEL', prefix .. id)
  end
end
"""
"""Adds a response to its owner's index, and removes the oldest beyond the limits."""


class RedisResponseStore:
    """Stores responses in Redis. Each expires by itself after the retention."""

    def __init__(
        self, config: ResponseStoreConfig, limits: StoreLimits, wall_clock: Callable[[], float]
    ) -> None:
        from redis.asyncio import Redis  # noqa: PLC0415 - it need not be installed
        from redis.exceptions import RedisError  # noqa: PLC0415 - as above

        assert config.redis is not None  # noqa: S101 - as build_response_store checks
        more: Any = {} if config.tls is None else {"ssl_ca_certs": config.tls.ca}
        self._redis: Any = Redis.from_url(
            config.redis.reveal(),
            protocol=2,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            **more,
        )
        self._errors = (RedisError, OSError, TimeoutError)
        self._prefix = config.prefix
        self._limits = limits
        self._wall_clock = wall_clock
        self._warnings = RareWarnings(wall_clock)

    async def locate_responses(
        self, owner: str, names: Sequence[str]
    ) -> Mapping[str, StoredLocation]:
        """See ``gateway.store.response_store.ResponseStore``."""
        responses, items = self._get_prefix(owner, "response"), self._get_prefix(owner, "item")
        try:
            owners = await self._redis.mget([items + name for name in names])
            ids = [
                name if found is None else found.decode()
                for name, found in zip(names, owners, strict=True)
            ]
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id in ids:
                    pipe.strlen(responses + response_id)
                sizes = await pipe.execute()
        except self._errors as error:
            raise self._fail(error) from error
        return {
            name: StoredLocation(response_id, size)
            for name, response_id, size in zip(names, ids, sizes, strict=True)
            if size
        }

    async def find_response(self, owner: str, name: str) -> StoredResponse | None:
        """See ``gateway.store.response_store.ResponseStore``."""
        try:
            body = await self._redis.get(self._get_prefix(owner, "response") + name)
        except self._errors as error:
            raise self._fail(error) from error
        return None if body is None else StoredResponse(name, (), body)

    async def add_response(self, owner: str, response: StoredResponse) -> None:
        """See ``gateway.store.response_store.ResponseStore``."""
        limits, size = self._limits, count_stored_bytes(response)
        if size > limits.owner_bytes:
            self._warnings.add("a response of %d bytes is too large to be stored", size)
            return
        responses, items = self._get_prefix(owner, "response"), self._get_prefix(owner, "item")
        retention = int(limits.retention)
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(responses + response.id, response.body, ex=retention)
                for item_id in response.item_ids:
                    pipe.set(items + item_id, response.id, ex=retention)
                pipe.eval(
                    _ADD,
                    1,
                    self._get_prefix(owner, "index"),
                    self._wall_clock(),
                    retention,
                    limits.owner_count,
                    limits.owner_bytes,
                    responses,
                    f"{response.id}|{size}",
                )
                await pipe.execute()
        except self._errors as error:
            self._warnings.add("a response was not stored in Redis: %s", type(error).__name__)

    async def remove_response(self, owner: str, name: str) -> None:
        """See ``gateway.store.response_store.ResponseStore``."""
        try:
            await self._redis.delete(self._get_prefix(owner, "response") + name)
        except self._errors as error:
            raise self._fail(error) from error

    async def aclose(self) -> None:
        """See ``gateway.store.response_store.ResponseStore``."""
        try:
            await self._redis.aclose()
        except self._errors as error:
            log.warning("the connections to Redis were not closed: %s", type(error).__name__)

    def _get_prefix(self, owner: str, kind: str) -> str:
        """The start of keys. An owner's name may hold anything, so its digest is used."""
        digest = hashlib.sha256(msgspec.json.encode(owner)).hexdigest()[:32]
        return f"{self._prefix}:{kind}:{digest}:"

    def _fail(self, error: Exception) -> StoreUnavailable:
        self._warnings.add("stored responses can't be read from Redis: %s", type(error).__name__)
        return StoreUnavailable(UNAVAILABLE_MESSAGE)
