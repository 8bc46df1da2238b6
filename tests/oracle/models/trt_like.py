"""A model like the TensorRT-LLM ensemble: it answers " w0", " w1" ... to each prompt of a batch.

Like the gateway's scripted echo backend, it counts a prompt's words as its tokens, and all of its
tokens are equally likely.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

LOGPROB = -0.5
WORDS = 8
"""Its default number of words."""


class TritonPythonModel:
    """The class that the Python backend loads."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb.InferenceResponse(list(outputs(request))) for request in requests]


def outputs(request: Any) -> Iterator[Any]:
    """Build the text and the requested outputs: a row for each prompt."""
    inputs = {t.name(): t.as_numpy() for t in request.inputs()}
    prompts = [one.decode() for one in inputs["text_input"].reshape(-1)]
    count = min(int(inputs["max_tokens"].reshape(-1)[0]), WORDS)
    text = "".join(f" w{k}" for k in range(count))
    starts = [""] * len(prompts) if is_requested(inputs, "exclude_input_in_output") else prompts
    yield tensor("text_output", [[(start + text).encode()] for start in starts], np.object_)
    if is_requested(inputs, "return_log_probs"):
        yield tensor("cum_log_probs", [[LOGPROB * count] for _ in prompts], np.float32)
        yield tensor("output_log_probs", [[[LOGPROB] * count] for _ in prompts], np.float32)
    if is_requested(inputs, "return_num_input_tokens"):
        words = [[len(prompt.split())] for prompt in prompts]
        yield tensor("num_input_tokens", words, np.int32)
    if is_requested(inputs, "return_num_output_tokens"):
        yield tensor("num_output_tokens", [[count] for _ in prompts], np.int32)


def is_requested(inputs: dict[str, Any], flag: str) -> bool:
    return flag in inputs and bool(inputs[flag].any())


def tensor(name: str, values: list[Any], datatype: Any) -> Any:
    return pb.Tensor(name, np.array(values, dtype=datatype))
