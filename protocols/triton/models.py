"""What the gateway serves, as the original would list it.

A gateway loads no models and shares no memory: it says so, or says that there is none.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import UNSET, Struct

from gateway.core.catalog import Catalog, ModelInfo, VersionInfo
from gateway.core.errors import ModelNotFound, VersionNotFound
from gateway.core.ports import Call, Reply
from protocols.triton import document, faults
from protocols.triton.refusal import ErrorBody, Status
from protocols.triton.vocabulary import Datatype, Profile
from protocols.triton.wire import JSON, PLAIN, encode

_SERVER: Final = encode(
    {
        "name": "triton",
        "version": "2.51.0",
        "extensions": ["model_repository", "model_configuration", "binary_tensor_data",
                       "parameters", "statistics"],
    }
)  # fmt: skip
"""The release whose words are spoken here, and what of it a gateway has."""

_CONFIG_TYPES: Final[Mapping[Datatype, str]] = {"BYTES": "TYPE_STRING"}


class Tensor(Struct):
    """A tensor as the metadata shows it, with the batch in its shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Metadata(Struct):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class ConfigInput(Struct):
    """An input as the configuration shows it, without the batch."""

    name: str
    data_type: str
    format: str
    dims: tuple[int, ...]
    optional: bool


class ConfigOutput(Struct):
    """An output as the configuration shows it."""

    name: str
    data_type: str
    dims: tuple[int, ...]


class Listed(Struct):
    """A version of a model in the index."""

    name: str
    version: str
    state: str
    reason: Any = UNSET


class Models:
    """Answers the endpoints that ask about the server and its models."""

    def __init__(self, profile: Profile, status: Status) -> None:
        self._profile = profile
        self._status_mode: Status = status
        self._handlers: Mapping[str, Callable[[Call, Catalog], Reply]] = {
            "server": lambda _call, _catalog: Reply(200, _SERVER, JSON),
            "live": lambda _call, _catalog: self._build_state_response(well=True),
            "ready": lambda _call, catalog: self._build_state_response(well=catalog.ready),
            "model": self._get_metadata,
            "config": self._get_config,
            "model_ready": self._get_model_ready,
            "model_stats": self._get_model_stats,
            "stats": self._get_stats,
            "index": self._list_index,
            "load": self._load_model,
            "unload": self._unload_model,
            "elsewhere": lambda _call, _catalog: _error(501, _NO_REPOSITORY),
            "memory": lambda _call, _catalog: Reply(200, b"[]", JSON),
        }

    def handle_request(self, call: Call, catalog: Catalog) -> Reply:
        """The answer of the endpoint that was called. Raises ClientError."""
        return self._handlers[call.endpoint.operation](call, catalog)

    def _build_state_response(self, *, well: bool) -> Reply:
        return Reply(200 if well else 400, b"", self._get_state_headers())

    def _get_state_headers(self) -> tuple[tuple[str, str], ...]:
        return PLAIN if self._status_mode == "strict" else JSON

    def _get_metadata(self, call: Call, catalog: Catalog) -> Reply:
        model, profile = (
            catalog.find_model(call.path_params["model"], call.path_params.get("version")),
            self._profile,
        )
        if not model.ready:
            return _unavailable(call)
        inputs = [
            Tensor(i.name, i.datatype, profile.build_shape(i.dims)) for i in profile.inputs.values()
        ]
        outputs = [Tensor(o.name, o.datatype, profile.build_shape(o.dims)) for o in profile.outputs]
        versions = [one.name for one in _versions(model) if one.ready]
        found = Metadata(call.path_params["model"], versions, profile.platform, inputs, outputs)
        return Reply(200, encode(found), JSON)

    def _get_config(self, call: Call, catalog: Catalog) -> Reply:
        model, profile = (
            catalog.find_model(call.path_params["model"], call.path_params.get("version")),
            self._profile,
        )
        if not model.ready:
            return _unavailable(call)
        found = {
            "name": call.path_params["model"],
            "platform": "" if profile.backend else profile.platform,
            "backend": profile.backend,
            "max_batch_size": profile.max_batch_size,
            "input": [
                ConfigInput(i.name, _config_type(i.datatype), "FORMAT_NONE", i.dims, i.optional)
                for i in profile.inputs.values()
            ],
            "output": [
                ConfigOutput(o.name, _config_type(o.datatype), o.dims) for o in profile.outputs
            ],
            "model_transaction_policy": {"decoupled": not profile.max_batch_size},
        }
        return Reply(200, encode(found), JSON)

    def _get_model_ready(self, call: Call, catalog: Catalog) -> Reply:
        version = call.path_params.get("version")
        try:
            model = catalog.find_model(call.path_params["model"], version)
        except ModelNotFound:
            return self._build_not_ready_response()
        for one in model.versions:
            if one.ready and (version is None or one.name == version):
                return Reply(200, b"", self._get_state_headers())
        return self._build_not_ready_response()

    def _build_not_ready_response(self) -> Reply:
        return Reply(400, encode(ErrorBody("Model version not ready")), self._get_state_headers())

    def _get_model_stats(self, call: Call, catalog: Catalog) -> Reply:
        name, version = call.path_params["model"], call.path_params.get("version")
        try:
            model = catalog.find_model(name, version)
        except VersionNotFound:
            text = f"requested model version is not available for model '{name}'"
            return _error(400, text)
        except ModelNotFound:
            model = None
        if model is None or not model.ready:
            return _error(400, f"requested model '{name}' is not available")
        return _statistics([(name, v.name) for v in _versions(model) if version in {None, v.name}])

    def _get_stats(self, _call: Call, catalog: Catalog) -> Reply:
        return _statistics(
            [(m.name, v.name) for m in _by_name(catalog) for v in _versions(m) if v.ready]
        )

    def _list_index(self, call: Call, catalog: Catalog) -> Reply:
        only_ready = _only_ready(call.body)
        listed = [
            Listed(m.name, v.name, "READY")
            if v.ready
            else Listed(m.name, v.name, "UNAVAILABLE", "no worker can answer")
            for m in _by_name(catalog)
            for v in _versions(m)
            if v.ready or not only_ready
        ]
        return Reply(200, encode(listed), JSON)

    def _load_model(self, call: Call, catalog: Catalog) -> Reply:
        name = call.path_params["model"]
        if call.body:
            document.value(call.body)
        if _known(catalog, name):
            return _REFUSED
        text = f"failed to load '{name}', failed to poll from model repository"
        return _error(500, text)

    def _unload_model(self, call: Call, catalog: Catalog) -> Reply:
        return _REFUSED if _known(catalog, call.path_params["model"]) else Reply(200, b"", JSON)


def _error(status: int, text: str) -> Reply:
    return Reply(status, encode(ErrorBody(text)), JSON)


_REFUSED: Final = _error(503, "explicit model load / unload is not allowed if polling is enabled")
"""What the original says when its own configuration decides what is loaded."""
_NO_REPOSITORY: Final = "'repository_name' specification is not supported"


def _unavailable(call: Call) -> Reply:
    name, version = call.path_params["model"], call.path_params.get("version")
    if version is not None:
        text = f"Request for unknown model: '{name}' version {version} is not at ready state"
        return _error(503, text)
    return _error(404, f"Request for unknown model: '{name}' has no available versions")


def _known(catalog: Catalog, name: str) -> bool:
    try:
        catalog.find_model(name)
    except ModelNotFound:
        return False
    return True


def _versions(model: ModelInfo) -> list[VersionInfo]:
    """The versions that have a number; a model without any is its own first version."""
    numbered = [v for v in model.versions if v.name.isascii() and v.name.isdigit()]
    return numbered or [VersionInfo("1", model.name, 100, ready=model.ready)]


def _by_name(catalog: Catalog) -> list[ModelInfo]:
    return sorted(catalog.list_models(), key=lambda model: model.name)


def _config_type(datatype: Datatype) -> str:
    return _CONFIG_TYPES.get(datatype, f"TYPE_{datatype}")


def _statistics(versions: list[tuple[str, str]]) -> Reply:
    """Names only: the counters are the workers' own, and we have none to show."""
    found = [{"name": name, "version": version} for name, version in versions]
    return Reply(200, encode({"model_stats": found}), JSON)


def _only_ready(body: bytes) -> bool:
    if not body:
        return False
    found = document.value(body)
    ready = found.get("ready", False) if isinstance(found, dict) else False
    if not isinstance(ready, bool):
        raise faults.wrong_type("ready", "attempt to access JSON non-boolean as boolean")
    return ready
