"""The public keys of an OIDC issuer (JWKS): fetched on demand, cached, refreshed.

Nothing is fetched before the first token. Keys older than a few minutes are refreshed in the
background; a request waits only if its token's key is unknown. An issuer is asked at most once per
half minute, whatever requests come.
"""

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec
from jwt import PyJWK
from jwt.exceptions import PyJWKError, PyJWTError
from msgspec import Struct

from gateway.config.schema import JwtConfig
from protocols.core.json_text import decode_json

# Key sets (RFC 7517).

_MAX_KEYS: Final = 100
_RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVE_ALGORITHMS: Final = {
    "P-256": "ES256",
    "P-384": "ES384",
    "P-521": "ES512",
    "Ed25519": "EdDSA",
}

KeyName = tuple[str, str]
"""A key's id (``kid``) and an algorithm."""


class _JwkSet(Struct):
    keys: list[dict[str, Any]]


class KeySet(Struct, frozen=True):
    """The usable keys by id and algorithm. A key without an id has the id ""."""

    by_name: Mapping[KeyName, PyJWK]
    source: bytes = b""
    """The bytes of the set, to notice a change."""

    def find_key(self, name: str | None, algorithm: str) -> PyJWK | None:
        """The key with this id; without an id, the only key of the algorithm."""
        if name is not None:
            return self.by_name.get((name, algorithm))
        keys = [key for (_, one), key in self.by_name.items() if one == algorithm]
        return keys[0] if len(keys) == 1 else None


def parse_key_set(body: bytes, algorithms: Collection[str]) -> KeySet:
    """The keys of a set for these algorithms. Raises ValueError if there are none."""
    try:
        keys = decode_json(body, kind=_JwkSet).keys[:_MAX_KEYS]
    except msgspec.DecodeError:
        raise ValueError("the response is not a JWK set") from None
    by_name: dict[KeyName, PyJWK] = {}
    for key in keys:
        for algorithm in _list_algorithms(key):
            if algorithm in algorithms:
                try:
                    by_name[str(key.get("kid", "")), algorithm] = PyJWK(key, algorithm)
                except (PyJWTError, PyJWKError):
                    continue
    if not by_name:
        raise ValueError(f"it has no key for {', '.join(algorithms)}")
    return KeySet(by_name, body)


def _list_algorithms(key: Mapping[str, Any]) -> Iterator[str]:
    """The signature algorithms of a public key; none for a symmetric key."""
    if key.get("use", "sig") != "sig":
        return
    candidates = (
        _RSA_ALGORITHMS
        if key.get("kty") == "RSA"
        else (_CURVE_ALGORITHMS.get(str(key.get("crv")), ""),)
    )
    declared = key.get("alg")
    yield from (one for one in candidates if one and declared in (None, one))


log = logging.getLogger("interlingua")

_MIN_REFRESH_INTERVAL: Final = 30.0
"""Seconds between two fetches."""
_MIN_REFRESH_INTERVAL_EMPTY: Final = 5.0
"""The same while there are no keys at all."""
_REFRESH_AFTER: Final = 300.0
"""Age in seconds after which keys in use are refreshed."""
_FETCH_TIMEOUT: Final = 3.0
"""Timeout of a fetch, and of a request that waits for a key, in seconds."""
_MAX_BODY_BYTES: Final = 1 << 18

JwksFetch = Callable[[], Awaitable[bytes]]
"""Returns the key set's bytes. Raises ValueError or OSError with the reason of a failure."""


class JwksClient:
    """The keys of one issuer."""

    def __init__(
        self, settings: JwtConfig, clock: Callable[[], float], fetch: JwksFetch | None = None
    ) -> None:
        """``clock`` is monotonic, in seconds. ``fetch`` is for tests."""
        self._settings = settings
        self._clock = clock
        self._fetch = fetch or JwksFetcher(settings).fetch_keys
        self._keys = KeySet({})
        self._fetched_at = 0.0
        self._next_fetch_at = clock()
        """When the issuer may be asked again."""
        self._task: asyncio.Task[None] | None = None
        self._version = 0

    def refresh_if_old(self) -> int:
        """Refresh or drop old keys. Returns how often the keys have changed."""
        age = self._clock() - self._fetched_at
        if age >= _REFRESH_AFTER and self._keys.by_name:
            if age >= self._settings.jwks_max_stale:
                log.warning(
                    "identity: %s can't be reached; its keys are too old", self._settings.issuer
                )
                self._store_keys(KeySet({}))
            if self.is_refreshing:
                self._start_refresh()
        return self._version

    def find_key(self, name: str | None, algorithm: str) -> PyJWK | None:
        """The key with this id, if it is known."""
        return self._keys.find_key(name, algorithm)

    @property
    def is_refreshing(self) -> bool:
        """Whether a fetch is running or may be started."""
        return self._task is not None or self._clock() >= self._next_fetch_at

    async def wait_refresh(self) -> None:
        """Start a fetch unless one is running, and wait for it."""
        self._start_refresh()
        assert self._task is not None  # noqa: S101 - it was started above
        await asyncio.wait({self._task})

    async def aclose(self) -> None:
        """Cancel a running fetch and start no more."""
        self._next_fetch_at = math.inf
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _start_refresh(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._refresh_keys())
            self._task.add_done_callback(self._on_refresh_done)

    def _on_refresh_done(self, task: asyncio.Task[None]) -> None:
        del task
        self._task = None

    async def _refresh_keys(self) -> None:
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT):
                keys = parse_key_set(await self._fetch(), self._settings.algorithms)
        except (OSError, ValueError, RecursionError, httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or f"no answer within {_FETCH_TIMEOUT:g} s"
            log.warning(
                "identity: the keys of %s can't be fetched: %s", self._settings.issuer, reason
            )
        else:
            self._fetched_at = self._clock()
            self._store_keys(keys)
        self._next_fetch_at = self._clock() + (
            _MIN_REFRESH_INTERVAL if self._keys.by_name else _MIN_REFRESH_INTERVAL_EMPTY
        )

    def _store_keys(self, keys: KeySet) -> None:
        if keys.source != self._keys.source:
            self._keys = keys
            self._version += 1


class _DiscoveryDocument(Struct):
    """The used fields of OpenID Connect Discovery 1.0, section 4.2."""

    issuer: str
    jwks_uri: str


class JwksFetcher:
    """Fetches keys over HTTP, without redirects, from the configured URL or the discovered one."""

    def __init__(self, settings: JwtConfig) -> None:
        self._settings = settings
        self._tls = ssl.create_default_context(cafile=settings.tls.ca if settings.tls else None)

    async def fetch_keys(self) -> bytes:
        """See ``JwksFetch``."""
        settings = self._settings
        async with httpx.AsyncClient(verify=self._tls, timeout=_FETCH_TIMEOUT) as client:
            url = settings.jwks
            if url is None:
                location = f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration"
                try:
                    document = decode_json(
                        await _fetch_body(client, location), kind=_DiscoveryDocument
                    )
                except msgspec.DecodeError:
                    raise ValueError(f"{location} is not a discovery document") from None
                if document.issuer != settings.issuer:
                    raise ValueError(f"{location} is another's: {document.issuer[:100]!r}")
                if urlsplit(url := document.jwks_uri).scheme != urlsplit(settings.issuer).scheme:
                    raise ValueError(f"{location} has its keys at {url[:100]!r}")
            return await _fetch_body(client, url)


async def _fetch_body(client: httpx.AsyncClient, url: str) -> bytes:
    """The body of a URL. Raises ValueError and httpx.HTTPError."""
    body = bytearray()
    async with client.stream("GET", url) as response:
        if not response.is_success:
            raise ValueError(f"{url} answers {response.status_code}")
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                raise ValueError(f"{url} gives more than {_MAX_BODY_BYTES} bytes")
    return bytes(body)
