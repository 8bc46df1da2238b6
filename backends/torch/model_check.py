"""A check of the whole model when it is loaded: our packed pass against the family's own.

transformers has hundreds of model families, and one that does something else in its attention than
the packed pass would give wrong texts without any error. Therefore two sequences run through the
model as it was loaded, each alone, with the eager attention of the family, and then packed
together, in two chunks. The outputs of each decoder layer must be the same.

The sequences are long enough to cross every length at which a family changes its behaviour: for the
check these lengths (sliding windows, attention chunks, the original context of a scaled rotary
embedding) are shortened.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from backends.torch.attention import AttentionParams, BatchSegment
from backends.torch.kv_cache import BLOCK_SIZE, BlockPool, SequenceCache
from backends.torch.model_files import ModelError

LONG_TOKENS: Final = 160
SHORT_TOKENS: Final = 40
"""The tokens of the two sequences; fewer if the context is shorter."""
SHORT_LENGTH: Final = 48
"""What the lengths at which a family changes its behaviour are shortened to."""
_LENGTH_NAME: Final = re.compile(
    r"(sliding|local|attention)_(window|chunk)(_size)?|attention_window|floor_scale"
    r"|original_max_position_embeddings"
)
_TOLERANCES: Final = {torch.float32: 0.01, torch.float64: 0.01}
_LOW_PRECISION_TOLERANCE: Final = 0.2
"""Allowed difference of a token's output, relative to its magnitude."""
_MAX_DIFFERENT: Final = 0.05
"""Allowed share of tokens that differ: a mixture of experts may choose another one by rounding."""


class ReferenceOutputs(NamedTuple):
    """What the family's own forward pass computed for the two sequences."""

    sequences: list[list[int]]
    layers: list[list[Tensor]]
    """By decoder layer and sequence: (tokens, size)."""
    logits: list[Tensor]
    """By sequence: (tokens, vocabulary)."""


def compute_reference(model: Any, context: int) -> ReferenceOutputs:
    """Run the sequences through a model that has eager attention. Raises ModelError."""
    vocabulary = model.config.get_text_config().vocab_size
    dice = torch.Generator().manual_seed(1)
    lengths = (min(LONG_TOKENS, context), min(SHORT_TOKENS, context))
    sequences = [torch.randint(vocabulary, (n,), generator=dice).tolist() for n in lengths]
    outputs: list[list[Tensor]] = []
    logits = []
    try:
        with shorten_lengths(model), torch.inference_mode():
            for sequence in sequences:
                with _record_layers(model) as layers:
                    ids = torch.tensor([sequence], device=model.device)
                    logits.append(model(input_ids=ids, use_cache=False).logits[0].float())
                outputs.append([output.float() for output in layers])
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise ModelError(f"this model family is not supported: {error}") from error
    by_layer = [list(one) for one in zip(*outputs, strict=True)]
    return ReferenceOutputs(sequences, by_layer, logits)


def check_model(model: Any, run: Any, reference: ReferenceOutputs) -> None:
    """Compare the packed pass with the reference; raises ModelError, which names the layer.

    ``run`` is the call of the ModelRunner of ``model``.
    """
    tolerance = _TOLERANCES.get(model.dtype, _LOW_PRECISION_TOLERANCE)
    layers, logits = _run_packed(model, run, reference.sequences)
    classes = [type(layer).__name__ for layer in find_layers(model)]
    for i, (expected, actual) in enumerate(zip(reference.layers, layers, strict=True)):
        if not _is_close(expected, actual, tolerance):
            raise ModelError(
                f"this model family is not supported: layer {i} ({classes[i]}) computes something "
                "else in a batch than alone with the family's own attention"
            )
    if not _is_close(reference.logits, logits, tolerance):
        raise ModelError(
            "this model family is not supported: its output layer computes something else in a "
            "batch than alone"
        )


def find_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers: the first list of modules that has as many as the configuration says."""
    config: Any = model.config
    count = config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return ()


def _run_packed(
    model: Any, run: Any, sequences: Sequence[Sequence[int]]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The outputs of each layer, and the logits, by sequence: computed in two chunks."""
    pool = BlockPool(sum(-(-len(one) // BLOCK_SIZE) for one in sequences))
    caches = [SequenceCache(pool, len(one)) for one in sequences]
    splits = [len(one) * 3 // 5 for one in sequences]
    layers: list[list[list[Tensor]]] = [[[] for _ in sequences] for _ in find_layers(model)]
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for chunk in range(2):
        parts = [
            one[:split] if chunk == 0 else one[split:]
            for one, split in zip(sequences, splits, strict=True)
        ]
        segments = [
            BatchSegment(cache, part, len(part)) for cache, part in zip(caches, parts, strict=True)
        ]
        sizes = [len(part) for part in parts]
        with shorten_lengths(model), _record_layers(model) as outputs:
            found = torch.split(run(segments), sizes)
        for i, one in enumerate(found):
            logits[i].append(one)
        for layer, output in zip(layers, outputs, strict=True):
            for i, one in enumerate(torch.split(output.float(), sizes)):
                layer[i].append(one)
    return (
        [[torch.cat(parts) for parts in layer] for layer in layers],
        [torch.cat(parts) for parts in logits],
    )


def _is_close(expected: Sequence[Tensor], actual: Sequence[Tensor], tolerance: float) -> bool:
    """Whether nearly all tokens have the same output, relative to its magnitude."""
    for one, other in zip(expected, actual, strict=True):
        errors = (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-6)
        if float((~(errors <= tolerance)).float().mean()) > _MAX_DIFFERENT:  # NaN differs
            return False
    return True


@contextlib.contextmanager
def _record_layers(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the output (tokens, size) of each decoder layer of a pass."""
    outputs: list[Tensor] = []

    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0].detach().clone())

    hooks = [layer.register_forward_hook(record) for layer in find_layers(model)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def shorten_lengths(model: nn.Module) -> Iterator[None]:
    """Shorten the lengths at which the family changes its behaviour; restore them afterwards."""
    changed: list[tuple[Any, str, Any]] = []
    for owner in _list_owners(model):
        values = owner if isinstance(owner, dict) else vars(owner)
        for name, value in list(values.items()):
            if (
                type(value) is int
                and value > SHORT_LENGTH
                and _LENGTH_NAME.fullmatch(name.removeprefix("_"))
            ):
                changed.append((values, name, value))
                values[name] = SHORT_LENGTH
            elif isinstance(value, AttentionParams) and (value.window or 0) > SHORT_LENGTH:
                changed.append((values, name, value))  # of a fused layer
                values[name] = value._replace(window=SHORT_LENGTH)
    try:
        yield
    finally:
        for values, name, value in changed:
            values[name] = value


def _list_owners(model: nn.Module) -> Iterator[Any]:
    """Where lengths may stand: the configuration, its dictionaries, and every module."""
    own_config: Any = getattr(model, "config", None)
    config = None if own_config is None else own_config.get_text_config()
    if config is not None:
        yield config
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        yield rope
        yield from (inner for inner in rope.values() if isinstance(inner, dict))
    yield from model.modules()


# --- rotary embeddings ----------------------------------------------------------------------------

_CHANGING_ROPE_TYPES: Final = ("longrope", "dynamic")
"""Rotary embeddings whose factors transformers chooses by the longest position in a pass."""
_ORIGINAL_KIND: Final = "original_rope_type"
"""The attribute that keeps a module's type, so that another context can be chosen."""


def freeze_rotary_factors(model: nn.Module, context: int) -> None:
    """Choose the factors of rotary embeddings once, for the served context, as vLLM does.

    Otherwise a long sequence would change the output of a short one in the same batch.
    """
    for module in model.modules():
        kind = vars(module).get(_ORIGINAL_KIND) or getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in _CHANGING_ROPE_TYPES:
            _choose_factors(module, kind, context, None)
            vars(module).update({_ORIGINAL_KIND: kind, "rope_type": "default"})
        elif isinstance(kind, dict):
            kept = {name: one for name, one in kind.items() if one not in _CHANGING_ROPE_TYPES}
            for layer_type in kind.keys() - kept.keys():
                _choose_factors(module, kind, context, layer_type)
            frozen = {**dict.fromkeys(kind, "default"), **kept}
            vars(module).update({_ORIGINAL_KIND: kind, "rope_type": frozen})


def _choose_factors(module: nn.Module, kind: Any, context: int, layer_type: str | None) -> None:
    """Let the module see the last position of the context."""
    vars(module)["rope_type"] = kind
    device = next(module.buffers()).device
    arguments: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    last = torch.tensor([[context - 1]], device=device)
    module(torch.zeros(1, device=device), last, **arguments)
