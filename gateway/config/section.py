"""What every part of the file is built on."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

OptionValue = str | int | float | bool
"""What a dialect's own setting may be."""

PositiveInt = Annotated[int, Meta(ge=1, le=100_000)]


class ConfigSection(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the file."""


class BackendConfigBase(ConfigSection, frozen=True, tag_field="kind"):
    """What one backend is made from."""

    implied_by: ClassVar[str | None] = None

    @property
    def kind(self) -> str:
        """Its name in the registry of backends."""
        return str(self.__struct_config__.tag)
