"""Who asks: a key to a Principal. Keys are known by their digest only."""

import binascii
import hashlib
import hmac
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from protocols.core.errors import Forbidden, Unauthorized


class Principal(Struct, frozen=True):
    """The holder of a key. ``models``: those it may ask for; None means all."""

    name: str
    sha256: str
    models: frozenset[str] | None = None
    protocol: str | None = None
    """What its holder speaks where several dialects have one path."""
    tags: frozenset[str] = frozenset()
    """What rules may know it by."""
    explain: bool = False
    """Whether its holder may have requests explained."""


class KeysPending(Exception):
    """Whether a token is good may be known after ``settle``."""


class TokenVerifier(Protocol):
    """Who knows whose token it is, where somebody else signs them."""

    def verify_token(self, token: str, digest: str) -> Principal | None:
        """Whose it is, by its text and SHA-256; None for what is no token.

        Raises Unauthorized and Unsettled.
        """

    async def wait_keys(self) -> None:
        """Find out what a token needs. It takes seconds at most."""


class Authenticator:
    """The keys of a configuration, and the tokens that are as good as they are.

    Without any, everybody may ask for everything.
    """

    def __init__(
        self, principals: Sequence[Principal], tokens: TokenVerifier | None = None
    ) -> None:
        self._by_digest = {(digest := p.sha256.lower()): (digest, p) for p in principals}
        """Each with its digest, to be compared."""
        self._token_verifier = tokens
        self._allows_anonymous = not principals and tokens is None

    def find_known_principal(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal of a request, if its key is good."""
        key = None if self._allows_anonymous else extract_credential(headers)
        try:
            return None if key is None else self._find_principal(key)
        except (Unauthorized, KeysPending):
            return None

    async def wait_keys(self) -> None:
        """Find out what ``authenticate`` could not know."""
        assert self._token_verifier is not None  # noqa: S101 - nothing else is ever unsettled
        await self._token_verifier.wait_keys()

    def authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal, or None where no keys are configured. Raises Unauthorized and Unsettled.

        What was unsettled is not, once ``settle`` was awaited.
        """
        if self._allows_anonymous:
            return None
        key = extract_credential(headers)
        if key is None:
            raise Unauthorized("no API key was given", missing=True)
        principal = self._find_principal(key)
        if principal is None:
            raise Unauthorized("the API key is not known", missing=False)
        return principal

    def impersonate(self, name: str) -> "Authenticator":
        """One that takes everybody for the holder of the key of this name. Raises KeyError."""
        found = next((one for _, one in self._by_digest.values() if one.name == name), None)
        if found is None:
            raise KeyError(name)
        return _ImpersonatingAuthenticator(found)

    def _find_principal(self, key: str) -> Principal | None:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        if digest in self._by_digest:
            own, principal = self._by_digest[digest]
            if hmac.compare_digest(own, digest):
                return principal
        return (
            None if self._token_verifier is None else self._token_verifier.verify_token(key, digest)
        )


class _ImpersonatingAuthenticator(Authenticator):
    def __init__(self, principal: Principal) -> None:
        super().__init__([principal])
        self._principal = principal

    def find_known_principal(self, headers: Mapping[str, str]) -> Principal | None:
        del headers
        return self._principal

    def authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        del headers
        return self._principal


def authorize_model(principal: Principal | None, model: str) -> None:
    """Raises Forbidden unless the principal may ask for this model."""
    if principal is None or principal.models is None or model in principal.models:
        return
    raise Forbidden(f"this key may not use the model {model!r}")


def extract_credential(headers: Mapping[str, str]) -> str | None:
    """The key of a request: Bearer, Basic (its password), ``api-key`` or ``x-api-key``."""
    if "authorization" in headers:
        scheme, _, value = headers["authorization"].partition(" ")
        kind, value = scheme.lower(), value.strip()
        if kind == "bearer" and value:
            return value
        if kind == "basic":
            return _decode_basic_password(value)
    return headers.get("api-key") or headers.get("x-api-key") or None


def _decode_basic_password(value: str) -> str | None:
    try:
        text = b64decode(value, validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return None
    return text.partition(":")[2] or None
