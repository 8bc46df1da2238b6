"""A model with inputs of its own: it repeats its prompt ``REPETITION`` times."""

import json
from typing import Any

import triton_python_backend_utils as pb


class TritonPythonModel:
    """What the Python backend looks for."""

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            given = {t.name(): t.as_numpy() for t in request.inputs()}
            count = int(json.loads(request.parameters()).get("REPETITION", 1))
            for _ in range(count if given["STREAM"].any() else 1):
                sender.send(pb.InferenceResponse([pb.Tensor("TEXT", given["PROMPT"])]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
