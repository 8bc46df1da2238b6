"""What the file may say of how much the gateway takes in, and for how long."""

from gateway.config.section import ConfigSection, PositiveInt
from gateway.config.units import Duration, Size, Timeout


class ServerLimitsConfig(ConfigSection, frozen=True):
    """What the gateway takes in.

    Of ``connections`` at most half as many are taken as the process may have files open, since
    each may need one to a worker. Where all are taken, a new one ends that which has waited longest
    for a request. ``head_time`` is how long the head of a request may take; ``body_pause``, how
    long nothing of its body may come; ``keep``, how long a connection may wait for its next
    request.

    At SIGTERM the gateway is not ready any more, ends each connection with its answer, and goes on
    as before for ``lame_duck``, so that whoever sends requests learns of it. Then it takes no more,
    and ``drain`` is how long running answers may go on.

    ``warm`` is how long a reload waits for a new backend to get ready: a model to be loaded.
    """

    body: Size = 8 << 20
    header: Size = 16 << 10
    connections: PositiveInt = 10_000
    connections_per_address: PositiveInt | None = None
    head_time: Timeout = 10.0
    body_pause: Timeout = 10.0
    keep: Timeout = 75.0
    lame_duck: Duration = 5.0
    drain: Duration = 60.0
    warm: Duration = 120.0
