"""A cache by the names of headers and fields: messages have the same few again and again."""

from collections.abc import Callable
from typing import Final, TypeVar

NameT = TypeVar("NameT", bound=str | bytes)
ValueT = TypeVar("ValueT")

MAX_NAMES: Final = 1024
"""Names in a cache; it is cleared when it is full."""
MAX_NAME_SIZE: Final = 64
"""The length of a name that is kept, at most."""


class NameCache(dict[NameT, ValueT]):
    """What is computed of each name, at most once for those that are usual; a lookup is no call."""

    def __init__(self, compute: Callable[[NameT], ValueT]) -> None:
        """What ``compute`` raises, a lookup raises."""
        super().__init__()
        self._compute: Callable[[NameT], ValueT] = compute

    def __missing__(self, name: NameT) -> ValueT:
        value = self._compute(name)
        if len(name) <= MAX_NAME_SIZE:
            if len(self) >= MAX_NAMES:
                self.clear()
            self[name] = value
        return value
