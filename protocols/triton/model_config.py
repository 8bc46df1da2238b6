"""A worker's model: which parameters of a request are tensors, and which are request parameters."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, field, structs

from protocols import params
from protocols.core import loss
from protocols.core.json_text import JsonDecoder
from protocols.core.loss import ParameterSupport, UnsupportedParameter
from protocols.core.request import GenerationRequest
from protocols.json_body import JSON_ERRORS
from protocols.params import Param, ParamTable
from protocols.triton import output_format
from protocols.triton.params import GUIDE_PARAM_NAMES, PROMPT_INPUT, TritonProfile
from protocols.triton.tensors import INTEGER_RANGES

# What is known of a model: from its configuration, or from the profile of its family.

_CONFIG_DATATYPES: Final[Mapping[str, str]] = {"TYPE_STRING": "BYTES"}


class TensorSpec(Struct, frozen=True):
    """An input of the model. ``dims`` is without the batch; -1 is any length."""

    datatype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    shape: tuple[int, ...] | None = None
    """The shape with the batch, if known."""


class WorkerModel(Struct, frozen=True):
    """A worker's model; its tensors have the profile's names."""

    inputs: Mapping[str, TensorSpec]
    outputs: frozenset[str]
    decoupled: bool | None = None
    """Whether the model is decoupled (can stream); None if unknown."""
    is_known: bool = False
    """Whether the worker described it; otherwise it is the profile's."""
    has_generate: bool = True
    """Whether its server has the generate extension."""
    streams_always: bool = False
    """Whether it refuses generate, whatever the flags are."""


class _ConfigTensor(Struct):
    name: str
    data_type: str = ""
    dims: tuple[int, ...] = ()
    optional: bool = False


class _TransactionPolicy(Struct):
    decoupled: bool = False


class _MetadataTensor(Struct):
    name: str
    datatype: str = ""
    shape: tuple[int, ...] = ()


class _ModelMetadata(Struct):
    inputs: list[_MetadataTensor]
    outputs: list[_MetadataTensor] = field(default_factory=list[_MetadataTensor])


class _ModelConfig(Struct):
    input: list[_ConfigTensor]
    output: list[_ConfigTensor] = field(default_factory=list[_ConfigTensor])
    model_transaction_policy: _TransactionPolicy = field(default_factory=_TransactionPolicy)
    max_batch_size: int = 0


_decode_config = JsonDecoder(_ModelConfig, strict=False).decode
_decode_metadata = JsonDecoder(_ModelMetadata, strict=False).decode


def build_model_from_profile(profile: TritonProfile) -> WorkerModel:
    """Return the model that every release of a family has, as far as known."""
    inputs = {
        name: TensorSpec(one.datatype, one.dims, one.optional)
        for name, one in profile.inputs.items()
    }
    return WorkerModel(inputs, frozenset(one.name for one in profile.outputs))


def parse_model_config(body: bytes, profile_names: Mapping[str, str]) -> WorkerModel | None:
    """Read a model configuration; None if it describes no model.

    ``profile_names`` maps a model's own tensor name to the profile's name.
    """
    try:
        config = _decode_config(body)
    except JSON_ERRORS:
        return None
    inputs = {
        profile_names.get(tensor.name, tensor.name): TensorSpec(
            _parse_datatype(tensor.data_type),
            tensor.dims,
            tensor.optional,
            (-1, *tensor.dims) if config.max_batch_size else tensor.dims,
        )
        for tensor in config.input
    }
    outputs = frozenset(profile_names.get(tensor.name, tensor.name) for tensor in config.output)
    decoupled = config.model_transaction_policy.decoupled
    return WorkerModel(inputs, outputs, decoupled, is_known=True)


def parse_model_metadata(body: bytes, profile_names: Mapping[str, str]) -> WorkerModel | None:
    """The same of metadata, which every V2 server has; None if it describes no model.

    A server without configurations is no Triton, so it has no generate extension either.
    """
    try:
        metadata = _decode_metadata(body)
    except JSON_ERRORS:
        return None
    inputs = {
        profile_names.get(tensor.name, tensor.name): TensorSpec(tensor.datatype, shape=tensor.shape)
        for tensor in metadata.inputs
    }
    outputs = frozenset(profile_names.get(tensor.name, tensor.name) for tensor in metadata.outputs)
    return WorkerModel(inputs, outputs, decoupled=False, is_known=True, has_generate=False)


def convert_value(value: Any, tensor: TensorSpec) -> Any:
    """Convert a value to the tensor's type; UNSET if that is impossible."""
    elements = value if isinstance(value, list) else [value]
    fixed_size = math.prod(dim for dim in tensor.dims if dim > 0)
    has_free_dim = any(dim < 0 for dim in tensor.dims)
    converted = [_convert_element(element, tensor.datatype) for element in elements]
    count = len(converted)
    if count % fixed_size or (count != fixed_size and not has_free_dim) or UNSET in converted:
        return UNSET
    return converted if isinstance(value, list) else converted[0]


def _parse_datatype(name: str) -> str:
    return _CONFIG_DATATYPES.get(name, name.removeprefix("TYPE_"))


def _convert_element(value: Any, datatype: str) -> Any:
    match datatype, value:
        case "BYTES", str():
            return value
        case "BYTES", _:
            return msgspec.json.encode(value).decode()
        case _, str():
            return UNSET
        case "BOOL", _:
            return bool(value)
        case (("FP16" | "BF16" | "FP32" | "FP64"), _):
            return float(value)
        case _ if int(value) == value:
            return int(value)
        case _:
            return UNSET


PACKED_PARAMETERS: Final = "sampling_parameters"
"""The tensor that takes all parameters as JSON."""
_EXCLUDE_FLAG: Final = "exclude_input_in_output"
_MIN_POSITIVE: Final = 1e-6
"""The smallest top_p, in place of a 0 that is rejected."""
_MAX_TOKENS_FIELD: Final = "stopping.max_tokens"
_TEMPERATURE_FIELD: Final = "sampling.temperature"
_TOP_LOGPROBS_FIELD: Final = "logprobs.top"
_LOGPROB_OUTPUTS: Final = ("logprobs", "output_log_probs")
_CUMULATIVE_OUTPUTS: Final = ("cumulative_logprob", "cum_log_probs")
"""Outputs from which the gateway reads each token's probability."""
_LIST_TYPES: Final = ("strings", "string list", "ints")
"""Parameter types whose values are lists."""
_REPORTING_OUTPUTS: Final = (
    "finish_reason",
    "stop_reason",
    "num_input_tokens",
    "num_output_tokens",
)
"""Outputs that are always requested: finish reason and token counts."""


class RequestPayload(Struct, frozen=True):
    """The body without the prompt: the model's tensors, and the request parameters."""

    tensors: dict[str, Any]
    parameters: dict[str, Any]


class ModelAdapter:
    """Plans requests for ``model`` of the family ``profile``.

    ``max_tokens`` is for a model that requires it. ``prompt_support`` is the parameter support
    of the prompt.
    """

    def __init__(
        self,
        profile: TritonProfile,
        model: WorkerModel,
        max_tokens: int,
        prompt_support: Mapping[str, ParameterSupport],
    ) -> None:
        self.model = model
        self.packs_parameters = PACKED_PARAMETERS in model.inputs
        flag = _find_first_input(profile.stream_flags, model) or (
            profile.stream_flags[0] if profile.streams_by_default else None
        )
        may_stream = bool(model.decoupled) and flag not in model.inputs
        self._streams_by_default = model.streams_always or may_stream
        """Whether the model may stream without a flag."""
        self._exclude_flag = _find_first_input(
            (*profile.exclude_prompt_flags, _EXCLUDE_FLAG), model
        )
        self._reports_finish_reason = any(
            one.name == "finish_reason" and one.name in model.outputs and one.flag in model.inputs
            for one in profile.outputs
        )
        self._profile = profile
        self._logprobs_flag = _find_logprobs_flag(profile, model)
        self._reporting_flags = tuple(
            str(one.flag)
            for one in profile.outputs
            if one.name in _REPORTING_OUTPUTS and one.flag in model.inputs
        )
        constant_flags = dict.fromkeys(
            filter(None, (self._exclude_flag, *self._reporting_flags)), True
        )
        self._stream_flags: Mapping[bool, Mapping[str, Any]] = {
            streams: {**({} if flag is None else {flag: streams}), **constant_flags}
            for streams in (False, True)
        }
        """The flags of a request, by whether it streams."""
        self._params = ParamTable(*self._iter_params())
        self._fallible_params = ParamTable(
            *[row for row in self._params if self._can_fail_conversion(row)]
        )
        self._converted_fields = frozenset(
            row.field for row in self._params if not self._is_sent_unchanged(row)
        )
        """Paths whose values may be converted, or sent as tensors."""
        self._parameter_support = {**self._build_parameter_support(), **prompt_support}
        is_required = any(
            row.field == _MAX_TOKENS_FIELD
            and row.wire in model.inputs
            and not model.inputs[row.wire].optional
            for row in self._params
        )
        self._default_max_tokens = max_tokens if is_required else None
        self._reserved_names = {
            PROMPT_INPUT, PACKED_PARAMETERS, _EXCLUDE_FLAG, "id", "parameters", profile.cancel_flag,
            *profile.stream_flags, *profile.exclude_prompt_flags,
            *GUIDE_PARAM_NAMES[profile.guide_style],
            *(row.wire for row in profile.parameters),
        }  # fmt: skip
        """Names with a meaning here, which extra fields of another family may not use."""

    def is_streaming(self, request: GenerationRequest) -> bool:
        """Whether the request sets the flag for streaming."""
        return request.stream and self.model.decoupled is not False

    def uses_events(self, request: GenerationRequest) -> bool:
        """Whether to use generate_stream.

        Also if the model may stream anyway: generate would fail then.
        """
        return request.stream or self._streams_by_default

    def list_reported_outputs(self, tensors: Collection[str]) -> list[str]:
        """The outputs beside the text that flags among these tensors ask for."""
        return [one.name for one in self._profile.outputs if one.flag in tensors]

    def must_cut_prompt(self, request: GenerationRequest) -> bool:
        """Whether the response may start with the prompt, which is then removed."""
        return (
            self._profile.echoes_prompt
            and self._exclude_flag is None
            and not self.is_streaming(request)
        )

    def may_be_empty(self, request: GenerationRequest) -> bool:
        """Whether a body without events is a valid response: a model may generate no text.

        If finish reasons were requested, the model must report them, unless max_tokens is 0.
        """
        silent = request.stopping.max_tokens == 0 or not self._reports_finish_reason
        return self.uses_events(request) and silent

    def build_payload(self, request: GenerationRequest) -> RequestPayload:
        """Return the tensors and parameters of the request that the model accepts."""
        inputs = self.model.inputs
        tensors = {**self._stream_flags[self.is_streaming(request)]}
        if request.logprobs is not None and self._logprobs_flag is not None:
            tensors[self._logprobs_flag] = True
        values, forced = request.set_fields, self._get_forced_values(request)
        if not forced and self._converted_fields.isdisjoint(values):
            parameters = params.write_params(self._params, values)
        else:
            parameters = {}
            for row, value in self._convert_values(values, forced, self._params):
                if value is not UNSET:
                    (tensors if row.wire in inputs else parameters)[row.wire] = value
        if request.output is not None or request.extra:
            for name, value in self._iter_extra_fields(request):
                (tensors if name in inputs else parameters)[name] = value
        return RequestPayload(tensors, parameters)

    def _iter_extra_fields(self, request: GenerationRequest) -> Iterator[tuple[str, Any]]:
        """Return values without a table row: output format and extra fields."""
        yield from self._write_guide(request).items()
        for name, raw in request.extra.items():
            if self._is_forwarded(name, raw, request):
                yield name, raw

    def find_unsupported_parameters(
        self, request: GenerationRequest, names: Mapping[str, str]
    ) -> list[UnsupportedParameter]:
        """Return the parameters that the model does not support, or approximates."""
        support = self._get_parameter_support(request)
        unsupported = [*loss.find_unsupported_parameters(request, support, names, extra=True)]
        if self._default_max_tokens is not None and request.stopping.max_tokens is None:
            detail = f"the model needs one: {self._default_max_tokens}"
            wire = names.get(_MAX_TOKENS_FIELD, "max_tokens")
            unsupported.append(UnsupportedParameter(wire, "defaulted", detail, _MAX_TOKENS_FIELD))
        if request.extra:
            unsupported += self._find_ignored_fields(request)
        return unsupported

    def _find_ignored_fields(self, request: GenerationRequest) -> list[UnsupportedParameter]:
        """Return the client's extra fields that are dropped."""
        used = set(self._list_flags(request))
        if self._logprobs_flag in used:
            used |= {
                str(one.flag) for one in self._profile.outputs if one.name in _CUMULATIVE_OUTPUTS
            }
        return [
            UnsupportedParameter(name, "dropped")
            for name, raw in request.extra.items()
            if name not in used and not self._is_forwarded(name, raw, request)
        ]

    # --- the table --------------------------------------------------------------------------------

    def _iter_params(self) -> Iterator[Param]:
        """Return the rows that this model has, limited to its tensors' ranges."""
        uncertain_types = set() if self.packs_parameters else {"string list", "ints"}
        for row in self._profile.parameters:
            if (
                row.wire in self._profile.removed_params
                or row.field == "logprobs.prompt"
                or (row.field == _TOP_LOGPROBS_FIELD and not self._logprobs_flag)
            ):
                continue
            tensor = self.model.inputs.get(row.wire)
            if tensor is not None:
                yield self._limit_param(row, tensor.datatype)
            elif row.wire in self._profile.inputs or row.type in uncertain_types:
                continue
            elif self.packs_parameters or row.field != "n":  # ignoring n returns one choice
                yield self._limit_param(row, "INT64")

    def _limit_param(self, row: Param, datatype: str) -> Param:
        if row.field == "stopping.stop" and self._profile.keeps_stop_strings:
            return structs.replace(row, loss_reason="approximated")
        if row.type == "float":
            is_positive = row.exclusive_minimum or 0 in row.disabled_values
            return structs.replace(row, minimum=_MIN_POSITIVE) if is_positive else row
        bounds = INTEGER_RANGES.get(datatype)
        if bounds is None or row.type != "int":
            return row
        low = bounds.start if row.minimum is None else max(row.minimum, bounds.start)
        high = bounds.stop - 1 if row.maximum is None else min(row.maximum, bounds.stop - 1)
        return structs.replace(row, minimum=low, maximum=high)

    def _can_fail_conversion(self, row: Param) -> bool:
        """Whether the model may reject a value of this row."""
        return row.wire in self.model.inputs or (
            row.type in _LIST_TYPES and not self.packs_parameters
        )

    def _is_sent_unchanged(self, row: Param) -> bool:
        """Whether any value in the row's range is sent unchanged."""
        listed = row.type in _LIST_TYPES and not self.packs_parameters
        return row.wire not in self.model.inputs and not listed

    def _build_parameter_support(self) -> dict[str, ParameterSupport]:
        """Build the parameter support of any request."""
        support = params.build_parameter_support(self._params)
        if _TEMPERATURE_FIELD in support:
            support["sampling.do_sample"] = ParameterSupport("")
        if _TOP_LOGPROBS_FIELD not in support and self._logprobs_flag is not None:
            support[_TOP_LOGPROBS_FIELD] = ParameterSupport("", reason="approximated")
        return support

    # --- one request ------------------------------------------------------------------------------

    def _get_forced_values(self, request: GenerationRequest) -> dict[str, Any]:
        """Return values that replace or add to those of the request, by path."""
        forced: dict[str, Any] = {}
        if self._default_max_tokens is not None and request.stopping.max_tokens is None:
            forced[_MAX_TOKENS_FIELD] = self._default_max_tokens
        if request.sampling.do_sample is False:
            forced[_TEMPERATURE_FIELD] = 0.0
        return forced

    def _convert_values(
        self, values: Mapping[str, Any], forced: Mapping[str, Any], rows: ParamTable
    ) -> list[tuple[Param, Any]]:
        """Return the value of each row; UNSET if the model cannot accept it."""
        values = {**values, **forced}
        return [
            (row, self._convert_value(row, values[row.field], exact=row.field in forced))
            if row.field in self._converted_fields or row.field in forced
            else (row, params.clamp_value(row, values[row.field]))
            for row in params.select_by_field(rows, values)
        ]

    def _convert_value(self, row: Param, value: Any, *, exact: bool) -> Any:
        value = value if exact else params.clamp_value(row, value)
        tensor = self.model.inputs.get(row.wire)
        if tensor is not None:
            return convert_value(value, tensor)
        if isinstance(value, list) and not self.packs_parameters:
            return value[0] if len(value) == 1 else UNSET
        return value

    def _write_guide(self, request: GenerationRequest) -> Mapping[str, str]:
        """Return the guide parameters, if the model has all of them."""
        if request.output is None:
            return {}
        guide = output_format.write_output_format(request.output, self._profile.guide_style)
        accepted = self._profile.accepts_extra_params or guide.keys() <= self.model.inputs.keys()
        return guide if accepted else {}

    def _list_flags(self, request: GenerationRequest) -> tuple[str, ...]:
        """Return the flags for outputs that the response needs."""
        if request.logprobs is None or self._logprobs_flag is None:
            return self._reporting_flags
        return (*self._reporting_flags, self._logprobs_flag)

    def _get_parameter_support(self, request: GenerationRequest) -> Mapping[str, ParameterSupport]:
        """Build the parameter support of this request."""
        more = {}
        if request.output is not None and self._write_guide(request):
            more["output"] = ParameterSupport("")
        if request.stopping.overflow == "error":
            more["stopping.overflow"] = ParameterSupport("")
        rejected: set[str] = set()
        if self._fallible_params:
            forced = self._get_forced_values(request)
            values = self._convert_values(request.set_fields, forced, self._fallible_params)
            rejected = {row.field for row, value in values if value is UNSET}
        if not more and not rejected:
            return self._parameter_support
        supports = self._parameter_support | more
        return {path: support for path, support in supports.items() if path not in rejected}

    def _is_forwarded(self, name: str, raw: Raw, request: GenerationRequest) -> bool:
        """Whether an extra field is sent: only to a worker of the same profile that accepts it."""
        if request.source != "triton" or name in self._reserved_names or name.startswith("return_"):
            return False
        if name in self.model.inputs:
            return True
        scalar = not bytes(raw).startswith((b"[", b"{", b"null"))
        accepted = self._profile.accepts_extra_params and name not in self._profile.inputs
        return accepted and (self.packs_parameters or scalar)


def _find_first_input(names: tuple[str, ...], model: WorkerModel) -> str | None:
    return next((name for name in names if name in model.inputs), None)


def _find_logprobs_flag(profile: TritonProfile, model: WorkerModel) -> str | None:
    """Return the flag for token probabilities, if the model has one."""
    for spec in profile.outputs:
        name = spec.name
        if name in _LOGPROB_OUTPUTS and name in model.outputs and spec.flag in model.inputs:
            return spec.flag
    return None
