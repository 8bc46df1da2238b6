"""A model with inputs of its own: it repeats its prompt ``REPETITION`` times.

With the parameter ``FAIL_LAST`` it then fails, with ``OUTPUT_0_DIM`` it returns nothing.
"""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """The class that the Python backend loads."""

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            inputs = {t.name(): t.as_numpy() for t in request.inputs()}
            parameters = json.loads(request.parameters())
            output = np.array([]) if parameters.get("OUTPUT_0_DIM", False) else inputs["PROMPT"]
            streams = inputs["STREAM"].any()
            for _ in range(parameters.get("REPETITION", 1) if streams else 1):
                sender.send(pb.InferenceResponse([pb.Tensor("TEXT", output)]))
            if streams and parameters.get("FAIL_LAST", False):
                sender.send(pb.InferenceResponse(error=pb.TritonError("An Error Occurred")))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
