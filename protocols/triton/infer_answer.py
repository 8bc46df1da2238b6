"""Writing the answers of infer: tensors with shapes, as JSON or as raw bytes behind the JSON."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from protocols.core.aggregate import ResponseAccumulator, UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import Event, StreamEnd
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.triton import binary, measures, refusal
from protocols.triton.infer import RequestedOutputs
from protocols.triton.meaning import list_requested_outputs
from protocols.triton.vocabulary import TEXT_OUTPUT, OutputSpec, TritonProfile
from protocols.triton.wire import JSON_HEADERS, encode_json, get_version_number, round_to_fp32


class OutputTensor(Struct):
    """One output; ``data`` is absent where its bytes stand behind the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Any = UNSET
    data: Any = UNSET


class InferResponse(Struct):
    """The answer's JSON."""

    id: Any
    model_name: str
    model_version: str
    outputs: list[OutputTensor]


class BinaryDataParameters(Struct):
    """The parameters of an output that stands behind the JSON."""

    binary_data_size: int


class InferEncoder:
    """Writes one answer of infer. It has no stream: written as one, it comes at the end."""

    content_type = "application/json"

    def __init__(
        self,
        request: GenerationRequest,
        about: ResponseContext,
        profile: TritonProfile,
        wishes: RequestedOutputs,
    ) -> None:
        self._request = request
        self._context = about
        self._profile = profile
        self._requested_outputs = wishes
        self._accumulator = ResponseAccumulator()

    def headers(self) -> Headers:
        """None of its own."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Nothing until Done."""
        self._accumulator.add(events)
        done = any(isinstance(event, StreamEnd) for event in events)
        return self.encode_unary(self._accumulator.result()).body if done else b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """The error's object."""
        return refusal.encode_error_body(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """The JSON and what stands behind it."""
        row = measures.list_choice_outputs(answer)
        prompt_tokens = answer.usage.prompt_tokens if answer.usage is not None else None
        outputs: list[OutputTensor] = []
        behind: list[bytes] = []
        for output in self._list_outputs():
            values = measures.get_output_values(output.name, row, prompt_tokens)
            if values is not None:
                tensor, data = self._build_tensor(output, values)
                outputs.append(tensor)
                behind.append(data)
        about = self._context
        name = self._request.client_id or UNSET
        head = encode_json(InferResponse(name, about.model, get_version_number(about), outputs))
        if not any(tensor.data is UNSET for tensor in outputs):
            return HttpResponse(200, head, JSON_HEADERS)
        length = ("Inference-Header-Content-Length", str(len(head)))
        headers = (("Content-Type", "application/octet-stream"), length)
        return HttpResponse(200, head + b"".join(behind), headers)

    def _list_outputs(self) -> list[OutputSpec]:
        asked = {
            TEXT_OUTPUT,
            *(one.name for one in list_requested_outputs(self._profile, self._request.given)),
        }
        return [
            one
            for one in self._profile.outputs
            if one.name in asked and self._requested_outputs.includes(one.name)
        ]

    def _build_tensor(self, output: OutputSpec, values: list[Any]) -> tuple[OutputTensor, bytes]:
        shape, flat = self._shape_values(values)
        tensor = OutputTensor(output.name, output.datatype, shape)
        if not self._requested_outputs.is_binary(output.name):
            tensor.data = (
                [round_to_fp32(one) for one in flat] if output.datatype == "FP32" else flat
            )
            return tensor, b""
        data = binary.pack_tensor(output.datatype, flat)
        tensor.parameters = BinaryDataParameters(len(data))
        return tensor, data

    def _shape_values(self, values: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """The values behind each other, and the shape that says whose they are."""
        batch = len(self._request.prompts)
        if len(values) % batch:
            batch = 1
        outer = (batch, len(values) // batch) if self._profile.max_batch_size else (len(values),)
        if not isinstance(values[0], list):
            return outer, values
        longest = max(len(one) for one in values)
        padded = [x for one in values for x in (*one, *(0.0,) * (longest - len(one)))]
        return (*outer, longest), padded
