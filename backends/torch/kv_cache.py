"""The KV cache: a pool of blocks, block tables of sequences, and the prefix cache.

A block holds ``BLOCK_SIZE`` tokens of every layer. A sequence has a table of blocks; sequences with
a common prefix share blocks, which are copied on write. Full blocks of a prompt are found by a hash
of all tokens up to their end, so that a later prompt with the same prefix reuses them. Unused
blocks stay cached until their memory is needed; the least recently used are evicted first.

Attention needs a sequence's past in contiguous memory. Blocks are therefore allocated one after
another, and a fragmented sequence is moved while there is plenty of room; otherwise its pieces are
copied together for each pass. Short pasts of several rows are always copied together in whole
blocks, so the unwritten part of a block must be zero.

What must never happen:

- A block that is written while another sequence, or the prefix cache, uses it: it is copied first.
- A prefix that is found by a tenant who may not know it: the salt of the hash keeps them apart.
- A block that is lost: its references, the free blocks and those that may be evicted add up.
"""

import hashlib
from array import array
from collections.abc import Sequence

import torch

BLOCK_SIZE = 32
"""Tokens per block. Prompts share full blocks only."""
_BLOCKS_AHEAD = 8
"""Blocks reserved after a sequence, so that its memory stays contiguous while it grows."""
_FREE_SHARE_DIVISOR = 4
"""A sequence is moved only if this fraction of all blocks (one in four) stays free."""

_BLOCK_FREE, _BLOCK_RESERVED, _BLOCK_USED = 0, 1, 2


class OutOfBlocksError(Exception):
    """The pool has too few free blocks."""


def hash_blocks(ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """For each full block of a prompt, a hash of it, of all before it, and of ``salt``.

    Prompts with different salts share no blocks.
    """
    hashes, previous = [], salt
    for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        content = array("q", ids[start : start + BLOCK_SIZE]).tobytes()
        previous = hashlib.blake2b(previous + content, digest_size=16).digest()
        hashes.append(previous)
    return hashes


class BlockPool:
    """A fixed number of blocks. A layer's memory is allocated when it is first written to."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._state = bytearray(blocks)
        self._reference_counts = array("q", bytes(8 * blocks))
        self._free_count = blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._evictable: dict[int, None] = {}
        """Cached blocks that no sequence uses, least recently used first."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gather_buffers: dict[tuple[int, int], torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_blocks} of {self.blocks} blocks used>"

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.blocks * BLOCK_SIZE

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones and evictable ones."""
        return self._free_count + len(self._evictable)

    @property
    def used_blocks(self) -> int:
        """Blocks used by sequences."""
        return self.blocks - self.available

    @property
    def layer_count(self) -> int:
        """Layers that have keys and values."""
        return len(self._layers)

    @property
    def size_bytes(self) -> int:
        """Allocated memory of all layers, in bytes."""
        return sum(part.nbytes for pair in self._layers.values() for part in pair)

    # --- blocks ---------------------------------------------------------------------------------

    def allocate(self, count: int, after: int, reserve: int) -> tuple[list[int], range]:
        """Allocate ``count`` blocks, directly after block ``after`` if possible (-1: anywhere).

        Reserves ``reserve`` blocks behind them if there is space. Returns the blocks and the
        reserved range. At least ``count`` blocks must be available.
        """
        while self._free_count < count:
            self._evict_block(next(iter(self._evictable)))
        allocated: list[int] = []
        while after >= 0 and len(allocated) < count and self._is_available(after + 1):
            after += 1
            allocated.append(self._claim_block(after))
        reserved = range(0)
        if missing := count - len(allocated):
            start = self._state.find(bytes(missing + reserve))
            if start >= 0:
                reserved = range(start + missing, start + missing + reserve)
            else:
                start = self._state.find(bytes(missing))
            allocated.extend(
                self._claim_block(start + i if start >= 0 else self._find_available())
                for i in range(missing)
            )
        for block in reserved:
            self._state[block] = _BLOCK_RESERVED
        return allocated, reserved

    def allocate_contiguous(self, count: int, reserve: int) -> tuple[list[int], range] | None:
        """Allocate contiguous blocks; None if there is no space or too few blocks stay free."""
        start = self._state.find(bytes(count + reserve))
        if start < 0 or self._free_count - count < self.blocks // _FREE_SHARE_DIVISOR:
            return None
        return self.allocate(count, -1, reserve)

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
        """Count one more sequence that uses these blocks."""
        for block in blocks:
            self._reference_counts[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int], reserved: range) -> None:
        """Count one sequence less for these blocks, and free its reserved range."""
        # Later blocks of a prefix are evicted first: without the earlier ones they are useless.
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block]:
                continue
            if block in self._hash_by_block:
                self._evictable[block] = None
            else:
                self._state[block] = _BLOCK_FREE
                self._free_count += 1
        for block in reserved:
            if self._state[block] == _BLOCK_RESERVED:
                self._state[block] = _BLOCK_FREE

    def is_shared(self, block: int) -> bool:
        """Whether several sequences use the block."""
        return self._reference_counts[block] > 1

    # --- prefix cache ---------------------------------------------------------------------------

    def find_cached(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix."""
        blocks = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def cache_block(self, block_hash: bytes, block: int) -> None:
        """Add a full block to the prefix cache; of two with equal content the first is kept."""
        if block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash

    # --- keys and values ------------------------------------------------------------------------

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write keys and values of shape (heads, tokens, size), each token to its slot."""
        if layer not in self._layers:
            self._layers[layer] = (self._make_layer_memory(keys), self._make_layer_memory(values))
            used = [block for block, state in enumerate(self._state) if state == _BLOCK_USED]
            _zero_ranges(self._layers[layer], _join_ranges(used))
        for memory, source in zip(self._layers[layer], (keys, values), strict=True):
            memory.index_copy_(1, slots, source)

    def _make_layer_memory(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((like.shape[0], self.tokens, like.shape[2]))

    def read(self, layer: int, slot_ranges: Sequence[range]) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values, of shape (heads, tokens, size), in these ranges of slots."""
        keys, values = self._layers[layer]
        if len(slot_ranges) == 1:
            (slots,) = slot_ranges
            return keys[:, slots.start : slots.stop], values[:, slots.start : slots.stop]
        return self._gather_ranges(0, keys, slot_ranges), self._gather_ranges(
            1, values, slot_ranges
        )

    def read_blocks(
        self, layer: int, blocks: range | torch.Tensor, blocks_per_sequence: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of shape (sequences, heads, tokens, size), ``blocks_per_sequence`` each.

        A range names contiguous blocks, which are not copied.
        """
        keys, values = self._layers[layer]
        return _view_by_sequence(keys, blocks, blocks_per_sequence), _view_by_sequence(
            values, blocks, blocks_per_sequence
        )

    def zero_slots(self, slot_ranges: Sequence[range]) -> None:
        """Write zeros to these slots; their old content may be NaN."""
        with torch.inference_mode():
            for pair in self._layers.values():
                _zero_ranges(pair, slot_ranges)

    def _gather_ranges(
        self, index: int, memory: torch.Tensor, slot_ranges: Sequence[range]
    ) -> torch.Tensor:
        """A contiguous copy, in a buffer that the next call reuses."""
        length = sum(map(len, slot_ranges))
        buffer = self._gather_buffers.get((index, memory.shape[2]))
        if buffer is None or buffer.shape[0] < memory.shape[0] or buffer.shape[1] < length:
            buffer = memory.new_empty((memory.shape[0], -(-length // 512) * 512, memory.shape[2]))
            self._gather_buffers[index, memory.shape[2]] = buffer
        buffer, offset = buffer[: memory.shape[0]], 0
        for slots in slot_ranges:
            buffer[:, offset : offset + len(slots)] = memory[:, slots.start : slots.stop]
            offset += len(slots)
        return buffer[:, :length]

    def copy_slots(self, slot_ranges: Sequence[range], block: int) -> None:
        """Copy these slots to ``block`` and the blocks after it."""
        with torch.inference_mode():
            for memory in (part for pair in self._layers.values() for part in pair):
                offset = block * BLOCK_SIZE
                for slots in slot_ranges:
                    memory[:, offset : offset + len(slots)] = memory[:, slots.start : slots.stop]
                    offset += len(slots)


class SequenceCache:
    """The keys and values of one sequence, whose first ``prompt`` tokens are its prompt."""

    def __init__(self, pool: BlockPool, prompt: int = 0) -> None:
        self.pool = pool
        self.prompt_length = prompt
        self.length = 0
        self._blocks: list[int] = []
        self._reserved = range(0)
        self._slot_ranges: list[range] | None = None

    def __repr__(self) -> str:
        return f"<SequenceCache {self.length} tokens in {len(self._blocks)} blocks>"

    def count_needed_blocks(self, tokens: int) -> int:
        """Blocks to allocate for this many more tokens."""
        count = -(-(self.length + tokens) // BLOCK_SIZE) - len(self._blocks)
        return count + 1 if self._writes_to_shared_block() else count

    def _writes_to_shared_block(self) -> bool:
        """Whether the next token is written to a block that another sequence also uses."""
        return self.length % BLOCK_SIZE > 0 and self.pool.is_shared(
            self._blocks[self.length // BLOCK_SIZE]
        )

    def reserve(self, tokens: int) -> None:
        """Allocate blocks for this many more tokens. Raises OutOfBlocksError."""
        if self.count_needed_blocks(tokens) > self.pool.available:
            raise OutOfBlocksError
        before = self._blocks[-1:], len(self._blocks)
        if self._writes_to_shared_block():
            index = self.length // BLOCK_SIZE
            (copy,), _ = self.pool.allocate(1, -1, 0)
            self.pool.copy_slots(_join_ranges(self._blocks[index : index + 1]), copy)
            self.pool.release([self._blocks[index]], range(0))
            self._blocks[index] = copy
            self._slot_ranges = None
        if (count := self.count_needed_blocks(tokens)) > 0:
            last_block = self._blocks[-1] if self._blocks else -1
            blocks, reserved = self.pool.allocate(
                count, last_block, self._count_blocks_ahead(count)
            )
            self._blocks.extend(blocks)
            if reserved:
                self.pool.release((), self._reserved)
                self._reserved = reserved
            self._slot_ranges = None
        if self._slot_ranges is None:
            self._slot_ranges = _join_ranges(self._blocks)
            if len(self._slot_ranges) > 1:
                self._compact()
        if (self._blocks[-1:], len(self._blocks)) != before:
            self.pool.zero_slots(_drop_slots(self.length, self._slot_ranges))

    def _count_blocks_ahead(self, allocated: int) -> int:
        """Blocks to reserve after the ``allocated`` next ones."""
        return (
            max(0, -(-self.prompt_length // BLOCK_SIZE) - len(self._blocks) - allocated)
            + _BLOCKS_AHEAD
        )

    def _compact(self) -> None:
        """Move the sequence to contiguous blocks, if there are enough."""
        allocated = self.pool.allocate_contiguous(len(self._blocks), self._count_blocks_ahead(0))
        if allocated is not None:
            self.pool.copy_slots(self.slot_ranges(self.length), allocated[0][0])
            self.pool.release(self._blocks, self._reserved)
            self._blocks, self._reserved = allocated
            self._slot_ranges = _join_ranges(self._blocks)

    def advance(self, tokens: int) -> None:
        """Record that this many tokens have passed all layers."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on; the blocks stay allocated."""
        if length < self.length:
            self.pool.zero_slots(_drop_slots(length, self.slot_ranges(self.length)))
            self.length = length

    def count_free_slots(self) -> int:
        """How many more tokens fit into the allocated blocks."""
        return len(self._blocks) * BLOCK_SIZE - self.length

    def next_slots(self, tokens: int) -> list[int]:
        """The slots of the next tokens."""
        positions = range(self.length, self.length + tokens)
        return [
            self._blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in positions
        ]

    def first_blocks(self, tokens: int) -> list[int]:
        """The blocks of its first ``tokens`` tokens."""
        return self._blocks[: -(-tokens // BLOCK_SIZE)]

    def slot_ranges(self, length: int) -> list[range]:
        """The slots of its first ``length`` tokens, as contiguous ranges."""
        if self._slot_ranges is None:
            self._slot_ranges = _join_ranges(self._blocks)
        ranges: list[range] = []
        for slots in self._slot_ranges:
            ranges.append(slots[:length])
            length -= len(ranges[-1])
        return [slots for slots in ranges if slots]

    def reuse_prefix(self, hashes: Sequence[bytes]) -> None:
        """Use the cached blocks of the prompt. Called before anything is written."""
        # The last token must be computed: the next token is sampled from its logits.
        max_blocks = (self.prompt_length - 1) // BLOCK_SIZE
        self._blocks = self.pool.find_cached(hashes[:max_blocks])
        self.pool.add_reference(self._blocks)
        self.length = len(self._blocks) * BLOCK_SIZE
        self._slot_ranges = None

    def cache_prefix(self, hashes: Sequence[bytes]) -> None:
        """Add the computed full blocks of the prompt to the prefix cache."""
        for block_hash, block in zip(
            hashes[: self.length // BLOCK_SIZE], self._blocks, strict=False
        ):
            self.pool.cache_block(block_hash, block)

    def fork(self) -> "SequenceCache":
        """A second sequence with the same tokens; it shares the blocks."""
        other = SequenceCache(self.pool, self.prompt_length)
        other.length = self.length
        other._blocks = self._blocks[: -(-self.length // BLOCK_SIZE)]
        self.pool.add_reference(other._blocks)
        return other

    def free(self) -> None:
        """Release all blocks; the sequence is empty again."""
        self.pool.release(self._blocks, self._reserved)
        self._blocks, self._reserved, self._slot_ranges, self.length = [], range(0), None, 0


def _join_ranges(blocks: Sequence[int]) -> list[range]:
    ranges: list[range] = []
    for block in blocks:
        start, stop = block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, stop)
        else:
            ranges.append(range(start, stop))
    return ranges


def _drop_slots(start: int, slot_ranges: Sequence[range]) -> list[range]:
    """The ranges without their first ``start`` slots."""
    remaining = []
    for slots in slot_ranges:
        remaining.append(slots[start:])
        start = max(0, start - len(slots))
    return [slots for slots in remaining if slots]


def _zero_ranges(pair: tuple[torch.Tensor, torch.Tensor], slot_ranges: Sequence[range]) -> None:
    for memory in pair:
        for slots in slot_ranges:
            memory[:, slots.start : slots.stop] = 0


def _view_by_sequence(
    memory: torch.Tensor, blocks: range | torch.Tensor, blocks_per_sequence: int
) -> torch.Tensor:
    heads, _, size = memory.shape
    if isinstance(blocks, range):
        view = memory[:, blocks.start * BLOCK_SIZE : blocks.stop * BLOCK_SIZE]
    else:
        # A block of one head is contiguous in memory.
        view = memory.view(heads, -1, BLOCK_SIZE * size).index_select(1, blocks)
    return view.view(heads, -1, blocks_per_sequence * BLOCK_SIZE, size).transpose(0, 1)
