"""Whose token it is: who has signed it, and what it says.

``keys`` reads an issuer's public keys, ``issuer`` fetches them and keeps them, and ``tokens``
verifies what they have signed.
"""

from gateway.identity.issuer import JwksClient
from gateway.identity.tokens import JwtPolicy, JwtVerifier

__all__ = ["JwksClient", "JwtPolicy", "JwtVerifier"]
