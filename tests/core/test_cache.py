"""Both cache managers: what a hit gives is what was computed, and nothing is lost, leaked or lent twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from nano_inference.core.cache import Hit, KVManager, Salt, compute_block_hash, make_kv
from nano_inference.types import CacheFull

SALT: Salt = (0, "", 0)
Content = tuple[Salt, tuple[int, ...]]


@pytest.fixture(params=["paged", "radix"])
def cache_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cached(kv: KVManager, tokens: list[int], salt: Salt = SALT) -> int:
    hit = kv.peek(tokens, salt)
    return len(hit.blocks) * kv.block_size + hit.partial_tokens


def leave_behind(kv: KVManager, tokens: list[int], salt: Salt = SALT) -> list[int]:
    """Compute, publish and release a text."""
    blocks = kv.take(-(-len(tokens) // kv.block_size))
    blocks = kv.publish(tokens, salt, blocks, 0, len(tokens))
    kv.release(blocks)
    return blocks


def test_block_hash_is_unique_for_any_ids() -> None:
    texts = [[0], [255], [256], [2**63], [2**64 - 1], [-1], [2**80], [1, 23], [12, 3], [12]]
    texts += [[1, 2, 3], [1] * 5000, [2**64, 1], [2**64 * 10 + 1]]
    names = [compute_block_hash(text, prefix) for text in texts for prefix in (None, 0, 1, 2**128 - 1)]
    assert len(set(names)) == len(names)
    assert all(0 <= name < 2**128 for name in names)
    with pytest.raises(ValueError, match="token_ids"):
        compute_block_hash([])


@dataclass(eq=False)
class Text:
    """One text that holds blocks."""

    tokens: list[int]
    salt: Salt
    blocks: list[int]
    published: int
    computed: int


@dataclass
class Story:
    """A random history of a cache, and what every slot really holds: a K/V is named by its salt and its whole past."""

    rng: random.Random
    kv: KVManager
    slots: dict[int, Content] = field(default_factory=dict)
    live: list[Text] = field(default_factory=list)
    num_hit: int = 0
    num_partial: int = 0

    def slot(self, blocks: list[int] | tuple[int, ...], position: int) -> int:
        return blocks[position // self.kv.block_size] * self.kv.block_size + position % self.kv.block_size

    def verify(self, tokens: list[int], salt: Salt, hit: Hit) -> None:
        size = self.kv.block_size
        whole = len(hit.blocks) * size
        assert whole + hit.partial_tokens < len(tokens), "one token is left to compute"
        for position in range(whole + hit.partial_tokens):
            blocks = (*hit.blocks, hit.partial_block)
            assert self.slots[self.slot(blocks, position)] == (salt, tuple(tokens[: position + 1]))
        self.num_hit += whole + hit.partial_tokens
        self.num_partial += hit.partial_tokens

    def arrive(self) -> None:
        kv, size = self.kv, self.kv.block_size
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 5 * size + 2))]
        salt = (0, self.rng.choice("ab"), 0)
        hit = kv.peek(tokens, salt)
        self.verify(tokens, salt, hit)
        num_fresh = -(-len(tokens) // size) - len(hit.blocks)
        if num_fresh + hit.num_idle > kv.num_free_blocks():
            return
        source = [self.slots[hit.partial_block * size + i] for i in range(hit.partial_tokens)]
        text = Text(tokens, salt, kv.hold(hit), len(hit.blocks), len(hit.blocks) * size + hit.partial_tokens)
        fresh = kv.take(num_fresh)
        assert not any(set(fresh) & set(other.blocks) for other in (text, *self.live)), "lent twice"
        text.blocks += fresh
        self.slots |= {fresh[0] * size + i: content for i, content in enumerate(source)}
        self.live.append(text)
        self.compute(text)

    def compute(self, text: Text) -> None:
        """Write the K/V of some more tokens, then publish it, or not."""
        end = self.rng.randrange(text.computed, len(text.tokens) + 1)
        for position in range(text.computed, end):
            self.slots[self.slot(text.blocks, position)] = (text.salt, tuple(text.tokens[: position + 1]))
        text.computed = end
        if self.rng.random() < 0.8:
            text.blocks = self.kv.publish(text.tokens, text.salt, text.blocks, text.published, end)
            text.published = max(text.published, end // self.kv.block_size)

    def extend(self) -> None:
        text = self.rng.choice(self.live)
        text.tokens.append(self.rng.randrange(2))
        missing = -(-len(text.tokens) // self.kv.block_size) - len(text.blocks)
        if missing > self.kv.num_free_blocks():
            return self.leave(text)
        text.blocks += self.kv.take(missing)
        return self.compute(text)

    def leave(self, text: Text) -> None:
        self.live.remove(text)
        self.kv.release(text.blocks)

    def step(self) -> None:
        kind = self.rng.choices(("arrive", "extend", "leave", "flush"), (40, 30, 27, 3))[0] if self.live else "arrive"
        if kind == "leave":
            self.leave(self.rng.choice(self.live))
        elif kind == "flush":
            self.kv.flush()
        else:
            self.arrive() if kind == "arrive" else self.extend()
        self.kv.check()
        held = {block for text in self.live for block in text.blocks}
        assert self.kv.num_free_blocks() == self.kv.num_blocks - len(held)


def test_hit_contains_the_kv_of_exactly_its_tokens(cache_type: str) -> None:
    num_hit = num_partial = 0
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.choice([1, 2, 4, 5])
        story = Story(rng, make_kv(cache_type, rng.randrange(6, 24), size))
        for _ in range(40):
            story.step()
        while story.live:
            story.leave(story.live[0])
        story.kv.check()
        assert story.kv.num_free_blocks() == story.kv.num_blocks
        num_hit += story.num_hit
        num_partial += story.num_partial
    assert num_hit > (1000, 2000)[cache_type == "radix"], "hits were found"
    assert (num_partial > 500) == (cache_type == "radix")


def test_a_radix_hit_is_exact_to_the_token_and_a_paged_one_to_the_block() -> None:
    text = list(range(100, 123))
    for cache_type, same, longer, parting in (("radix", 22, 23, 18), ("paged", 16, 16, 16)):
        kv = make_kv(cache_type, 8, 16)
        leave_behind(kv, text)
        assert cached(kv, text) == same, "the last token is always left to compute"
        assert cached(kv, [*text, 1]) == longer
        assert cached(kv, [*text[:18], 1, 2, 3]) == parting
        assert cached(kv, [1, *text]) == 0
        others: list[Salt] = [(1, "", 0), (0, "x", 0), (0, "", 1)]
        assert not any(cached(kv, text, salt) for salt in others), "another version, namespace or adapter"
        assert cached(kv, text[:16]) == (15 if cache_type == "radix" else 0)


def test_eviction_is_least_recently_released_and_last_block_first(cache_type: str) -> None:
    kv = make_kv(cache_type, 6, 2)
    a, b, c = ([i, i + 1, i + 2, i + 3, 0] for i in (10, 20, 30))
    for text in (a, b, c):
        leave_behind(kv, text[:4])
    kv.release(kv.hold(kv.peek(a, SALT)))  # a was used again: now b is the oldest
    seen = []
    for _ in range(6):
        kv.take(1)
        kv.check()
        seen.append((cached(kv, a), cached(kv, b), cached(kv, c)))
    assert seen == [(4, 2, 4), (4, 0, 4), (4, 0, 2), (4, 0, 0), (2, 0, 0), (0, 0, 0)]


def test_a_held_block_is_never_evicted(cache_type: str) -> None:
    kv = make_kv(cache_type, 4, 2)
    leave_behind(kv, [1, 2, 3, 4])
    held = kv.hold(kv.peek([1, 2, 3, 4, 5], SALT))
    assert kv.num_private(held) == 2
    kv.hold(kv.peek([1, 2, 9], SALT))
    assert kv.num_private(held) == 1
    assert not set(kv.take(2)) & set(held)
    with pytest.raises(CacheFull):
        kv.take(1)
    assert cached(kv, [1, 2, 3, 4, 5]) == 4


def test_flush_blanks_idle_blocks_now_and_held_ones_on_release(cache_type: str) -> None:
    kv = make_kv(cache_type, 8, 2)
    leave_behind(kv, [1, 2, 3, 4])
    held = kv.hold(kv.peek([1, 2, 9], SALT)) + kv.take(1)
    kv.publish([1, 2, 9, 9], SALT, held, 1, 4)
    assert kv.flush() == 1, "one was idle, two are held"
    assert cached(kv, [1, 2, 9, 9, 9]) == 0
    held += kv.take(1)
    kv.publish([1, 2, 9, 9, 7, 7], SALT, held, 2, 6)  # still computing under a forgotten prefix
    assert cached(kv, [1, 2, 9, 9, 7, 7, 7]) == 0
    kv.release(held)
    kv.check()
    assert kv.num_free_blocks() == 8
    assert kv.flush() == 0, "nothing was left to be found"


def test_salt_is_forgotten_with_its_last_block(cache_type: str) -> None:
    kv = make_kv(cache_type, 8, 2)
    for number in range(500):
        leave_behind(kv, [1, 2, 3, 4], (number, f"user {number}", number))
    books = [value for value in vars(kv).values() if isinstance(value, dict)]
    assert books and all(len(book) <= 8 for book in books)
    assert cached(kv, [1, 2, 3, 4, 5], (499, "user 499", 499)) == 4
