"""OpenVINO Model Server: chat, completions and embeddings under ``/v3``.

endpoints   what clients call: routes, and the adapter
params      the scalar parameters, and the server's error texts
requests    client bodies to the internal request
responses   events to unary responses and streams
errors      statuses and error texts
upstream    the internal request to a worker's request; worker errors; pass-through
openapi     schemas of requests and responses
"""

from protocols.ovms.endpoints import OVMS

__all__ = ["OVMS"]
