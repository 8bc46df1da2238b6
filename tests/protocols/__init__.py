"""What a protocol brings to the tests that all protocols share: one module for each protocol.

A module has those of these names that apply; the shared tests find them.

MOUNT           the protocol on a listener with others
CONVERSATION    the path and the body, without the model, of the smallest conversation
BODIES          a valid body, without the model, for each operation that reaches a worker
REQUESTS        paths with bodies that have every kind of object of the protocol
KNOWN_FIELDS    a path and a body for each operation with a table of parameters
RELATED_FIELDS  parameters without a meaning unless another field is sent, and that field
ANSWER, EVENTS  a worker's unary response, and the data of the events of a stream
CROSS_CLIENTS   clients of ``tests.cross.clients``
CROSS_WORKERS   scripted workers of ``tests.cross.workers.table``, by name
"""

import importlib
import json
from pathlib import Path
from typing import Any


def list_mounts() -> str:
    """Return the protocols on a listener with others, as items of a list in YAML."""
    return ", ".join(json.dumps(mount) for mount in find_rows("MOUNT").values())


def find_rows(name: str) -> dict[str, Any]:
    """Return what the protocols' modules have under this name, by protocol."""
    modules = {
        path.stem: importlib.import_module(f"{__name__}.{path.stem}")
        for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))
    }
    return {
        protocol: getattr(module, name)
        for protocol, module in modules.items()
        if hasattr(module, name)
    }
