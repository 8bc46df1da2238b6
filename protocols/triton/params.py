"""Profiles: the inputs, outputs and parameters of each model family.

The protocol itself has only the fields ``id`` and ``parameters``: every other name is a model's.
A profile describes one family of models, from the configurations that their backends publish.
``Profile.parameters`` is the table for ``protocols.params``, for both directions.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from protocols.core.catalog import ModelInfo, ModelTask
from protocols.core.request_headers import RequestHeaders
from protocols.core.stateful import StatefulField
from protocols.params import Param, ParamTable

Datatype = Literal["BYTES", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32"]

REQUEST_HEADERS: Final = RequestHeaders(("triton-",), {"endpoint-load-metrics-format": "reported"})
"""The server's load in a header of the response is of one worker, whose names clients don't see."""
PROMPT_INPUT: Final = "text_input"
TEXT_OUTPUT: Final = "text_output"


GUIDE_OBJECT_PARAMS: Final = ("structured_outputs", "guided_decoding")
"""Parameters whose value is the JSON text of an object with one guide."""
GUIDE_TYPE: Final = "guided_decoding_guide_type"
GUIDE_TEXT: Final = "guided_decoding_guide"
GUIDE_PARAM_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "object": GUIDE_OBJECT_PARAMS,
    "pair": (GUIDE_TYPE, GUIDE_TEXT),
}
"""The parameters of an output format, by ``Profile.guide_style``."""


class InputSpec(Struct, frozen=True):
    """An input tensor of the model. ``dims`` is without the batch; -1 is any length."""

    name: str
    datatype: Datatype
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    is_counted: bool = True
    """Whether the error for missing inputs counts it."""


class OutputSpec(Struct, frozen=True):
    """An output tensor of the model: always sent, or if the input ``flag`` is true."""

    name: str
    datatype: Datatype
    flag: str | None = None
    dims: tuple[int, ...] = (-1,)


class TritonProfile(Struct, frozen=True, kw_only=True, dict=True):
    """The inputs, outputs and parameters of one model family."""

    name: str
    platform: str
    backend: str
    inputs: Mapping[str, InputSpec]
    outputs: tuple[OutputSpec, ...]
    parameters: ParamTable
    stream_flags: tuple[str, ...] = ("stream",)
    """The flags that request a stream; without them generate_stream returns one event."""
    streams_by_default: bool = False
    """Whether generate_stream streams if no flag is sent."""
    exclude_prompt_flags: tuple[str, ...] = ()
    """The flags that remove the prompt from the response."""
    echoes_prompt: bool = False
    """Whether a unary response starts with the prompt by default. No stream does."""
    rejects_stream_echo: bool = False
    """Whether requesting the prompt in a stream is an error."""
    coerces_params: bool = False
    """Whether parameters are converted as by Python's constructors: "5" to 5."""
    cancel_flag: str = ""
    """The flag that lets a second request cancel the first; the gateway rejects it."""
    error_prefix: str = ""
    """The prefix of the model's error texts."""
    guide_style: Literal["none", "object", "pair"] = "none"
    """How an output format is requested: see ``GUIDE_PARAM_NAMES``."""
    max_batch_size: int = 0
    """The maximum number of prompts in a request; 0: no batches, and shapes without a batch."""
    accepts_extra_params: bool = False
    """As a worker: whether its models read parameters that are not their tensors."""
    keeps_stop_strings: bool = False
    """As a worker: whether a stop string may stay in the text."""
    removed_params: tuple[str, ...] = ()
    """As a worker: parameters that current releases reject."""

    @cached_property
    def is_decoupled(self) -> bool:
        """Whether the model may answer with several responses: a stream."""
        return not self.max_batch_size and PROMPT_INPUT in self.inputs

    @cached_property
    def required_inputs(self) -> tuple[str, ...]:
        """The inputs that every request needs."""
        return tuple(one.name for one in self.inputs.values() if not one.optional)

    @cached_property
    def output_flags(self) -> frozenset[str]:
        """The inputs that request an output."""
        return frozenset(one.flag for one in self.outputs if one.flag is not None)

    @cached_property
    def fields_without_row(self) -> frozenset[str]:
        """The fields that are in no table, and have a meaning."""
        guides = GUIDE_PARAM_NAMES[self.guide_style]
        flags = (*self.stream_flags, *self.exclude_prompt_flags, *self.output_flags)
        return frozenset((*flags, *guides))

    @cached_property
    def input_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each input."""
        return {name: self.build_shape(one.dims) for name, one in self.inputs.items()}

    def build_shape(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Build the whole shape, with the batch if the model supports batches."""
        return (-1, *dims) if self.max_batch_size else dims


def index_inputs(*inputs: InputSpec) -> Mapping[str, InputSpec]:
    """Return inputs by name, in order."""
    return {one.name: one for one in inputs}


_PROMPT_SPEC: Final = InputSpec(PROMPT_INPUT, "BYTES", optional=False)
_TEXT_SPEC: Final = OutputSpec(TEXT_OUTPUT, "BYTES")

_MAX_CHOICES: Final = 128
"""The maximum number of choices. Each event lists all of them, so size grows quadratically."""

_SAMPLING_PARAMS: Final = (
    Param("max_tokens", "stopping.max_tokens", "int", 0),
    Param("min_tokens", "stopping.min_tokens", "int", 0, default=0),
    Param("temperature", "sampling.temperature", "float", 0, default=1.0),
    Param("top_p", "sampling.top_p", "float", 0, 1, exclusive_minimum=True),
    Param("top_k", "sampling.top_k", "int", -1, disabled_values=(0, -1)),
    Param("min_p", "sampling.min_p", "float", 0, 1),
    Param("seed", "sampling.seed", "int", -(2**63), 2**64 - 1),
    Param("presence_penalty", "sampling.presence_penalty", "float", -2, 2),
    Param("frequency_penalty", "sampling.frequency_penalty", "float", -2, 2),
    Param("repetition_penalty", "sampling.repetition_penalty", "float", 0, exclusive_minimum=True),
    Param("length_penalty", "sampling.length_penalty", "float"),
    Param("stop", "stopping.stop", "strings"),
    Param("n", "n", "int", 1, _MAX_CHOICES, default=1),
    Param("best_of", "best_of", "int", 1, _MAX_CHOICES),
)
"""The sampling parameters of all Python backends."""

_VLLM_PARAMS: Final = (
    Param("stop_token_ids", "stopping.stop_token_ids", "ints"),
    Param("bad_words", "sampling.bad_words", "string list"),
    Param("allowed_token_ids", "sampling.allowed_token_ids", "ints"),
    Param("ignore_eos", "stopping.ignore_eos", "bool", default=False),
    Param("include_stop_str_in_output", "stopping.include_stop", "bool"),
    Param("skip_special_tokens", "stopping.skip_special_tokens", "bool"),
    Param("spaces_between_special_tokens", "stopping.spaces_between_special_tokens", "bool"),
    Param("truncate_prompt_tokens", "stopping.truncate_prompt", "int", -1),
    Param("logprobs", "logprobs.top", "int", -1),
    Param("prompt_logprobs", "logprobs.prompt", "int", -1),
    Param("lora_name", "adapter", "str"),
)

VLLM: Final = TritonProfile(
    name="vllm",
    platform="python",
    backend="vllm",
    inputs=index_inputs(
        _PROMPT_SPEC,
        InputSpec("stream", "BOOL"),
        InputSpec("sampling_parameters", "BYTES"),
        InputSpec("exclude_input_in_output", "BOOL"),
        InputSpec("return_finish_reason", "BOOL"),
        InputSpec("return_num_output_tokens", "BOOL"),
        # Further inputs differ between releases, so they are not counted.
        InputSpec("image", "BYTES", (-1,), is_counted=False),
        InputSpec("return_cumulative_logprob", "BOOL", is_counted=False),
        InputSpec("return_logprobs", "BOOL", is_counted=False),
        InputSpec("return_num_input_tokens", "BOOL", is_counted=False),
    ),
    outputs=(
        _TEXT_SPEC,
        OutputSpec("finish_reason", "BYTES", "return_finish_reason"),
        OutputSpec("cumulative_logprob", "FP32", "return_cumulative_logprob"),
        OutputSpec("logprobs", "BYTES", "return_logprobs"),
        OutputSpec("num_input_tokens", "UINT32", "return_num_input_tokens", (1,)),
        OutputSpec("num_output_tokens", "UINT32", "return_num_output_tokens"),
    ),
    parameters=ParamTable(*_SAMPLING_PARAMS, *_VLLM_PARAMS),
    exclude_prompt_flags=("exclude_input_in_output",),
    echoes_prompt=True,
    rejects_stream_echo=True,
    coerces_params=True,
    error_prefix="Error generating stream: ",
    guide_style="object",
    accepts_extra_params=True,
    removed_params=("best_of", "length_penalty"),
)

_TRTLLM_PARAMS: Final = (
    Param("max_tokens", "stopping.max_tokens", "int", 0),
    Param("min_tokens", "stopping.min_tokens", "int", 0),
    Param("num_return_sequences", "n", "int", 1, _MAX_CHOICES, default=1),
    Param("stop_words", "stopping.stop", "strings"),
    Param("bad_words", "sampling.bad_words", "strings"),
    Param("temperature", "sampling.temperature", "float", 0, default=1.0),
    Param("top_k", "sampling.top_k", "int", 0, disabled_values=(0,)),
    Param("top_p", "sampling.top_p", "float", 0, 1, disabled_values=(0,)),
    Param("length_penalty", "sampling.length_penalty", "float"),
    Param("repetition_penalty", "sampling.repetition_penalty", "float", 0, exclusive_minimum=True),
    Param("presence_penalty", "sampling.presence_penalty", "float"),
    Param("frequency_penalty", "sampling.frequency_penalty", "float"),
    Param("seed", "sampling.seed", "int", 0, 2**64 - 1),
    Param("beam_width", "sampling.beam_width", "int", 1, disabled_values=(1,)),
)

TRTLLM: Final = TritonProfile(
    name="trtllm",
    platform="ensemble",
    backend="",
    inputs=index_inputs(
        _PROMPT_SPEC,
        InputSpec("max_tokens", "INT32", optional=False),
        InputSpec("num_return_sequences", "INT32"),
        InputSpec("bad_words", "BYTES", (-1,)),
        InputSpec("stop_words", "BYTES", (-1,)),
        InputSpec("exclude_input_in_output", "BOOL"),
        InputSpec("end_id", "INT32"),
        InputSpec("pad_id", "INT32"),
        InputSpec("top_k", "INT32"),
        InputSpec("top_p", "FP32"),
        InputSpec("temperature", "FP32"),
        InputSpec("length_penalty", "FP32"),
        InputSpec("repetition_penalty", "FP32"),
        InputSpec("min_tokens", "INT32"),
        InputSpec("presence_penalty", "FP32"),
        InputSpec("frequency_penalty", "FP32"),
        InputSpec("seed", "UINT64"),
        InputSpec("return_log_probs", "BOOL"),
        InputSpec("return_context_logits", "BOOL"),
        InputSpec("return_generation_logits", "BOOL"),
        InputSpec("return_perf_metrics", "BOOL"),
        InputSpec("return_num_input_tokens", "BOOL"),
        InputSpec("return_num_output_tokens", "BOOL"),
        InputSpec("beam_width", "INT32"),
        InputSpec("stream", "BOOL"),
        InputSpec("embedding_bias_words", "BYTES", (-1,)),
        InputSpec("embedding_bias_weights", "FP32", (-1,)),
        InputSpec("lora_task_id", "UINT64"),
        InputSpec("guided_decoding_guide_type", "BYTES"),
        InputSpec("guided_decoding_guide", "BYTES"),
    ),
    outputs=(
        _TEXT_SPEC,
        OutputSpec("cum_log_probs", "FP32", "return_log_probs"),
        OutputSpec("output_log_probs", "FP32", "return_log_probs", (-1, -1)),
        OutputSpec("num_input_tokens", "INT32", "return_num_input_tokens", (1,)),
        OutputSpec("num_output_tokens", "INT32", "return_num_output_tokens", (1,)),
    ),
    parameters=ParamTable(*_TRTLLM_PARAMS),
    exclude_prompt_flags=("exclude_input_in_output",),
    echoes_prompt=True,
    guide_style="pair",
    max_batch_size=4,
    keeps_stop_strings=True,
)

_LLMAPI_PREFIX: Final = "sampling_param_"
_LLMAPI_PARAM_NAMES: Final = frozenset(
    {"best_of", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty",
     "max_tokens", "stop", "seed"}
)  # fmt: skip
_LLMAPI_PARAMS: Final = tuple(
    replace(row, wire=_LLMAPI_PREFIX + row.wire, exclusive_minimum=False, default=None)
    for row in _SAMPLING_PARAMS
    if row.wire in _LLMAPI_PARAM_NAMES
)

LLMAPI: Final = TritonProfile(
    name="llmapi",
    platform="python",
    backend="python",
    inputs=index_inputs(
        _PROMPT_SPEC,
        InputSpec("image_url", "BYTES", (-1,)),
        InputSpec("streaming", "BOOL"),
        InputSpec(_LLMAPI_PREFIX + "best_of", "INT32"),
        InputSpec(_LLMAPI_PREFIX + "temperature", "FP32"),
        InputSpec(_LLMAPI_PREFIX + "top_k", "INT32"),
        InputSpec(_LLMAPI_PREFIX + "top_p", "FP32"),
        InputSpec(_LLMAPI_PREFIX + "frequency_penalty", "FP32"),
        InputSpec(_LLMAPI_PREFIX + "presence_penalty", "FP32"),
        InputSpec(_LLMAPI_PREFIX + "max_tokens", "INT32"),
        InputSpec(_LLMAPI_PREFIX + "stop", "BYTES", (-1,)),
        InputSpec(_LLMAPI_PREFIX + "seed", "UINT64"),
        InputSpec(_LLMAPI_PREFIX + "exclude_input_from_output", "BOOL"),
        InputSpec(_LLMAPI_PREFIX + "return_perf_metrics", "BOOL"),
        InputSpec("return_finish_reason", "BOOL"),
        InputSpec("return_stop_reason", "BOOL"),
        InputSpec("return_cumulative_logprob", "BOOL"),
        InputSpec("stop", "BOOL"),
    ),
    outputs=(
        _TEXT_SPEC,
        OutputSpec("finish_reason", "BYTES", "return_finish_reason"),
        OutputSpec("stop_reason", "BYTES", "return_stop_reason"),
        OutputSpec("cumulative_logprob", "FP32", "return_cumulative_logprob"),
    ),
    parameters=ParamTable(*_LLMAPI_PARAMS),
    stream_flags=("streaming", "stream"),
    exclude_prompt_flags=(_LLMAPI_PREFIX + "exclude_input_from_output", "exclude_input_in_output"),
    cancel_flag="stop",
    echoes_prompt=True,
    max_batch_size=64,
)

PLAIN: Final = TritonProfile(
    name="plain",
    platform="python",
    backend="python",
    inputs=index_inputs(_PROMPT_SPEC),
    outputs=(_TEXT_SPEC,),
    parameters=ParamTable(*_SAMPLING_PARAMS),
    streams_by_default=True,
    accepts_extra_params=True,
    keeps_stop_strings=True,
)

EMBEDDING_OUTPUT: Final = "embedding"
QUERY_INPUT: Final = "query"
DOCUMENTS_INPUT: Final = "documents"
SCORES_OUTPUT: Final = "scores"

EMBEDDING: Final = TritonProfile(
    name="embedding",
    platform="python",
    backend="python",
    inputs=index_inputs(_PROMPT_SPEC),
    outputs=(OutputSpec(EMBEDDING_OUTPUT, "FP32"),),
    parameters=ParamTable(),
    max_batch_size=2048,
)
RERANK: Final = TritonProfile(
    name="rerank",
    platform="python",
    backend="python",
    inputs=index_inputs(
        InputSpec(QUERY_INPUT, "BYTES", optional=False),
        InputSpec(DOCUMENTS_INPUT, "BYTES", (-1,), optional=False),
    ),
    outputs=(OutputSpec(SCORES_OUTPUT, "FP32"),),
    parameters=ParamTable(),
)
TASK_PROFILES: Final[Mapping[ModelTask, TritonProfile]] = {
    "embedding": EMBEDDING,
    "rerank": RERANK,
}
"""The tensors of models that generate no text, whatever the profile of the listener."""


def select_profile(model: ModelInfo | None, profile: TritonProfile) -> TritonProfile:
    """The profile of a model; ``profile`` is that of the listener, for models of text."""
    return profile if model is None else TASK_PROFILES.get(model.task, profile)


PROFILES: Final[Mapping[str, TritonProfile]] = {
    one.name: one for one in (VLLM, TRTLLM, LLMAPI, PLAIN)
}


STATEFUL_FIELDS: Final = tuple(
    StatefulField(
        name,
        "forwarded",
        "the state of a sequence that Triton keeps",
        "The model's workers keep no sequences: send the whole conversation.",
    )
    for name in ("sequence_id", "sequence_start", "sequence_end")
)
"""The fields that refer to what a server keeps."""
