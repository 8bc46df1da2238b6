"""The KV cache: what is written is read, however blocks are shared, moved or evicted."""

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


def write(kv: SequenceCache, values: list[int]) -> None:
    """A pass of one layer in which a token's keys are its value, and its values twice that."""
    kv.reserve(len(values))
    slots = torch.tensor(kv.next_slots(len(values)))
    line = torch.tensor(values, dtype=torch.float64)[None, :, None].expand(2, -1, 4)
    kv.pool.write(0, slots, line, 2 * line)
    kv.advance(len(values))


def read(kv: SequenceCache) -> list[int]:
    keys, values = kv.pool.read(0, kv.slot_ranges(kv.length))
    assert torch.equal(2 * keys, values)
    assert keys.shape == (2, kv.length, 4)
    return [int(value) for value in keys[1, :, 2].tolist()]


def prompted(pool: BlockPool, ids: list[int]) -> SequenceCache:
    """A row that has read a prompt, as the scheduler does it."""
    kv, names = SequenceCache(pool, len(ids)), hash_blocks(ids)
    kv.reuse_prefix(names)
    try:
        write(kv, ids[kv.length :])
    except OutOfBlocksError:
        kv.free()
        raise
    kv.cache_prefix(names)
    return kv


def test_a_hash_names_all_that_came_before() -> None:
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


def test_a_row_lies_in_one_piece_where_there_is_room() -> None:
    pool = BlockPool(16)
    one, two = SequenceCache(pool), SequenceCache(pool)
    for start in range(0, 90, 30):
        write(one, list(range(start, start + 30)))
        write(two, list(range(start, start + 30)))
    assert len(one.slot_ranges(90)) == len(two.slot_ranges(90)) == 1
    assert read(one) == read(two) == list(range(90))
    assert one.slot_ranges(40)[0] == range(
        one.slot_ranges(90)[0].start, one.slot_ranges(90)[0].start + 40
    )


def test_a_row_in_pieces_is_read_whole() -> None:
    pool = BlockPool(6)
    rows = [SequenceCache(pool) for _ in range(3)]
    for start in range(0, 64, 32):
        for row in rows:
            write(row, list(range(start, start + 32)))
    rows[1].free()
    rest = list(range(64, 128))
    write(rows[0], rest)
    assert len(rows[0].slot_ranges(128)) > 1
    assert read(rows[0]) == list(range(128))
    assert read(rows[2]) == list(range(64))
    with pytest.raises(OutOfBlocksError):
        rows[2].reserve(1)
    assert pool.used_blocks == pool.blocks == 6


def test_a_known_beginning_is_shared_and_not_read_again() -> None:
    pool = BlockPool(8)
    ids = list(range(80))
    one = prompted(pool, ids)
    two = prompted(pool, [*ids[:70], 5])
    assert pool.used_blocks == 4
    assert read(two) == [*ids[:70], 5]
    three = SequenceCache(pool, 64)
    three.reuse_prefix(hash_blocks(ids[:64]))
    assert three.length == BLOCK_SIZE  # its last token must be read
    for row in (one, two, three):
        row.free()
    assert pool.used_blocks == 0
    assert pool.available == 8
    again = SequenceCache(pool, 80)
    again.reuse_prefix(hash_blocks(ids))
    assert again.length == 64
    assert read(again) == ids[:64]


def test_what_was_unused_longest_is_forgotten_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4)
    old, new = list(range(70)), list(range(100, 140))
    prompted(pool, old).free()
    prompted(pool, new).free()
    write(SequenceCache(pool), [0])
    write(SequenceCache(pool), [0] * 32)
    assert len(pool.find_cached(hash_blocks(old))) == 1
    assert len(pool.find_cached(hash_blocks(new))) == 1
    taken = SequenceCache(pool, 40)
    taken.reuse_prefix(hash_blocks(new))
    write(SequenceCache(pool), [0])
    assert pool.find_cached(hash_blocks(old)) == []
    assert read(taken) == new[:32]


def test_alike_prompts_at_a_time_leave_one_known() -> None:
    pool = BlockPool(8)
    ids = list(range(40))
    one, two = SequenceCache(pool, 40), SequenceCache(pool, 40)
    for row in (one, two):
        write(row, ids)
        row.cache_prefix(hash_blocks(ids))
    one.free()
    two.free()
    assert pool.used_blocks == 0
    third = prompted(pool, ids)
    assert pool.used_blocks == 2
    assert read(third) == ids


def test_a_copy_shares_until_one_of_the_two_goes_on() -> None:
    pool = BlockPool(6)
    one = prompted(pool, list(range(40)))
    two, three = one.fork(), one.fork()
    assert pool.used_blocks == 2
    assert two.count_needed_blocks(1) == 1
    write(two, [7])
    write(three, [8])
    write(one, [9])
    assert pool.used_blocks == 4
    assert [read(row)[40:] for row in (one, two, three)] == [[9], [7], [8]]
    assert read(one)[:40] == read(two)[:40] == list(range(40))


def test_room_that_was_promised_is_given_when_there_is_no_other() -> None:
    pool = BlockPool(4)
    one, two = SequenceCache(pool), SequenceCache(pool)
    write(one, [1])
    write(two, list(range(90)))
    assert read(two) == list(range(90))
    assert pool.available == 0
    two.free()
    write(one, list(range(100)))
    assert read(one) == [1, *range(100)]


def test_a_row_in_pieces_moves_where_there_is_plenty_of_room() -> None:
    pool = BlockPool(64)
    ids = list(range(80))
    one = prompted(pool, ids)
    two, three = prompted(pool, [*ids[:70], 5]), one.fork()
    write(three, [6])
    for row, expected in ((two, [*ids[:70], 5]), (three, [*ids, 6])):
        assert read(row) == expected
        assert len(row.slot_ranges(row.length)) == 1
    assert pool.used_blocks == 9
    for row in (one, two, three):
        row.free()
    assert pool.used_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_anything_in_any_order(seed: int) -> None:
    """Rows are what a dictionary of lists says they are."""
    dice = random.Random(seed)
    pool = BlockPool(dice.choice((6, 12, 40)))
    stem = [dice.randrange(9) for _ in range(120)]
    rows: dict[SequenceCache, list[int]] = {}
    for number in range(300):
        deed = dice.choice(("begin", "write", "write", "write", "copy", "free"))
        row = dice.choice(list(rows)) if rows else None
        try:
            if deed == "begin":
                ids = stem[: dice.randrange(1, 120)] + [number] * dice.randrange(3)
                rows[prompted(pool, ids)] = ids
            elif row is not None and deed == "write":
                more = [dice.randrange(1000) for _ in range(dice.choice((1, 1, 5, 40)))]
                write(row, more)
                rows[row] = rows[row] + more
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
            assert read(kv) == expected
    for kv in rows:
        kv.free()
    assert pool.used_blocks == 0
    assert pool.available == pool.blocks
