"""What a file says that ``interlingua conform --worker --write`` has found of a pool's workers."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec.inspect
from msgspec import Meta

from gateway.config.complaints import Complaints, ConfigError, instead, quoted
from gateway.config.document import compose, decode
from gateway.config.ground import known
from gateway.config.reader import Reader
from gateway.config.section import Section
from gateway.config.units import Text
from gateway.core.restricted import PATHS


class Capabilities(Section, frozen=True):
    """What workers of one dialect and profile do not do of what these can say.

    ``fields`` are paths of the internal request, such as sampling.top_k. ``quirks`` tells people
    what else was found, by the probe's name.
    """

    dialect: Text
    profile: Text | None = None
    model: Text | None = None
    version: Annotated[int, Meta(ge=1, le=1)] = 1
    fields: tuple[Text, ...] = ()
    quirks: Mapping[str, str] = {}


_SHAPE: Final = msgspec.inspect.type_info(Capabilities)


def capabilities(data: bytes, filename: str) -> Capabilities:
    """The capabilities that a file tells. Raises ConfigError with all that is wrong."""
    complaints = Complaints(filename)
    reader = Reader(complaints, {})
    found: Capabilities = reader.document(compose(decode(data, filename), complaints), _SHAPE)
    if known(found) and known(found.fields):
        for n, path in enumerate(found.fields):
            if known(path) and path not in PATHS:
                message = f"{quoted(path)} is no field that can be kept from a worker; "
                at = reader.places["fields", n].value
                complaints.add(at, message + instead(path, sorted(PATHS)), ("fields", n))
    if complaints.found:
        raise ConfigError(filename, complaints.found)
    return found
