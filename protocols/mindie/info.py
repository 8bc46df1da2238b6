"""What the server tells of itself and its models.

What a gateway does not have (a device's memory, a scheduler's slots) stands at the server's own
defaults, since clients read the keys; whether a model can take requests is true. Source:
MindIE-LLM 0695772, parse_protocol.cpp and http_handler.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gateway.core.catalog import Catalog, ModelInfo
from gateway.core.errors import PathNotFound
from gateway.core.ports import Call, Reply
from protocols.mindie import errors
from protocols.mindie.checks import body
from protocols.mindie.profiles import MODEL, Setup

_encode = msgspec.json.Encoder().encode

_SLOTS: Final = 200
_BLOCK_TOKENS: Final = 8192
_SEQUENCE: Final = 2560
_MAX_ITER_TIMES: Final = 512
_OWNER: Final = "MindIE Server"


def inform(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    """See ``gateway.core.ports.Dialect``. Raises ModelNotFound or PathNotFound."""
    return _ANSWERS[call.endpoint.operation](call, catalog, setup)


def model_name(call: Call) -> str:
    """The model of a path. Raises PathNotFound for what no model may be called."""
    name = call.path_params["model"]
    if not MODEL.fullmatch(name):
        raise PathNotFound("no endpoint of this path")
    return name


def _told(told: Any) -> Reply:
    return Reply(200, _encode(told), errors.JSON)


def _model(call: Call, catalog: Catalog) -> ModelInfo:
    return catalog.find_model(model_name(call))


def _server(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    del call, catalog
    return _told(
        {
            "name": _OWNER,
            "version": setup.profile.version,
            "extensions": {
                "max_iter_times": setup.max_iter_times or _MAX_ITER_TIMES,
                "prefill_policy_type": 0,
                "decode_policy_type": 0,
                "max_prefill_batch_size": 50,
                "max_prefill_tokens": _BLOCK_TOKENS,
            },
        }
    )


def _tensor(name: str) -> dict[str, Any]:
    return {"name": name, "shape": [-1], "datatype": "UINT32"}


def _metadata(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    del setup
    _model(call, catalog)
    return _told(
        {
            "name": call.path_params["model"],
            "platform": _OWNER,
            "inputs": [_tensor("input0")],
            "outputs": [_tensor("output0")],
        }
    )


def _config(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    del setup
    model = _model(call, catalog)
    return _told(
        {
            "model_name": call.path_params["model"],
            "input_datatype": "INT64",
            "output_datatype": "INT64",
            "max_seq_len": model.context_length or _SEQUENCE,
            "npu_mem_size": -1,
            "cpu_mem_size": 0,
            "world_size": 1,
            "model_weight_path": model.name,
            "model_instance_type": "Standard",
        }
    )


def _slots(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    """A model that can't take requests has no free slot."""
    del setup
    model = _model(call, catalog)
    free = model.ready and catalog.ready
    return _told(
        {
            "total_slots": _SLOTS,
            "free_slots": _SLOTS if free else 0,
            "available_tokens_length": (model.context_length or _SEQUENCE) * _SLOTS if free else 0,
        }
    )


def _info(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    del call
    models = catalog.list_models()
    return _told(
        {
            "docker_label": None,
            "max_batch_total_tokens": _BLOCK_TOKENS,
            "max_best_of": 1,
            "max_concurrent_requests": _SLOTS,
            "max_stop_sequences": None,
            "max_waiting_tokens": None,
            "sha": None,
            "validation_workers": None,
            "version": setup.profile.version,
            "waiting_served_ratio": None,
            "models": [_info_of(model) for model in models],
            "max_input_length": max(
                (m.context_length or _SEQUENCE for m in models), default=_SEQUENCE
            ),
        }
    )


def _info_of(model: ModelInfo) -> dict[str, Any]:
    return {
        "model_device_type": "npu",
        "model_dtype": "float16",
        "model_id": model.name,
        "model_pipeline_tag": "text-generation",
        "model_sha": None,
        "max_total_tokens": model.context_length or _SEQUENCE,
    }


def _listed(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": _OWNER}


def _list(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    del call, setup
    data = [_listed(model.name, model.created) for model in catalog.list_models()]
    return _told({"object": "list", "data": data})


def _one(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    del setup
    return _told(_listed(call.path_params["model"], _model(call, catalog).created))


def _live(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    """Alive until it is told to stop: restarting a gateway mends no worker."""
    del call, setup
    return errors.nothing(200) if catalog.ready else errors.told(503, errors.STOPPED)


def _ready(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    """Ready when some model is; until then, as while an engine starts, 503 with no body."""
    if not catalog.ready or any(model.ready for model in catalog.list_models()):
        return _live(call, catalog, setup)
    return errors.nothing(503)


def _model_ready(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    if not catalog.ready or _model(call, catalog).ready:
        return _live(call, catalog, setup)
    return errors.nothing(503)


def _stopped(call: Call, catalog: Catalog, setup: Setup) -> Reply:
    """A request that was stopped: the body says it back."""
    del catalog, setup
    return _told(dict(body(call)))


_ANSWERS: Mapping[str, Callable[[Call, Catalog, Setup], Reply]] = {
    "server": _server,
    "metadata": _metadata,
    "config": _config,
    "slots": _slots,
    "info": _info,
    "models": _list,
    "model": _one,
    "live": _live,
    "ready": _ready,
    "model_ready": _model_ready,
    "stop": _stopped,
}
