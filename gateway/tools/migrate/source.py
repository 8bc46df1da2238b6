"""Another gateway's file, read so that nothing of it is passed over unseen."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import yaml
from msgspec import Struct

from gateway.config.complaints import Complaints, Mark, Steps, written
from gateway.config.document import at
from gateway.config.pairs import pairs

_ENVIRONMENT: Final = "os.environ/"
_CONSTRUCT: Final = yaml.constructor.SafeConstructor().construct_object

Kind = Literal["left out", "changed", "needless"]


class Env(Struct, frozen=True):
    """What a variable of the environment holds, by the variable's name."""

    name: str


class Note(Struct, frozen=True, order=True):
    """What became of a part of the file. ``path`` is as in ``model_list[0].model_name``."""

    line: int
    column: int
    path: str
    kind: Kind
    why: str

    def text(self, filename: str) -> str:
        """It as one line."""
        return f"{filename}:{self.line}:{self.column}: {self.kind}: {self.path}: {self.why}"


class LeftOut(Exception):
    """Nobody here can answer for an entry."""

    def __init__(self, given: "Given", why: str) -> None:
        self.given = given
        super().__init__(f"{why}; the whole entry")


class Notes:
    """Gathers them."""

    def __init__(self) -> None:
        self.found: list[Note] = []

    def add(self, given: "Given", kind: Kind, why: str) -> None:
        """Tell what became of this."""
        mark = given.mark
        self.found.append(Note(mark.line, mark.column, written(given.path), kind, why))


class Given:
    """A value of the file: where it is, and what it says by YAML 1.1, as the other one reads it."""

    def __init__(self, node: yaml.Node, path: Steps, complaints: Complaints) -> None:
        self.node = node
        self.path = path
        self.mark: Mark = at(node.start_mark)
        self._complaints = complaints

    @property
    def value(self) -> Any:
        """A plain value; a text that names a variable is an Env."""
        found = _CONSTRUCT(self.node, deep=True)
        if isinstance(found, str) and found.startswith(_ENVIRONMENT):
            return Env(found.removeprefix(_ENVIRONMENT))
        return found

    @property
    def text(self) -> str:
        """The value, if it is a text and names no variable; else an empty one."""
        found = self.value
        return found if isinstance(found, str) else ""

    def items(self) -> Iterator["Given"]:
        """Those of a list; none where it is no list."""
        if isinstance(self.node, yaml.SequenceNode):
            for n, node in enumerate(self.node.value):
                yield Given(node, (*self.path, n), self._complaints)

    def part(self) -> "Part":
        """It as a mapping; an empty one, and a complaint, where it is none."""
        found = pairs(self.node, "a mapping", self._complaints, self.path)
        return Part(self, found or {}, self._complaints)

    @property
    def is_mapping(self) -> bool:
        """Whether it has parts by name."""
        return isinstance(self.node, yaml.MappingNode)


class Part:
    """A mapping of the file. What is not taken from it is told of by ``leave``."""

    def __init__(
        self,
        given: Given,
        found: Mapping[str, tuple[yaml.Node, yaml.Node]],
        complaints: Complaints,
    ) -> None:
        self.given = given
        self._left = {
            key: Given(value, (*given.path, key), complaints)
            for key, (_, value) in found.items()
            if value.tag != "tag:yaml.org,2002:null"
        }

    def take(self, *keys: str) -> Given | None:
        """The value of the first of these keys that is given."""
        for key in keys:
            if (found := self._left.pop(key, None)) is not None:
                return found
        return None

    def items(self) -> Iterator[tuple[str, Given]]:
        """All that was not taken yet, which is then taken."""
        left, self._left = self._left, {}
        yield from left.items()

    def under(self, other: "Part") -> None:
        """Take the other's values where this one has none."""
        self._left = {**other._left, **self._left}  # noqa: SLF001 - its own kind

    def leave(
        self, notes: Notes, why: str, whys: Mapping[str, str], needless: Mapping[str, str]
    ) -> None:
        """Tell of all that was not taken: for a reason of its own, or for ``why``."""
        for key, given in self.items():
            if key in needless:
                notes.add(given, "needless", needless[key])
            else:
                notes.add(given, "left out", whys.get(key, why))
