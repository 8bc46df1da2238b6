"""An issuer's public keys, as RFC 7517 writes them. Pure."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec
from jwt import PyJWK
from jwt.exceptions import PyJWKError, PyJWTError
from msgspec import Struct

_MAX_KEYS: Final = 100
_RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVE_ALGORITHMS: Final = {
    "P-256": "ES256",
    "P-384": "ES384",
    "P-521": "ES512",
    "Ed25519": "EdDSA",
}

KeyName = tuple[str, str]
"""A key's name and an algorithm."""


class _JwkSet(Struct):
    keys: list[dict[str, Any]]


class KeySet(Struct, frozen=True):
    """Those that verify something, by their names and what they verify. "" is a lone key's."""

    by_name: Mapping[KeyName, PyJWK]
    source: bytes = b""
    """As they came, to know whether others did."""

    def find_key(self, name: str | None, algorithm: str) -> PyJWK | None:
        """The key of this name; without a name, the only one that there is."""
        if name is not None:
            return self.by_name.get((name, algorithm))
        found = [key for (_, one), key in self.by_name.items() if one == algorithm]
        return found[0] if len(found) == 1 else None


def parse_key_set(body: bytes, algorithms: Collection[str]) -> KeySet:
    """The keys of a set that can be used with these algorithms. Raises ValueError without any."""
    try:
        told = msgspec.json.decode(body, type=_JwkSet).keys[:_MAX_KEYS]
    except msgspec.DecodeError:
        raise ValueError("it gives no set of keys") from None
    found: dict[KeyName, PyJWK] = {}
    for one in told:
        for algorithm in _list_algorithms(one):
            if algorithm in algorithms:
                try:
                    found[str(one.get("kid", "")), algorithm] = PyJWK(one, algorithm)
                except (PyJWTError, PyJWKError):
                    continue
    if not found:
        raise ValueError(f"it has no key for {', '.join(algorithms)}")
    return KeySet(found, body)


def _list_algorithms(key: Mapping[str, Any]) -> Iterator[str]:
    """The algorithms of a key, which is public and made for signatures; a secret has none here."""
    if key.get("use", "sig") != "sig":
        return
    fits = (
        _RSA_ALGORITHMS
        if key.get("kty") == "RSA"
        else (_CURVE_ALGORITHMS.get(str(key.get("crv")), ""),)
    )
    said = key.get("alg")
    yield from (one for one in fits if one and said in (None, one))
