"""One thing that was looked at."""

import os
from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True):
    """``what`` was looked at, what is so, and where it should not be, what to do."""

    state: Literal["ok", "warn", "bad"]
    what: str
    said: str
    mend: str = ""


def ok(what: str, said: str) -> Finding:
    """It is as it should be."""
    return Finding("ok", what, said)


def warn(what: str, said: str, mend: str) -> Finding:
    """It works, and may not always."""
    return Finding("warn", what, said, mend)


def bad(what: str, said: str, mend: str) -> Finding:
    """It keeps the gateway from its work."""
    return Finding("bad", what, said, mend)


def why(error: BaseException) -> str:
    """What the system says of a failure, at its bottom."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0).lower()
    said = getattr(error, "strerror", None) or str(error)
    return str(said) or "nothing was heard in time"
