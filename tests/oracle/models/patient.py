"""A model that talks for ten seconds, and can be asked how its last talk ended."""

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

QUESTION = "how did it end?"
PAUSE = 0.1
WORDS = 100


class TritonPythonModel:
    """What the Python backend looks for."""

    def initialize(self, _args: dict[str, str]) -> None:
        self._ended = "it never began"

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            [prompt] = (tensor.as_numpy()[0].decode() for tensor in request.inputs())
            if prompt == QUESTION:
                say(sender, self._ended)
            else:
                self._ended = talk(sender)
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def talk(sender: Any) -> str:
    """Word by word, until nobody listens any more."""
    for k in range(WORDS):
        if sender.is_cancelled():
            return "cancelled"
        say(sender, f" w{k}")
        time.sleep(PAUSE)
    return "finished"


def say(sender: Any, text: str) -> None:
    sender.send(
        pb.InferenceResponse([pb.Tensor("text_output", np.array([text], dtype=np.object_))])
    )
