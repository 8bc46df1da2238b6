"""Attention of a packed pass: each row over its own past, the same whatever is beside it.

A sum of floating point numbers depends on how it is cut up, and kernels cut by the shape of what
they are given. So that a token's result does not depend on how a prompt was cut into chunks, what
was found in the cache, or whether a row was computed twice, the shapes are fixed by a token's place
in its row alone: a prompt is attended in whole blocks, what was generated token by token.

Tokens that were generated go through the kernel together where their pasts have equally many
blocks, as far as ``SHORT``: each of them is a batch's entry of its own, which the kernel computes
by itself. They are attended over whole blocks, with what lies behind their places masked, also
where one is alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch.capped import Manner, attend_capped
from backends.torch.kv import BLOCK, Kv
from backends.torch.parts import Turns

SHORT = 8 * BLOCK
"""Tokens. To copy a longer past costs more than a call of the kernel."""


class Segment(NamedTuple):
    """What a row brings to a pass, and of how many of its last tokens the logits are wanted."""

    kv: Kv
    tokens: Sequence[int]
    wants: int = 1


class Tile(NamedTuple):
    """Tokens of a row that are attended together; in the pass they are from ``start`` on."""

    start: int
    first: int
    """The place of the first one in its row."""
    end: int
    """The place behind the last one."""

    @property
    def stop(self) -> int:
        """Behind the last one, in the pass."""
        return self.start + self.end - self.first

    @property
    def alone(self) -> bool:
        """Whether it is one token."""
        return self.end - self.first == 1


class Alike(NamedTuple):
    """Single tokens of rows whose pasts have equally many blocks."""

    at: torch.Tensor | None
    """Where they are in the pass; None where they are all of it."""
    ends: torch.Tensor
    """The places behind them in their rows."""
    blocks: range | torch.Tensor
    """Of all their pasts, one behind another."""
    each: int
    """So many for each."""


class Packed(Turns):
    """The segments of a pass, laid one behind another; made once and used by each layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        super().__init__()
        self.segments = segments
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.wanted: list[int] = []
        self._rows: list[tuple[list[range], list[Tile], list[Tile]]] = []
        self._masks: dict[tuple[Tile | int, int | None], torch.Tensor | None] = {}
        self._device = device
        slots: list[int] = []
        alike: dict[int, list[tuple[Tile, list[int]]]] = {}
        for segment in segments:
            kv, count = segment.kv, len(segment.tokens)
            kv.reserve(count)
            tiles = _tiles(kv, len(self.tokens), count)
            short = [tile for tile in tiles if tile.alone and tile.end <= SHORT]
            long = [tile for tile in tiles if not tile.alone or tile.end > SHORT]
            self._rows.append((kv.runs(kv.length + count), long, short))
            for tile in short:
                blocks = kv.blocks(tile.end)
                alike.setdefault(len(blocks), []).append((tile, blocks))
            slots.extend(kv.slots(count))
            self.tokens.extend(segment.tokens)
            self.positions.extend(range(kv.length, kv.length + count))
            self.wanted.extend(range(len(self.tokens) - segment.wants, len(self.tokens)))
        self._slots = torch.tensor(slots, device=device)
        self._alike = [self._together(each, found) for each, found in alike.items()]

    def _together(self, each: int, found: Sequence[tuple[Tile, list[int]]]) -> Alike:
        blocks = [block for _, own in found for block in own]
        near = range(blocks[0], blocks[0] + len(blocks))
        whole = len(found) == len(self.tokens)
        ends = [tile.end for tile, _ in found]
        return Alike(
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
        manner: Manner,
    ) -> torch.Tensor:
        """Attention of all tokens, (heads, tokens, size) in and (tokens, heads, size) out."""
        pool = self.segments[0].kv.pool
        pool.write(layer, self._slots, key, value)
        alike = self._alike if manner.plain else ()
        if len(alike) == 1 and alike[0].at is None:
            return self._attend_alike(layer, alike[0], query, manner)
        out = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        for one in alike:
            out[one.at] = self._attend_alike(layer, one, query[:, one.at], manner)
        for runs, long, short in self._rows:
            tiles = long if manner.plain else (*long, *short)
            if not tiles:
                continue
            keys, values = pool.read(layer, runs)
            for tile in tiles:
                own = query[:, tile.start : tile.stop]
                out[tile.start : tile.stop] = self._attend_tile(tile, own, keys, values, manner)
        return out

    def _attend_alike(
        self, layer: int, alike: Alike, query: torch.Tensor, manner: Manner
    ) -> torch.Tensor:
        keys, values = self.segments[0].kv.pool.read_blocks(layer, alike.blocks, alike.each)
        heads, tokens, size = query.shape
        # All queries of a key's group see the same keys: they become one head's queries.
        grouped = query.transpose(0, 1).reshape(tokens, keys.shape[1], -1, size)
        mask = self._mask_alike(alike, manner.window, query.dtype)
        out = scaled_dot_product_attention(grouped, keys, values, mask, scale=manner.scale)
        return out.reshape(tokens, heads, -1)

    def _mask_alike(self, alike: Alike, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of a row's tokens for each of these: nothing, or -inf."""
        found = self._masks.get((alike.each, window))
        if found is None:
            place = torch.arange(alike.each * BLOCK, device=self._device)
            hidden = place >= alike.ends
            if window is not None:
                hidden |= place < alike.ends - window
            found = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            self._masks[alike.each, window] = found.masked_fill_(hidden, float("-inf"))
        return found

    def _attend_tile(
        self,
        tile: Tile,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        manner: Manner,
    ) -> torch.Tensor:
        window = manner.window
        if tile.alone:
            begin = max(0, tile.end - window) if window is not None else 0
            past, mask = slice(begin, tile.end), None
        else:
            past, mask = slice(0, tile.end), self._mask(tile, window)
        keys, values = keys[:, past], values[:, past]
        if not manner.plain:
            return attend_capped(query, keys, values, manner, mask).transpose(0, 1)
        if tile.alone:
            return attend_one(query, keys, values, manner.scale)
        return attend_many(query, keys, values, manner.scale, mask).transpose(0, 1)

    def _mask(self, tile: Tile, window: int | None) -> torch.Tensor | None:
        """Which of its row's tokens each of a tile sees; None where that is all before it."""
        key = (tile, window)
        if key not in self._masks:
            self._masks[key] = _mask(tile, window, self._device)
        return self._masks[key]

    def done(self) -> None:
        """The pass went through all layers."""
        for segment in self.segments:
            segment.kv.advance(len(segment.tokens))


def _tiles(kv: Kv, start: int, count: int) -> list[Tile]:
    found = []
    at, end = kv.length, kv.length + count
    while at < end:
        until = min(end, kv.prompt, at - at % BLOCK + BLOCK) if at < kv.prompt else at + 1
        found.append(Tile(start + at - kv.length, at, until))
        at = until
    return found


def _mask(tile: Tile, window: int | None, device: torch.device) -> torch.Tensor | None:
    if tile.first == 0 and (window is None or tile.end <= window):
        return None
    at = torch.arange(tile.first, tile.end, device=device)[:, None]
    seen = torch.arange(tile.end, device=device)[None]
    mask = seen <= at
    return mask if window is None else mask & (seen > at - window)


def attend_one(
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
