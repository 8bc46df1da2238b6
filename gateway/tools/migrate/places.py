"""Where a worker is, and what it is: by LiteLLM's ``model`` and ``api_base``."""

import re
from typing import Final

from msgspec import Struct

from gateway.config import units
from gateway.config.dialects import Dialects
from gateway.tools.migrate.origins import CLIENTS, FOREIGN, ORIGINS, Origin
from gateway.tools.migrate.source import Env, Given, LeftOut, Notes
from protocols import DIALECTS

_SLASHES: Final = 2
"""Those before the host."""


class Place(Struct, frozen=True):
    """A worker's base, whose it is, the model's name there (None: the public one), and remarks."""

    url: str | Env
    origin: Origin
    model: str | None
    comments: tuple[str, ...]


def place(model: Given, said: Given | None, where: Given | None, notes: Notes) -> Place:
    """Where an entry leads. Raises LeftOut where nobody here could ask there."""
    origin, name = _origin(model, said)
    comments = (origin.note,) if origin.note else ()
    if where is None:
        if origin.url is None:
            raise LeftOut(model, "it has no api_base")
        return Place(origin.url, origin, name, comments)
    if isinstance(variable := where.value, Env):
        if origin.root:
            why = f"{variable.name} must hold the address without {origin.root} at its end"
            notes.add(where, "changed", why)
            comments = (*comments, why)
        return Place(variable, origin, name, comments)
    text = where.text
    if origin.address is not None:
        found = re.fullmatch(origin.address, text)
        if found is None:
            raise LeftOut(where, origin.mend)
        text, name = found.groups()
    url, at_its_root = _base(where, text, origin)
    if origin.root and not at_its_root and not origin.note:
        why = f"is asked below {origin.root}, as its dialect has it"
        notes.add(where, "changed", why)
        comments = (*comments, why)
    return Place(url, origin, name, comments)


def _origin(model: Given, said: Given | None) -> tuple[Origin, str | None]:
    """Whom it means, and by which name they have the model. Raises LeftOut."""
    prefix, _, name = model.text.partition("/")
    if said is not None:
        prefix, name = said.text, model.text.removeprefix(f"{said.text}/")
    elif not name or (prefix not in ORIGINS and prefix not in FOREIGN):
        prefix, name = CLIENTS, model.text
    origin = ORIGINS.get(prefix)
    if origin is None:
        raise LeftOut(model, f"nobody here speaks as {prefix!r} does")
    if model.text == "*":
        raise LeftOut(model, "it may mean anybody")
    return origin, None if name == "*" else name


def _base(where: Given, text: str, origin: Origin) -> tuple[str, bool]:
    """A worker's base, and whether the dialect's own path was behind it. Raises LeftOut."""
    try:
        url = str(units.UNITS["worker"].read(text))
    except ValueError as error:
        raise LeftOut(where, f"the address {error}") from None
    roots = Dialects(DIALECTS).make(origin.dialect, origin.profile, {}).roots
    for root in filter(None, roots):
        if url.endswith(root):
            return url.removesuffix(root), True
    if origin.root and url.count("/") > _SLASHES:
        raise LeftOut(where, f"{origin.dialect} is spoken at {origin.root}, and it ends otherwise")
    return url, False
