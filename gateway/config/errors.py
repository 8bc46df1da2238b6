"""What is wrong with a configuration, and where: all of it at once, for a person who mends it."""

import difflib
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

ConfigPath = tuple[str | int, ...]
"""The way from the document's root to a value: keys, and places in lists."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_URL_USERINFO = re.compile(r"//[^/@]*@")
_MAX_QUOTED_LENGTH = 60


class SourcePosition(Struct, frozen=True, order=True):
    """A place in the text; both count from 1."""

    line: int
    column: int


DOCUMENT_START = SourcePosition(1, 1)


class ConfigIssue(Struct, frozen=True, order=True):
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
        self, filename: str, complaints: Iterable[ConfigIssue], files: Iterable[str] = ()
    ) -> None:
        self.filename = filename
        self.issues = sorted(set(complaints))
        self.files = frozenset(files)
        super().__init__("\n".join(map(self.format_issue, self.issues)))

    def format_issue(self, complaint: ConfigIssue) -> str:
        """``file:line:column: what is wrong, and what would be right (at path)``."""
        at = f" (at {complaint.path})" if complaint.path else ""
        place = f"{self.filename}:{complaint.line}:{complaint.column}"
        return f"{place}: {complaint.message}{at}"


class IssueCollector:
    """Gathers what is wrong with one file."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.issues: list[ConfigIssue] = []

    def add(self, mark: SourcePosition, message: str, path: ConfigPath = ()) -> None:
        """Take one more."""
        self.issues.append(ConfigIssue(mark.line, mark.column, message, format_path(path)))

    def build_error(self, mark: SourcePosition, message: str) -> ConfigError:
        """What to raise where nothing further can be read."""
        self.add(mark, message)
        return ConfigError(self.filename, self.issues)


def format_path(path: ConfigPath) -> str:
    """A path as a person writes it."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{quote(step)}]"
    return text


def quote(text: str) -> str:
    """A piece of the file as a message may show it: in quotes, in one line, without passwords."""
    text = _URL_USERINFO.sub("//***@", text)
    return repr(text if len(text) <= _MAX_QUOTED_LENGTH else text[:_MAX_QUOTED_LENGTH] + "…")


def join_names(names: Iterable[str]) -> str:
    """Names in a row."""
    return ", ".join(names)


def find_closest_name(name: str, known: Sequence[str]) -> str | None:
    """The one that was perhaps meant."""
    for found in difflib.get_close_matches(name, known, 1):
        return found
    return next((one for one in known if one.lower() == name.lower()), None)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """What would be right in place of an unknown name."""
    names = [str(one) for one in known]
    if found := find_closest_name(name, names):
        return f"did you mean {quote(found)}?"
    return f"known: {join_names(names)}" if names else "there is none to choose"
