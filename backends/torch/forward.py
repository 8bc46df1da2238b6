"""One packed pass of transformers' model over many rows.

The tokens of all rows lie one behind another in a batch of one, so that every linear layer sees
them together, whether a row brings one new token or a chunk of its prompt. Only attention looks at
rows one by one, each over its own keys and values: no padding, no waste, and a row's attention
does not depend on its neighbours. Works for every family whose attention goes through
transformers' attention interface.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from backends.torch.models import Found, ModelError, load, pick_device, pick_dtype

ATTENTION = "interlingua_rows"
_GRAIN = 64


class Kv:
    """The keys and values of one row, layer by layer; they grow as the row does."""

    __slots__ = ("_keys", "_values", "length")

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self.length = 0

    @property
    def layers(self) -> int:
        """How many layers keep something."""
        return len(self._keys)

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, these (heads, tokens, size) at the end.

        ``length`` counts them only after ``advance``, once every layer has them.
        """
        end = self.length + keys.shape[1]
        if layer not in self._keys or self._keys[layer].shape[1] < end:
            self._keys[layer] = self._grown(self._keys.get(layer), keys, end)
            self._values[layer] = self._grown(self._values.get(layer), values, end)
        self._keys[layer][:, self.length : end] = keys
        self._values[layer][:, self.length : end] = values
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor, end: int) -> torch.Tensor:
        room = -(-(end + end // 4 + 1) // _GRAIN) * _GRAIN
        new = like.new_zeros((like.shape[0], room, like.shape[2]))
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new

    def advance(self, tokens: int) -> None:
        """So many tokens went through all layers."""
        self.length += tokens

    def copy(self) -> "Kv":
        """The same past, for another row."""
        other = Kv()
        other.length = self.length
        other._keys = {layer: keys.clone() for layer, keys in self._keys.items()}
        other._values = {layer: values.clone() for layer, values in self._values.items()}
        return other


class Segment(NamedTuple):
    """What a row brings to a pass, and of how many of its last tokens the logits are wanted."""

    kv: Kv
    tokens: Sequence[int]
    wants: int = 1


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of a row's last tokens (heads, tokens, size) over the whole row."""
    new, length = query.shape[1], keys.shape[1]
    if new == 1:
        if window is not None and length > window:
            keys, values = keys[:, -window:], values[:, -window:]
        # All queries of a key's group see the same keys: they become one head's queries.
        grouped = query.view(keys.shape[0], -1, query.shape[-1])
        out = scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=scale)
        return out.reshape(query.shape[0], 1, values.shape[-1])
    mask = None
    if new != length or (window is not None and length > window):
        at = torch.arange(length - new, length, device=query.device)[:, None]
        seen = torch.arange(length, device=query.device)[None]
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
    return scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=keys.shape[0] != query.shape[0],
    )[0]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; the pass's segments come through its keywords."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise ModelError("this model's attention (soft caps or sinks) is not served here yet")
    segments: Sequence[Segment] | None = options.get("segments")
    if segments is None:
        raise ModelError("this family does not hand keywords on to its attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    pieces, start = [], 0
    for segment in segments:
        end = start + len(segment.tokens)
        keys, values = segment.kv.append(layer, key[0, :, start:end], value[0, :, start:end])
        row = _attend_row(
            query[0, :, start:end],
            keys,
            values,
            options.get("scaling"),
            options.get("sliding_window"),
        )
        pieces.append(row.transpose(0, 1))
        start = end
    return torch.cat(pieces)[None], None


AttentionInterface.register(ATTENTION, _attend)


class Forward:
    """A model that takes segments and gives logits."""

    def __init__(self, model: Any, context: int | None = None) -> None:
        self._model = model.eval()
        self.device: torch.device = model.device
        self.config = config = model.config.get_text_config()
        self.generation: Any = model.generation_config
        limit = getattr(config, "max_position_embeddings", None) or 2048
        self.context = min(limit, context or limit)
        self.vocabulary: int = config.vocab_size
        self._prove(config.num_hidden_layers)

    def _prove(self, layers: int) -> None:
        """A first pass: it warms up, and shows whether the model keeps all its past in our rows."""
        kv = Kv()
        try:
            self([Segment(kv, (0, 0))])
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
            raise ModelError(f"this family of models is not served here yet: {error}") from error
        if kv.layers != layers:
            raise ModelError("this family keeps a past that is not keys and values; not served yet")

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        """The wanted logits in float32, one row a token, in the order of the segments."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            tokens.extend(segment.tokens)
            first = segment.kv.length
            positions.extend(range(first, first + len(segment.tokens)))
            wanted.extend(range(len(tokens) - segment.wants, len(tokens)))
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                # Of a pass that wants none, the least.
                logits_to_keep=torch.tensor(wanted or [0], device=self.device),
                segments=segments,
            )
            for segment in segments:
                segment.kv.advance(len(segment.tokens))
            logits: torch.Tensor = out.logits[0].float()
        return logits if wanted else logits[:0]


def load_forward(found: Found, device: str, dtype: str, context: int | None) -> Forward:
    """The model of a folder or hub name, ready for segments."""
    place = pick_device(device)
    model = load(
        AutoModelForCausalLM,
        found,
        dtype=pick_dtype(dtype, place),
        attn_implementation=ATTENTION,
    )
    return Forward(model.to(place), context)
