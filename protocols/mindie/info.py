"""What the server tells of itself and its models.

What a gateway does not have (a device's memory, a scheduler's slots) stands at the server's own
defaults, since clients read the keys; whether a model can take requests is true. Source:
MindIE-LLM 0695772, parse_protocol.cpp and http_handler.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from protocols.core.catalog import Catalog, ModelInfo
from protocols.core.errors import PathNotFound
from protocols.core.interfaces import ClientRequest, HttpResponse
from protocols.mindie import errors
from protocols.mindie.checks import read_body_fields
from protocols.mindie.profiles import MODEL_NAME_PATTERN, MindieConfig

_encode = msgspec.json.Encoder().encode

_TOTAL_SLOTS: Final = 200
_MAX_BATCH_TOKENS: Final = 8192
_DEFAULT_MAX_SEQUENCE: Final = 2560
_DEFAULT_MAX_ITER_TIMES: Final = 512
_SERVER_NAME: Final = "MindIE Server"


def build_info_response(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """See ``protocols.core.interfaces.ClientAdapter``. Raises ModelNotFound or PathNotFound."""
    return _INFO_HANDLERS[call.endpoint.operation](call, catalog, setup)


def read_path_model(call: ClientRequest) -> str:
    """The model of a path. Raises PathNotFound for what no model may be called."""
    name = call.path_params["model"]
    if not MODEL_NAME_PATTERN.fullmatch(name):
        raise PathNotFound("no endpoint of this path")
    return name


def _build_json_response(told: Any) -> HttpResponse:
    return HttpResponse(200, _encode(told), errors.JSON_HEADERS)


def _find_model(call: ClientRequest, catalog: Catalog) -> ModelInfo:
    return catalog.find_model(read_path_model(call))


def _describe_server(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del call, catalog
    return _build_json_response(
        {
            "name": _SERVER_NAME,
            "version": setup.profile.version,
            "extensions": {
                "max_iter_times": setup.max_iter_times or _DEFAULT_MAX_ITER_TIMES,
                "prefill_policy_type": 0,
                "decode_policy_type": 0,
                "max_prefill_batch_size": 50,
                "max_prefill_tokens": _MAX_BATCH_TOKENS,
            },
        }
    )


def _describe_tensor(name: str) -> dict[str, Any]:
    return {"name": name, "shape": [-1], "datatype": "UINT32"}


def _describe_model(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del setup
    _find_model(call, catalog)
    return _build_json_response(
        {
            "name": call.path_params["model"],
            "platform": _SERVER_NAME,
            "inputs": [_describe_tensor("input0")],
            "outputs": [_describe_tensor("output0")],
        }
    )


def _describe_model_config(
    call: ClientRequest, catalog: Catalog, setup: MindieConfig
) -> HttpResponse:
    del setup
    model = _find_model(call, catalog)
    return _build_json_response(
        {
            "model_name": call.path_params["model"],
            "input_datatype": "INT64",
            "output_datatype": "INT64",
            "max_seq_len": model.context_length or _DEFAULT_MAX_SEQUENCE,
            "npu_mem_size": -1,
            "cpu_mem_size": 0,
            "world_size": 1,
            "model_weight_path": model.name,
            "model_instance_type": "Standard",
        }
    )


def _describe_slots(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """A model that can't take requests has no free slot."""
    del setup
    model = _find_model(call, catalog)
    free = model.ready and catalog.ready
    return _build_json_response(
        {
            "total_slots": _TOTAL_SLOTS,
            "free_slots": _TOTAL_SLOTS if free else 0,
            "available_tokens_length": (model.context_length or _DEFAULT_MAX_SEQUENCE)
            * _TOTAL_SLOTS
            if free
            else 0,
        }
    )


def _describe_server_info(
    call: ClientRequest, catalog: Catalog, setup: MindieConfig
) -> HttpResponse:
    del call
    models = catalog.list_models()
    return _build_json_response(
        {
            "docker_label": None,
            "max_batch_total_tokens": _MAX_BATCH_TOKENS,
            "max_best_of": 1,
            "max_concurrent_requests": _TOTAL_SLOTS,
            "max_stop_sequences": None,
            "max_waiting_tokens": None,
            "sha": None,
            "validation_workers": None,
            "version": setup.profile.version,
            "waiting_served_ratio": None,
            "models": [_describe_info_model(model) for model in models],
            "max_input_length": max(
                (m.context_length or _DEFAULT_MAX_SEQUENCE for m in models),
                default=_DEFAULT_MAX_SEQUENCE,
            ),
        }
    )


def _describe_info_model(model: ModelInfo) -> dict[str, Any]:
    return {
        "model_device_type": "npu",
        "model_dtype": "float16",
        "model_id": model.name,
        "model_pipeline_tag": "text-generation",
        "model_sha": None,
        "max_total_tokens": model.context_length or _DEFAULT_MAX_SEQUENCE,
    }


def _build_model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": _SERVER_NAME}


def _list_models(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del call, setup
    data = [_build_model_card(model.name, model.created) for model in catalog.list_models()]
    return _build_json_response({"object": "list", "data": data})


def _get_model_card(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    del setup
    return _build_json_response(
        _build_model_card(call.path_params["model"], _find_model(call, catalog).created)
    )


def _check_live(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """Alive until it is told to stop: restarting a gateway mends no worker."""
    del call, setup
    return (
        errors.build_empty_response(200)
        if catalog.ready
        else errors.build_status_response(503, errors.SERVICE_STOPPED)
    )


def _check_ready(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """Ready when some model is; until then, as while an engine starts, 503 with no body."""
    if not catalog.ready or any(model.ready for model in catalog.list_models()):
        return _check_live(call, catalog, setup)
    return errors.build_empty_response(503)


def _check_model_ready(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    if not catalog.ready or _find_model(call, catalog).ready:
        return _check_live(call, catalog, setup)
    return errors.build_empty_response(503)


def _confirm_stop(call: ClientRequest, catalog: Catalog, setup: MindieConfig) -> HttpResponse:
    """A request that was stopped: the body says it back."""
    del catalog, setup
    return _build_json_response(dict(read_body_fields(call)))


_INFO_HANDLERS: Mapping[str, Callable[[ClientRequest, Catalog, MindieConfig], HttpResponse]] = {
    "server": _describe_server,
    "metadata": _describe_model,
    "config": _describe_model_config,
    "slots": _describe_slots,
    "info": _describe_server_info,
    "models": _list_models,
    "model": _get_model_card,
    "live": _check_live,
    "ready": _check_ready,
    "model_ready": _check_model_ready,
    "stop": _confirm_stop,
}
