"""A packed forward pass of a transformers model over many sequences.

The tokens of all sequences are concatenated in a batch of one, so that each linear layer processes
them together, whether a sequence has one new token or a chunk of its prompt. Only attention is
computed per sequence, over its own keys and values. This works for every model family that uses
transformers' attention interface.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from backends.torch.attention import AttentionParams, BatchSegment, PackedBatch
from backends.torch.fused_layers import fuse_layers, prepack_linears
from backends.torch.kv_cache import BLOCK_SIZE, BlockPool, SequenceCache
from backends.torch.loader import (
    ModelLocation,
    find_model_class,
    load_int8_model,
    load_quantized_model,
    load_weights,
    pick_device,
    pick_dtype,
    release_free_memory,
)
from backends.torch.model_check import (
    ReferenceOutputs,
    check_model,
    compute_reference,
    freeze_rotary_factors,
)
from backends.torch.model_files import ModelError, check_quantized_use

ATTENTION_NAME = "interlingua_packed"


def _attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; the PackedBatch is a keyword argument."""
    packed: PackedBatch | None = options.get("packed")
    if packed is None:
        raise ModelError("this model family does not pass keyword arguments to its attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    params = AttentionParams(
        options.get("scaling"),
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )
    return packed.attend(layer, query[0], key[0], value[0], params)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend_packed)


_UNSUPPORTED_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
"""Errors of a model family that does something else than the packed pass expects."""


_COMPARED_TOKENS = 9
_MIN_CONTEXT = 2 * BLOCK_SIZE
"""The shortest context that is served because of too little memory, in tokens."""


def compute_context_length(config: Any, context: int | None) -> int:
    """The context length that is served: the model's own, or ``context`` if that is less."""
    limit = getattr(config, "max_position_embeddings", None) or 2048
    return min(limit, context or limit)


class ModelRunner:
    """Runs a model on batch segments and returns logits."""

    def __init__(
        self,
        model: Any,
        context: int | None = None,
        reference: ReferenceOutputs | None = None,
        *,
        owns_weights: bool = False,
    ) -> None:
        """Fuse layers, check the model, then replace linear layers.

        ``reference`` is what the model must compute. ``owns_weights``: see prepack_linears.
        """
        self._model = model.eval()
        fuse_layers(model)
        self.device: torch.device = model.device
        self.config = config = model.config.get_text_config()
        self.generation_config: Any = model.generation_config
        self.context_length = compute_context_length(config, context)
        self.vocabulary_size: int = config.vocab_size
        if reference is not None:
            self._check_reference(reference)
        prepack_linears(model, owns_weights=owns_weights)
        self.cache_bytes_per_token = self._check_first_pass(config.num_hidden_layers)
        """KV cache bytes per token."""
        self.is_batch_invariant = self._compare_passes()
        """Whether a token has the same logits in a pass of its own and with those after it."""

    def limit_context(self, cache_bytes: int) -> None:
        """Shorten the context to what a KV cache of this size holds. Raises ModelError."""
        if not self.cache_bytes_per_token:
            return
        tokens = cache_bytes // self.cache_bytes_per_token // BLOCK_SIZE * BLOCK_SIZE
        if tokens < min(_MIN_CONTEXT, self.context_length):
            required = _MIN_CONTEXT * self.cache_bytes_per_token
            raise ModelError(
                f"memory: kv_cache_memory of {cache_bytes / 1e6:,.1f} MB holds {tokens} tokens; "
                f"{_MIN_CONTEXT} tokens need {required / 1e6:,.1f} MB"
            )
        if tokens < self.context_length:
            self.context_length = tokens
            freeze_rotary_factors(self._model, tokens)

    def _check_reference(self, reference: ReferenceOutputs) -> None:
        """Raise ModelError unless the packed pass computes the same."""
        try:
            check_model(self._model, self, reference)
        except _UNSUPPORTED_ERRORS as error:
            raise ModelError(f"this model family is not supported: {error}") from error

    def _check_first_pass(self, layers: int) -> int:
        """Run a first pass, which warms up and checks that every layer uses our KV cache.

        Returns the KV cache bytes per token.
        """
        pool = BlockPool(1)
        try:
            self([BatchSegment(SequenceCache(pool, 2), (0, 0))])
        except _UNSUPPORTED_ERRORS as error:
            raise ModelError(f"this model family is not supported: {error}") from error
        if pool.layer_count != layers:
            raise ModelError(
                "this model family is not supported: some of its layers do not use a KV cache"
            )
        return pool.size_bytes // pool.tokens

    def _compare_passes(self) -> bool:
        """Whether generated tokens have equal logits together and one by one."""
        tokens = [i % self.vocabulary_size for i in range(_COMPARED_TOKENS)]
        pool = BlockPool(2)
        alone, together = SequenceCache(pool, 1), SequenceCache(pool, 1)
        self([BatchSegment(alone, tokens[:1], 0), BatchSegment(together, tokens[:1], 0)])
        expected = [self([BatchSegment(alone, [token])]) for token in tokens[1:]]
        actual = self([BatchSegment(together, tokens[1:], len(expected))])
        return torch.equal(torch.cat(expected), actual)

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        """The requested logits in float32, one row per token, in the order of the segments."""
        with torch.inference_mode():
            packed = PackedBatch(segments, self.device)
            out = self._model(
                input_ids=torch.tensor([packed.tokens], device=self.device),
                position_ids=torch.tensor([packed.positions], device=self.device),
                use_cache=False,
                # If no logits are requested, compute those of a single token.
                logits_to_keep=torch.tensor(packed.logit_indices or [0], device=self.device),
                packed=packed,
            )
            packed.finish_pass()
            logits: torch.Tensor = out.logits[0].float()
        return logits if packed.logit_indices else logits[:0]


def load_model_runner(
    location: ModelLocation, device: str, dtype: str, context: int | None
) -> ModelRunner:
    """Load a model for generation. Raises ModelError."""
    if not find_model_class(AutoModelForCausalLM, location)._supports_attention_backend:  # noqa: SLF001
        raise ModelError(
            f"{location.source}: this model family is not supported: it does not use transformers' "
            "attention interface"
        )
    torch_device = pick_device(device)
    if dtype in ("int8", "quantized") and torch_device.type != "cpu":
        raise ModelError(f"dtype {dtype} needs a CPU; for {torch_device} choose auto or bfloat16")
    if location.is_quantized and torch_device.type != "cpu":
        raise ModelError(f"the quantized weights of {location.source} need a CPU: set device: cpu")
    owns_weights = location.is_quantized or dtype == "int8"
    if location.is_quantized:
        check_quantized_use(location.source, location.task, dtype)
        model = load_quantized_model(location)
    elif dtype == "int8":
        model = load_int8_model(location)
    else:
        torch_dtype = pick_dtype("float32" if dtype == "quantized" else dtype, torch_device)
        model = load_weights(
            AutoModelForCausalLM, location, torch_device, torch_dtype, attn_implementation="eager"
        )
    release_free_memory()
    length = compute_context_length(model.config.get_text_config(), context)
    freeze_rotary_factors(model, length)
    reference = compute_reference(model, length)
    model.set_attn_implementation(ATTENTION_NAME)
    runner = ModelRunner(model, context, reference, owns_weights=owns_weights)
    del reference
    release_free_memory()
    return runner
