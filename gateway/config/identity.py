"""What the file may say of who signs tokens, beside the keys that it lists itself."""

from typing import Annotated, Literal

from msgspec import Meta

from gateway.config.pools import ClientTlsConfig
from gateway.config.section import ConfigSection
from gateway.config.units import Duration, NonEmptyStr, Timeout

JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class JwtClaimsConfig(ConfigSection, frozen=True):
    """Where a token says what. A name with dots leads into what is nested.

    ``name`` is its holder, whom logs and usage call ``jwt:`` and that. With ``models`` he may ask
    for those that it lists, by a list or a text with blanks (``*``: all), and for none where it
    lists none; ``tags`` are what rules may know him by.
    """

    name: NonEmptyStr = "sub"
    models: NonEmptyStr | None = None
    tags: NonEmptyStr | None = None


class JwtConfig(ConfigSection, frozen=True, kw_only=True):
    """Tokens (JWT) that this issuer has signed are taken as keys are.

    ``audience`` is what one of them must be meant for. ``jwks`` is where its public keys are; left
    out, ``issuer`` is a URL, and its ``/.well-known/openid-configuration`` tells. ``leeway`` is how
    far clocks may be apart. While the issuer can't be asked, the keys that were had last are good
    for ``keep``.
    """

    issuer: NonEmptyStr
    audience: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)]
    jwks: NonEmptyStr | None = None
    algorithms: Annotated[tuple[JwtAlgorithm, ...], Meta(min_length=1)] = ("RS256", "ES256")
    leeway: Duration = 30.0
    keep: Timeout = 86400.0
    claims: JwtClaimsConfig = JwtClaimsConfig()
    tls: ClientTlsConfig | None = None
