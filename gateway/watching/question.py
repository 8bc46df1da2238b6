"""What may be asked to be explained."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct


class ExplainRequest(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A request that is to be explained.

    ``body`` is JSON, or a string that holds the body's text; ``base64`` is one of any bytes, in its
    place. ``key`` is the name of one. ``peer`` is the address that it comes from. ``listener`` is
    the address where it comes in; left out, the first that has the path. ``draw`` is the luck that
    it has wherever chance decides.
    """

    path: Annotated[str, Meta(pattern=r"^/[!-~]*\Z")]
    method: str = "POST"
    headers: Mapping[str, str] = {}
    body: Raw = Raw(b"null")
    base64: bytes = b""
    key: str | None = None
    peer: str = ""
    listener: str | None = None
    draw: Annotated[float, Meta(ge=0, lt=1)] = 0.5

    @property
    def body_bytes(self) -> bytes:
        """The body as it would be sent."""
        raw = bytes(self.body)
        if raw == b"null":
            return self.base64
        return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw
