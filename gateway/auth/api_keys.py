"""Authentication by API key or JWT, and authorization for models.

Of API keys the gateway knows only the SHA-256.
"""

import binascii
import hashlib
import hmac
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from msgspec import Struct

from protocols.core.errors import Unauthorized


class Principal(Struct, frozen=True, gc=False):
    """The authenticated caller. ``models`` are those it may use; None is all."""

    name: str
    sha256: str
    models: frozenset[str] | None = None
    protocol: str | None = None
    """The caller's protocol where several protocols have the same path."""
    tags: frozenset[str] = frozenset()
    """Tags for route conditions."""
    explain: bool = False
    """Whether the caller may ask for explanations."""
    feedback: bool = False
    """Whether the caller may send feedback on its requests."""
    feedback_on_all_keys: bool = False
    """Whether it may send feedback on the requests of other callers, too."""

    def may_use(self, model: str) -> bool:
        """Whether the caller may use the model of this name (not an alias)."""
        return self.models is None or model in self.models


class KeysPending(Exception):
    """The token can't be verified before ``wait_keys``."""


class TokenVerifier(Protocol):
    """Verifies tokens of an issuer."""

    def verify_token(self, token: str, digest: str) -> Principal | None:
        """The principal of a token, by its text and SHA-256; None for a text that is no token.

        Raises Unauthorized and KeysPending.
        """

    async def wait_keys(self) -> None:
        """Wait until the issuer's keys were fetched; seconds at most."""


class Authenticator:
    """Authenticates requests by the configuration's API keys and by JWTs.

    Without either, everybody may use every model.
    """

    def __init__(
        self, principals: Sequence[Principal], tokens: TokenVerifier | None = None
    ) -> None:
        self._by_digest = {(digest := p.sha256.lower()): (digest, p) for p in principals}
        """Each principal with its digest, for a comparison in constant time."""
        self._token_verifier = tokens
        self.allows_anonymous = not principals and tokens is None
        """Whether requests need no key."""

    def find_principal(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal whose API key is the Bearer token, as most clients send it.

        None does not say that the caller is unknown: ``authenticate`` reads all credentials.
        """
        text = headers.get("authorization", "")
        token = text[7:].strip(" \t") if text[:7] == "Bearer " else ""
        return self._find_key(_hash_key(token)) if token else None

    async def wait_keys(self) -> None:
        """Wait after ``authenticate`` raised KeysPending."""
        assert self._token_verifier is not None  # noqa: S101 - only tokens raise KeysPending
        await self._token_verifier.wait_keys()

    def authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal; None if no keys are configured. Raises Unauthorized and KeysPending.

        After KeysPending, await ``wait_keys`` and call it again.
        """
        if self.allows_anonymous:
            return None
        credentials = extract_credentials(headers)
        if not credentials:
            raise Unauthorized("no API key was given", missing=True)
        error: Unauthorized | None = None
        for credential in credentials:
            digest = _hash_key(credential)
            try:
                principal = self._find_key(digest)
                if principal is None and self._token_verifier is not None:
                    principal = self._token_verifier.verify_token(credential, digest)
                if principal is not None:
                    return principal
            except Unauthorized as invalid_token:
                error = invalid_token
        raise error or Unauthorized("the API key is not known", missing=False)

    def impersonate(self, name: str) -> "Authenticator":
        """An authenticator whose principal is always this key's. Raises KeyError."""
        principal = next((one for _, one in self._by_digest.values() if one.name == name), None)
        if principal is None:
            raise KeyError(name)
        return _ImpersonatingAuthenticator(principal)

    def _find_key(self, digest: str) -> Principal | None:
        known = self._by_digest.get(digest)
        return known[1] if known is not None and hmac.compare_digest(known[0], digest) else None


class _ImpersonatingAuthenticator(Authenticator):
    def __init__(self, principal: Principal) -> None:
        super().__init__([principal])
        self._principal = principal

    def find_principal(self, headers: Mapping[str, str]) -> Principal | None:
        del headers
        return self._principal

    def authenticate(self, headers: Mapping[str, str]) -> Principal | None:
        del headers
        return self._principal


def _hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def may_explain(principal: Principal | None, *, open_to_all: bool) -> bool:
    """Whether the caller may see targets and traffic splits.

    ``open_to_all``: callers without a key may, too.
    """
    return open_to_all if principal is None else principal.explain


_KEY_HEADERS: Final = ("api-key", "x-api-key")
_SCHEMES: Final = frozenset({"basic", "bearer"})


def extract_credentials(headers: Mapping[str, str]) -> Sequence[str]:
    """The credentials of a request: Bearer, Basic (password), ``api-key`` and ``x-api-key``.

    Some clients send a placeholder beside the valid one, so that each is tried.
    """
    credentials: list[str] = []
    if "authorization" in headers:
        scheme, _, value = headers["authorization"].partition(" ")
        kind, credential = scheme.lower(), value.strip(" \t")
        if kind == "basic":
            credential = _decode_basic_password(credential) or ""
        if credential and kind in _SCHEMES:
            credentials.append(credential)
    for name in _KEY_HEADERS:
        if name in headers and (credential := headers[name]):
            credentials.append(credential)
    return credentials


def _decode_basic_password(value: str) -> str | None:
    try:
        text = b64decode(value, validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return None
    return text.partition(":")[2] or None
