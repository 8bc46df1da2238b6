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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from backends.torch.attention import AttentionParams, BatchSegment
from backends.torch.kv_cache import BLOCK_SIZE, BlockPool, SequenceCache
from backends.torch.loader import release_free_memory
from backends.torch.model_files import ModelError

LONG_TOKENS: Final = 128
SHORT_TOKENS: Final = 32
"""The tokens of the two sequences; fewer if the context is shorter."""
SHORT_LENGTH: Final = 40
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
_SLICE_LOGITS: Final = 1 << 21
"""How many logits are computed at a time: those of all tokens would take much memory."""
_SKETCH_SIZE: Final = 128
"""Numbers of a sketch, which stands for what one token has: all of them would take much memory."""
_MAX_LOGIT: Final = 1e4
"""Larger ones are masks, whose sums would overflow."""


class ReferenceOutputs(NamedTuple):
    """What the family's own forward pass computed for the two sequences, as sketches."""

    sequences: list[list[int]]
    layers: list[list[Tensor]]
    """By decoder layer and sequence: the outputs of all tokens."""
    logits: list[Tensor]
    """By sequence: the logits of all tokens."""


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
                options = {
                    "input_ids": torch.tensor([sequence], device=model.device),
                    "use_cache": False,
                }
                layers: list[Tensor] = []
                last: list[Tensor] = []

                def record(
                    _layer: int,
                    output: Tensor,
                    to: list[Tensor] = layers,
                    last: list[Tensor] = last,
                ) -> None:
                    to.append(_sketch(output))
                    last[:] = [output]

                with _record_layers(model, record):
                    model(**options, logits_to_keep=1)
                outputs.append(layers)
                sketches = []
                with _replay_layers(model, last):
                    for [part] in _slice_tokens([len(sequence)], vocabulary):
                        indices = torch.tensor(part, device=model.device)
                        result = model(**options, logits_to_keep=indices)
                        sketches.append(_sketch_logits(result.logits[0]))
                        del result
                        release_free_memory()
                logits.append(torch.cat(sketches))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise ModelError(f"this model family is not supported: {error}") from error
    by_layer = [list(one) for one in zip(*outputs, strict=True)]
    return ReferenceOutputs(sequences, by_layer, logits)


def check_model(model: Any, run: Any, reference: ReferenceOutputs) -> None:
    """Compare the packed pass with the reference; raises ModelError, which names the layer.

    ``run`` is the call of the ModelRunner of ``model``.
    """
    tolerance = _TOLERANCES.get(model.dtype, _LOW_PRECISION_TOLERANCE)
    classes = [type(layer).__name__ for layer in find_layers(model)]
    errors, last_outputs = _run_packed(model, run, reference)
    for i, layer_errors in enumerate(errors):
        if not _are_small(layer_errors, tolerance):
            raise ModelError(
                f"this model family is not supported: layer {i} ({classes[i]}) computes something "
                "else in a batch than alone with the family's own attention"
            )
    actual = _compute_packed_logits(model, run, reference.sequences, last_outputs)
    if not _are_small(map(_measure_errors, reference.logits, actual), tolerance):
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
    model: Any, run: Any, reference: ReferenceOutputs
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The errors of each layer, and the outputs of the last one, by sequence.

    The pass is computed in two chunks.
    """
    sequences = reference.sequences
    caches = _make_caches(sequences)
    splits = [len(one) * 3 // 5 for one in sequences]
    errors: list[list[Tensor]] = [[] for _ in reference.layers]
    last_outputs: list[list[Tensor]] = [[] for _ in sequences]
    for starts, stops in (([0] * len(splits), splits), (splits, [len(one) for one in sequences])):
        spans = [slice(*pair) for pair in zip(starts, stops, strict=True)]
        segments = [
            BatchSegment(cache, one[span], 0)
            for cache, one, span in zip(caches, sequences, spans, strict=True)
        ]
        sizes = [len(one.tokens) for one in segments]

        def compare(layer: int, output: Tensor, spans: Any = spans, sizes: Any = sizes) -> None:
            for i, part in enumerate(torch.split(output, sizes)):
                expected = reference.layers[layer][i][spans[i]]
                errors[layer].append(_measure_errors(expected, _sketch(part)))
                if layer == len(errors) - 1:
                    last_outputs[i].append(part.clone())

        with shorten_lengths(model), _record_layers(model, compare):
            run(segments)
        release_free_memory()
    return errors, [torch.cat(parts) for parts in last_outputs if parts]


def _compute_packed_logits(
    model: Any, run: Any, sequences: Sequence[Sequence[int]], last_outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Sketches of the logits of all tokens, by sequence: computed for all sequences together."""
    vocabulary = model.config.get_text_config().vocab_size
    sketches: list[list[Tensor]] = [[] for _ in sequences]
    for parts in _slice_tokens([len(one) for one in sequences], vocabulary):
        segments = [
            BatchSegment(cache, one[: part.stop], len(part))
            for cache, one, part in zip(_make_caches(sequences), sequences, parts, strict=True)
        ]
        outputs = [one[: part.stop] for one, part in zip(last_outputs, parts, strict=False)]
        with shorten_lengths(model), _replay_layers(model, [torch.cat(outputs)] if outputs else []):
            logits = torch.split(run(segments), [len(part) for part in parts])
        for to, one in zip(sketches, logits, strict=True):
            to.append(_sketch_logits(one))
        del logits, one
        release_free_memory()
    return [torch.cat(parts) for parts in sketches]


def _make_caches(sequences: Sequence[Sequence[int]]) -> list[SequenceCache]:
    pool = BlockPool(sum(-(-len(one) // BLOCK_SIZE) for one in sequences))
    return [SequenceCache(pool, len(one)) for one in sequences]


def _slice_tokens(lengths: Sequence[int], vocabulary: int) -> Iterator[list[range]]:
    """The positions of each sequence, slice by slice; a slice has about ``_SLICE_LOGITS``."""
    count = min(-(-sum(lengths) * vocabulary // _SLICE_LOGITS), *lengths)
    for i in range(count):
        yield [range(n * i // count, n * (i + 1) // count) for n in lengths]


def _sketch_logits(logits: Tensor) -> Tensor:
    return _sketch(logits, _MAX_LOGIT)


def _sketch(rows: Tensor, largest: float = float("inf")) -> Tensor:
    """Sums with random signs: two sketches differ by about as much as their rows do."""
    size = rows.shape[-1]
    dice = torch.Generator().manual_seed(size)
    signs = torch.randint(2, (size,), generator=dice).mul_(2).sub_(1).to(rows.device)
    sketch = rows.new_zeros((len(rows), _SKETCH_SIZE), dtype=torch.float32)
    for at in range(0, size, _SKETCH_SIZE):
        part = rows[:, at : at + _SKETCH_SIZE].float().clamp(-largest, largest)
        sketch[:, : part.shape[1]] += part * signs[at : at + _SKETCH_SIZE]
    return sketch


def _measure_errors(expected: Tensor, actual: Tensor) -> Tensor:
    """The difference of each token's sketch, relative to its magnitude."""
    errors: Tensor = (expected - actual).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return errors


def _are_small(errors: Iterable[Tensor], tolerance: float) -> bool:
    """Whether nearly all tokens of each part have an error within the tolerance."""
    shares = [float((~(one <= tolerance)).float().mean()) for one in errors]  # NaN is no small one
    return all(share <= _MAX_DIFFERENT for share in shares)


@contextlib.contextmanager
def _record_layers(model: nn.Module, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Give the output (tokens, size) of each decoder layer of a pass to ``receive``."""

    def make_hook(layer: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            receive(layer, (output[0] if isinstance(output, tuple) else output)[0].detach())
            release_free_memory()

        return record

    hooks = [
        layer.register_forward_hook(make_hook(i)) for i, layer in enumerate(find_layers(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _replay_layers(model: nn.Module, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Let the decoder layers return what was recorded, if anything, so that a pass costs little."""
    layers = find_layers(model) if outputs else ()
    for layer in layers:
        vars(layer)["forward"] = lambda *_args, **_options: outputs[0][None]
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


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
