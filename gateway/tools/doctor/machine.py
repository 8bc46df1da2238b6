"""What is installed, and what the system lets a process do."""

import platform
import re
import resource
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from gateway import __version__
from gateway.tools.doctor.finding import Finding, ok, warn

_FLOORS: Final = {"aiohttp": (3, 14), "httptools": (0, 6, 4), "msgspec": (0, 19), "httpx": (0, 27)}
"""Where aiohttp is older, known holes are open."""
_OTHERS: Final = 64
"""Files that are neither a client's nor a worker's."""
_BACKLOG: Final = 1024
_PORTS: Final = 20_000


def versions(version: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    """The gateway's own, Python's, and those of what everything goes through."""
    yield ok("interlingua", __version__)
    yield ok("python", f"{platform.python_version()} on {platform.machine()}")
    for name, floor in _FLOORS.items():
        found = version(name)
        if _numbers(found) < floor:
            least = ".".join(map(str, floor))
            yield warn(name, f"{found} is older than {least}", f"pip install '{name}>={least}'")
        else:
            yield ok(name, found)
    try:
        yield ok("uvloop", version("uvloop"))
    except metadata.PackageNotFoundError:
        yield warn("uvloop", "is not there: the slower loop is used", "pip install uvloop")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def descriptors(connections: int) -> Iterator[Finding]:
    """Whether as many clients may come as ``limits.connections`` says, each with a worker's."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * connections + _OTHERS
    if hard < needed:
        said = f"a process may have {hard:,} files open: too few for {connections:,} connections"
        mend = f"raise the limit (ulimit -Hn {needed}), or lower limits.connections"
        yield warn("open files", said, mend)
    else:
        yield ok("open files", f"{hard:,}, and {needed:,} may be needed")


def kernel(settings: Path = Path("/proc/sys/net")) -> Iterator[Finding]:
    """How many connections may wait, and how many may go out; nothing where it does not say."""
    try:
        backlog = int((settings / "core/somaxconn").read_text("ascii"))
        low, high = map(int, (settings / "ipv4/ip_local_port_range").read_text("ascii").split())
    except OSError:
        return
    if backlog < _BACKLOG:
        said = f"only {backlog} connections may wait to be taken"
        yield warn("somaxconn", said, f"sysctl net.core.somaxconn={_BACKLOG * 4}")
    else:
        yield ok("somaxconn", str(backlog))
    if (ports := high - low + 1) < _PORTS:
        said = f"only {ports:,} connections may go out to one worker"
        yield warn("ports", said, 'sysctl net.ipv4.ip_local_port_range="15000 65000"')
    else:
        yield ok("ports", f"{ports:,}")
