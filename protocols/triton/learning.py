"""What is known of a worker's model: from its configuration, or from its family's vocabulary."""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from protocols.triton.vocabulary import Profile

_TYPES: Final[Mapping[str, str]] = {"TYPE_STRING": "BYTES"}


class Slot(Struct, frozen=True):
    """An input of the model. ``dims`` is without the batch; -1 is any length."""

    datatype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True


class Model(Struct, frozen=True):
    """A worker's model, its tensors under the names of the profile."""

    inputs: Mapping[str, Slot]
    outputs: frozenset[str]
    decoupled: bool | None = None
    """Whether it can answer in pieces, where known."""


class _Tensor(Struct):
    name: str
    data_type: str = ""
    dims: tuple[int, ...] = ()
    optional: bool = False


class _Policy(Struct):
    decoupled: bool = False


class _Config(Struct):
    input: list[_Tensor]
    output: list[_Tensor] = field(default_factory=list[_Tensor])
    model_transaction_policy: _Policy = field(default_factory=_Policy)


_read = msgspec.json.Decoder(_Config, strict=False).decode


def of_profile(profile: Profile) -> Model:
    """The model as every release of its family has it, as far as is known."""
    inputs = {
        name: Slot(one.datatype, one.dims, one.optional) for name, one in profile.inputs.items()
    }
    return Model(inputs, frozenset(one.name for one in profile.outputs))


def of_config(answer: bytes, own: Mapping[str, str]) -> Model | None:
    """The model that this configuration describes; None if it describes none.

    ``own`` gives the profile's name for a tensor that the model calls by another.
    """
    try:
        config = _read(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inputs = {
        own.get(one.name, one.name): Slot(_datatype(one.data_type), one.dims, one.optional)
        for one in config.input
    }
    outputs = frozenset(own.get(one.name, one.name) for one in config.output)
    return Model(inputs, outputs, config.model_transaction_policy.decoupled)


def fit(what: Any, slot: Slot) -> Any:
    """The value as the tensor takes it, or UNSET where it does not."""
    several = what if isinstance(what, list) else [what]
    fixed = math.prod(dim for dim in slot.dims if dim > 0)
    free = any(dim < 0 for dim in slot.dims)
    cast = [_element(one, slot.datatype) for one in several]
    if len(cast) % fixed or (len(cast) != fixed and not free) or msgspec.UNSET in cast:
        return msgspec.UNSET
    return cast if isinstance(what, list) else cast[0]


def _datatype(name: str) -> str:
    return _TYPES.get(name, name.removeprefix("TYPE_"))


def _element(what: Any, datatype: str) -> Any:
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
