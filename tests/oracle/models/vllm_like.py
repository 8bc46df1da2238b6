"""A model like the vLLM backend: it answers " w0", " w1" ....

With the model parameter ``fail_at`` it fails in place of that word.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

EXPLODED = "the worker answered with an error"
WORDS = 8
"""Its default number of words."""


class TritonPythonModel:
    """The class that the Python backend loads."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        fail_at = parameters.get("fail_at", {}).get("string_value")
        self._fail_at = None if fail_at is None else int(fail_at)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                for outputs in self._answers(request):
                    sender.send(pb.InferenceResponse(outputs))
            except Exception as error:  # noqa: BLE001 - the backend would name this file's lines
                sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answers(self, request: Any) -> Iterator[list[Any]]:
        inputs = {t.name(): t.as_numpy().reshape(-1)[0] for t in request.inputs()}
        prompt = inputs["text_input"].decode()
        parameters = json.loads(request.parameters())
        if "sampling_parameters" in inputs:
            parameters = json.loads(inputs["sampling_parameters"])
        count = min(int(parameters.get("max_tokens", 3)), WORDS)
        choices = int(parameters.get("n", 1))
        reason = "length" if count < WORDS else "stop"
        if inputs.get("stream", False):
            for k in range(count):
                self._fail(k)
                ended = reason if k == count - 1 else "None"
                yield outputs(inputs, f" w{k}", choices, ended, 1)
            return
        self._fail(0)
        self._fail(count - 1)
        text = "".join(f" w{k}" for k in range(count))
        start = "" if inputs.get("exclude_input_in_output", False) else prompt
        yield outputs(inputs, start + text, choices, reason, count)

    def _fail(self, word: int) -> None:
        if self._fail_at == word:
            raise RuntimeError(EXPLODED)


def outputs(inputs: dict[str, Any], text: str, choices: int, reason: str, tokens: int) -> list[Any]:
    """Build a response: the text and the requested outputs, each for every choice."""
    tensors = [tensor("text_output", [text.encode()] * choices, np.object_)]
    if inputs.get("return_finish_reason", False):
        tensors.append(tensor("finish_reason", [reason.encode()] * choices, np.object_))
    if inputs.get("return_num_output_tokens", False):
        tensors.append(tensor("num_output_tokens", [tokens] * choices, np.uint32))
    return tensors


def tensor(name: str, values: list[Any], datatype: Any) -> Any:
    return pb.Tensor(name, np.array(values, dtype=datatype))
