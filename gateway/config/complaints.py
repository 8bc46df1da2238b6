"""What is wrong with a configuration, and where: all of it at once, for a person who mends it."""

import difflib
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

Steps = tuple[str | int, ...]
"""The way from the document's root to a value: keys, and places in lists."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_USER = re.compile(r"//[^/@]*@")
_SHOWN = 60


class Mark(Struct, frozen=True, order=True):
    """A place in the text; both count from 1."""

    line: int
    column: int


START = Mark(1, 1)


class Complaint(Struct, frozen=True, order=True):
    """One thing that is wrong. ``path`` is as in ``backends.gpu.workers[1].url``, "" the root."""

    line: int
    column: int
    message: str
    path: str = ""


class ConfigError(Exception):
    """A configuration that can't be used. Its text is one line for each complaint.

    ``files`` are those that it names, as far as it was read: mending one may mend it.
    """

    def __init__(
        self, filename: str, complaints: Iterable[Complaint], files: Iterable[str] = ()
    ) -> None:
        self.filename = filename
        self.issues = sorted(set(complaints))
        self.files = frozenset(files)
        super().__init__("\n".join(map(self.format_issue, self.issues)))

    def format_issue(self, complaint: Complaint) -> str:
        """``file:line:column: what is wrong, and what would be right (at path)``."""
        at = f" (at {complaint.path})" if complaint.path else ""
        place = f"{self.filename}:{complaint.line}:{complaint.column}"
        return f"{place}: {complaint.message}{at}"


class Complaints:
    """Gathers what is wrong with one file."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.issues: list[Complaint] = []

    def add(self, mark: Mark, message: str, path: Steps = ()) -> None:
        """Take one more."""
        self.issues.append(Complaint(mark.line, mark.column, message, written(path)))

    def build_error(self, mark: Mark, message: str) -> ConfigError:
        """What to raise where nothing further can be read."""
        self.add(mark, message)
        return ConfigError(self.filename, self.issues)


def written(path: Steps) -> str:
    """A path as a person writes it."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{quoted(step)}]"
    return text


def quoted(text: str) -> str:
    """A piece of the file as a message may show it: in quotes, in one line, without passwords."""
    text = _USER.sub("//***@", text)
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def listed(names: Iterable[str]) -> str:
    """Names in a row."""
    return ", ".join(names)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The one that was perhaps meant."""
    for found in difflib.get_close_matches(name, known, 1):
        return found
    return next((one for one in known if one.lower() == name.lower()), None)


def instead(name: str, known: Iterable[str]) -> str:
    """What would be right in place of an unknown name."""
    names = [str(one) for one in known]
    if found := nearest(name, names):
        return f"did you mean {quoted(found)}?"
    return f"known: {listed(names)}" if names else "there is none to choose"
