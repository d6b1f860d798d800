"""Reasoning split from the content of an answer, and its tokens counted."""

from __future__ import annotations

import pytest

from nano_inference.text.reasoning import ReasoningSplitter


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\na </thin b</think>\n\nc </think>", False, ("a </thin b", "c </think>")),
        ("a</think>b", True, ("a", "b")),
        ("plain <think>a</think>", False, ("", "plain <think>a</think>")),
        ("<thi", False, ("", "<thi")),
        ("<think>a </thi", False, ("a </thi", "")),
    ],
)
def test_reasoning_is_split_from_content(text: str, inside: bool, expected: tuple[str, str], size: int) -> None:
    state = ReasoningSplitter(starts_inside=inside)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [state.push(piece) for piece in pieces] + [state.push("", is_end=True)]
    assert ("".join(one for one, _ in found), "".join(two for _, two in found)) == expected


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("prefix", "text", "inside", "expected"),
    [
        ("<think>a", "b</think>c", False, ("b", "c")),
        ("<thi", "nk>a</think>b", False, ("a", "b")),
        ("<thi", "s is it", False, ("", "s is it")),
        ("a</th", "ink>b", True, ("", "b")),
        ("a</th", "at is b</think>c", True, ("at is b", "c")),
        ("plain", "<think>c</think>", False, ("", "<think>c</think>")),
    ],
)
def test_given_beginning_is_not_returned_again(
    prefix: str, text: str, inside: bool, expected: tuple[str, str], size: int
) -> None:
    state = ReasoningSplitter(starts_inside=inside, prefix=prefix)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [state.push(piece) for piece in pieces] + [state.push("", is_end=True)]
    assert ("".join(one for one, _ in found), "".join(two for _, two in found)) == expected


@pytest.mark.parametrize(
    ("prefix", "tokens", "inside", "count"),
    [
        ("", ["<think>", "a", "b", "</think>", "c"], False, 4),
        ("", ["<th", "ink>a", "b</th", "ink>c", "d"], False, 4),
        ("", ["a", "</think>", "c"], True, 2),
        ("", ["a", "<think>", "b", "</think>"], False, 0),
        ("<think>a</th", ["ink>", "c"], False, 1),
        ("<think>a</think>", ["b", "</think>"], False, 0),
    ],
)
def test_tokens_of_reasoning_are_counted_with_its_marks(
    prefix: str, tokens: list[str], inside: bool, count: int
) -> None:
    for size in (1, 2, 5):
        state = ReasoningSplitter(starts_inside=inside, prefix=prefix)
        for at in range(0, len(tokens), size):
            state.push("".join(tokens[at : at + size]))
            state.count(token.encode() for token in tokens[at : at + size])
        assert state.num_tokens == count
