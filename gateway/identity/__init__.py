"""Whose token it is: who has signed it, and what it says.

``keys`` reads an issuer's public keys, ``issuer`` fetches them and keeps them, and ``tokens``
verifies what they have signed.
"""

from gateway.auth.jwks import JwksClient
from gateway.auth.jwt import JwtPolicy, JwtVerifier

__all__ = ["JwksClient", "JwtPolicy", "JwtVerifier"]
