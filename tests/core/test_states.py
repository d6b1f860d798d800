"""Slots of recurrent states: the pool alone, and snapshots among the blocks of a cache."""

from __future__ import annotations

import random

import pytest

from nano_inference.core.cache import KVManager, StatePool, make_kv

SALT = (0, "", 0)


def pool_of(*snapshots: tuple[int, int], num_slots: int = 3) -> StatePool:
    """A pool whose slots 0, 1, … are snapshots."""
    pool = StatePool(num_slots)
    for block, count in snapshots:
        pool.keep(taken(pool), block, count)
    return pool


def taken(pool: StatePool) -> int:
    slot = pool.take()
    assert slot is not None
    return slot


def test_take_evicts_the_least_recently_used_snapshot() -> None:
    pool = pool_of((10, 1), (11, 2), (12, 3))
    pool.pin(0)
    pool.unpin()
    assert [pool.take(), pool.take(), pool.take(), pool.take()] == [1, 2, 0, None]
    pool.check()


def test_take_spares_pinned_snapshots() -> None:
    pool = pool_of((10, 1), (11, 2), (12, 3))
    pool.pin(0)
    assert [pool.take(), pool.take(), pool.take()] == [1, 2, None]
    pool.unpin()
    assert pool.take() == 0


def test_spare_snapshot_is_evicted_first() -> None:
    pool = pool_of((10, 1), (11, 2))
    pool.keep(taken(pool), 12, 3, is_spare=True)
    assert [pool.take(), pool.take()] == [2, 0]


def test_end_of_an_answer_is_evicted_first_once_it_was_used() -> None:
    pool = pool_of((10, 1), (11, 2))
    pool.keep(taken(pool), 12, 3, is_end=True)
    pool.pin(2)
    pool.unpin()
    assert [pool.take(), pool.take(), pool.take()] == [2, 0, 1]
    pool.check()


def test_equal_snapshot_is_kept_once() -> None:
    pool = pool_of((10, 1), (11, 2), (10, 1))
    assert pool.num_snapshots == 2 and pool.longest(10, 4) == (1, 0)
    assert [pool.take(), pool.take()] == [2, 1], "keeping it again counts as a use"
    pool.check()


def test_longest_snapshot_of_a_block_within_a_limit() -> None:
    pool = pool_of((10, 1), (10, 3), (11, 4))
    assert [pool.longest(10, most) for most in (0, 1, 2, 3, 4)] == [(0, -1), (1, 0), (1, 0), (3, 1), (3, 1)]
    pool.forget(10)
    assert not pool.has(10) and pool.snapshots() == ((11, 4),)
    pool.forget_all()
    assert [pool.num_snapshots, pool.num_held] == [0, 0]


def test_slot_that_is_not_held_cannot_be_released() -> None:
    pool = pool_of((10, 1))
    with pytest.raises(KeyError):
        pool.release(0)


def fill(kv: KVManager, tokens: list[int], *positions: int) -> list[int]:
    """Publish tokens with snapshots after some of them; release and return their blocks."""
    blocks = kv.publish(tokens, SALT, kv.take(-(-len(tokens) // kv.block_size)), 0, len(tokens))
    for position in positions:
        kv.keep_state(taken(kv.states), tokens, SALT, blocks, position)
    kv.release(blocks)
    kv.check()
    return blocks


TEXT = list(range(30, 44))


@pytest.mark.parametrize(
    ("position", "blocks", "partial"), [(8, 2, 0), (7, 1, 3), (9, 2, 1), (13, 3, 1), (14, 0, 0), (1, 0, 1)]
)
def test_hit_ends_at_a_snapshot(position: int, blocks: int, partial: int) -> None:
    kv = make_kv("radix", 20, 4, 4)
    table = fill(kv, TEXT, position)
    hit = kv.peek(TEXT, SALT)  # the last token is computed in any case
    assert (hit.blocks, hit.num_idle, hit.partial_tokens) == (tuple(table[:blocks]), blocks, partial)
    assert (hit.state >= 0) == (position < 14) and hit.reach == 13
    none = kv.peek([9, *TEXT], SALT)
    assert none.state == -1 and all(kv.peek(TEXT, salt) == none for salt in ((1, "", 0), (0, "other", 0), (0, "", 1)))


def test_hit_may_end_in_a_block_of_another_text() -> None:
    kv = make_kv("radix", 20, 4, 8)
    fill(kv, TEXT[:10], 10)  # the third block is not full
    longer = fill(kv, TEXT)
    hit = kv.peek([*TEXT, 1], SALT)
    assert len(hit.blocks) == 2 and hit.partial_tokens == 2 and hit.partial_block not in longer and hit.reach == 14


def test_state_of_an_equal_text_is_found_at_its_published_block() -> None:
    kv = make_kv("radix", 20, 4, 8)
    fill(kv, TEXT[:10])
    fill(kv, TEXT[:10], 10)  # its last block is not published: an equal one is
    assert kv.peek([*TEXT[:10], 1], SALT).state >= 0


def test_state_whose_tokens_are_not_found_is_not_kept() -> None:
    kv = make_kv("radix", 20, 4, 8)
    blocks = kv.publish(TEXT[:6], SALT, kv.take(4), 0, 6)
    kv.keep_state(taken(kv.states), TEXT, SALT, blocks, 7)
    kv.keep_state(taken(kv.states), TEXT, SALT, blocks, 0)
    assert kv.states.num_snapshots == kv.states.num_held == 0


def test_hits_of_random_texts_have_the_state_of_exactly_their_tokens() -> None:
    rng = random.Random(5)
    num_hits = 0
    for _ in range(60):
        kv = make_kv("radix", rng.choice([6, 12, 40]), rng.choice([1, 2, 4]), rng.choice([2, 5, 30]))
        state_of: dict[int, list[int]] = {}
        for _ in range(25):
            text = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            if -(-len(text) // kv.block_size) > kv.num_free_blocks():
                continue
            blocks = kv.publish(text, SALT, kv.take(-(-len(text) // kv.block_size)), 0, len(text))
            for position in {rng.randrange(1, len(text) + 1) for _ in range(2)}:
                slot = taken(kv.states)
                state_of[slot] = text[:position]
                kv.keep_state(slot, text, SALT, blocks, position)
            kv.release(blocks)
            kv.check()
            wanted = [rng.randrange(2) for _ in range(14)]
            hit = kv.peek(wanted, SALT)
            size = len(hit.blocks) * kv.block_size + hit.partial_tokens
            assert size <= hit.reach < 14 and (size > 0) == (hit.state >= 0)
            assert hit.state < 0 or state_of[hit.state] == wanted[:size]
            num_hits += hit.state >= 0
    assert num_hits > 600
