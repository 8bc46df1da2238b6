"""What is known of the gateway that cases are played against, and which of them it can meet."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from gateway.conformance.cases import Case


class Setting(Struct, frozen=True, kw_only=True):
    """A dialect as a gateway has it mounted. ``profiles`` are all of the dialect's.

    A case is written for its own options, and for the defaults of all others; so it can't be met
    where another option is set, either.
    """

    profiles: tuple[str, ...]
    """The first is the default."""
    profile: str | None = None
    options: Mapping[str, object] = {}
    alone: bool = False
    """The dialect has the listener to itself."""

    def lacks(self, case: "Case") -> str:
        """What the case needs and the gateway is not known to have; "" where it can be met."""
        return ", ".join(self._lacking(case))

    def _lacking(self, case: "Case") -> Iterator[str]:
        wanted = case.profile or self.profiles[0]
        if wanted != (self.profile or self.profiles[0]):
            yield f"the profile {wanted}"
        for name, value in case.needs.items():
            if self.options.get(name) != value:
                yield f"{name}={_written(value)}"
        for name in self.options.keys() - case.needs.keys():
            yield f"{name} left as it is by default"
        if case.alone and not self.alone:
            yield "the dialect alone on its listener"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
