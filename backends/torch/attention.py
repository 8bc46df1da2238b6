"""Attention of a packed pass: each row over its own past, independent of the rest of the batch.

A floating point sum depends on its order, and kernels choose the order by the shape of their
inputs. So that a token's result does not depend on chunking, prefix cache hits or recomputation,
the shapes depend only on a token's position in its row: prompts are attended in whole blocks,
generated tokens one by one.

Generated tokens whose pasts have equally many blocks, up to a limit, go through the kernel as one
batch, in which each entry is computed by itself. They attend to whole blocks with later positions
masked, even if there is only one of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch.kv_cache import BLOCK_SIZE, SequenceCache

# Attention written out, for families whose scores are capped or whose heads have sinks.
#
# No kernel does that for rows of our kind. The products keep the shapes that a token's place in its
# row gives them, so that here, too, a result does not depend on what is beside it.
# (Source: the eager attention of transformers 5's Gemma 2 and gpt-oss.)


class AttentionParams(NamedTuple):
    """How a layer attends, as its family has it."""

    scale: float | None
    window: int | None = None
    """So many of the last tokens are seen, a token itself among them."""
    logit_cap: float | None = None
    """Scores stay within this, by a hyperbolic tangent."""
    sinks: torch.Tensor | None = None
    """A score of each head to which no value belongs."""

    @property
    def is_standard(self) -> bool:
        """Whether kernels do it."""
        return self.logit_cap is None and self.sinks is None


def attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    manner: AttentionParams,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last tokens (heads, tokens, size) of these keys and values.

    ``mask`` says which each of them sees; None is all up to itself.
    """
    heads, tokens, size = query.shape
    # All queries of a key's group see the same keys: they become one head's queries.
    grouped = query.reshape(keys.shape[0], -1, size)
    scale = manner.scale or size**-0.5
    scores = (grouped @ keys.transpose(1, 2) * scale).view(heads, tokens, -1)
    if manner.logit_cap is not None:
        scores = torch.tanh(scores / manner.logit_cap) * manner.logit_cap
    if mask is None:
        mask = scores.new_ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - tokens)
    scores = scores.masked_fill(~mask, float("-inf"))
    if manner.sinks is not None:
        sinks = manner.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[1]]
    out = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values
    return out.view(heads, tokens, values.shape[-1])


class RotaryFactors:
    """A pass's places as they turn queries and keys: a rotation of halves."""

    def __init__(self) -> None:
        self._position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor]

    def get_factors(
        self, given: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors (tokens, 1, size) of values, and of values rolled by half, from cos and sin."""
        if self._position_embeddings is not given:
            cos, sin = given[0][0, :, None], given[1][0, :, None]
            half = sin.shape[-1] // 2
            self._position_embeddings, self._factors = (
                given,
                (cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)),
            )
        return self._factors


MAX_GROUPED_TOKENS = 8 * BLOCK_SIZE
"""Tokens. To copy a longer past costs more than a call of the kernel."""


class BatchSegment(NamedTuple):
    """What a row brings to a pass, and of how many of its last tokens the logits are wanted."""

    cache: SequenceCache
    tokens: Sequence[int]
    logit_count: int = 1


class QueryTile(NamedTuple):
    """Tokens of a row that are attended together; in the pass they are from ``start`` on."""

    start: int
    first_position: int
    """The place of the first one in its row."""
    end_position: int
    """The place behind the last one."""

    @property
    def stop(self) -> int:
        """Behind the last one, in the pass."""
        return self.start + self.end_position - self.first_position

    @property
    def is_single(self) -> bool:
        """Whether it is one token."""
        return self.end_position - self.first_position == 1


class DecodeGroup(NamedTuple):
    """Single tokens of rows whose pasts have equally many blocks."""

    token_indices: torch.Tensor | None
    """Where they are in the pass; None where they are all of it."""
    lengths: torch.Tensor
    """The places behind them in their rows."""
    blocks: range | torch.Tensor
    """Of all their pasts, one behind another."""
    block_count: int
    """So many for each."""


class PackedBatch(RotaryFactors):
    """The segments of a pass, laid one behind another; made once and used by each layer."""

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
        alike: dict[int, list[tuple[QueryTile, list[int]]]] = {}
        for segment in segments:
            kv, count = segment.cache, len(segment.tokens)
            kv.reserve(count)
            tiles = _split_tiles(kv, len(self.tokens), count)
            short = [
                tile for tile in tiles if tile.is_single and tile.end_position <= MAX_GROUPED_TOKENS
            ]
            long = [
                tile
                for tile in tiles
                if not tile.is_single or tile.end_position > MAX_GROUPED_TOKENS
            ]
            self._tiles_by_sequence.append((kv.slot_ranges(kv.length + count), long, short))
            for tile in short:
                blocks = kv.first_blocks(tile.end_position)
                alike.setdefault(len(blocks), []).append((tile, blocks))
            slots.extend(kv.next_slots(count))
            self.tokens.extend(segment.tokens)
            self.positions.extend(range(kv.length, kv.length + count))
            self.logit_indices.extend(
                range(len(self.tokens) - segment.logit_count, len(self.tokens))
            )
        self._slots = torch.tensor(slots, device=device)
        self._decode_groups = [
            self._build_decode_group(each, found) for each, found in alike.items()
        ]

    def _build_decode_group(
        self, each: int, found: Sequence[tuple[QueryTile, list[int]]]
    ) -> DecodeGroup:
        blocks = [block for _, own in found for block in own]
        near = range(blocks[0], blocks[0] + len(blocks))
        whole = len(found) == len(self.tokens)
        ends = [tile.end_position for tile, _ in found]
        return DecodeGroup(
            None if whole else torch.tensor([t.start for t, _ in found], device=self._device),
            torch.tensor(ends, device=self._device)[:, None, None, None],
            near if blocks == list(near) else torch.tensor(blocks, device=self._device),
            each,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        manner: AttentionParams,
    ) -> torch.Tensor:
        """Attention of all tokens, (heads, tokens, size) in and (tokens, heads, size) out."""
        pool = self.segments[0].cache.pool
        pool.write(layer, self._slots, key, value)
        alike = self._decode_groups if manner.is_standard else ()
        if len(alike) == 1 and alike[0].token_indices is None:
            return self._attend_group(layer, alike[0], query, manner)
        out = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        for one in alike:
            out[one.token_indices] = self._attend_group(
                layer, one, query[:, one.token_indices], manner
            )
        for runs, long, short in self._tiles_by_sequence:
            tiles = long if manner.is_standard else (*long, *short)
            if not tiles:
                continue
            keys, values = pool.read(layer, runs)
            for tile in tiles:
                own = query[:, tile.start : tile.stop]
                out[tile.start : tile.stop] = self._attend_tile(tile, own, keys, values, manner)
        return out

    def _attend_group(
        self, layer: int, alike: DecodeGroup, query: torch.Tensor, manner: AttentionParams
    ) -> torch.Tensor:
        keys, values = self.segments[0].cache.pool.read_blocks(
            layer, alike.blocks, alike.block_count
        )
        heads, tokens, size = query.shape
        # All queries of a key's group see the same keys: they become one head's queries.
        grouped = query.transpose(0, 1).reshape(tokens, keys.shape[1], -1, size)
        mask = self._mask_group(alike, manner.window, query.dtype)
        out = scaled_dot_product_attention(grouped, keys, values, mask, scale=manner.scale)
        return out.reshape(tokens, heads, -1)

    def _mask_group(
        self, alike: DecodeGroup, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """What is added to the scores of a row's tokens for each of these: nothing, or -inf."""
        found = self._masks.get((alike.block_count, window))
        if found is None:
            place = torch.arange(alike.block_count * BLOCK_SIZE, device=self._device)
            hidden = place >= alike.lengths
            if window is not None:
                hidden |= place < alike.lengths - window
            found = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            self._masks[alike.block_count, window] = found.masked_fill_(hidden, float("-inf"))
        return found

    def _attend_tile(
        self,
        tile: QueryTile,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        manner: AttentionParams,
    ) -> torch.Tensor:
        window = manner.window
        if tile.is_single:
            begin = max(0, tile.end_position - window) if window is not None else 0
            past, mask = slice(begin, tile.end_position), None
        else:
            past, mask = slice(0, tile.end_position), self._get_tile_mask(tile, window)
        keys, values = keys[:, past], values[:, past]
        if not manner.is_standard:
            return attend_capped(query, keys, values, manner, mask).transpose(0, 1)
        if tile.is_single:
            return attend_single(query, keys, values, manner.scale)
        return attend_many(query, keys, values, manner.scale, mask).transpose(0, 1)

    def _get_tile_mask(self, tile: QueryTile, window: int | None) -> torch.Tensor | None:
        """Which of its row's tokens each of a tile sees; None where that is all before it."""
        key = (tile, window)
        if key not in self._masks:
            self._masks[key] = _build_tile_mask(tile, window, self._device)
        return self._masks[key]

    def finish_pass(self) -> None:
        """The pass went through all layers."""
        for segment in self.segments:
            segment.cache.advance(len(segment.tokens))


def _split_tiles(kv: SequenceCache, start: int, count: int) -> list[QueryTile]:
    found = []
    at, end = kv.length, kv.length + count
    while at < end:
        until = (
            min(end, kv.prompt_length, at - at % BLOCK_SIZE + BLOCK_SIZE)
            if at < kv.prompt_length
            else at + 1
        )
        found.append(QueryTile(start + at - kv.length, at, until))
        at = until
    return found


def _build_tile_mask(
    tile: QueryTile, window: int | None, device: torch.device
) -> torch.Tensor | None:
    if tile.first_position == 0 and (window is None or tile.end_position <= window):
        return None
    at = torch.arange(tile.first_position, tile.end_position, device=device)[:, None]
    seen = torch.arange(tile.end_position, device=device)[None]
    mask = seen <= at
    return mask if window is None else mask & (seen > at - window)


def attend_single(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of one token (heads, 1, size) over these keys and values; (1, heads, size)."""
    # All queries of a key's group see the same keys: they become one head's queries.
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
    """Attention of the last tokens (heads, tokens, size) of these keys and values."""
    return scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=keys.shape[0] != query.shape[0],
    )[0]
