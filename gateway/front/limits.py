"""What a listener holds its clients to."""

from msgspec import Struct


class ConnectionLimits(Struct, frozen=True):
    """Times in seconds, sizes in bytes. What opens after a change is held to the new ones."""

    max_header_size: int = 16 << 10
    """A line of the head; all of it together is eight times as large at most."""
    max_connections: int = 10_000
    max_per_address: int | None = None
    """How many of them one address may have; None: all."""
    header_timeout: float = 10.0
    """How long a head may take, once its first byte is there."""
    body_timeout: float = 10.0
    """How long nothing of a body may come."""
    idle_timeout: float = 75.0
    """How long a connection may wait between requests."""
    write_timeout: float = 30.0
    """How long nothing may be taken of an answer that is complete."""
    linger_timeout: float = 2.0
    """How long what is sent after a refusal is thrown away, so that the refusal is read."""

    @property
    def check_interval(self) -> float:
        """Seconds between looks at who takes too long.

        Nobody is let go sooner than these times say, and nobody later by more than two of it.
        """
        return min(1.0, self.header_timeout / 4, self.body_timeout / 4, self.idle_timeout / 4)
