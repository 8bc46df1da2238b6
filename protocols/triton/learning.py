"""What is known of a worker's model: from its configuration, or from its family's vocabulary."""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from protocols.triton.vocabulary import TritonProfile

_CONFIG_DATATYPES: Final[Mapping[str, str]] = {"TYPE_STRING": "BYTES"}


class TensorSpec(Struct, frozen=True):
    """An input of the model. ``dims`` is without the batch; -1 is any length."""

    datatype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True


class WorkerModel(Struct, frozen=True):
    """A worker's model, its tensors under the names of the profile."""

    inputs: Mapping[str, TensorSpec]
    outputs: frozenset[str]
    decoupled: bool | None = None
    """Whether it can answer in pieces, where known."""


class _ConfigTensor(Struct):
    name: str
    data_type: str = ""
    dims: tuple[int, ...] = ()
    optional: bool = False


class _TransactionPolicy(Struct):
    decoupled: bool = False


class _ModelConfig(Struct):
    input: list[_ConfigTensor]
    output: list[_ConfigTensor] = field(default_factory=list[_ConfigTensor])
    model_transaction_policy: _TransactionPolicy = field(default_factory=_TransactionPolicy)


_decode_config = msgspec.json.Decoder(_ModelConfig, strict=False).decode


def build_model_from_profile(profile: TritonProfile) -> WorkerModel:
    """The model as every release of its family has it, as far as is known."""
    inputs = {
        name: TensorSpec(one.datatype, one.dims, one.optional)
        for name, one in profile.inputs.items()
    }
    return WorkerModel(inputs, frozenset(one.name for one in profile.outputs))


def parse_model_config(answer: bytes, own: Mapping[str, str]) -> WorkerModel | None:
    """The model that this configuration describes; None if it describes none.

    ``own`` gives the profile's name for a tensor that the model calls by another.
    """
    try:
        config = _decode_config(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inputs = {
        own.get(one.name, one.name): TensorSpec(
            _parse_datatype(one.data_type), one.dims, one.optional
        )
        for one in config.input
    }
    outputs = frozenset(own.get(one.name, one.name) for one in config.output)
    return WorkerModel(inputs, outputs, config.model_transaction_policy.decoupled)


def convert_value(what: Any, slot: TensorSpec) -> Any:
    """The value as the tensor takes it, or UNSET where it does not."""
    several = what if isinstance(what, list) else [what]
    fixed = math.prod(dim for dim in slot.dims if dim > 0)
    free = any(dim < 0 for dim in slot.dims)
    cast = [_convert_element(one, slot.datatype) for one in several]
    if len(cast) % fixed or (len(cast) != fixed and not free) or msgspec.UNSET in cast:
        return msgspec.UNSET
    return cast if isinstance(what, list) else cast[0]


def _parse_datatype(name: str) -> str:
    return _CONFIG_DATATYPES.get(name, name.removeprefix("TYPE_"))


def _convert_element(what: Any, datatype: str) -> Any:
    match datatype, what:
        case "BYTES", str():
            return what
        case "BYTES", _:
            return msgspec.json.encode(what).decode()
        case _, str():
            return msgspec.UNSET
        case "BOOL", _:
            return bool(what)
        case (("FP16" | "BF16" | "FP32" | "FP64"), _):
            return float(what)
        case _ if int(what) == what:
            return int(what)
        case _:
            return msgspec.UNSET
