"""Attention of a packed pass: each row over its own past, the same whatever is beside it.

A sum of floating point numbers depends on how it is cut up, and kernels cut by the shape of what
they are given. So that a token's result does not depend on how a prompt was cut into chunks, what
was found in the cache, or whether a row was computed twice, the shapes are fixed by a token's place
in its row alone: a prompt is attended in whole blocks, what was generated token by token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch.capped import Manner, attend_capped
from backends.torch.kv import BLOCK, Kv


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


class Packed:
    """The segments of a pass, laid one behind another; made once and used by each layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = segments
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.wanted: list[int] = []
        self._rows: list[tuple[list[range], list[Tile]]] = []
        self._masks: dict[tuple[Tile, int | None], torch.Tensor | None] = {}
        self._device = device
        slots: list[int] = []
        for segment in segments:
            kv, count = segment.kv, len(segment.tokens)
            kv.reserve(count)
            tiles = _tiles(kv, len(self.tokens), count)
            self._rows.append((kv.runs(kv.length + count), tiles))
            slots.extend(kv.slots(count))
            self.tokens.extend(segment.tokens)
            self.positions.extend(range(kv.length, kv.length + count))
            self.wanted.extend(range(len(self.tokens) - segment.wants, len(self.tokens)))
        self._slots = torch.tensor(slots, device=device)

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
        pieces = []
        for runs, tiles in self._rows:
            keys, values = pool.read(layer, runs)
            for tile in tiles:
                own = query[:, tile.start : tile.stop]
                pieces.append(self._attend_tile(tile, own, keys, values, manner))
        return torch.cat(pieces)

    def _attend_tile(
        self,
        tile: Tile,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        manner: Manner,
    ) -> torch.Tensor:
        window = manner.window
        if tile.end - tile.first == 1:
            begin = max(0, tile.end - window) if window is not None else 0
            past, mask = slice(begin, tile.end), None
        else:
            past, mask = slice(0, tile.end), self._mask(tile, window)
        keys, values = keys[:, past], values[:, past]
        if not manner.plain:
            return attend_capped(query, keys, values, manner, mask).transpose(0, 1)
        if tile.end - tile.first == 1:
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
