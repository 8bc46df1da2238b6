"""Issues of a configuration, with their locations; all of them are reported at once."""

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import UNSET, Struct, UnsetType

ConfigPath = tuple[str | int, ...]
"""The path from the document's root to a value: keys, and indexes of lists."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_URL_USERINFO = re.compile(r"//[^/@]*@")
_MAX_QUOTED_LENGTH = 60
_MAX_COMPARED_NAMES = 500
"""How many names are compared with an unknown one, which takes time for each."""
_MAX_LISTED_NAMES = 100
MAX_ISSUES = 1_000
"""How many issues of a configuration are reported."""


class SourcePosition(Struct, frozen=True, order=True, gc=False):
    """A position in the text; both numbers start at 1."""

    line: int
    column: int


DOCUMENT_START = SourcePosition(1, 1)


class ConfigIssue(Struct, frozen=True):
    """One issue. ``path`` is as in ``backends.gpu.workers[1].url``, "" the root.

    ``file`` is set for an issue of a file that the configuration names. ``hint`` is the description
    of the key that was probably meant.
    """

    line: int
    column: int
    message: str
    path: str = ""
    file: str | UnsetType = UNSET
    hint: str | UnsetType = UNSET

    def format_place(self, filename: str) -> str:
        """``file:line:column``; ``filename`` is that of the configuration."""
        return f"{self.file or filename}:{self.line}:{self.column}"


class ConfigError(Exception):
    """A configuration that can't be used. The text has one line for each issue.

    ``files`` are those that it names: a change of one of them may solve the issue.
    """

    def __init__(
        self, filename: str, issues: Iterable[ConfigIssue], files: Iterable[str] = ()
    ) -> None:
        self.filename = filename
        self.issues = sorted(
            set(issues), key=lambda one: (one.file or "", one.line, one.column, one.message)
        )
        self.files = frozenset(files)
        super().__init__("\n".join(map(self.format_issue, self.issues)))

    def format_issue(self, issue: ConfigIssue) -> str:
        """``file:line:column: message (at path)``."""
        at = f" (at {issue.path})" if issue.path else ""
        return f"{issue.format_place(self.filename)}: {issue.message}{at}"


class IssueCollector:
    """Collects the issues of one file."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.issues: list[ConfigIssue] = []

    def add(
        self,
        position: SourcePosition,
        message: str,
        path: ConfigPath = (),
        file: str | UnsetType = UNSET,
        hint: str | UnsetType = UNSET,
    ) -> None:
        """Add an issue, of ``file`` if it is set."""
        self.issues.append(
            ConfigIssue(position.line, position.column, message, format_path(path), file, hint)
        )

    def build_error(self, position: SourcePosition, message: str) -> ConfigError:
        """The error with all issues and this one, after which nothing can be read."""
        self.add(position, message)
        return ConfigError(self.filename, self.issues)


def format_path(path: ConfigPath) -> str:
    """A path as text."""
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
    """A part of the file for a message: in quotes, on one line, without passwords."""
    text = _URL_USERINFO.sub("//***@", text)
    return repr(text if len(text) <= _MAX_QUOTED_LENGTH else text[:_MAX_QUOTED_LENGTH] + "…")


def join_names(names: Iterable[str]) -> str:
    """Names, separated by commas."""
    listed = list(islice(names, _MAX_LISTED_NAMES + 1))
    return ", ".join(listed if len(listed) <= _MAX_LISTED_NAMES else [*listed[:-1], "…"])


def find_closest_name(name: str, names: Sequence[str]) -> str | None:
    """The known name that was probably meant, or None."""
    for match in difflib.get_close_matches(name, names, 1):
        return match
    return next((one for one in names if one.lower() == name.lower()), None)


def suggest_name(name: str, names: Iterable[str]) -> str:
    """A suggestion for an unknown name."""
    known_names = [str(one) for one in islice(names, _MAX_COMPARED_NAMES)]
    if match := find_closest_name(name, known_names):
        return f"did you mean {quote(match)}?"
    return f"known: {join_names(known_names)}" if known_names else "there is none to choose"
