"""Whose token it is: who has signed it, and what it says.

``keys`` reads an issuer's public keys, ``issuer`` fetches them and keeps them, and ``tokens``
verifies what they have signed.
"""

from gateway.identity.issuer import Issuer
from gateway.identity.tokens import Rules, Tokens

__all__ = ["Issuer", "Rules", "Tokens"]
