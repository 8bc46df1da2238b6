"""What limits have left, in a Redis that several gateways share.

One script does it all, so that nothing comes between reading and writing; it goes by the server's
clock, so that the gateways' need not agree.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha1
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from gateway.limits.ports import LeaseGrant, LeaseRequest, LeaseStoreUnavailable, StoreFailurePolicy
from protocols.core.interfaces import Clock

LEASE_SECONDS: Final = 2.0
"""Seconds that a loan lasts: what a process that died held is lent to others after them."""
STORE_TIMEOUT: Final = 0.25
"""Seconds in which one call ends, well or not; after one that did not end well none follows."""
STORE_RETRY_DELAY: Final = 4.0
"""Seconds for which none is made after one that failed, at most; at least half as long."""
MAX_LEASES_PER_CALL: Final = 50
"""The counters of one call: until it is made and read, this process does nothing else."""
_SCRIPT: Final = Path(__file__).with_name("lend.lua").read_text("utf-8")
_SCRIPT_SHA1: Final = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_MAX_ERROR_TEXT: Final = 200

log = logging.getLogger("interlingua")


class RedisLimitSettings(Struct, frozen=True):
    """Where limits are shared, and by whom."""

    url: str
    """With the password: it is shown to nobody."""
    policy: StoreFailurePolicy = "local"
    replicas: int = 1
    """Processes."""
    prefix: str = "interlingua"
    """What the names of all keys begin with."""
    ca: str | None = None
    """A file with who signed the server's certificate; None for whom the system trusts."""


class RedisLeaseStore:
    """Lends what a Redis says is left; see ``gateway.limits.ports.LeaseStore``."""

    def __init__(
        self, shared: RedisLimitSettings, borrower: str, *, clock: Clock, draw: Clock
    ) -> None:
        """``borrower`` is this process and no other. ``draw`` gives a number in [0, 1)."""
        more: Any = {} if shared.ca is None else {"ssl_ca_certs": shared.ca}
        self._redis: Any = Redis.from_url(
            shared.url,
            protocol=2,
            socket_timeout=STORE_TIMEOUT,
            socket_connect_timeout=STORE_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            **more,
        )
        self.policy = shared.policy
        self.replicas = shared.replicas
        self._prefix = shared.prefix
        self._borrower_id = borrower
        self._clock = clock
        self._draw = draw
        self._next_attempt_at = clock()
        self.errors = 0
        """Askings that failed; those that were not made are not counted."""
        self.up = True
        """Whether the last one went well."""

    async def request_leases(self, wishes: Sequence[LeaseRequest]) -> Sequence[LeaseGrant]:
        """Ask for all of them."""
        if self._clock() < self._next_attempt_at:
            raise LeaseStoreUnavailable
        grants: list[LeaseGrant] = []
        try:
            for first in range(0, len(wishes), MAX_LEASES_PER_CALL):
                async with asyncio.timeout(STORE_TIMEOUT):
                    grants += _parse_grants(
                        await self._call_script(wishes[first : first + MAX_LEASES_PER_CALL])
                    )
        except Exception as error:  # noqa: BLE001 - whatever its client raises, limits go on
            self._record_failure(error)
            raise LeaseStoreUnavailable from None
        if not self.up:
            log.info("limits are shared again")
        self.up = True
        return grants

    async def aclose(self) -> None:
        """Let the connection go, also of one that does not answer."""
        with suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _call_script(self, wishes: Sequence[LeaseRequest]) -> Sequence[Any]:
        keys = [f"{self._prefix}:{wish.name}" for wish in wishes]
        told = [part for wish in wishes for part in _build_script_arguments(wish)]
        call = (len(keys), *keys, self._borrower_id, LEASE_SECONDS, *told)
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
            why = (
                str(error)[:_MAX_ERROR_TEXT]
                or f"it did not answer within {STORE_TIMEOUT * 1000:g} ms"
            )
            log.warning("limits are not shared, since the Redis can't be asked: %s", why)
        self.up = False


def _build_script_arguments(wish: LeaseRequest) -> tuple[str | float, ...]:
    limit = wish.limit
    return limit.kind, limit.amount, limit.period, wish.requested, wish.retained, wish.used


def _parse_grants(reply: Sequence[Any]) -> list[LeaseGrant]:
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return [LeaseGrant(granted, LEASE_SECONDS, float(wait)) for granted, wait in pairs]
