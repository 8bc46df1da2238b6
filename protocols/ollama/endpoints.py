"""Paths, model names and listings, and the adapter.

Source: ollama 0.9, server/routes.go.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from protocols import params
from protocols.chat.params import missing_error, null_to_none
from protocols.core.catalog import Catalog, LoadsModels, ModelInfo, ModelWeights
from protocols.core.errors import GatewayError
from protocols.core.interfaces import (
    ClientRequest,
    Endpoint,
    HttpResponse,
    OpenApiFragment,
    ResponseContext,
    ResponseEncoder,
    RoutingInfo,
)
from protocols.core.json_text import encode_ascii
from protocols.core.request import EmbeddingRequest, Request
from protocols.core.request_headers import NO_REQUEST_HEADERS, RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.json_body import (
    decode_value,
    read_fields,
    read_object,
    read_unchecked_fields,
)
from protocols.ollama import errors, openapi, requests, responses
from protocols.ollama.params import (
    CHAT_PARAMS,
    EMBEDDING_PARAMS,
    OPTION_PARAMS,
    REQUEST_PARAMS,
    STATEFUL_FIELDS,
)
from protocols.ollama.requests import Fields, get_capabilities, read_text
from protocols.ollama.responses import build_json_response, format_time
from protocols.params import Param, ParamTable

_TEXT_HEADERS: Final = (("Content-Type", "text/plain; charset=utf-8"),)
_DEFAULT_TAG: Final = ":latest"
_EXPIRY_TIME: Final = "2318-01-01T00:00:00Z"
"""When a model is unloaded that always stays: never. In ``/api/ps``, where clients parse a time."""
_UNKNOWN_FAMILY: Final = "gateway"
_MANAGEMENT_ERROR: Final = "model management is not supported by this gateway"
_GENERATION_OPERATIONS: Final = ("chat", "generate")

_ROOT_ENDPOINTS: Final = tuple(
    Endpoint(method, "/", "inform", "root", public=True) for method in ("GET", "HEAD")
)
_ENDPOINTS: Final = (
    Endpoint("POST", "/api/chat", operation="chat"),
    Endpoint("POST", "/api/generate", operation="generate"),
    Endpoint("POST", "/api/embed", operation="embed"),
    Endpoint("POST", "/api/embeddings", operation="embeddings"),
    *(Endpoint(method, "/api/tags", "inform", "tags") for method in ("GET", "HEAD")),
    Endpoint("POST", "/api/show", "inform", "show"),
    Endpoint("GET", "/api/ps", "inform", "ps"),
    *(
        Endpoint(method, "/api/version", "inform", "version", public=True)
        for method in ("GET", "HEAD")
    ),
    Endpoint("POST", "/api/pull", "inform", "pull"),
    *(
        Endpoint(method, f"/api/{path}", "inform", "manage")
        for method, path in (
            ("POST", "push"),
            ("POST", "create"),
            ("POST", "copy"),
            ("DELETE", "delete"),
            ("POST", "blobs/{digest}"),
            ("HEAD", "blobs/{digest}"),
        )
    ),
)


class Ollama:
    """Ollama's API, for clients only.

    ``m`` and ``m:latest`` are the same model, and case does not count. ``version`` is what
    ``/api/version`` says. ``pull_known`` makes ``/api/pull`` of a served model succeed. Otherwise
    that is an error, as is all management of models. Without ``root`` the path ``/`` is the
    gateway's own page instead of the text that Ollama is running.
    """

    name: str = "ollama"
    profiles: ClassVar[tuple[str, ...]] = ("0.9",)
    model_options: ClassVar[Mapping[str, Any]] = requests.MODEL_OPTIONS
    stateful_fields: Sequence[StatefulField] = STATEFUL_FIELDS
    request_headers: RequestHeaders = NO_REQUEST_HEADERS
    path_prefixes: tuple[str, ...] = ("/api",)

    def __init__(
        self,
        profile: str | None = None,
        *,
        version: str = "0.9.7",
        pull_known: bool = False,
        root: bool = True,
    ) -> None:
        if profile not in (None, *self.profiles):
            known = ", ".join(self.profiles)
            raise ValueError(f"there is no profile {profile!r} of {self.name}; known: {known}")
        self.endpoints: tuple[Endpoint, ...] = (*(_ROOT_ENDPOINTS if root else ()), *_ENDPOINTS)
        self._version = version
        self._pull_known = pull_known
        generation = ParamTable(*_add_prefix(OPTION_PARAMS), *REQUEST_PARAMS)
        chat = ParamTable(*_add_prefix(OPTION_PARAMS), *CHAT_PARAMS)
        self.param_tables: Mapping[str, tuple[Param, ...]] = {
            "chat": chat,
            "generate": generation,
            "embed": EMBEDDING_PARAMS,
        }
        self._field_names = {
            **params.map_field_names((*generation, *EMBEDDING_PARAMS)),
            **_FIELD_NAMES,
        }

    def read_routing_info(self, call: ClientRequest) -> RoutingInfo:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        fields = read_unchecked_fields(call)
        if fields is None:
            fields = read_object(call.body)  # which raises the error
        name = _read_model(fields, call)
        operation = call.endpoint.operation
        return RoutingInfo(
            name,
            stream=operation in _GENERATION_OPERATIONS and _read_stream(fields),
            other_names=_list_other_names(name),
            inform=_is_empty(operation, fields),
        )

    def decode_request(self, call: ClientRequest, model: ModelInfo | None = None) -> Request:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        fields = read_fields(call)
        name = _read_model(fields, call)
        capabilities = None if model is None else get_capabilities(model, self.name)
        match call.endpoint.operation:
            case "chat":
                return requests.read_chat(fields, name, capabilities, stream=_read_stream(fields))
            case "generate":
                return requests.read_generate(
                    fields, name, capabilities, stream=_read_stream(fields)
                )
            case "embed":
                call.__dict__["dimensions"] = requests.read_dimensions(fields)
                inputs = requests.read_inputs(fields)
            case _:
                inputs = (read_text(fields, "prompt"),)
        return requests.read_embedding(fields, name, capabilities, inputs)

    def create_encoder(
        self, call: ClientRequest, request: Request, context: ResponseContext
    ) -> ResponseEncoder:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        name, operation = _get_model_name(call), call.endpoint.operation
        if isinstance(request, EmbeddingRequest):
            return responses.EmbeddingEncoder(
                context,
                name,
                is_single=operation == "embeddings",
                dimensions=call.__dict__.get("dimensions"),
            )
        is_chat = operation == "chat"
        return responses.GenerationEncoder(
            context,
            name,
            call.started_at,
            is_chat=is_chat,
            hides_reasoning=request.response_options.hides_reasoning,
        )

    def encode_error(self, error: GatewayError, call: ClientRequest | None) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        if call is None:
            return errors.build_error_response(error, "", "")
        return errors.build_error_response(error, call.endpoint.operation, _get_model_name(call))

    def field_names(self, call: ClientRequest) -> Mapping[str, str]:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        del call
        return self._field_names

    def openapi_fragment(self) -> OpenApiFragment:
        """See ``protocols.core.interfaces.OpenApiProvider``."""
        return openapi.describe_api()

    # --- without a model --------------------------------------------------------------------------

    def handle_info_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """See ``protocols.core.interfaces.ClientAdapter``."""
        match call.endpoint.operation:
            case "root":
                return HttpResponse(200, b"Ollama is running", _TEXT_HEADERS)
            case "version":
                return build_json_response({"version": self._version})
            case "tags":
                models = [self._describe_listed_model(model) for model in catalog.list_models()]
                return build_json_response({"models": models})
            case "ps":
                running = [
                    description
                    for model in catalog.list_models()
                    if (description := _describe_running(model, call.started_at)) is not None
                ]
                return build_json_response({"models": running})
            case "show":
                return self._show_model(call, catalog)
            case "pull" if self._pull_known:
                _find_model(_read_model(read_fields(call), call), catalog)
                return build_json_response({"status": "success"})
            case "pull" | "manage":
                body = encode_ascii(errors.OllamaError(_MANAGEMENT_ERROR))
                return HttpResponse(501, body, errors.JSON_HEADERS)
            case operation:
                return _answer_empty_request(call, operation, catalog)

    def _describe_listed_model(self, model: ModelInfo) -> dict[str, Any]:
        return {
            **_identify_model(model),
            "modified_at": format_time(model.created),
            "size": 0 if model.weights is None else model.weights.size_bytes,
            "details": _describe_weights(model.weights),
            "capabilities": get_capabilities(model, self.name).names,
        }

    def _show_model(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        model = _find_model(_read_model(read_fields(call), call), catalog)
        details = _describe_weights(model.weights)
        family = details["family"]
        info: dict[str, Any] = {"general.architecture": family, "general.basename": model.name}
        if model.weights is not None:
            info["general.parameter_count"] = model.weights.parameters
        if model.context_length is not None:
            info[f"{family}.context_length"] = model.context_length
        return build_json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "license": "",
                "details": details,
                "model_info": info,
                "capabilities": get_capabilities(model, self.name).names,
                "modified_at": format_time(model.created),
            }
        )


_FIELD_NAMES: Final = {
    "messages": "messages",
    "prompts": "prompt",
    "inputs": "input",
    "tools": "tools",
    "output": "format",
    "reasoning.effort": "think",
    "logprobs.top": "logprobs",
    "insert_before": "suffix",
}


def _add_prefix(table: ParamTable) -> list[Param]:
    """The rows with the names under which errors and losses are reported."""
    return [replace(row, wire=f"options.{row.wire}") for row in table]


# --- model names ----------------------------------------------------------------------------------


def _read_model(fields: Fields, call: ClientRequest) -> str:
    """The model's name as it was sent; kept for the response. Raises InvalidParameter."""
    name = read_text(fields, "model") or read_text(fields, "name")
    if not name:
        raise missing_error("model")
    call.__dict__["model_name"] = name
    return name


def _get_model_name(call: ClientRequest) -> str:
    name: str = call.__dict__.get("model_name", "")
    return name


def _list_other_names(name: str) -> tuple[str, ...]:
    """Without the default tag, or with it."""
    if name.lower().endswith(_DEFAULT_TAG):
        return (name[: -len(_DEFAULT_TAG)],)
    return (name + _DEFAULT_TAG,)


def _find_model(name: str, catalog: Catalog) -> ModelInfo:
    """The model of this name, as for ``RoutingInfo.other_names``. Raises ModelNotFound."""
    models = {known: one for one in catalog.list_models() for known in (one.name, *one.aliases)}
    by_lower_case = {known.lower(): one for known, one in models.items()}
    names = (name, *_list_other_names(name))
    for known in names:
        if known in models:
            return models[known]
    for known in names:
        if known.lower() in by_lower_case:
            return by_lower_case[known.lower()]
    return catalog.find_model(name)


def _identify_model(model: ModelInfo) -> dict[str, Any]:
    """The name with a tag, which clients look for, and a digest of the name."""
    is_tagged = ":" in model.name.rpartition("/")[2]
    name = model.name if is_tagged else model.name + _DEFAULT_TAG
    digest = hashlib.sha256(model.name.encode()).hexdigest()
    return {"name": name, "model": name, "digest": digest}


def _describe_weights(weights: ModelWeights | None) -> dict[str, Any]:
    """Details of a local model; of others nothing is known."""
    family = _UNKNOWN_FAMILY if weights is None else weights.family
    return {
        "parent_model": "",
        "format": "" if weights is None else weights.format,
        "family": family,
        "families": [family],
        "parameter_size": "" if weights is None else _format_count(weights.parameters),
        "quantization_level": "" if weights is None else weights.quantization,
    }


def _format_count(number: int) -> str:
    """A number as Ollama writes it, as in ``134.52M``.

    Source: ollama 0.9, format/format.go.
    """
    for unit, name, decimals in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= unit:
            return f"{number / unit:.{decimals if number % unit else 0}f}{name}"
    return str(number)


def _describe_running(model: ModelInfo, now: float) -> dict[str, Any] | None:
    """A model in memory; None if no version is. Of remote models only the readiness is known."""
    states = [version.state for version in model.versions if version.state is not None]
    loaded = [state for state in states if state.loaded]
    is_remote = len(states) < len(model.versions)
    if not loaded and not (is_remote and model.ready):
        return None
    delays = [state.expires_in for state in loaded if state.expires_in is not None]
    expires = len(delays) == len(model.versions)
    length = {} if model.context_length is None else {"context_length": model.context_length}
    return {
        **_identify_model(model),
        "size": sum(state.memory_bytes for state in loaded),
        "details": _describe_weights(model.weights),
        "expires_at": format_time(now + max(delays)) if expires else _EXPIRY_TIME,
        "size_vram": 0,
        **length,
    }


# --- requests without content ---------------------------------------------------------------------


def _read_stream(fields: Fields) -> bool:
    """Whether to stream, which is the default. Raises InvalidParameter."""
    values = params.read_params(_STREAM_PARAM, fields)
    return values.get("stream") is not False


_STREAM_PARAM: Final = ParamTable(*REQUEST_PARAMS.by_wire.select_params(("stream",)))


def _is_empty(operation: str, fields: Fields) -> bool:
    """Whether there is nothing to generate or to embed: such a request loads a model."""
    match operation:
        case "chat":
            raw = null_to_none(fields.get("messages"))
            return raw is None or (len(raw) < 8 and decode_value(raw) == [])  # noqa: PLR2004 - and blanks
        case "generate":
            rest = ("suffix", "images")
            return not read_text(fields, "prompt") and not any(
                null_to_none(fields.get(name)) for name in rest
            )
        case "embed":
            return not requests.read_inputs(fields)
        case _:
            return not read_text(fields, "prompt")


def _answer_empty_request(call: ClientRequest, operation: str, catalog: Catalog) -> HttpResponse:
    """The response without a model's work. Raises ModelNotFound and InvalidParameter."""
    fields = read_fields(call)
    name = _read_model(fields, call)
    keep_alive = requests.read_keep_alive(fields)
    model = _find_model(name, catalog)
    is_kept = isinstance(catalog, LoadsModels) and catalog.keep_model(model, keep_alive)
    response = _build_empty_response(call, operation, name, is_unload=keep_alive == 0)
    if keep_alive is None or is_kept:
        return response
    return replace(response, headers=(*response.headers, _KEPT_AS_IT_IS))


_KEPT_AS_IT_IS: Final = ("x-interlingua-loss", "keep_alive=dropped")
"""The model is not loaded on demand: it is neither loaded nor unloaded."""


def _build_empty_response(
    call: ClientRequest, operation: str, name: str, *, is_unload: bool
) -> HttpResponse:
    if operation in _GENERATION_OPERATIONS:
        time = format_time(call.started_at)
        is_chat = operation == "chat"
        return responses.build_load_answer(name, time, unload=is_unload, is_chat=is_chat)
    if operation == "embed":
        return build_json_response(responses.EmbedAnswer(name, []))
    return build_json_response(responses.EmbeddingsAnswer(()))
