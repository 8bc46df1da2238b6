"""One packed pass of transformers' model over many rows.

The tokens of all rows lie one behind another in a batch of one, so that every linear layer sees
them together, whether a row brings one new token or a chunk of its prompt. Only attention looks at
each row by itself, over its own keys and values, so that it does not depend on its neighbours.
Works for every family whose attention goes through transformers' attention interface.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from backends.torch.attention import BatchSegment, PackedBatch
from backends.torch.capped import AttentionParams
from backends.torch.int8 import quantize_linear
from backends.torch.kv import BlockPool, SequenceCache
from backends.torch.linear import LinearFactory, prepack_linears
from backends.torch.loading import find_model_class, load_weights, pick_device, pick_dtype
from backends.torch.models import ModelError, ModelLocation
from backends.torch.parts import fuse_layers

ATTENTION_NAME = "interlingua_rows"


def _attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; the pass's segments come through its keywords."""
    packed: PackedBatch | None = options.get("packed")
    if packed is None:
        raise ModelError("this family does not hand keywords on to its attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    manner = AttentionParams(
        options.get("scaling"),
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )
    return packed.attend(layer, query[0], key[0], value[0], manner)[None], None


AttentionInterface.register(ATTENTION_NAME, _attend_packed)


class ModelRunner:
    """A model that takes segments and gives logits."""

    def __init__(
        self, model: Any, context: int | None = None, made: LinearFactory | None = None
    ) -> None:
        """``made`` is what becomes of linear layers, once ``join`` is done; see ``lay_out``."""
        self._model = model.eval()
        fuse_layers(model)
        prepack_linears(model, made)
        self.device: torch.device = model.device
        self.config = config = model.config.get_text_config()
        self.generation_config: Any = model.generation_config
        limit = getattr(config, "max_position_embeddings", None) or 2048
        self.context_length = min(limit, context or limit)
        self.vocabulary_size: int = config.vocab_size
        self.cache_bytes_per_token = self._check_first_pass(config.num_hidden_layers)
        """What the past of one token takes."""

    def _check_first_pass(self, layers: int) -> int:
        """A first pass: it warms up, and shows whether the model keeps all its past in our rows."""
        pool = BlockPool(1)
        try:
            self([BatchSegment(SequenceCache(pool, 2), (0, 0))])
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
            raise ModelError(f"this family of models is not served here yet: {error}") from error
        if pool.layer_count != layers:
            raise ModelError("this family keeps a past that is not keys and values; not served yet")
        return pool.size_bytes // pool.tokens

    def __call__(self, segments: Sequence[BatchSegment]) -> torch.Tensor:
        """The wanted logits in float32, one row a token, in the order of the segments."""
        with torch.inference_mode():
            packed = PackedBatch(segments, self.device)
            out = self._model(
                input_ids=torch.tensor([packed.tokens], device=self.device),
                position_ids=torch.tensor([packed.positions], device=self.device),
                use_cache=False,
                # Of a pass that wants none, the least.
                logits_to_keep=torch.tensor(packed.logit_indices or [0], device=self.device),
                packed=packed,
            )
            packed.finish_pass()
            logits: torch.Tensor = out.logits[0].float()
        return logits if packed.logit_indices else logits[:0]


def load_forward(found: ModelLocation, device: str, dtype: str, context: int | None) -> ModelRunner:
    """The model of a folder, ready for segments. Raises ModelError."""
    if not find_model_class(AutoModelForCausalLM, found)._supports_attention_backend:  # noqa: SLF001
        raise ModelError(
            f"{found.source} is of a family whose attention or past can't be kept in our rows; "
            "it is not served here"
        )
    place = pick_device(device)
    made = quantize_linear if dtype == "int8" else None
    if made is not None and place.type != "cpu":
        raise ModelError(f"dtype int8 is for processors; for {place} choose auto or bfloat16")
    wanted = pick_dtype("float32" if made else dtype, place)
    model = load_weights(
        AutoModelForCausalLM, found, place, wanted, attn_implementation=ATTENTION_NAME
    )
    return ModelRunner(model, context, made)
