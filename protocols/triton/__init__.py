"""Triton Inference Server's HTTP protocol: generate both ways, infer towards clients.

endpoints     what clients call: routes, and the adapter
metadata      repository, metadata and statistics endpoints
params        profiles: inputs, outputs and parameters of each model family
requests      bodies of generate and infer to the internal request
tensors       tensors checked against the model; binary tensors
rapidjson     JSON as Triton's own parser reads it
responses     events to generate and infer responses
formats       numbers and texts as Triton writes them; content types
errors        error texts; our errors to Triton's bodies; worker errors to ours
upstream      the internal request to a worker's request; unsupported parameters
model_config  a worker's model: its tensors and parameters
passthrough   requests and responses forwarded unchanged
decoder       worker responses to events
openapi       schemas of requests and responses
"""

from protocols.triton.endpoints import Triton

__all__ = ["Triton"]
