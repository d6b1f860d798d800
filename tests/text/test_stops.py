"""Stop strings in tokens: the same result as in the text, with limited memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.stops import stop_matcher
from nano_inference.text.stream import push, start
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import Matcher


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
