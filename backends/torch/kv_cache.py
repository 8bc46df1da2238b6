"""The KV cache: a pool of blocks, block tables of sequences, and the prefix cache.

A block holds ``BLOCK_SIZE`` tokens of every layer. A sequence has a table of blocks; sequences with
a common prefix share blocks, which are copied on write. Full blocks of a prompt are found by a hash
of all tokens up to their end, so that a later prompt with the same prefix reuses them. Unused
blocks stay cached until their memory is needed; the least recently used are evicted first.

Attention needs a sequence's past in contiguous memory. Blocks are therefore allocated one after
another, and a fragmented sequence is moved while there is plenty of room; otherwise its pieces are
copied together for each pass. Short pasts of several rows are always copied together in whole
blocks, so the unwritten part of a block must be zero.
"""

import hashlib
from array import array
from collections.abc import Sequence

import torch

BLOCK_SIZE = 32
"""Tokens. A beginning is shared in whole blocks."""
_BLOCKS_AHEAD = 8
"""Blocks that are kept free behind a row, so that it can grow in one piece."""
_FREE_SHARE_DIVISOR = 4
"""One in so many blocks stays free when a row is moved."""

_BLOCK_FREE, _BLOCK_RESERVED, _BLOCK_USED = 0, 1, 2


class OutOfBlocksError(Exception):
    """The pool has no such room."""


def hash_blocks(ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """For each full block of a prompt, a hash of it, of all before it, and of ``salt``.

    Prompts with different salts share no blocks.
    """
    found, last = [], salt
    for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        part = array("q", ids[start : start + BLOCK_SIZE]).tobytes()
        last = hashlib.blake2b(last + part, digest_size=16).digest()
        found.append(last)
    return found


class BlockPool:
    """So many blocks, and no more. A layer's memory is taken when it is first written to."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._state = bytearray(blocks)
        self._reference_counts = array("q", bytes(8 * blocks))
        self._free_count = blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._evictable: dict[int, None] = {}
        """Known blocks that no row uses, the longest unused first."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gather_buffers: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def tokens(self) -> int:
        """How many it can hold."""
        return self.blocks * BLOCK_SIZE

    @property
    def available(self) -> int:
        """Blocks that can be had."""
        return self._free_count + len(self._evictable)

    @property
    def used_blocks(self) -> int:
        """Blocks that rows hold."""
        return self.blocks - self.available

    @property
    def layer_count(self) -> int:
        """How many layers keep something."""
        return len(self._layers)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks together."""
        return sum(part.nbytes for pair in self._layers.values() for part in pair)

    # --- blocks ---------------------------------------------------------------------------------

    def allocate(self, count: int, behind: int, more: int) -> tuple[list[int], range]:
        """So many blocks, right behind that one if possible, and room kept for ``more``.

        Returns them and what is promised. There must be so many to be had.
        """
        while self._free_count < count:
            self._evict_block(next(iter(self._evictable)))
        found: list[int] = []
        while behind >= 0 and len(found) < count and self._is_available(behind + 1):
            behind += 1
            found.append(self._claim_block(behind))
        promised = range(0)
        if rest := count - len(found):
            start = self._state.find(bytes(rest + more))
            if start >= 0:
                promised = range(start + rest, start + rest + more)
            else:
                start = self._state.find(bytes(rest))
            found.extend(
                self._claim_block(start + i if start >= 0 else self._find_available())
                for i in range(rest)
            )
        for block in promised:
            self._state[block] = _BLOCK_RESERVED
        return found, promised

    def allocate_contiguous(self, count: int, more: int) -> tuple[list[int], range] | None:
        """The same in one piece, and only where there is plenty of room."""
        start = self._state.find(bytes(count + more))
        if start < 0 or self._free_count - count < self.blocks // _FREE_SHARE_DIVISOR:
            return None
        return self.allocate(count, -1, more)

    def _is_available(self, block: int) -> bool:
        return block < self.blocks and self._state[block] != _BLOCK_USED

    def _find_available(self) -> int:
        free = self._state.find(_BLOCK_FREE)
        return free if free >= 0 else self._state.find(_BLOCK_RESERVED)

    def _claim_block(self, block: int) -> int:
        self._state[block] = _BLOCK_USED
        self._reference_counts[block] = 1
        self._free_count -= 1
        return block

    def _evict_block(self, block: int) -> None:
        del self._evictable[block]
        del self._block_by_hash[self._hash_by_block.pop(block)]
        self._state[block] = _BLOCK_FREE
        self._free_count += 1

    def add_reference(self, blocks: Sequence[int]) -> None:
        """One more row uses these."""
        for block in blocks:
            self._reference_counts[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int], promised: range) -> None:
        """One row less uses these, and none waits for what was promised."""
        # The end of a beginning goes before its start, which alone is of use.
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block]:
                continue
            if block in self._hash_by_block:
                self._evictable[block] = None
            else:
                self._state[block] = _BLOCK_FREE
                self._free_count += 1
        for block in promised:
            if self._state[block] == _BLOCK_RESERVED:
                self._state[block] = _BLOCK_FREE

    def is_shared(self, block: int) -> bool:
        """Whether several rows use it."""
        return self._reference_counts[block] > 1

    # --- known beginnings -----------------------------------------------------------------------

    def find_cached(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning that is known."""
        found = []
        for name in hashes:
            block = self._block_by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def cache_block(self, name: bytes, block: int) -> None:
        """This block is complete. Of two that are alike the first stays known."""
        if name not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[name] = block
            self._hash_by_block[block] = name

    # --- what lies in the blocks ----------------------------------------------------------------

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Keys and values (heads, tokens, size), each token at its slot."""
        if layer not in self._layers:
            self._layers[layer] = (self._make_layer_memory(keys), self._make_layer_memory(values))
            used = [block for block, state in enumerate(self._state) if state == _BLOCK_USED]
            _zero_ranges(self._layers[layer], _join_ranges(used))
        for whole, new in zip(self._layers[layer], (keys, values), strict=True):
            whole.index_copy_(1, slots, new)

    def _make_layer_memory(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((like.shape[0], self.tokens, like.shape[2]))

    def read(self, layer: int, runs: Sequence[range]) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values (heads, tokens, size) of these slots."""
        keys, values = self._layers[layer]
        if len(runs) == 1:
            (run,) = runs
            return keys[:, run.start : run.stop], values[:, run.start : run.stop]
        return self._gather_ranges(0, keys, runs), self._gather_ranges(1, values, runs)

    def read_blocks(
        self, layer: int, blocks: range | torch.Tensor, each: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (rows, heads, tokens, size) of rows with ``each`` so many of these.

        A range is of blocks that lie one behind another: there nothing is copied.
        """
        keys, values = self._layers[layer]
        return _view_by_sequence(keys, blocks, each), _view_by_sequence(values, blocks, each)

    def zero_slots(self, runs: Sequence[range]) -> None:
        """Zeros in these slots: what they held before may be no number."""
        with torch.inference_mode():
            for pair in self._layers.values():
                _zero_ranges(pair, runs)

    def _gather_ranges(
        self, which: int, whole: torch.Tensor, runs: Sequence[range]
    ) -> torch.Tensor:
        """A copy in one piece, in memory that the next one takes again."""
        length = sum(map(len, runs))
        place = self._gather_buffers.get((which, whole.shape[2]))
        if place is None or place.shape[0] < whole.shape[0] or place.shape[1] < length:
            place = whole.new_empty((whole.shape[0], -(-length // 512) * 512, whole.shape[2]))
            self._gather_buffers[which, whole.shape[2]] = place
        place, at = place[: whole.shape[0]], 0
        for run in runs:
            place[:, at : at + len(run)] = whole[:, run.start : run.stop]
            at += len(run)
        return place[:, :length]

    def copy_slots(self, runs: Sequence[range], block: int) -> None:
        """What lies in these slots, to that block and those behind it."""
        with torch.inference_mode():
            for whole in (part for pair in self._layers.values() for part in pair):
                at = block * BLOCK_SIZE
                for run in runs:
                    whole[:, at : at + len(run)] = whole[:, run.start : run.stop]
                    at += len(run)


class SequenceCache:
    """The past of one row. ``prompt`` of its tokens were, or will be, read in whole blocks."""

    def __init__(self, pool: BlockPool, prompt: int = 0) -> None:
        self.pool = pool
        self.prompt_length = prompt
        self.length = 0
        self._blocks: list[int] = []
        self._reserved = range(0)
        self._slot_ranges: list[range] | None = None

    def count_needed_blocks(self, tokens: int) -> int:
        """Blocks to be taken before so many more tokens have room."""
        need = -(-(self.length + tokens) // BLOCK_SIZE) - len(self._blocks)
        return need + 1 if self._writes_to_shared_block() else need

    def _writes_to_shared_block(self) -> bool:
        """Whether what is written next goes to a block that another row uses, too."""
        return self.length % BLOCK_SIZE > 0 and self.pool.is_shared(
            self._blocks[self.length // BLOCK_SIZE]
        )

    def reserve(self, tokens: int) -> None:
        """Room for so many more tokens. Raises OutOfBlocksError."""
        if self.count_needed_blocks(tokens) > self.pool.available:
            raise OutOfBlocksError
        before = self._blocks[-1:], len(self._blocks)
        if self._writes_to_shared_block():
            at = self.length // BLOCK_SIZE
            (own,), _ = self.pool.allocate(1, -1, 0)
            self.pool.copy_slots(_join_ranges(self._blocks[at : at + 1]), own)
            self.pool.release([self._blocks[at]], range(0))
            self._blocks[at] = own
            self._slot_ranges = None
        if (count := self.count_needed_blocks(tokens)) > 0:
            behind = self._blocks[-1] if self._blocks else -1
            blocks, promised = self.pool.allocate(count, behind, self._count_blocks_ahead(count))
            self._blocks.extend(blocks)
            if promised:
                self.pool.release((), self._reserved)
                self._reserved = promised
            self._slot_ranges = None
        if self._slot_ranges is None:
            self._slot_ranges = _join_ranges(self._blocks)
            if len(self._slot_ranges) > 1:
                self._compact()
        if (self._blocks[-1:], len(self._blocks)) != before:
            self.pool.zero_slots(_drop_slots(self.length, self._slot_ranges))

    def _count_blocks_ahead(self, taken: int) -> int:
        """Blocks that it will want behind those it has and the next ones."""
        return (
            max(0, -(-self.prompt_length // BLOCK_SIZE) - len(self._blocks) - taken) + _BLOCKS_AHEAD
        )

    def _compact(self) -> None:
        """To where it lies in one piece, if there is such a place."""
        place = self.pool.allocate_contiguous(len(self._blocks), self._count_blocks_ahead(0))
        if place is not None:
            self.pool.copy_slots(self.slot_ranges(self.length), place[0][0])
            self.pool.release(self._blocks, self._reserved)
            self._blocks, self._reserved = place
            self._slot_ranges = _join_ranges(self._blocks)

    def advance(self, tokens: int) -> None:
        """So many tokens went through all layers."""
        self.length += tokens

    def next_slots(self, tokens: int) -> list[int]:
        """Where the next tokens go."""
        places = range(self.length, self.length + tokens)
        return [self._blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in places]

    def first_blocks(self, tokens: int) -> list[int]:
        """Those of its first so many tokens."""
        return self._blocks[: -(-tokens // BLOCK_SIZE)]

    def slot_ranges(self, length: int) -> list[range]:
        """The slots of its first ``length`` tokens, in as few pieces as they lie in."""
        if self._slot_ranges is None:
            self._slot_ranges = _join_ranges(self._blocks)
        found: list[range] = []
        for piece in self._slot_ranges:
            found.append(piece[:length])
            length -= len(found[-1])
        return [run for run in found if run]

    def reuse_prefix(self, hashes: Sequence[bytes]) -> None:
        """Take over what is known of a prompt, before anything else is done."""
        most = (
            self.prompt_length - 1
        ) // BLOCK_SIZE  # its last token must be read, for the next one's sake
        self._blocks = self.pool.find_cached(hashes[:most])
        self.pool.add_reference(self._blocks)
        self.length = len(self._blocks) * BLOCK_SIZE
        self._slot_ranges = None

    def cache_prefix(self, hashes: Sequence[bytes]) -> None:
        """Make known what is read of a prompt."""
        for name, block in zip(hashes[: self.length // BLOCK_SIZE], self._blocks, strict=False):
            self.pool.cache_block(name, block)

    def fork(self) -> "SequenceCache":
        """The same past, for another row."""
        other = SequenceCache(self.pool, self.prompt_length)
        other.length = self.length
        other._blocks = self._blocks[: -(-self.length // BLOCK_SIZE)]
        self.pool.add_reference(other._blocks)
        return other

    def free(self) -> None:
        """Give back all of it; it begins anew."""
        self.pool.release(self._blocks, self._reserved)
        self._blocks, self._reserved, self._slot_ranges, self.length = [], range(0), None, 0


def _join_ranges(blocks: Sequence[int]) -> list[range]:
    found: list[range] = []
    for block in blocks:
        start, stop = block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE
        if found and found[-1].stop == start:
            found[-1] = range(found[-1].start, stop)
        else:
            found.append(range(start, stop))
    return found


def _drop_slots(start: int, runs: Sequence[range]) -> list[range]:
    """What is left of runs behind their first ``start`` slots."""
    found = []
    for run in runs:
        found.append(run[start:])
        start = max(0, start - len(run))
    return [run for run in found if run]


def _zero_ranges(pair: tuple[torch.Tensor, torch.Tensor], runs: Sequence[range]) -> None:
    for whole in pair:
        for run in runs:
            whole[:, run.start : run.stop] = 0


def _view_by_sequence(whole: torch.Tensor, blocks: range | torch.Tensor, each: int) -> torch.Tensor:
    heads, _, size = whole.shape
    if isinstance(blocks, range):
        own = whole[:, blocks.start * BLOCK_SIZE : blocks.stop * BLOCK_SIZE]
    else:
        # A block of a head is one piece of memory.
        own = whole.view(heads, -1, BLOCK_SIZE * size).index_select(1, blocks)
    return own.view(heads, -1, each * BLOCK_SIZE, size).transpose(0, 1)
