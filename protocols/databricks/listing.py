"""Serving endpoints as the workspace API lists them.

A public model is an endpoint, and each of its versions a served entity. Times are in milliseconds,
shares in whole percent that add up to 100. Callers who may not see the traffic split get none.

Source: databricks-sdk 0.156, service/serving.py.
"""

import hashlib
from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from protocols.core.catalog import ModelInfo, VersionInfo

_TASKS = {"chat": "llm/v1/chat", "embedding": "llm/v1/embeddings"}
_ENTITY_FAMILY = "databricks"


class _State(Struct):
    ready: str
    config_update: str = "NOT_UPDATING"


class _Deployment(Struct):
    deployment: str
    deployment_state_message: str = ""


class _Foundation(Struct):
    name: str
    display_name: str


class _Entity(Struct):
    name: str
    entity_name: str
    entity_version: str
    creation_timestamp: int
    foundation_model: _Foundation | UnsetType = UNSET
    state: _Deployment | UnsetType = UNSET
    workload_size: str | UnsetType = UNSET
    scale_to_zero_enabled: bool | UnsetType = UNSET


class _Route(Struct):
    served_model_name: str
    served_entity_name: str
    traffic_percentage: int


class _Traffic(Struct):
    routes: list[_Route]


class _Config(Struct):
    served_entities: list[_Entity]
    traffic_config: _Traffic | UnsetType = UNSET
    config_version: int | UnsetType = UNSET


class ServingEndpoint(Struct):
    """One endpoint; the later fields are only set if it is requested by name."""

    name: str
    id: str
    creation_timestamp: int
    last_updated_timestamp: int
    state: _State
    task: str | UnsetType
    """Absent for other tasks, as for models of a customer."""
    config: _Config
    tags: list[dict[str, str]]
    route_optimized: bool | UnsetType = UNSET
    permission_level: str | UnsetType = UNSET


class ServingEndpointList(Struct):
    """The list of endpoints; its key is present even if it is empty."""

    endpoints: list[ServingEndpoint]


class DatabricksModel(Struct):
    """An endpoint as OpenAI's clients list it."""

    id: str
    object: str
    created: int
    owned_by: str = _ENTITY_FAMILY


class DatabricksModelList(Struct):
    """The list of endpoints for OpenAI's clients."""

    object: str
    data: list[DatabricksModel]


def is_pay_per_token(info: ModelInfo) -> bool:
    """Whether the endpoint is one of the service's own, paid per token, or provisioned."""
    return bool(info.protocol_options.get(_ENTITY_FAMILY, {}).get("pay_per_token"))


def build_endpoint_list(models: Sequence[ModelInfo]) -> ServingEndpointList:
    """Every endpoint, without details."""
    return ServingEndpointList([_build_endpoint(info, detailed=False) for info in models])


def build_endpoint_details(info: ModelInfo) -> ServingEndpoint:
    """One endpoint, with its traffic split if the caller may see it."""
    return _build_endpoint(info, detailed=True)


def build_model_list(infos: Sequence[ModelInfo]) -> DatabricksModelList:
    """Every endpoint, as a model."""
    return DatabricksModelList(
        "list", [DatabricksModel(info.name, "model", info.created) for info in infos]
    )


def _build_endpoint(info: ModelInfo, *, detailed: bool) -> ServingEndpoint:
    entities = [_build_entity(info, version, detailed=detailed) for version in info.versions]
    config = _Config(entities)
    if detailed:
        config.traffic_config = _build_traffic(info.versions)
        config.config_version = 1
    created_ms = info.created * 1000
    return ServingEndpoint(
        name=info.name,
        id=hashlib.sha256(info.name.encode()).hexdigest()[:32],
        creation_timestamp=created_ms,
        last_updated_timestamp=created_ms,
        state=_State("READY" if info.ready else "NOT_READY"),
        task=_TASKS.get(info.task, UNSET),
        config=config,
        tags=[],
        route_optimized=False if detailed else UNSET,
        permission_level="CAN_QUERY" if detailed else UNSET,
    )


def _build_entity(info: ModelInfo, version: VersionInfo, *, detailed: bool) -> _Entity:
    entity = _Entity(version.name, version.backend_model, version.name, info.created * 1000)
    if is_pay_per_token(info):
        entity.foundation_model = _Foundation(version.backend_model, version.backend_model)
    if detailed:
        state = "DEPLOYMENT_READY" if version.ready else "DEPLOYMENT_RECOVERING"
        entity.state = _Deployment(state)
        entity.workload_size = "Small"
        entity.scale_to_zero_enabled = False
    return entity


def _build_traffic(versions: Sequence[VersionInfo]) -> _Traffic | UnsetType:
    routes = [
        _Route(version.name, version.name, version.share)
        for version in versions
        if version.share is not None
    ]
    if len(routes) < len(versions):
        return UNSET
    if routes:  # rounded shares may miss 100 by a little: the largest bears it
        largest = max(routes, key=lambda route: route.traffic_percentage)
        largest.traffic_percentage += 100 - sum(route.traffic_percentage for route in routes)
    return _Traffic(routes)
