"""What an exchange asks of each request. The whole of one is read where somebody needs it."""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gateway.core.types import EmbedRequest, GenerateRequest, Request


class Brief(Struct, frozen=True, dict=True, kw_only=True):
    """The little that is asked of every request, each by its name there."""

    read: Callable[[], Request]
    """Gives the request, as far as choosing a worker and reading the answer need it."""
    kind: Literal["chat", "completion", "embedding"]
    stream: bool = False
    priority: int | None = None
    timeout: float | None = None
    client_id: str | None = None

    @property
    def request(self) -> Request:
        """The request, which is read when it is asked for, and then kept."""
        kept = self.__dict__
        if "request" not in kept:
            kept["request"] = self.read()
        found: Request = kept["request"]
        return found


AnyRequest = Request | Brief


def request_of(asked: AnyRequest) -> Request:
    """The request itself."""
    return asked if isinstance(asked, (GenerateRequest, EmbedRequest)) else asked.request
