"""The infer endpoint of workers: embeddings, scores, and text of servers without generate.

Every server of the V2 protocol has it (Triton, MLServer, KServe, OVMS); generate is an extension of
Triton. Its tensors have shapes, which ``build_shape`` derives from the model's metadata.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocols.core.errors import StreamBroken, WorkerFailed
from protocols.core.events import Embedding, Event, RelevanceScore, ResponseMetadata, StreamEnd
from protocols.core.extra import list_paths, write_extra_fields
from protocols.core.interfaces import ResponseDecoder
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.request import EmbeddingRequest, ExtraFields, RerankRequest
from protocols.core.sse import MAX_UNARY_BYTES
from protocols.core.vectors import decode_array, find_vectors, remove_vectors
from protocols.json_body import JSON_ERRORS, build_answer_error
from protocols.triton.errors import raise_response_error
from protocols.triton.model_config import TensorSpec, WorkerModel
from protocols.triton.tensors import flatten_values

_encode = msgspec.json.Encoder().encode


# --- requests -------------------------------------------------------------------------------------


def build_shape(spec: TensorSpec, count: int) -> tuple[int, ...]:
    """The shape of so many elements: the first free dimension takes them, other free ones are 1.

    Without metadata the shape is that of a batch: (count, 1).
    """
    if spec.shape is None:
        return (count, 1)
    shape, left = [], count
    for length in spec.shape:
        if length < 0:
            shape.append(left)
            left = 1
        else:
            shape.append(length)
    return tuple(shape)


def takes_several(spec: TensorSpec) -> bool:
    """Whether a tensor takes more than one element."""
    return spec.shape is None or any(length < 0 for length in spec.shape)


def write_infer_request(
    inputs: Mapping[str, tuple[TensorSpec, Sequence[Any]]],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of a request: tensors by name, with their elements."""
    body: dict[str, Any] = {
        "inputs": [
            {
                "name": name,
                "shape": build_shape(spec, len(values)),
                "datatype": spec.datatype,
                "data": values,
            }
            for name, (spec, values) in inputs.items()
        ],
        "outputs": [{"name": name} for name in outputs],
    }
    if parameters:
        body["parameters"] = parameters
    return body


def write_unknown_keys(body: dict[str, Any], extras: Iterable[ExtraFields]) -> Iterator[str]:
    """Add keys to the tensors that they belong to; yields the path of each without a tensor."""
    for extra in extras:
        target: dict[str, Any] | None = body
        if extra.inside:
            kind, name = extra.inside
            target = next((one for one in body.get(kind, ()) if one["name"] == name), None)
        if target is None:
            yield from list_paths(extra.at, extra.values.items())
        else:
            write_extra_fields(target, extra.values)


def describe_inputs(model: WorkerModel) -> str:
    """The inputs of a model, for errors."""
    return ", ".join(f"{name} ({spec.datatype})" for name, spec in model.inputs.items()) or "none"


# --- responses ------------------------------------------------------------------------------------


class _WireTensor(Struct):
    name: str
    data: list[Any] = []
    shape: list[int] = []


class _WireInfer(Struct):
    outputs: list[_WireTensor]
    model_name: str | None = None


_decode_infer = JsonDecoder(_WireInfer).decode


def _read_tensors(body: bytes) -> _WireInfer:
    """The outputs of a response. Raises the error that it reports, or WorkerFailed."""
    arrays = find_vectors(body, b'"data"', len(body))
    try:
        wire = _decode_infer(remove_vectors(body, arrays))
        emptied = [tensor for tensor in wire.outputs if not tensor.data]
        if len(emptied) != len(arrays):  # others have this name, too
            return _decode_infer(body)
        for tensor, span in zip(emptied, arrays, strict=True):
            tensor.data = decode_array(body, span)
    except JSON_ERRORS as e:
        try:
            response = decode_json(body)
        except JSON_ERRORS:
            response = None
        if isinstance(response, dict) and "error" in response:
            raise_response_error(response, "outputs")
        raise build_answer_error(e) from e
    return wire


class InferDecoder:
    """Decodes the response to a request that was sent to infer, at its end.

    ``output`` is the model's name of the embeddings or scores. For a text, ``text_decoder`` gets
    the tensors as the object that generate would have returned.
    """

    def __init__(
        self,
        request: Any,
        output: str,
        text_decoder: ResponseDecoder | None = None,
    ) -> None:
        self._request = request
        self._output_name = output
        self._text_decoder = text_decoder
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        self._body += data
        if len(self._body) > MAX_UNARY_BYTES:
            raise WorkerFailed("The worker's answer is too large.")
        return ()

    def close(self) -> Sequence[Event]:
        """See ``protocols.core.interfaces.ResponseDecoder``."""
        if not self._body.strip():
            raise StreamBroken("The worker's answer is empty.")
        wire = _read_tensors(bytes(self._body))
        tensors = {tensor.name: flatten_values(tensor.data) for tensor in wire.outputs}
        if self._text_decoder is not None:
            names = {} if wire.model_name is None else {"model_name": wire.model_name}
            events = self._text_decoder.feed(_encode({**tensors, **names}))
            return [*events, *self._text_decoder.close()]
        if self._output_name not in tensors:
            found = ", ".join(tensors) or "none"
            raise WorkerFailed(
                f"The worker's answer has no output {self._output_name}; it has {found}."
            )
        values = tensors[self._output_name]
        if not all(type(value) in _NUMBER_TYPES for value in values):
            raise WorkerFailed("The worker's answer holds no numbers.")
        return [
            ResponseMetadata(wire.model_name),
            *_build_events(self._request, values),
            StreamEnd(),
        ]


_NUMBER_TYPES: Final = (float, int)


def _build_events(
    request: EmbeddingRequest | RerankRequest, values: Sequence[float]
) -> Sequence[Event]:
    """One event for each input or document, of which each has as many values."""
    count = len(request.inputs if isinstance(request, EmbeddingRequest) else request.documents)
    size, rest = divmod(len(values), count)
    if rest or not size or (isinstance(request, RerankRequest) and size > 1):
        raise WorkerFailed("The worker did not answer each input with as many numbers.")
    if isinstance(request, RerankRequest):
        return [RelevanceScore(i, float(value)) for i, value in enumerate(values)]
    return [
        Embedding(i, tuple(map(float, values[i * size : (i + 1) * size]))) for i in range(count)
    ]
