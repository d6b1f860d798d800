"""Streamed decoding: text is emitted only when it can no longer change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.text.stream import finish, first_stop, push, repeats, start


def run(pieces: list[bytes], stops: tuple[str, ...] = (), *, drop_space: bool = False) -> tuple[list[str], str | None]:
    """Push all pieces; return the text emitted by each step and by `finish`, and the stop string."""
    state, out = start(stops=stops, drop_space=drop_space), []
    for piece in pieces:
        state, text = push(state, piece)
        out.append(text)
    state, text = finish(state)
    return [*out, text], state.stopped


def split(data: bytes, places: list[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(marks)]


places = st.lists(st.integers(0, 10**6), max_size=12)
stop_lists = st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=24) | st.text(max_size=12).map(str.encode), places=places)
def test_any_split_decodes_to_the_whole_text(data: bytes, places: list[int]) -> None:
    assert "".join(run(split(data, places))[0]) == data.decode("utf-8", "replace")


@settings(max_examples=60, deadline=None)
@given(text=st.text("abé😀", max_size=14), places=places, stops=stop_lists)
def test_any_split_stops_at_the_same_place(text: str, places: list[int], stops: tuple[str, ...]) -> None:
    emitted, stopped = run(split(text.encode(), places), stops)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    wanted = text[: min(ends)[1]] if ends else text
    assert ("".join(emitted), stopped) == (wanted, min(ends)[2] if ends else None)


@settings(max_examples=60, deadline=None)
@given(text=st.text("abé", max_size=14), places=places, stops=stop_lists)
def test_prefix_of_a_stop_string_is_withheld(text: str, places: list[int], stops: tuple[str, ...]) -> None:
    state, sent, seen = start(stops=stops), "", b""
    for piece in split(text.encode(), places):
        state, new = push(state, piece)
        sent, seen = sent + new, seen + piece
        whole = seen.decode("utf-8", "ignore")
        beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
        longest = max((len(b) for b in beginnings if whole.endswith(b)), default=0)
        assert state.stopped or len(sent) == len(whole) - longest


def test_incomplete_character_is_withheld() -> None:
    assert run([b"\xf0", b"\x9f\x98", b"\x80!"])[0] == ["", "", "😀!", ""]
    assert run([b"\xf0\x9f"])[0] == ["", "\ufffd"]
    assert run([b"a\xffb", b"\xc3", b"("])[0] == ["a\ufffdb", "", "\ufffd(", ""]


def test_stop_string_that_ends_first_applies() -> None:
    assert run([b"xabcd"], ("abcd", "bc"))[1] == "bc"
    assert first_stop("abc", ("bc", "abc")) == (0, "abc")
    assert first_stop("abc", ("x",)) is None


def test_drop_leading_space() -> None:
    assert run([b" Hello", b" world"], drop_space=True)[0] == ["Hello", " world", ""]
    assert run([b"", b"  a"], drop_space=True)[0] == ["", " a", ""]
    assert run([b"a", b" b"], drop_space=True)[0] == ["a", " b", ""]


LOOP = [5, 6, 7] * 50


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], False),
        (list(range(1000)), False),
        ([1] * 127, False),
        ([1] * 128, True),
        ([*range(100, 300), *LOOP], True),
        ([*LOOP, 8], False),
        (list(range(48)) * 5, False),
        (list(range(48)) * 6, True),
        (list(range(49)) * 20, False),
        ([*"ab"] * 64, True),
    ],
)
def test_repetition_is_six_equal_periods_and_128_tokens(tokens: list[object], found: bool) -> None:
    assert repeats(tokens) is found
