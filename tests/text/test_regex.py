"""Stop expressions: the same matches as Python's `re`, in linear time; what is not supported is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nano_inference.text.regex import MAX_STATES, Search, compile_regex
from nano_inference.types import BadRequest
from tests.effort import some

_ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\d", "\\W", "\\.", "[a-c\\d-]", "x1"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{,2}", "*?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(_ATOMS, _grown, max_leaves=6)


def first_end(pattern: str, text: str) -> int | None:
    """Return the end of the first match that ends, by the search under test."""
    search = Search(compile_regex(pattern))
    return next((index + 1 for index, char in enumerate(text) if search.push(char)), None)


def pythons_first_end(pattern: str, text: str) -> int | None:
    """Return the same by `re`: the shortest beginning of the text with a match."""
    compiled = re.compile(pattern)
    return next((end for end in range(1, len(text) + 1) if compiled.search(text[:end])), None)


@settings(deadline=None, max_examples=some(300))
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
    ("pattern", "says"),
    [
        ("(", "missing parenthesis"),
        ("a)", "unbalanced parenthesis"),
        ("[a", "an incomplete expression"),
        ("a\\", "an incomplete expression"),
        ("*a", "nothing to repeat"),
        ("a**", "a quantifier after a quantifier"),
        ("a{", "a brace that is no quantifier"),
        ("a{3,2}", "a quantifier whose most is less"),
        ("a*+", "a possessive quantifier"),
        ("^a", "the anchor ^ is not supported"),
        ("a$", "the anchor $ is not supported"),
        ("\\ba", "the escape"),
        ("(a)\\1", "the escape"),
        ("(?=a)b", "only plain groups"),
        ("(?i)a", "only plain groups"),
        ("[b-a]", "a range whose end is before its start"),
        ("\\xz", "an incomplete escape"),
        ("\\UFFFFFFFF", "an escape beyond Unicode"),
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("a{999}", f"more than {MAX_STATES}"),
        ("(((a{9}){9}){9}){9}", f"more than {MAX_STATES} states"),
        ("[" + "".join(map(chr, range(200, 240))) + "]{1,20}", f"more than {MAX_STATES} states"),
        ("a{1 }", "a brace that is no quantifier"),
        ("(" * 100 + "a" + ")" * 100, "nested groups"),
    ],
)
def test_unsupported_expression_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compile_regex(pattern)
    assert says in str(caught.value)


def test_a_count_may_begin_with_zeros() -> None:
    search = Search(compile_regex("a{00003}b"))
    assert [search.push(char) for char in "aabaaab"] == [False] * 6 + [True]


def test_search_keeps_a_bounded_state() -> None:
    """An expression that takes `re` exponential time."""
    search = Search(compile_regex("(a|aa)+b"))
    assert not any(search.push("a") for _ in range(5000))
    assert search.push("b")
