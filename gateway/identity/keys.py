"""An issuer's public keys, as RFC 7517 writes them. Pure."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec
from jwt import PyJWK
from jwt.exceptions import PyJWKError, PyJWTError
from msgspec import Struct

_MOST: Final = 100
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}

Named = tuple[str, str]
"""A key's name and an algorithm."""


class _Set(Struct):
    keys: list[dict[str, Any]]


class Keys(Struct, frozen=True):
    """Those that verify something, by their names and what they verify. "" is a lone key's."""

    by_name: Mapping[Named, PyJWK]
    source: bytes = b""
    """As they came, to know whether others did."""

    def find_key(self, name: str | None, algorithm: str) -> PyJWK | None:
        """The key of this name; without a name, the only one that there is."""
        if name is not None:
            return self.by_name.get((name, algorithm))
        found = [key for (_, one), key in self.by_name.items() if one == algorithm]
        return found[0] if len(found) == 1 else None


def read(body: bytes, algorithms: Collection[str]) -> Keys:
    """The keys of a set that can be used with these algorithms. Raises ValueError without any."""
    try:
        told = msgspec.json.decode(body, type=_Set).keys[:_MOST]
    except msgspec.DecodeError:
        raise ValueError("it gives no set of keys") from None
    found: dict[Named, PyJWK] = {}
    for one in told:
        for algorithm in _verifies(one):
            if algorithm in algorithms:
                try:
                    found[str(one.get("kid", "")), algorithm] = PyJWK(one, algorithm)
                except (PyJWTError, PyJWKError):
                    continue
    if not found:
        raise ValueError(f"it has no key for {', '.join(algorithms)}")
    return Keys(found, body)


def _verifies(key: Mapping[str, Any]) -> Iterator[str]:
    """The algorithms of a key, which is public and made for signatures; a secret has none here."""
    if key.get("use", "sig") != "sig":
        return
    fits = _RSA if key.get("kty") == "RSA" else (_CURVES.get(str(key.get("crv")), ""),)
    said = key.get("alg")
    yield from (one for one in fits if one and said in (None, one))
