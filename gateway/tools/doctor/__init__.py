"""Whether a gateway could do its work here: this machine, its workers, and what it writes to.

``machine`` looks at what is installed and at the system, ``entrances`` at where clients come in,
``workers`` at who answers, ``stores`` at what is shared or kept elsewhere, ``local`` at models in
this process. ``tls`` reads certificates.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain

from gateway.config import Config
from gateway.server import Surroundings
from gateway.tools.doctor import entrances, local, machine, stores, workers
from gateway.tools.doctor.finding import Finding

__all__ = ["Finding", "examine", "installed"]


def installed() -> Sequence[Finding]:
    """What holds without a configuration."""
    return [*machine.versions(), *machine.kernel()]


async def examine(config: Config, outside: Surroundings) -> Sequence[Finding]:
    """All that this configuration needs. Sends nothing that costs anybody anything."""
    rest = await asyncio.gather(
        entrances.examine(config, outside.now),
        workers.examine(config, outside),
        stores.examine(config),
    )
    return [*machine.descriptors(config.limits.connections), *local.examine(config), *chain(*rest)]
