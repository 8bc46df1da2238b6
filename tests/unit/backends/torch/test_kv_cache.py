"""The KV cache returns what was written, however blocks are shared, moved or evicted."""

import random

import pytest
import torch

from backends.torch.kv_cache import (
    BLOCK_SIZE,
    BlockPool,
    OutOfBlocksError,
    SequenceCache,
    hash_blocks,
)


def write_values(kv: SequenceCache, values: list[int]) -> None:
    """Write one layer's keys, equal to the tokens, and values, twice that."""
    kv.reserve(len(values))
    slots = torch.tensor(kv.next_slots(len(values)))
    line = torch.tensor(values, dtype=torch.float64)[None, :, None].expand(2, -1, 4)
    kv.pool.write(0, slots, line, 2 * line)
    kv.advance(len(values))


def read_values(kv: SequenceCache) -> list[int]:
    keys, values = kv.pool.read(0, kv.slot_ranges(kv.length))
    assert torch.equal(2 * keys, values)
    assert keys.shape == (2, kv.length, 4)
    return [int(value) for value in keys[1, :, 2].tolist()]


def prefill(pool: BlockPool, ids: list[int]) -> SequenceCache:
    """Prefill a prompt like the scheduler."""
    kv, names = SequenceCache(pool, len(ids)), hash_blocks(ids)
    kv.reuse_prefix(names)
    try:
        write_values(kv, ids[kv.length :])
    except OutOfBlocksError:
        kv.free()
        raise
    kv.cache_prefix(names)
    return kv


def test_block_hash_covers_all_preceding_tokens() -> None:
    ids = list(range(100))
    assert len(hash_blocks(ids)) == 3
    assert hash_blocks(ids)[:2] == hash_blocks(ids[:64])

    other = [9, *ids[1:]]
    assert not set(hash_blocks(other)) & set(hash_blocks(ids))
    assert hash_blocks(ids[: BLOCK_SIZE - 1]) == []


def test_prompts_with_different_salts_share_no_blocks() -> None:
    ids = list(range(100))
    assert not set(hash_blocks(ids, b"a")) & set(hash_blocks(ids, b"b"))
    assert not set(hash_blocks(ids, b"a")) & set(hash_blocks(ids))
    assert hash_blocks(ids, b"a") == hash_blocks(ids, b"a")


def test_sequence_is_contiguous_if_there_is_room() -> None:
    pool = BlockPool(16)
    one, two = SequenceCache(pool), SequenceCache(pool)

    for start in range(0, 90, 30):
        write_values(one, list(range(start, start + 30)))
        write_values(two, list(range(start, start + 30)))

    assert len(one.slot_ranges(90)) == len(two.slot_ranges(90)) == 1
    assert read_values(one) == read_values(two) == list(range(90))
    assert one.slot_ranges(40)[0] == range(
        one.slot_ranges(90)[0].start, one.slot_ranges(90)[0].start + 40
    )


def test_fragmented_sequence_is_read_completely() -> None:
    pool = BlockPool(6)
    rows = [SequenceCache(pool) for _ in range(3)]
    for start in range(0, 64, 32):
        for row in rows:
            write_values(row, list(range(start, start + 32)))
    rows[1].free()
    rest = list(range(64, 128))

    write_values(rows[0], rest)

    assert len(rows[0].slot_ranges(128)) > 1
    assert read_values(rows[0]) == list(range(128))
    assert read_values(rows[2]) == list(range(64))
    with pytest.raises(OutOfBlocksError):
        rows[2].reserve(1)
    assert pool.used_blocks == pool.blocks == 6


def test_cached_prefix_is_shared() -> None:
    pool = BlockPool(8)
    ids = list(range(80))
    one = prefill(pool, ids)
    two = prefill(pool, [*ids[:70], 5])

    assert pool.used_blocks == 4
    assert read_values(two) == [*ids[:70], 5]

    three = SequenceCache(pool, 64)
    three.reuse_prefix(hash_blocks(ids[:64]))
    assert three.length == BLOCK_SIZE  # its last token is always computed

    for row in (one, two, three):
        row.free()
    assert pool.used_blocks == 0
    assert pool.available == 8

    again = SequenceCache(pool, 80)
    again.reuse_prefix(hash_blocks(ids))
    assert again.length == 64
    assert read_values(again) == ids[:64]


def test_lru_eviction_removes_later_blocks_before_earlier_ones() -> None:
    pool = BlockPool(4)
    old, new = list(range(70)), list(range(100, 140))
    prefill(pool, old).free()
    prefill(pool, new).free()
    write_values(SequenceCache(pool), [0])
    write_values(SequenceCache(pool), [0] * 32)

    assert len(pool.find_cached(hash_blocks(old))) == 1
    assert len(pool.find_cached(hash_blocks(new))) == 1

    taken = SequenceCache(pool, 40)
    taken.reuse_prefix(hash_blocks(new))
    write_values(SequenceCache(pool), [0])

    assert pool.find_cached(hash_blocks(old)) == []
    assert read_values(taken) == new[:32]


def test_concurrent_equal_prompts_cache_one_prefix() -> None:
    pool = BlockPool(8)
    ids = list(range(40))
    one, two = SequenceCache(pool, 40), SequenceCache(pool, 40)
    for row in (one, two):
        write_values(row, ids)
        row.cache_prefix(hash_blocks(ids))
    one.free()
    two.free()

    assert pool.used_blocks == 0

    third = prefill(pool, ids)
    assert pool.used_blocks == 2
    assert read_values(third) == ids


def test_forked_sequences_copy_on_write() -> None:
    pool = BlockPool(6)
    one = prefill(pool, list(range(40)))
    two, three = one.fork(), one.fork()

    assert pool.used_blocks == 2
    assert two.count_needed_blocks(1) == 1

    write_values(two, [7])
    write_values(three, [8])
    write_values(one, [9])

    assert pool.used_blocks == 4
    assert [read_values(row)[40:] for row in (one, two, three)] == [[9], [7], [8]]
    assert read_values(one)[:40] == read_values(two)[:40] == list(range(40))


def test_reserved_blocks_are_used_by_others_if_needed() -> None:
    pool = BlockPool(4)
    one, two = SequenceCache(pool), SequenceCache(pool)
    write_values(one, [1])
    write_values(two, list(range(90)))

    assert read_values(two) == list(range(90))
    assert pool.available == 0

    two.free()
    write_values(one, list(range(100)))
    assert read_values(one) == [1, *range(100)]


def test_sequence_is_kept_contiguous_if_there_is_room() -> None:
    pool = BlockPool(64)
    ids = list(range(80))
    one = prefill(pool, ids)
    two, three = prefill(pool, [*ids[:70], 5]), one.fork()
    write_values(three, [6])

    for row, expected in ((two, [*ids[:70], 5]), (three, [*ids, 6])):
        assert read_values(row) == expected
        assert len(row.slot_ranges(row.length)) == 1
    assert pool.used_blocks == 9

    for row in (one, two, three):
        row.free()
    assert pool.used_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_cache_operations_match_a_reference(seed: int) -> None:
    """The reference is a dictionary of lists."""
    rng = random.Random(seed)
    pool = BlockPool(rng.choice((6, 12, 40)))
    stem = [rng.randrange(9) for _ in range(120)]
    rows: dict[SequenceCache, list[int]] = {}
    for number in range(300):
        deed = rng.choice(("begin", "write", "write", "write", "copy", "free"))
        row = rng.choice(list(rows)) if rows else None
        try:
            if deed == "begin":
                ids = stem[: rng.randrange(1, 120)] + [number] * rng.randrange(3)
                rows[prefill(pool, ids)] = ids
            elif row is not None and deed == "write":
                tokens = [rng.randrange(1000) for _ in range(rng.choice((1, 1, 5, 40)))]
                write_values(row, tokens)
                rows[row] = rows[row] + tokens
            elif row is not None and deed == "copy":
                rows[row.fork()] = rows[row]
            elif row is not None:
                row.free()
                del rows[row]
        except OutOfBlocksError:
            for row in list(rows)[: 1 + len(rows) // 2]:
                row.free()
                del rows[row]
        for kv, expected in rows.items():
            assert read_values(kv) == expected

    for kv in rows:
        kv.free()

    assert pool.used_blocks == 0
    assert pool.available == pool.blocks
