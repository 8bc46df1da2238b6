"""Classification in vLLM's form: requests of clients, responses to them, and the same of workers.

Sources: vLLM's protocol module of classification, and SGLang's, which follows it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from protocols import params
from protocols.chat.params import NULL
from protocols.chat.requests import (
    DEFAULT_REQUEST_RULES,
    EMBEDDING_FIELDS,
    RequestRules,
    collect_extra,
    read_inputs,
    read_model,
    set_request_info,
)
from protocols.chat.responses import EmbeddingUsage, ResponseStyle, encode_json
from protocols.chat.unary import (
    UnaryBodyDecoder,
    UnaryEncoder,
    add_extra_keys,
    keep_identity,
    list_unknown_keys,
)
from protocols.chat.wire_responses import read_text
from protocols.chat.worker_errors import raise_worker_error
from protocols.core.aggregate import UnaryResponse
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import Classification, Event, ResponseMetadata, StreamEnd, Usage
from protocols.core.extra import KeyTree
from protocols.core.indices import check_indices
from protocols.core.interfaces import HttpResponse, ResponseContext
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.request import ClassifyRequest
from protocols.core.token_counts import MAX_TIMESTAMP, MAX_TOKENS, read_integer
from protocols.core.vectors import encode_array
from protocols.json_body import build_answer_error
from protocols.params import Param, ParamTable

CLASSIFY_PARAMS: Final = ParamTable(
    Param("truncate_prompt_tokens", "truncate", "int", minimum=-1),
    Param("add_special_tokens", "add_special_tokens", "bool"),
    Param(
        "use_activation",
        "activation",
        "bool",
        description="false returns logits instead of probabilities.",
    ),
    Param("priority", "priority", "int", minimum=0, maximum=255),
    Param("request_id", "client_id", "str"),
    Param("user", "labels.user", "str"),
)


# --- clients --------------------------------------------------------------------------------------


def read_classify(
    fields: Mapping[str, Raw],
    rules: RequestRules = DEFAULT_REQUEST_RULES,
    *,
    client_id: str | None = None,
    timeout: float | None = None,
) -> ClassifyRequest:
    """Decode a request with ``input``: one or more texts, or their tokens. Raises ClientError."""
    model = read_model(fields)
    if fields.get("messages", NULL) != NULL:
        text = "Classification of 'messages' is not supported: send their text as 'input'."
        raise UnsupportedFeature(text, param="messages")
    inputs = read_inputs(fields)
    values = params.read_params(CLASSIFY_PARAMS, fields)
    set_request_info(values, fields, client_id, timeout)
    return ClassifyRequest(
        model=model,
        inputs=inputs,
        labels=values.get_section("labels"),
        extra=collect_extra(
            values, fields, CLASSIFY_PARAMS, EMBEDDING_FIELDS, rules.unknown_fields
        ),
        **values.build_request_arguments(),
    )


class ClassificationItem(Struct):
    """The class of one input; ``label`` is null if the model has no names for its classes."""

    index: int
    label: str | None
    probs: tuple[float, ...]
    num_classes: int


class ClassificationResponse(Struct):
    """The classes of all inputs, in their order."""

    id: str
    created: int
    model: str
    data: list[ClassificationItem]
    object: Literal["list"] = "list"
    usage: EmbeddingUsage | UnsetType = UNSET


class ClassificationEncoder(UnaryEncoder):
    """Encodes the response to a classify request."""

    def __init__(self, style: ResponseStyle, context: ResponseContext) -> None:
        super().__init__(style, context)
        self._context = context
        self.extra_source = style.source

    def encode_unary(self, response: UnaryResponse) -> HttpResponse:
        """See ``protocols.core.interfaces.ResponseEncoder``."""
        context = self._context
        items = [
            ClassificationItem(
                one.index, one.label, encode_array(one.probabilities), len(one.probabilities)
            )
            for one in response.classifications
        ]
        body = ClassificationResponse(
            f"classify-{context.id}", context.created, context.model, encode_array(items)
        )
        keep_identity(body, response, self.extra_source)
        if response.usage is not None:
            tokens = response.usage.prompt_tokens
            body.usage = EmbeddingUsage(tokens, tokens)
        return HttpResponse(200, add_extra_keys(encode_json(body), response, self.extra_source))


# --- workers --------------------------------------------------------------------------------------


def write_classify(request: ClassifyRequest) -> dict[str, Any]:
    """The body of a request to a worker."""
    is_single = len(request.inputs) == 1
    return {"model": request.model, "input": request.inputs[0] if is_single else request.inputs}


class _WireClass(Struct):
    index: int
    probs: tuple[float, ...]
    label: str | None = None


class _WireUsage(Struct):
    prompt_tokens: Any = None


class _WireClasses(Struct):
    data: list[_WireClass]
    id: Any = None
    created: Any = None
    model: Any = None
    usage: _WireUsage | None = None


_ANSWER_KEYS: Final[KeyTree] = {
    **dict.fromkeys(("id", "object", "model", "created", "data")),
    "usage": dict.fromkeys(("prompt_tokens", "total_tokens")),
}
_CLASS_KEYS: Final[KeyTree] = dict.fromkeys(("index", "label", "probs", "num_classes"))
_decode_classes = JsonDecoder(_WireClasses).decode


class ClassificationDecoder(UnaryBodyDecoder):
    """Decodes the response to a ClassifyRequest."""

    def __init__(
        self, request: ClassifyRequest, complaint: Any = raise_worker_error, source: str = ""
    ) -> None:
        """``source`` is the worker's protocol, of which unknown keys are."""
        super().__init__(complaint)
        self._request, self._source = request, source

    def read_body(self, body: bytes) -> Sequence[Event]:
        """See ``protocols.chat.unary.UnaryBodyDecoder``."""
        try:
            wire = _decode_classes(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            self._raise_if_error(body)
            raise build_answer_error(e) from e
        check_indices((item.index for item in wire.data), len(self._request.inputs), "class")
        return [
            ResponseMetadata(
                read_text(wire.model),
                id=read_text(wire.id),
                created=read_integer(wire.created, MAX_TIMESTAMP),
                source=self._source,
            ),
            *list_unknown_keys(
                decode_json(body), self._source, _ANSWER_KEYS, (_CLASS_KEYS, "data")
            ),
            *(Classification(item.index, item.label, item.probs) for item in wire.data),
            *self._read_usage(wire.usage),
        ]

    def _read_usage(self, usage: _WireUsage | None) -> list[Event]:
        """The last events."""
        if usage is None or usage.prompt_tokens is None:
            return [StreamEnd()]
        tokens = read_integer(usage.prompt_tokens, len(self._request.inputs) * MAX_TOKENS)
        return (
            [StreamEnd(has_ignored_usage=True)] if tokens is None else [Usage(tokens), StreamEnd()]
        )
