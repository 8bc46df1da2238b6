"""Responses of infer: tensors with shapes, as JSON or as binary data after the JSON."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct

from protocols.core import sse
from protocols.core.aggregate import ResponseAccumulator, UnaryResponse
from protocols.core.errors import GatewayError
from protocols.core.events import Event, StreamEnd
from protocols.core.interfaces import Headers, HttpResponse, ResponseContext
from protocols.core.request import GenerationRequest
from protocols.core.response_losses import TEXT_AND_REFUSAL
from protocols.core.vectors import encode_array
from protocols.triton import errors, tensors
from protocols.triton.formats import (
    CHUNKED_EVENT_HEADERS,
    CHUNKED_JSON_HEADERS,
    JSON_HEADERS,
    encode_json,
    get_version_number,
    round_to_fp32,
)
from protocols.triton.infer_requests import RequestedOutputs
from protocols.triton.params import EMBEDDING, RERANK, TEXT_OUTPUT, OutputSpec, TritonProfile
from protocols.triton.requests import list_requested_outputs
from protocols.triton.responses import get_output_values, list_choice_outputs


class OutputTensor(Struct):
    """One output; ``data`` is absent if its bytes follow the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Any = UNSET
    data: Any = UNSET


class InferResponse(Struct):
    """The JSON object of a response."""

    id: Any
    model_name: str
    model_version: str
    outputs: list[OutputTensor]


class BinaryDataParameters(Struct):
    """The parameters of a binary output."""

    binary_data_size: int


class InferEncoder:
    """Encodes an infer response, which has no stream: everything comes at the end."""

    content_type = "application/json"
    hidden_reasons = frozenset({"content_filter"})
    content_losses = TEXT_AND_REFUSAL

    def __init__(
        self,
        request: GenerationRequest,
        context: ResponseContext,
        profile: TritonProfile,
        requested_outputs: RequestedOutputs,
    ) -> None:
        self._request = request
        self._context = context
        self._profile = profile
        self._requested_outputs = requested_outputs
        self._accumulator = ResponseAccumulator()

    def headers(self) -> Headers:
        """Empty: no extra headers."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Encode nothing until StreamEnd."""
        self._accumulator.add(events)
        if not any(isinstance(event, StreamEnd) for event in events):
            return b""
        return self.encode_unary(self._accumulator.result()).body

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode the error object."""
        return errors.encode_error_body(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """Encode the JSON and the binary data after it."""
        row = list_choice_outputs(answer)
        prompt_tokens = answer.usage.prompt_tokens if answer.usage is not None else None
        outputs: list[OutputTensor] = []
        binary_data: list[bytes] = []
        for output in self._list_outputs():
            values = get_output_values(output.name, row, prompt_tokens)
            if values is not None:
                tensor, data = self._build_tensor(output, values)
                outputs.append(tensor)
                binary_data.append(data)
        return _build_infer_response(self._request.client_id, self._context, outputs, binary_data)

    def _list_outputs(self) -> list[OutputSpec]:
        flagged = list_requested_outputs(self._profile, self._request.provided_fields)
        names = {TEXT_OUTPUT, *(output.name for output in flagged)}
        return [
            output
            for output in self._profile.outputs
            if output.name in names and self._requested_outputs.includes(output.name)
        ]

    def _build_tensor(self, output: OutputSpec, values: list[Any]) -> tuple[OutputTensor, bytes]:
        shape, elements = self._shape_values(values)
        is_binary = self._requested_outputs.is_binary(output.name)
        return _build_output_tensor(output, shape, elements, is_binary=is_binary)

    def _shape_values(self, values: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """Concatenate the values, and return their shape."""
        batch = len(self._request.prompts)
        if len(values) % batch:
            batch = 1
        outer = (batch, len(values) // batch) if self._profile.max_batch_size else (len(values),)
        if not isinstance(values[0], list):
            return outer, values
        length = max(map(len, values))
        padded = [x for value in values for x in (*value, *(0.0,) * (length - len(value)))]
        return (*outer, length), padded


def _build_output_tensor(
    output: OutputSpec, shape: tuple[int, ...], elements: list[Any], *, is_binary: bool
) -> tuple[OutputTensor, bytes]:
    """An output, and its bytes if they follow the JSON."""
    tensor = OutputTensor(output.name, output.datatype, shape)
    if not is_binary:
        is_float = output.datatype == "FP32"
        tensor.data = encode_array([*map(round_to_fp32, elements)]) if is_float else elements
        return tensor, b""
    data = tensors.pack_tensor(output.datatype, elements)
    tensor.parameters = BinaryDataParameters(len(data))
    return tensor, data


def _build_infer_response(
    client_id: str | None,
    context: ResponseContext,
    outputs: list[OutputTensor],
    binary_data: Sequence[bytes],
) -> HttpResponse:
    """The response of infer: JSON, and the binary data after it."""
    version = get_version_number(context)
    body = encode_json(InferResponse(client_id or UNSET, context.model, version, outputs))
    if not any(tensor.data is UNSET for tensor in outputs):
        return HttpResponse(200, body, JSON_HEADERS)
    length = ("Inference-Header-Content-Length", str(len(body)))
    headers = (("Content-Type", "application/octet-stream"), length)
    return HttpResponse(200, body + b"".join(binary_data), headers)


class NumberEncoder:
    """Encodes embeddings or scores, which have no stream.

    ``requested_outputs`` is None for generate, whose object has the numbers without a shape.
    """

    content_type = "application/json"

    def __init__(
        self,
        client_id: str | None,
        context: ResponseContext,
        requested_outputs: RequestedOutputs | None,
        *,
        framed: bool,
    ) -> None:
        """``framed``: the object is an event, since generate_stream was called."""
        self._client_id = client_id
        self._context = context
        self._requested_outputs = requested_outputs
        self._as_event = framed

    def headers(self) -> Headers:
        """Empty: no extra headers."""
        return ()

    def encode_events(self, events: Sequence[Event]) -> bytes:
        """Empty: there is nothing to stream."""
        del events
        return b""

    def encode_error_event(self, error: GatewayError) -> bytes:
        """Encode the error object."""
        return errors.encode_error_body(error)

    def encode_unary(self, answer: UnaryResponse) -> HttpResponse:
        """Encode the numbers of all inputs."""
        if answer.embeddings:
            [output] = EMBEDDING.outputs
            numbers = [number for vector in answer.embeddings for number in vector]
            shape: tuple[int, ...] = (len(answer.embeddings), len(answer.embeddings[0]))
        else:
            [output] = RERANK.outputs
            numbers, shape = list(answer.scores), (len(answer.scores),)
        requested = self._requested_outputs
        if requested is None:
            return self._encode_object(output, numbers)
        is_binary = requested.is_binary(output.name)
        tensor, data = _build_output_tensor(output, shape, numbers, is_binary=is_binary)
        return _build_infer_response(self._client_id, self._context, [tensor], [data])

    def _encode_object(self, output: OutputSpec, numbers: list[float]) -> HttpResponse:
        body = {} if self._client_id is None else {"id": self._client_id}
        rounded = [*map(round_to_fp32, numbers)]
        values = {
            output.name: rounded[0] if len(rounded) == 1 else encode_array(rounded),
            "model_name": self._context.model,
            "model_version": get_version_number(self._context),
        }
        data = encode_json({**body, **values})
        if self._as_event:
            return HttpResponse(200, sse.format_event(data), CHUNKED_EVENT_HEADERS)
        return HttpResponse(200, data, CHUNKED_JSON_HEADERS)
