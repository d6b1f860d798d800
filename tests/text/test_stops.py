"""Stop strings in tokens: the same result as in the text, with limited memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.stops import MAX_TOKENS, BadWords, Both, bad_words_matcher, stop_matcher
from nano_inference.text.stream import push, start
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import BadRequest, Matcher, StopReason
from tests.nanochat.samples import tokenizer as nanochat_tokenizer


@pytest.fixture(scope="module")
def tokenizer(chatml_dir: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(str(chatml_dir)))


def first(matcher: Matcher, ids: list[int]) -> tuple[int, object] | None:
    """Return the number of tokens after which the matcher stops, and the reason."""
    for count, token in enumerate(ids, 1):
        reason = matcher.advance(token)
        if reason is not None:
            return count, reason
    return None


def test_stop_string_inside_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" the")
    assert len(ids) == 1
    assert first(stop_matcher(tokenizer, ("h",))(), ids) == (1, "h")


def test_stop_string_across_tokens_stops_at_the_last(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1234567")
    assert first(stop_matcher(tokenizer, ("345",))(), ids) == (5, "345")
    assert first(stop_matcher(tokenizer, ("99", "7"))(), ids) == (7, "7")
    assert first(stop_matcher(tokenizer, ("48",))(), ids) is None


def test_special_tokens_are_not_text_but_can_be_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1<|im_end|>2")
    assert first(stop_matcher(tokenizer, ("12",))(), ids) == (3, "12")
    assert first(stop_matcher(tokenizer, ("<|im_end|>",))(), ids) == (2, "<|im_end|>")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab é😀1", max_size=16), stops=st.lists(st.text("ab é😀1", min_size=1, max_size=3), max_size=3))
def test_matcher_stops_where_the_stream_stops(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    ids = tokenizer.encode(text)
    state, wanted = start(stops=tuple(stops)), None
    for count, token in enumerate(ids, 1):
        state, _ = push(state, tokenizer.token_bytes(token))
        if state.stopped:
            wanted = (count, state.stopped)
            break
    assert first(stop_matcher(tokenizer, tuple(stops))(), ids) == wanted


def test_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        stop_matcher(tokenizer, ("a", ""))


def test_displayed_special_tokens_are_part_of_the_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<|im_end|>", add_special=False)
    before, after = (tokenizer.encode(text, add_special=False) for text in ("a", "b"))
    for skip, reasons in ((True, [None, None, None]), (False, [None, None, "end|>b"])):
        matcher = stop_matcher(tokenizer, ("end|>b",), skip_special=skip)()
        assert [matcher.advance(token) for token in (*before, *end, *after)] == reasons
    hidden, shown = (stop_matcher(tokenizer, ("ab",), skip_special=skip)() for skip in (True, False))
    assert [hidden.advance(token) for token in (*before, *end, *after)][-1] == "ab"
    assert [shown.advance(token) for token in (*before, *end, *after)][-1] is None


def test_dropped_leading_space_is_not_part_of_the_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(" ab", add_special=False)
    for drop, reason in ((False, " ab"), (True, None)):
        matcher = stop_matcher(tokenizer, (" ab",), drop_space=drop)()
        assert [matcher.advance(token) for token in tokens][-1] == reason
    matcher = stop_matcher(tokenizer, (" ab",), drop_space=True)()
    assert [matcher.advance(token) for token in (*tokens, *tokens)][-1] == " ab", "only a leading space is dropped"


TOKENIZER = nanochat_tokenizer()


def allowed(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special=False, parse_special=False))


words = st.sets(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, st.lists(st.integers(0, 5), max_size=20), st.sampled_from([6, 8, 9, 17]))
def test_exactly_the_tokens_that_complete_a_word_are_banned(
    spellings: set[tuple[int, ...]], tokens: list[int], vocab_size: int
) -> None:
    matcher = BadWords(frozenset(spellings), vocab_size)
    for count in range(len(tokens) + 1):
        past = tuple(tokens[:count])
        mask = matcher.mask()
        assert mask is None or len(mask) == -(-vocab_size // 8)
        for token in range(vocab_size):
            completes = any((*past, token)[-len(word) :] == word for word in spellings)
            assert allowed(mask, token) == (not completes)
        if count < len(tokens):
            assert matcher.advance(tokens[count]) is None


def test_word_is_banned_at_the_start_and_after_a_space() -> None:
    make = bad_words_matcher(TOKENIZER, ["hello"], TOKENIZER.vocab_size)
    for text in ("hello", " hello"):
        matcher = make()
        ids = spelled(text)
        for token in ids[:-1]:
            assert allowed(matcher.mask(), token)
            matcher.advance(token)
        assert not allowed(matcher.mask(), ids[-1])
    assert make() is not make(), "each sample has its own matcher"


def test_text_of_a_special_token_is_banned_as_text() -> None:
    matcher = bad_words_matcher(TOKENIZER, ["<|bos|>"], TOKENIZER.vocab_size)()
    (special,) = TOKENIZER.encode("<|bos|>", add_special=False)
    assert allowed(matcher.mask(), special)
    for token in spelled("<|bos|>")[:-1]:
        matcher.advance(token)
    assert not allowed(matcher.mask(), spelled("<|bos|>")[-1])


def test_empty_and_too_long_words_are_refused() -> None:
    with pytest.raises(BadRequest, match="bad_words: a word has no tokens"):
        bad_words_matcher(TOKENIZER, [""], TOKENIZER.vocab_size)
    with pytest.raises(BadRequest, match=f"bad_words: the words have more than {MAX_TOKENS} tokens"):
        bad_words_matcher(TOKENIZER, ["é" * 300, "ж" * 300], TOKENIZER.vocab_size)


class Fixed:
    """A matcher with a constant stop reason and mask."""

    def __init__(self, reason: StopReason | None, mask: bytes | None) -> None:
        self.seen: list[int] = []
        self._reason, self._mask = reason, mask

    def advance(self, token: int) -> StopReason | None:
        self.seen.append(token)
        return self._reason

    def mask(self) -> bytes | None:
        return self._mask


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [(None, None, None), ("a", None, "a"), (None, "b", "b"), ("a", "b", "a"), (0, "b", 0)],
)
def test_both_stops_if_either_stops(
    first: StopReason | None, second: StopReason | None, reason: StopReason | None
) -> None:
    pair = Fixed(first, None), Fixed(second, None)
    assert Both(*pair).advance(7) == reason
    assert [one.seen for one in pair] == [[7], [7]], "both receive every token"


@pytest.mark.parametrize(
    ("first", "second", "mask"),
    [
        (None, None, None),
        (b"\x0f\xff", None, b"\x0f\xff"),
        (None, b"\x0f\xff", b"\x0f\xff"),
        (b"\x0f\xff", b"\x3c\x01", b"\x0c\x01"),
    ],
)
def test_both_allows_tokens_that_both_allow(first: bytes | None, second: bytes | None, mask: bytes | None) -> None:
    assert Both(Fixed(None, first), Fixed(None, second)).mask() == mask
