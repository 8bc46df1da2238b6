"""The names of a message's headers, as a parser tells them and as they are looked up. Pure."""

from typing import Final

_KNOWN: Final = 512
"""Names that are remembered, before all of them are forgotten."""
_SHORT: Final = 64
"""Bytes that one of these has at most: whoever sends them must not fill the memory."""


class Names(dict[bytes, str]):
    """Each name in lower case, by how it was sent; most are sent again and again."""

    def __missing__(self, name: bytes) -> str:
        known = name.decode("latin-1").lower()
        if len(name) <= _SHORT:
            if len(self) >= _KNOWN:
                self.clear()
            self[name] = known
        return known
