"""Attention of a packed batch: each sequence attends to its own KV cache only.

A floating point sum depends on its order, and kernels choose the order by the shape of their
inputs. A token's result must not depend on the other sequences in the batch, on prefill chunks,
prefix cache hits or recomputation. The shapes therefore depend only on the token's position in its
sequence: prompt tokens are attended block by block, generated tokens one by one.

Generated tokens of sequences with the same number of KV cache blocks, up to a limit, are one batch
for the kernel, which computes each entry separately. They attend to full blocks with later
positions masked, even if there is only one such token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch.kv_cache import BLOCK_SIZE, SequenceCache

# Eager attention, for model families with capped scores (softcap) or attention sinks.
#
# scaled_dot_product_attention supports neither. As above, the shapes of the matrix products depend
# only on a token's position in its sequence, so results do not depend on the rest of the batch.
# (Source: the eager attention of transformers 5's Gemma 2 and gpt-oss.)


class AttentionParams(NamedTuple):
    """The attention parameters of a layer."""

    scale: float | None
    window: int | None = None
    """The sliding window: tokens that a token attends to, itself included."""
    logit_cap: float | None = None
    """Scores are limited to this magnitude by tanh."""
    sinks: torch.Tensor | None = None
    """One score per head that takes part in the softmax but has no value."""

    @property
    def is_standard(self) -> bool:
        """Whether scaled_dot_product_attention supports it."""
        return self.logit_cap is None and self.sinks is None


def attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Eager attention with capped scores and sinks, for the last tokens of the keys and values.

    ``query`` and the result have shape (heads, tokens, size). ``mask`` is True where a token
    attends; None is causal attention.
    """
    heads, tokens, size = query.shape
    # Grouped-query attention: query heads that share a key head become queries of one head.
    grouped = query.reshape(keys.shape[0], -1, size)
    scale = params.scale or size**-0.5
    scores = (grouped @ keys.transpose(1, 2) * scale).view(heads, tokens, -1)
    if params.logit_cap is not None:
        scores = torch.tanh(scores / params.logit_cap) * params.logit_cap
    if mask is None:
        mask = scores.new_ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - tokens)
    scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[1]]
    out = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values
    return out.view(heads, tokens, values.shape[-1])


class RotaryFactors:
    """The rotary embedding of a forward pass, which rotates halves of queries and keys."""

    def __init__(self) -> None:
        self._position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor]

    def get_factors(
        self, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two factors (tokens, 1, size): of the values, and of the values rolled by half a head.

        They are computed from cos and sin once per forward pass.
        """
        if self._position_embeddings is not position_embeddings:
            cos, sin = position_embeddings[0][0, :, None], position_embeddings[1][0, :, None]
            half = sin.shape[-1] // 2
            self._position_embeddings, self._factors = (
                position_embeddings,
                (cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)),
            )
        return self._factors


MAX_GROUPED_TOKENS = 8 * BLOCK_SIZE
"""Context length up to which decoding sequences are batched.

Copying more keys and values together costs more than a kernel call for each sequence.
"""


class BatchSegment(NamedTuple):
    """New tokens of a sequence in a forward pass; the last ``logit_count`` of them get logits."""

    cache: SequenceCache
    tokens: Sequence[int]
    logit_count: int = 1


class QueryTile(NamedTuple):
    """Tokens of a sequence that are attended together, from index ``start`` of the batch on."""

    start: int
    first_position: int
    """The position of the first token in its sequence."""
    end_position: int
    """The position after the last token."""

    @property
    def stop(self) -> int:
        """The index after the last token in the batch."""
        return self.start + self.end_position - self.first_position

    @property
    def is_single(self) -> bool:
        """Whether it has a single token."""
        return self.end_position - self.first_position == 1


class DecodeGroup(NamedTuple):
    """Decode tokens of sequences with the same number of KV cache blocks."""

    token_indices: torch.Tensor | None
    """Their indices in the batch; None if they are the whole batch."""
    lengths: torch.Tensor
    """The context length of each, itself included."""
    blocks: range | torch.Tensor
    """The blocks of all their sequences, concatenated."""
    block_count: int
    """Blocks per sequence."""


class PackedBatch(RotaryFactors):
    """The concatenated segments of a forward pass; built once and used by every layer."""

    def __init__(self, segments: Sequence[BatchSegment], device: torch.device) -> None:
        super().__init__()
        self.segments = segments
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.logit_indices: list[int] = []
        self._tiles_by_sequence: list[tuple[list[range], list[QueryTile], list[QueryTile]]] = []
        self._masks: dict[tuple[QueryTile | int, int | None], torch.Tensor | None] = {}
        self._device = device
        slots: list[int] = []
        groups: dict[int, list[tuple[QueryTile, list[int]]]] = {}
        for segment in segments:
            cache, count = segment.cache, len(segment.tokens)
            cache.reserve(count)
            tiles = _split_tiles(cache, len(self.tokens), count)
            grouped_tiles = [
                tile for tile in tiles if tile.is_single and tile.end_position <= MAX_GROUPED_TOKENS
            ]
            separate_tiles = [
                tile
                for tile in tiles
                if not tile.is_single or tile.end_position > MAX_GROUPED_TOKENS
            ]
            self._tiles_by_sequence.append(
                (cache.slot_ranges(cache.length + count), separate_tiles, grouped_tiles)
            )
            for tile in grouped_tiles:
                blocks = cache.first_blocks(tile.end_position)
                groups.setdefault(len(blocks), []).append((tile, blocks))
            slots.extend(cache.next_slots(count))
            self.tokens.extend(segment.tokens)
            self.positions.extend(range(cache.length, cache.length + count))
            self.logit_indices.extend(
                range(len(self.tokens) - segment.logit_count, len(self.tokens))
            )
        self._slots = torch.tensor(slots, device=device)
        self._decode_groups = [
            self._build_decode_group(block_count, entries)
            for block_count, entries in groups.items()
        ]

    def _build_decode_group(
        self, block_count: int, entries: Sequence[tuple[QueryTile, list[int]]]
    ) -> DecodeGroup:
        blocks = [block for _, tile_blocks in entries for block in tile_blocks]
        contiguous = range(blocks[0], blocks[0] + len(blocks))
        is_whole_batch = len(entries) == len(self.tokens)
        ends = [tile.end_position for tile, _ in entries]
        return DecodeGroup(
            None
            if is_whole_batch
            else torch.tensor([t.start for t, _ in entries], device=self._device),
            torch.tensor(ends, device=self._device)[:, None, None, None],
            contiguous if blocks == list(contiguous) else torch.tensor(blocks, device=self._device),
            block_count,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention of all tokens: from (heads, tokens, size) to (tokens, heads, size)."""
        pool = self.segments[0].cache.pool
        pool.write(layer, self._slots, key, value)
        groups = self._decode_groups if params.is_standard else ()
        if len(groups) == 1 and groups[0].token_indices is None:
            return self._attend_group(layer, groups[0], query, params)
        out = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        for group in groups:
            out[group.token_indices] = self._attend_group(
                layer, group, query[:, group.token_indices], params
            )
        for ranges, separate_tiles, grouped_tiles in self._tiles_by_sequence:
            tiles = separate_tiles if params.is_standard else (*separate_tiles, *grouped_tiles)
            if not tiles:
                continue
            keys, values = pool.read(layer, ranges)
            for tile in tiles:
                tile_query = query[:, tile.start : tile.stop]
                out[tile.start : tile.stop] = self._attend_tile(
                    tile, tile_query, keys, values, params
                )
        return out

    def _attend_group(
        self, layer: int, group: DecodeGroup, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        keys, values = self.segments[0].cache.pool.read_blocks(
            layer, group.blocks, group.block_count
        )
        heads, tokens, size = query.shape
        # Grouped-query attention: query heads that share a key head become queries of one head.
        grouped = query.transpose(0, 1).reshape(tokens, keys.shape[1], -1, size)
        mask = self._mask_group(group, params.window, query.dtype)
        out = scaled_dot_product_attention(grouped, keys, values, mask, scale=params.scale)
        return out.reshape(tokens, heads, -1)

    def _mask_group(
        self, group: DecodeGroup, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """The additive attention mask of a decode group: 0, or -inf where nothing is attended."""
        mask = self._masks.get((group.block_count, window))
        if mask is None:
            positions = torch.arange(group.block_count * BLOCK_SIZE, device=self._device)
            is_masked = positions >= group.lengths
            if window is not None:
                is_masked |= positions < group.lengths - window
            mask = torch.zeros(is_masked.shape, dtype=dtype, device=self._device)
            self._masks[group.block_count, window] = mask.masked_fill_(is_masked, float("-inf"))
        return mask

    def _attend_tile(
        self,
        tile: QueryTile,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        window = params.window
        if tile.is_single:
            start = max(0, tile.end_position - window) if window is not None else 0
            span, mask = slice(start, tile.end_position), None
        else:
            span, mask = slice(0, tile.end_position), self._get_tile_mask(tile, window)
        keys, values = keys[:, span], values[:, span]
        if not params.is_standard:
            return attend_capped(query, keys, values, params, mask).transpose(0, 1)
        if tile.is_single:
            return attend_single(query, keys, values, params.scale)
        return attend_many(query, keys, values, params.scale, mask).transpose(0, 1)

    def _get_tile_mask(self, tile: QueryTile, window: int | None) -> torch.Tensor | None:
        """The boolean mask of a tile; None if plain causal attention is the same."""
        key = (tile, window)
        if key not in self._masks:
            self._masks[key] = _build_tile_mask(tile, window, self._device)
        return self._masks[key]

    def finish_pass(self) -> None:
        """Add the new tokens to the caches; called after the last layer."""
        for segment in self.segments:
            segment.cache.advance(len(segment.tokens))


def _split_tiles(cache: SequenceCache, start: int, count: int) -> list[QueryTile]:
    tiles = []
    position, end = cache.length, cache.length + count
    while position < end:
        tile_end = (
            min(end, cache.prompt_length, position - position % BLOCK_SIZE + BLOCK_SIZE)
            if position < cache.prompt_length
            else position + 1
        )
        tiles.append(QueryTile(start + position - cache.length, position, tile_end))
        position = tile_end
    return tiles


def _build_tile_mask(
    tile: QueryTile, window: int | None, device: torch.device
) -> torch.Tensor | None:
    if tile.first_position == 0 and (window is None or tile.end_position <= window):
        return None
    positions = torch.arange(tile.first_position, tile.end_position, device=device)[:, None]
    key_positions = torch.arange(tile.end_position, device=device)[None]
    mask = key_positions <= positions
    return mask if window is None else mask & (key_positions > positions - window)


def attend_single(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of one token: from (heads, 1, size) to (1, heads, size)."""
    # Grouped-query attention: query heads that share a key head become queries of one head.
    grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
    out = scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=scale)
    return out.reshape(1, query.shape[0], values.shape[-1])


def attend_many(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last tokens of the keys and values; (heads, tokens, size) in and out.

    Without a mask it is causal.
    """
    return scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=keys.shape[0] != query.shape[0],
    )[0]
