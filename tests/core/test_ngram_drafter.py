"""N-gram drafts and their selection, compared with naive implementations."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.core.drafting import Draft, Offer, choose_drafts
from nano_inference.core.ngram_drafter import (
    CANDIDATES,
    FIRST_CHANCE,
    LONGEST,
    RATE,
    NgramDrafter,
    TextIndex,
    continuation,
)

few_tokens = st.lists(st.integers(0, 3), max_size=60)


class Tokens(list[int]):
    """A list that supports weak references and counts reads."""

    num_reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self.num_reads += 1
        return super().__getitem__(place)


def agreement(tokens: Sequence[int], text: Sequence[int], end: int) -> int:
    """Return how many of the last tokens match those before `end`."""
    count = 0
    while count < min(LONGEST, end, len(tokens)) and text[end - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


def naive_find(tokens: Sequence[int], places: Sequence[tuple[Sequence[int], int]]) -> tuple[Sequence[int], int] | None:
    """The longest agreement among the last places where two tokens agree; the most recent of them."""
    recent = [place for place in reversed(places) if agreement(tokens, *place) >= 2][:CANDIDATES]
    return max(recent, key=lambda place: agreement(tokens, *place)) if recent else None


@given(few_tokens)
def test_find_returns_the_longest_recent_occurrence(tokens: list[int]) -> None:
    text: list[int] = []
    index = TextIndex()
    number, num_read = index.add_text(text), 0
    for token in tokens:
        text.append(token)
        num_read = index.extend(number, num_read)
        place = index.find(text)
        expected = naive_find(text, [(text, end) for end in range(2, len(text))])
        assert (place and (place.tokens, place.end)) == expected
        assert place is None or place.length == agreement(text, text, place.end)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=80))
def test_find_searches_all_texts(additions: list[tuple[int, int]]) -> None:
    """Three texts grow in any order; an occurrence counts once it is indexed."""
    texts: list[list[int]] = [[], [], []]
    index = TextIndex()
    for text in texts:
        index.add_text(text)
    num_read = [0, 0, 0]
    places: list[tuple[list[int], int]] = []
    for number, token in additions:
        text = texts[number]
        text.append(token)
        if len(text) > 2:
            places.append((text, len(text) - 1))
        num_read[number] = index.extend(number, num_read[number])
        place = index.find(text)
        found = None if place is None else (place.tokens, place.end)
        expected = naive_find(text, places)
        assert found == expected and (found is None or found[0] is expected[0])  # type: ignore[index]


@given(few_tokens.filter(lambda tokens: len(tokens) > 2), st.integers(1, 9), st.data())
def test_continuation_repeats_a_periodic_text(tokens: list[int], limit: int, data: st.DataObject) -> None:
    index = TextIndex()
    index.extend(index.add_text(tokens), 0)
    place = index.find(tokens)
    if place is None:
        return
    longer = list(tokens)
    for _ in range(limit):
        longer.append(longer[place.end + len(longer) - len(tokens)])
    assert continuation(place, tokens, limit) == tuple(longer[len(tokens) :])
    other = data.draw(st.permutations(tokens))
    assert continuation(place._replace(tokens=other), tokens, limit) == tuple(other[place.end : place.end + limit])


def test_index_is_freed_with_the_last_sample_of_a_request() -> None:
    drafter = NgramDrafter(5)
    samples = [Tokens([1, 2, 3]) for _ in range(3)]
    kept = [weakref.ref(tokens) for tokens in samples]
    for number, tokens in enumerate(samples):
        drafter.open(number, 7, tokens, 3)
        drafter.draft(number)
    other = Tokens([4, 5])
    kept_other = weakref.ref(other)
    drafter.open(3, 8, other, 2)
    del samples, tokens, other
    for number in (1, 0):
        drafter.close(number, 7)
    gc.collect()
    assert kept[0]() is not None, "the text of an ended sample stays indexed"
    drafter.close(2, 7)
    gc.collect()
    assert not any(ref() for ref in kept) and kept_other() is not None
    drafter.close(3, 8)
    drafter.close(3, 8)
    gc.collect()
    assert kept_other() is None and drafter.draft(3) == Draft()


def test_samples_of_one_request_share_an_index() -> None:
    prompt = [1, 2, 3, 4]
    drafter = NgramDrafter(3)
    first, second, stranger = [*prompt, 9, 8, 7, 6, 5], [*prompt, 9, 8], [*prompt, 9, 8]
    drafter.open(0, 0, first, 4)
    drafter.open(1, 0, second, 4)
    drafter.open(2, 1, stranger, 4)
    drafter.draft(0)
    assert drafter.draft(1).tokens == (7, 6, 5) == drafter.last_draft(1)
    assert drafter.draft(2).tokens == ()
    drafter.close(0, 0)
    second += [7]
    assert drafter.draft(1).tokens == (6, 5), "also after its end"
    drafter.disable(1)
    assert drafter.draft(1) == Draft()


def test_prompt_is_indexed_once_by_any_first_sample() -> None:
    drafter = NgramDrafter(4)
    prompts = [Tokens(range(1000)) for _ in range(3)]
    for number, tokens in enumerate(prompts):
        drafter.open(number, 0, tokens, 1000)
    drafter.close(0, 0)
    for tokens in prompts[1:]:
        tokens += [500, 501]
    assert drafter.draft(2).tokens == (502, 503, 504, 505) == drafter.draft(1).tokens
    assert prompts[2].num_reads > 1000 > prompts[1].num_reads


def test_acceptance_is_updated_by_drafts_that_were_not_computed() -> None:
    drafter = NgramDrafter(3)
    tokens = [1, 2, 3, 1, 2]
    drafter.open(0, 0, tokens, 5)
    assert drafter.draft(0) == Draft((3, 1, 2), FIRST_CHANCE)
    tokens += [3]
    better = FIRST_CHANCE + RATE * (1 - FIRST_CHANCE)
    assert drafter.draft(0) == Draft((1, 2, 3), pytest.approx(better))
    tokens += [1, 7, 3, 1, 2]
    mixed = (better + RATE * (1 - better)) * (1 - RATE)
    assert drafter.draft(0).chance == pytest.approx(mixed), "right, then wrong; what comes after that says nothing"
    for _ in range(60):
        tokens += [3, 1, 2]
        drafter.draft(0)
    assert drafter.draft(0).chance > 0.9


offers = st.lists(st.builds(Offer, st.integers(0, 4), st.floats(0, 1)), max_size=3)


@given(offers, st.integers(1, 30), st.integers(0, 12), st.integers(1, 40))
def test_choose_drafts_maximises_the_rate(wanted: list[Offer], num_tokens: int, room: int, weight_tokens: int) -> None:
    def rate(counts: Sequence[int]) -> float:
        worth = sum(o.chance**j for o, count in zip(wanted, counts, strict=True) for j in range(1, count + 1))
        return (num_tokens + worth) / (num_tokens + sum(counts) + weight_tokens)

    chosen = choose_drafts(wanted, num_tokens, room, weight_tokens)
    assert len(chosen) == len(wanted) and sum(chosen) <= room
    assert all(0 <= count <= offer.limit for count, offer in zip(chosen, wanted, strict=True))
    every = itertools.product(*(range(offer.limit + 1) for offer in wanted))
    assert rate(chosen) == pytest.approx(max(rate(counts) for counts in every if sum(counts) <= room))


def test_larger_steps_choose_fewer_doubtful_drafts() -> None:
    counts = [choose_drafts([Offer(5, 0.7)], size, 99, 4)[0] for size in range(1, 40)]
    assert counts[0] >= 3 and counts == sorted(counts, reverse=True) and counts[-1] == 0
    assert choose_drafts([Offer(5, 1.0)] * 50, 50, 999, 4) == [5] * 50, "what is certain always pays"
    assert choose_drafts([Offer(5, 0.3), Offer(5, 0.9)], 2, 1, 4) == [0, 1], "the likeliest first"
    assert choose_drafts([], 5, 5, 4) == [] and choose_drafts([Offer(0, 1.0)], 5, 5, 4) == [0]
