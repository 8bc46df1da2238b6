"""Whether rows of usage can be kept where the file says."""

import importlib.util
from urllib.parse import urlsplit

from gateway.config.ground import Ground, known
from gateway.config.shape import Config

_PATH = ("observe", "usage")
_FORM = "write it as postgresql://USER@HOST:5432/DATABASE"


def check(config: Config, ground: Ground) -> None:
    """Complain of no place, of two, and of a database that can't be one. No URL is shown."""
    usage = config.observe.usage if known(config.observe) else None
    if not known(usage) or usage is None:
        return
    if not known(usage.sqlite) or not known(usage.postgres):
        return
    if (usage.sqlite is None) == (usage.postgres is None):
        ground.say(_PATH, "rows are kept in one place: give either sqlite or postgres")
    elif usage.postgres is not None:
        at = (*_PATH, "postgres")
        if importlib.util.find_spec("asyncpg") is None:
            what = "needs the client of PostgreSQL"
            ground.say(at, f"{what}; install it with: pip install 'interlingua[postgres]'")
        if not is_url(usage.postgres.reveal()):
            ground.say(at, f"this is not the URL of a database; {_FORM}")


def is_url(text: str) -> bool:
    """Whether a text is where a database of PostgreSQL is."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    host = parts.netloc.rpartition("@")[2]
    return parts.scheme in ("postgresql", "postgres") and bool(host or "host=" in parts.query)
