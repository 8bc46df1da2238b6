"""What a request asks of a worker, beside its prompt."""

from collections.abc import Mapping
from typing import Any

from gateway.core.loss import losses
from gateway.core.types import Request


def wishes(request: Request) -> Mapping[str, Any]:
    """All that a worker that carries nothing would lose, by path."""
    lost = losses(request, {}, {}, extra=True)
    return {one.path: request.said[one.path] for one in lost}
