"""The parameters that a request asks a worker to support."""

from collections.abc import Mapping
from typing import Any

from protocols.core.loss import find_unsupported_parameters
from protocols.core.request import Request


def list_requested_parameters(request: Request) -> Mapping[str, Any]:
    """Return all parameters that a worker without any parameter support would lose, by path."""
    lost = find_unsupported_parameters(request, {}, {}, extra=True)
    return {one.path: request.set_fields[one.path] for one in lost}
