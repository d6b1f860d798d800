"""Stop expressions: the same matches as Python's `re`, in limited time; what is not supported is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nano_inference.text.stop_regex import MAX_SIZE, compile_regex, stop_regex_matcher
from nano_inference.types import BadRequest, Matcher

_ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\d", "\\W", "\\.", "[a-c\\d-]", "x1"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{,2}", "*?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(_ATOMS, _grown, max_leaves=6)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    vocab_size = 256
    special_ids = frozenset[int]()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def matcher_of(*patterns: str) -> Matcher:
    return stop_regex_matcher(Bytes(), patterns)()  # type: ignore[arg-type]


def first_end(pattern: str, text: str) -> int | None:
    """Return the end of the first match that ends, by the matcher under test."""
    matcher = matcher_of(pattern)
    for index, char in enumerate(text):
        if any(matcher.advance(token) == pattern for token in char.encode()):
            return index + 1
    return None


def pythons_first_end(pattern: str, text: str) -> int | None:
    """Return the same by `re`: the shortest beginning of the text with a match."""
    compiled = re.compile(pattern)
    return next((end for end in range(1, len(text) + 1) if compiled.search(text[:end])), None)


@settings(deadline=None, max_examples=100)
@given(PATTERNS, st.text("abcx1.- \n", max_size=12))
@example("(a|ab)(c|bcd)", "abcd")
@example("(a*)b{2,}", "aabbb")
def test_matches_are_those_of_re(pattern: str, text: str) -> None:
    if re.compile(pattern).match("") is not None:
        with pytest.raises(BadRequest, match="matches the empty text"):
            compile_regex(pattern)
    else:
        assert first_end(pattern, text) == pythons_first_end(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text", "end"),
    [
        ("\\n\\n", "a\n\nb", 3),
        ("[\\]x]", "]", 1),
        ("[]a]", "]", 1),
        ("\\u00e9{2}", "éé", 2),
        ("\\x41|b", "A", 1),
        ("Final: \\d+", "Final: 42", 8),
        ("(ab)+c", "ababd", None),
        ("a-", "a-", 2),
    ],
)
def test_characters_and_escapes(pattern: str, text: str, end: int | None) -> None:
    assert first_end(pattern, text) == end


@pytest.mark.parametrize(
    ("supported", "rest"),
    [
        *[("a", "{"), ("a", "{1 }"), ("a", "**"), ("a", "*+"), ("", "^a"), ("a", "$"), ("", "[a"), ("a", "\\")],
        *[("", "\\ba"), ("(a)", "\\1"), ("", "(?=a)b"), ("", "(?i)a"), ("(?:a)", "{e<=1}"), ("", "(?R)")],
        *[("", "\\p{L}"), ("", "\\xz"), ("", "[\\b]")],
    ],
)
def test_unsupported_part_of_an_expression_is_named(supported: str, rest: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(f"{rest!r} at position {len(supported)} is not supported")):
        compile_regex(supported + rest)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "missing )"),
        ("a{3,2}", "min repeat greater than max repeat"),
        ("[b-a]", "bad character range"),
        ("a*", "matches the empty text"),
        ("a{999}", f"more than {MAX_SIZE}"),
        ("(((a{9}){9}){9}){9}", f"more than {MAX_SIZE}"),
        ("(?:" * 2000 + "a" + ")" * 2000, f"more than {MAX_SIZE}"),
        ("(?:" * 190 + "a" + ")*" * 190, "recursion"),
    ],
)
def test_unsupported_expression_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compile_regex(pattern)
    assert says in str(caught.value) and caught.value.field == "stop_regex"


def test_of_several_expressions_the_one_that_matches_first_is_the_reason() -> None:
    matcher = matcher_of("x+y", "b", "ab")
    assert [matcher.advance(token) for token in b"xxab"] == [None, None, None, "b"]


@pytest.mark.slow
def test_search_keeps_only_what_may_begin_a_match() -> None:
    """A search of the whole text at each token would take hours."""
    matcher = matcher_of("User: \\d+", "(a|b)+c")
    assert not any(matcher.advance(token) for token in b"text " * 20_000)
    assert [matcher.advance(token) for token in b"User: 1"][-1] == "User: \\d+"


def test_expression_that_takes_exponential_time_ends_its_sample_by_name() -> None:
    matcher = matcher_of("(a|aa)+b")
    with pytest.raises(ValueError, match=r"stop_regex: '\(a\|aa\)\+b' needs more than 0.1 s"):
        for token in b"a" * 5000:
            matcher.advance(token)
