"""What the file may say of what several gateways share."""

from typing import Annotated, Literal

from msgspec import Meta

from gateway.config.pools import ClientTlsConfig
from gateway.config.section import ConfigSection
from gateway.config.units import Name, Secret


class SharedStateConfig(ConfigSection, frozen=True):
    """A Redis that keeps what is left of the keys' limits, for several gateways together.

    ``redis`` is its URL, which may hold a password and is never shown: redis://HOST:6379/0, with
    TLS rediss://, on this machine also unix:///PATH. ``prefix`` is what all names there begin with:
    gateways with the same one share their limits.
    """

    redis: Secret
    on_failure: Literal["local", "open", "closed"] = "local"
    """While it can't be asked: each gateway admits its part of every limit (``local``), everything
    is admitted (``open``), or nothing that has a limit (``closed``)."""
    replicas: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """How many gateways there are: what ``local`` divides by."""
    prefix: Name = "interlingua"
    tls: ClientTlsConfig | None = None
