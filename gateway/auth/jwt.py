"""Verification of JSON Web Tokens. A verified token is cached until it expires."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import jwt
from jwt.exceptions import (
    InvalidAudienceError,
    InvalidIssuerError,
    MissingRequiredClaimError,
    PyJWTError,
)
from msgspec import Struct

from gateway.auth.api_keys import KeysPending, Principal
from gateway.auth.jwks import JwksClient
from gateway.config.schema import JwtConfig
from protocols.core.errors import Unauthorized

_JWT_PATTERN: Final = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)
_MAX_TOKEN_LENGTH: Final = 8192
_MAX_CACHED_TOKENS: Final = 4096
"""The size of the cache of verified tokens."""
_NAME_PATTERN: Final = re.compile(r"[\x20-\x7e]{1,200}")
_TAG_PATTERN: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_DECODE_OPTIONS: Final[Any] = {
    "require": ["exp", "aud", "iss"],
    "verify_exp": False,  # checked by the gateway's clock, below
    "verify_nbf": False,
    "verify_iat": False,
    "enforce_minimum_key_length": True,
}


class _CachedToken(Struct, frozen=True):
    """A verified token."""

    principal: Principal
    expires_at: float


class JwtVerifier:
    """Verifies tokens."""

    def __init__(
        self,
        settings: JwtConfig,
        model_names: Mapping[str, str],
        jwks: JwksClient,
        wall_clock: Callable[[], float],
    ) -> None:
        """``model_names`` is the model of each name and alias. The clock returns Unix seconds."""
        self._settings = settings
        self._model_names = model_names
        self._jwks = jwks
        self._now = wall_clock
        self._cache: dict[str, _CachedToken] = {}
        self._keys_version = 0
        """The version of the issuer's keys that verified the cached tokens."""

    def verify_token(self, token: str, digest: str) -> Principal | None:
        """The principal of a token, by its text and SHA-256; None for a text that is no token.

        Raises Unauthorized, and KeysPending if the issuer's keys have to be fetched first.
        """
        if self._keys_version != (version := self._jwks.refresh_if_old()):
            self._cache.clear()
            self._keys_version = version
        if (cached := self._cache.get(digest)) is not None:
            if self._now() < cached.expires_at:
                return cached.principal
            del self._cache[digest]
        if len(token) > _MAX_TOKEN_LENGTH or not _JWT_PATTERN.fullmatch(token):
            return None
        return self._verify_token(token, digest)

    async def wait_keys(self) -> None:
        """Wait until the issuer's keys were fetched."""
        await self._jwks.wait_refresh()

    def _verify_token(self, token: str, digest: str) -> Principal:
        settings = self._settings
        try:
            header = jwt.get_unverified_header(token)
        except (PyJWTError, RecursionError):
            raise Unauthorized("the token is malformed", missing=False) from None
        algorithm = header.get("alg")
        if algorithm not in settings.algorithms:
            raise Unauthorized("the token's signing algorithm is not allowed", missing=False)
        key = self._jwks.find_key(header.get("kid"), algorithm)
        if key is None:
            if self._jwks.is_refreshing:
                raise KeysPending
            raise Unauthorized("the token's signing key is unknown", missing=False)
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                options=_DECODE_OPTIONS,
            )
        except (PyJWTError, RecursionError) as error:
            raise Unauthorized(_describe_error(error), missing=False) from None
        expires_at = self._get_expiry(claims)
        principal = self._build_principal(claims)
        while len(self._cache) >= _MAX_CACHED_TOKENS:
            del self._cache[next(iter(self._cache))]
        self._cache[digest] = _CachedToken(principal, expires_at)
        return principal

    def _get_expiry(self, claims: Mapping[str, Any]) -> float:
        """When the token expires. Raises Unauthorized if it is not valid now."""
        leeway, now = self._settings.leeway, self._now()
        expires_at, not_before = claims["exp"], claims.get("nbf", 0)
        if not _is_timestamp(expires_at) or not _is_timestamp(not_before):
            raise Unauthorized("the token has an invalid exp or nbf claim", missing=False)
        if now >= expires_at + leeway:
            raise Unauthorized("the token has expired", missing=False)
        if now < not_before - leeway:
            raise Unauthorized("the token is not valid yet", missing=False)
        return float(expires_at + leeway)

    def _build_principal(self, claims: Mapping[str, Any]) -> Principal:
        claim_names = self._settings.claims
        name = _get_claim(claims, claim_names.name)
        if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
            raise Unauthorized("the token has no valid name claim", missing=False)
        models = None
        if claim_names.models is not None:
            listed = _parse_texts(_get_claim(claims, claim_names.models))
            names = self._model_names
            models = None if "*" in listed else frozenset(names.get(one, one) for one in listed)
        tags = (
            () if claim_names.tags is None else _parse_texts(_get_claim(claims, claim_names.tags))
        )
        valid_tags = frozenset(one for one in tags if _TAG_PATTERN.fullmatch(one))
        return Principal(
            f"jwt:{name}", "", models, tags=valid_tags, feedback=self._settings.feedback
        )


def _describe_error(error: Exception) -> str:
    match error:
        case InvalidAudienceError():
            return "the token has another audience"
        case InvalidIssuerError():
            return "the token has another issuer"
        case MissingRequiredClaimError(claim=claim):
            return f"the token has no {claim} claim"
        case _:
            return "the token's signature is invalid"


def _is_timestamp(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12  # noqa: PLR2004 - far in the future


def _get_claim(claims: Mapping[str, Any], name: str) -> Any:
    """The claim of this name, or at this dotted path."""
    value: Any = claims
    for step in (name,) if name in claims else name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _parse_texts(value: Any) -> tuple[str, ...]:
    """The strings of a list, or of a text separated by blanks."""
    if isinstance(value, str):
        return tuple(value.split())
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()
