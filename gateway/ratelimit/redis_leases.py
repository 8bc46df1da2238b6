"""The store of leases in Redis: one Lua script reads and writes atomically, by Redis' clock."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha1
from pathlib import Path
from typing import Any, Final

from gateway.config.schema import SharedStateConfig
from gateway.ratelimit.leases import LeaseGrant, LeaseRequest, LeaseStoreUnavailable
from protocols.core.interfaces import Clock

log = logging.getLogger("interlingua")

LEASE_SECONDS: Final = 2.0
"""Seconds that a lease lasts; then the leases of a process that died go to others."""
STORE_TIMEOUT: Final = 0.25
"""Timeout of one call, in seconds. After a failure the remaining calls are skipped."""
STORE_RETRY_DELAY: Final = 4.0
"""Maximum seconds without a call after a failure; the minimum is half of it."""
MAX_LEASES_PER_CALL: Final = 50
"""The leases of one call, bounded since writing and reading it blocks the process."""
_SCRIPT: Final = Path(__file__).with_name("redis_leases.lua").read_text("utf-8")
_SCRIPT_SHA1: Final = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_MAX_ERROR_TEXT: Final = 200


class RedisLeaseStore:
    """Leases limits from Redis: a ``LeaseStore``."""

    def __init__(
        self, state: SharedStateConfig, process_id: str, *, clock: Clock, draw: Clock
    ) -> None:
        """``process_id`` is unique. ``draw`` returns a number in [0, 1)."""
        from redis.asyncio import Redis  # noqa: PLC0415 - it need not be installed
        from redis.asyncio.retry import Retry  # noqa: PLC0415 - as above
        from redis.backoff import NoBackoff  # noqa: PLC0415 - as above

        more: Any = {} if state.tls is None else {"ssl_ca_certs": state.tls.ca}
        self._redis: Any = Redis.from_url(
            state.redis.reveal(),
            protocol=2,
            socket_timeout=STORE_TIMEOUT,
            socket_connect_timeout=STORE_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            **more,
        )
        self.policy = state.on_failure
        self.replicas = state.replicas
        self._prefix = state.prefix
        self._process_id = process_id
        self._clock = clock
        self._draw = draw
        self._next_attempt_at = clock()
        self.errors = 0
        """The number of failed calls; skipped ones are not counted."""
        self.up = True
        """Whether the last call succeeded."""

    async def request_leases(self, requests: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        """See ``LeaseStore``."""
        if self._clock() < self._next_attempt_at:
            raise LeaseStoreUnavailable
        grants: list[LeaseGrant] = []
        try:
            for first in range(0, len(requests), MAX_LEASES_PER_CALL):
                async with asyncio.timeout(STORE_TIMEOUT):
                    grants += _parse_grants(
                        await self._call_script(requests[first : first + MAX_LEASES_PER_CALL])
                    )
        except Exception as error:  # noqa: BLE001 - whatever its client raises, limits go on
            self._record_failure(error)
            raise LeaseStoreUnavailable from None
        if not self.up:
            log.info("rate limits are shared again")
        self.up = True
        return grants

    async def aclose(self) -> None:
        """Close the connection, even if the server does not reply."""
        from redis.exceptions import RedisError  # noqa: PLC0415 - as above

        with suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _call_script(self, requests: Sequence[LeaseRequest]) -> Sequence[Any]:
        keys = [f"{self._prefix}:{request.name}" for request in requests]
        arguments = [
            argument for request in requests for argument in _build_script_arguments(request)
        ]
        call = (len(keys), *keys, self._process_id, LEASE_SECONDS, *arguments)
        from redis.exceptions import NoScriptError  # noqa: PLC0415 - as above

        reply: Sequence[Any]
        try:
            reply = await self._redis.evalsha(_SCRIPT_SHA1, *call)
        except NoScriptError:
            reply = await self._redis.eval(_SCRIPT, *call)
        return reply

    def _record_failure(self, error: Exception) -> None:
        self.errors += 1
        self._next_attempt_at = self._clock() + STORE_RETRY_DELAY * (1 + self._draw()) / 2
        if self.up:
            reason = (
                str(error)[:_MAX_ERROR_TEXT]
                or f"it did not answer within {STORE_TIMEOUT * 1000:g} ms"
            )
            log.warning("rate limits are not shared, since Redis failed: %s", reason)
        self.up = False


def _build_script_arguments(request: LeaseRequest) -> tuple[str | float, ...]:
    limit = request.limit
    return limit.kind, limit.amount, limit.period, request.requested, request.retained, request.used


def _parse_grants(reply: Sequence[Any]) -> list[LeaseGrant]:
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return [LeaseGrant(granted, LEASE_SECONDS, float(wait)) for granted, wait in pairs]
