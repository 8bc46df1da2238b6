"""Whether what several gateways share can be kept where the file says it is."""

import importlib.util
import ssl
from urllib.parse import SplitResult, urlsplit

from gateway.config.certificates import reason
from gateway.config.ground import Ground, known
from gateway.config.shape import Config
from gateway.config.state import State

_PATH = ("state", "redis")
_FORMS = "write redis://HOST:6379/0, rediss://HOST:6379/0 for TLS, or unix:///PATH"


def check(config: Config, ground: Ground) -> None:
    """Complain of a place that nothing could be kept at. The URL is not shown: it is a secret."""
    state = config.state
    if not known(state) or state is None:
        return
    if importlib.util.find_spec("redis") is None:
        message = "needs the client of Redis; install it with: pip install 'interlingua[redis]'"
        ground.say(_PATH, message)
    if known(state.redis) and (why := _wrong(state.redis.reveal())):
        ground.say(_PATH, f"this {why}")
    _check_trust(state, ground)


def _wrong(url: str) -> str:
    """What is wrong with a URL, or ""."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return f"is no URL; {_FORMS}; signs in a password are written as %40"
    if parts.query or parts.fragment:
        return "has options, which are not taken from a URL; remove what follows ? or #"
    if parts.scheme == "unix":
        bad = bool(parts.hostname) or len(parts.path) <= 1
    else:
        bad = parts.scheme not in ("redis", "rediss") or port == 0 or not _is_served(parts)
    return f"is not the URL of a Redis; {_FORMS}" if bad else ""


def _is_served(parts: SplitResult) -> bool:
    """Whether it names a host, and a database by its number or none."""
    database = parts.path.removeprefix("/")
    return bool(parts.hostname) and (not database or database.isdigit())


def _check_trust(state: State, ground: Ground) -> None:
    trust = state.tls
    if not known(trust) or trust is None:
        return
    if known(state.redis) and not state.redis.reveal().startswith("rediss://"):
        message = "is for a Redis with TLS; write rediss:// in its URL, or remove this"
        ground.say(("state", "tls"), message, key=True)
    if not known(trust.ca):
        return
    try:
        ssl.create_default_context(cafile=trust.ca)
    except OSError as error:
        message = f"can't be used: {reason(error)}; give certificates in PEM"
        ground.say(("state", "tls", "ca"), message)
