"""Repository, metadata, configuration and statistics endpoints.

A gateway loads no models and shares no memory: these endpoints return an error or an empty list.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import UNSET, Struct

from protocols.core.catalog import Catalog, ModelInfo, VersionInfo
from protocols.core.errors import ModelNotFound, VersionNotFound
from protocols.core.interfaces import ClientRequest, HttpResponse
from protocols.triton import rapidjson
from protocols.triton.errors import ErrorBody, StatusMode, build_type_error
from protocols.triton.formats import JSON_HEADERS, PLAIN_TEXT_HEADERS, encode_json
from protocols.triton.params import Datatype, TritonProfile, select_profile

_SERVER_METADATA: Final = encode_json(
    {
        "name": "triton",
        "version": "2.51.0",
        "extensions": ["model_repository", "model_configuration", "binary_tensor_data",
                       "parameters", "statistics"],
    }
)  # fmt: skip
"""The Triton release that is reproduced, and which of its extensions the gateway has."""

_CONFIG_TYPES: Final[Mapping[Datatype, str]] = {"BYTES": "TYPE_STRING"}


class MetadataTensor(Struct):
    """A tensor in model metadata, with the batch in its shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(Struct):
    """The inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[MetadataTensor]
    outputs: list[MetadataTensor]


class ConfigInput(Struct):
    """An input in a model configuration, without the batch."""

    name: str
    data_type: str
    format: str
    dims: tuple[int, ...]
    optional: bool


class ConfigOutput(Struct):
    """An output in a model configuration."""

    name: str
    data_type: str
    dims: tuple[int, ...]


class ModelIndexEntry(Struct):
    """A model version in the repository index."""

    name: str
    version: str
    state: str
    reason: Any = UNSET


class InfoHandler:
    """Handles the endpoints about the server and its models."""

    def __init__(self, profile: TritonProfile, status: StatusMode) -> None:
        self._profile = profile
        self._status_mode: StatusMode = status
        self._handlers: Mapping[str, Callable[[ClientRequest, Catalog], HttpResponse]] = {
            "server": lambda _call, _catalog: HttpResponse(200, _SERVER_METADATA, JSON_HEADERS),
            "live": lambda _call, _catalog: self._build_state_response(ready=True),
            "ready": lambda _call, catalog: self._build_state_response(ready=catalog.ready),
            "model": self._get_metadata,
            "config": self._get_config,
            "model_ready": self._get_model_ready,
            "model_stats": self._get_model_stats,
            "stats": self._get_stats,
            "index": self._list_index,
            "load": self._load_model,
            "unload": self._unload_model,
            "elsewhere": lambda _call, _catalog: _build_error_response(501, _NO_REPOSITORY_ERROR),
            "memory": lambda _call, _catalog: HttpResponse(200, b"[]", JSON_HEADERS),
        }

    def handle_request(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        """Build the response of the requested endpoint. Raises ClientError."""
        return self._handlers[call.endpoint.operation](call, catalog)

    def _build_state_response(self, *, ready: bool) -> HttpResponse:
        return HttpResponse(200 if ready else 400, b"", self._get_state_headers())

    def _get_state_headers(self) -> tuple[tuple[str, str], ...]:
        return PLAIN_TEXT_HEADERS if self._status_mode == "strict" else JSON_HEADERS

    def _get_metadata(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        model = _find_model(call, catalog)
        profile = select_profile(model, self._profile)
        if not model.ready:
            return _build_unavailable_response(call)
        inputs = [
            MetadataTensor(i.name, i.datatype, profile.build_shape(i.dims))
            for i in profile.inputs.values()
        ]
        outputs = [
            MetadataTensor(o.name, o.datatype, profile.build_shape(o.dims)) for o in profile.outputs
        ]
        versions = [version.name for version in _list_versions(model) if version.ready]
        name = call.path_params["model"]
        return _build_json_response(
            ModelMetadata(name, versions, profile.platform, inputs, outputs)
        )

    def _get_config(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        model = _find_model(call, catalog)
        profile = select_profile(model, self._profile)
        if not model.ready:
            return _build_unavailable_response(call)
        config = {
            "name": call.path_params["model"],
            "platform": "" if profile.backend else profile.platform,
            "backend": profile.backend,
            "max_batch_size": profile.max_batch_size,
            "input": [
                ConfigInput(i.name, _get_config_type(i.datatype), "FORMAT_NONE", i.dims, i.optional)
                for i in profile.inputs.values()
            ],
            "output": [
                ConfigOutput(o.name, _get_config_type(o.datatype), o.dims) for o in profile.outputs
            ],
            "model_transaction_policy": {"decoupled": profile.is_decoupled},
        }
        return _build_json_response(config)

    def _get_model_ready(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        version = call.path_params.get("version")
        try:
            model = catalog.find_model(call.path_params["model"], version)
        except ModelNotFound:
            return self._build_not_ready_response()
        if any(v.ready and (version is None or v.name == version) for v in model.versions):
            return self._build_state_response(ready=True)
        return self._build_not_ready_response()

    def _build_not_ready_response(self) -> HttpResponse:
        body = encode_json(ErrorBody("Model version not ready"))
        return HttpResponse(400, body, self._get_state_headers())

    def _get_model_stats(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        name, version = call.path_params["model"], call.path_params.get("version")
        try:
            model = catalog.find_model(name, version)
        except VersionNotFound:
            text = f"requested model version is not available for model '{name}'"
            return _build_error_response(400, text)
        except ModelNotFound:
            model = None
        if model is None or not model.ready:
            return _build_error_response(400, f"requested model '{name}' is not available")
        return _build_stats_response(
            [(name, v.name) for v in _list_versions(model) if version in {None, v.name}]
        )

    def _get_stats(self, _call: ClientRequest, catalog: Catalog) -> HttpResponse:
        return _build_stats_response(
            [(m.name, v.name) for m in _sort_models(catalog) for v in _list_versions(m) if v.ready]
        )

    def _list_index(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        only_ready = _read_ready_filter(call.body)
        listed = [
            ModelIndexEntry(m.name, v.name, "READY")
            if v.ready
            else ModelIndexEntry(m.name, v.name, "UNAVAILABLE", "no worker can answer")
            for m in _sort_models(catalog)
            for v in _list_versions(m)
            if v.ready or not only_ready
        ]
        return _build_json_response(listed)

    def _load_model(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        name = call.path_params["model"]
        if call.body:
            rapidjson.parse_value(call.body)
        if _is_known_model(catalog, name):
            return _LOAD_NOT_ALLOWED
        text = f"failed to load '{name}', failed to poll from model repository"
        return _build_error_response(500, text)

    def _unload_model(self, call: ClientRequest, catalog: Catalog) -> HttpResponse:
        return (
            _LOAD_NOT_ALLOWED
            if _is_known_model(catalog, call.path_params["model"])
            else HttpResponse(200, b"", JSON_HEADERS)
        )


def _find_model(call: ClientRequest, catalog: Catalog) -> ModelInfo:
    return catalog.find_model(call.path_params["model"], call.path_params.get("version"))


def _build_json_response(value: Any) -> HttpResponse:
    return HttpResponse(200, encode_json(value), JSON_HEADERS)


def _build_error_response(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, encode_json(ErrorBody(text)), JSON_HEADERS)


_LOAD_NOT_ALLOWED: Final = _build_error_response(
    503, "explicit model load / unload is not allowed if polling is enabled"
)
"""The response to load and unload, as of a Triton that polls its model repository."""
_NO_REPOSITORY_ERROR: Final = "'repository_name' specification is not supported"


def _build_unavailable_response(call: ClientRequest) -> HttpResponse:
    name, version = call.path_params["model"], call.path_params.get("version")
    if version is not None:
        text = f"Request for unknown model: '{name}' version {version} is not at ready state"
        return _build_error_response(503, text)
    return _build_error_response(
        404, f"Request for unknown model: '{name}' has no available versions"
    )


def _is_known_model(catalog: Catalog, name: str) -> bool:
    try:
        catalog.find_model(name)
    except ModelNotFound:
        return False
    return True


def _list_versions(model: ModelInfo) -> list[VersionInfo]:
    """Return the versions with a number; a model without any is its own version 1."""
    numbered = [v for v in model.versions if v.name.isascii() and v.name.isdigit()]
    return numbered or [VersionInfo("1", model.name, None, ready=model.ready)]


def _sort_models(catalog: Catalog) -> list[ModelInfo]:
    return sorted(catalog.list_models(), key=lambda model: model.name)


def _get_config_type(datatype: Datatype) -> str:
    return _CONFIG_TYPES.get(datatype, f"TYPE_{datatype}")


def _build_stats_response(versions: list[tuple[str, str]]) -> HttpResponse:
    """Names only: the gateway has no counters of the workers."""
    stats = [{"name": name, "version": version} for name, version in versions]
    return _build_json_response({"model_stats": stats})


def _read_ready_filter(body: bytes) -> bool:
    if not body:
        return False
    filters = rapidjson.parse_value(body)
    ready = filters.get("ready", False) if isinstance(filters, dict) else False
    if not isinstance(ready, bool):
        raise build_type_error("ready", "attempt to access JSON non-boolean as boolean")
    return ready
