"""A model that streams for ten seconds and reports how its last stream ended."""

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

QUESTION = "how did it end?"
PAUSE = 0.1
WORDS = 100


class TritonPythonModel:
    """The class that the Python backend loads."""

    def initialize(self, _args: dict[str, str]) -> None:
        self._ended = "it never began"

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            [prompt] = (tensor.as_numpy()[0].decode() for tensor in request.inputs())
            if prompt == QUESTION:
                say(sender, self._ended)
            else:
                self._ended = stream_words(sender)
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def stream_words(sender: Any) -> str:
    """Send word by word until the client disconnects."""
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
