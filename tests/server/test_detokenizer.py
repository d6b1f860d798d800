"""Deltas to text, compared with a slow reference that joins all bytes first; hidden ends, entries, single tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.server.detokenizer import (
    DecodedDelta,
    LogprobEntry,
    detokenize,
    prompt_entries,
    start_detokenizer,
    token_bytes_of,
    token_text,
    visible_bytes,
)
from nano_inference.server.generation import Generation
from nano_inference.text.stops import stop_matcher
from nano_inference.types import Delta, FinishReason, StopReason, TokenLogprob, TrainingSample

PIECES: tuple[bytes, ...] = (
    *(b"a", b"b", b"c", b"ab", b"ba", b"aba", b"x y", b"\n\n"),
    *("é".encode(), "日本".encode(), "😀".encode()),
    *(b"\xf0\x9f", b"\x98\x80", b"\xe6\x97", b"\xa5", b"\xff", b"\xc3", b"\xa9a"),
    b"c\xf0",
    *(b"<end>", b"<bos>"),
)
END, BOS = len(PIECES) - 2, len(PIECES) - 1
PLAIN = range(END)
UNKNOWN = len(PIECES)
"""An id in the padding of the vocabulary, which has no text."""
STOPS = ("a", "ab", "abab", "bab", "c", "é", "日本", "本a", "😀", "\n\n", "y\n", "a😀b", "ca", "abac", "bé", "zz")


@dataclass(frozen=True)
class Pieces:
    """A tokenizer made of a list of byte strings, the last two special."""

    vocab_size: int = len(PIECES)
    bos_id: int | None = BOS
    eos_ids: tuple[int, ...] = (END,)
    special_ids: frozenset[int] = frozenset({END, BOS})
    drops_space: bool = False
    named: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        raise AssertionError("writing works on tokens: it neither encodes nor decodes")

    def decode(self, ids: object, *, skip_special: bool = True) -> str:
        raise AssertionError("writing works on tokens: it neither encodes nor decodes")

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]

    def token_text(self, token: int) -> str:
        return PIECES[token].decode("latin-1")


TOKENIZER = Pieces()


def sample_of(tokens: Sequence[int], reason: FinishReason, stop_reason: StopReason | None) -> TrainingSample:
    count = len(tokens)
    return TrainingSample(
        request_id=0,
        sample_index=0,
        prompt_tokens=(0,),
        completion_tokens=tuple(tokens),
        logprobs=(-1.0,) * count,
        mask=(1,) * count,
        token_versions=(0,) * count,
        weight_version=0,
        finish_reason=reason,
        stop_reason=stop_reason,
    )


def deltas_of(
    tokens: Sequence[int], cuts: Sequence[int], reason: FinishReason = "length", stop_reason: StopReason | None = None
) -> Iterator[Delta]:
    """Split tokens into deltas at the given positions; the last one has the sample."""
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    pairs = list(pairwise(edges)) or [(0, 0)]
    for start, end in pairs:
        some = tuple(tokens[start:end])
        yield Delta(
            request_id=0,
            sample_index=0,
            token_ids=some,
            logprobs=tuple(-0.5 - token for token in some),
            mask=(1,) * len(some),
            versions=(0,) * len(some),
            sample=sample_of(tokens, reason, stop_reason) if end == len(tokens) else None,
        )


def options(**fields: Any) -> Generation:
    """Return a generation without requests."""
    fixed = {"requests": (), "kind": "completion", "id": "id-1", "model": "m", "tokenizer": TOKENIZER, "created": 5}
    return Generation(**{**fixed, "num_samples": 1, "num_tokens": 0, **fields})


def decode_all(shape: Generation, deltas: Iterator[Delta]) -> list[DecodedDelta]:
    detokenizer = start_detokenizer(shape, 0)
    out = []
    for delta in deltas:
        detokenizer, written = detokenize(detokenizer, delta, shape)
        out.append(written)
    return out


def reference(tokens: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[int, str | None, str]:
    """Return (number of tokens, stop string, text before it) by searching the joined bytes."""
    data = b""
    for count, token in enumerate(tokens, start=1):
        before, data = len(data), data + PIECES[token]
        ends = [
            (at + len(stop.encode()), at, stop)
            for stop in stops
            for at in range(len(data))
            if data.startswith(stop.encode(), at) and at + len(stop.encode()) > before
        ]
        if count > min_tokens and ends:
            _, at, stop = min(ends)
            return count, stop, data[:at].decode("utf-8", "replace")
    return len(tokens), None, data.decode("utf-8", "replace")


cases = st.tuples(
    st.lists(st.sampled_from(PLAIN), max_size=24),
    st.lists(st.sampled_from(STOPS), max_size=4, unique=True),
    st.sets(st.integers(1, 23)),
    st.integers(0, 6),
    st.booleans(),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases)
def test_text_ends_exactly_before_stop_string(case: tuple[list[int], list[str], set[int], int, bool]) -> None:
    tokens, stops, cuts, min_tokens, include = case
    count, stop, text = reference(tokens, stops, min_tokens)
    tokens = tokens[:count]
    shape = options(stops=tuple(stops), include_stop=include)
    deltas = deltas_of(tokens, sorted(cuts), "length" if stop is None else "stop", stop)
    pieces = [one.text for one in decode_all(shape, deltas)]
    assert "".join(pieces) == text + (stop if include and stop is not None else "")
    assert text.startswith("".join(pieces[:-1])), "nothing of the stop string left before it was complete"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases)
def test_engine_matcher_stops_where_reference_does(case: tuple[list[int], list[str], set[int], int, bool]) -> None:
    tokens, stops, _, _, _ = case
    count, stop, _ = reference(tokens, stops, 0)
    matcher = stop_matcher(TOKENIZER, tuple(stops))()
    verdicts = [matcher.advance(token) for token in tokens[:count]]
    assert verdicts[:-1] == [None] * len(verdicts[:-1])
    assert (verdicts[-1] if verdicts else None) == stop


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*range(len(PIECES)), UNKNOWN]), max_size=24), st.sets(st.integers(1, 23)), st.booleans()
)
def test_token_texts_join_to_the_text(tokens: list[int], cuts: set[int], skip_special: bool) -> None:
    shape = options(logprobs=0, skip_special=skip_special)
    written = decode_all(shape, deltas_of(tokens, sorted(cuts)))
    entries = [entry for one in written for entry in one.entries]
    data = b"".join(visible_bytes(token, TOKENIZER, skip_special) for token in tokens)
    assert "".join(entry.text for entry in entries) == "".join(one.text for one in written)
    assert "".join(one.text for one in written) == data.decode("utf-8", "replace")
    assert [entry.token for entry in entries] == tokens
    assert [entry.offset for entry in entries] == [
        sum(len(before.text) for before in entries[:index]) for index in range(len(entries))
    ]


def test_possible_stop_string_is_held_back_until_excluded() -> None:
    tokens = [PIECES.index(piece) for piece in (b"a", b"b", b"a", b"c", b"a")]
    pieces = [one.text for one in decode_all(options(stops=("abab",)), deltas_of(tokens, [1, 2, 3, 4]))]
    assert pieces == ["", "", "", "abac", "a"]


@pytest.mark.parametrize(
    ("reason", "stop_reason", "include", "skip_special", "text"),
    [
        ("stop", None, False, True, "a"),
        ("stop", None, False, False, "a"),
        ("stop", None, True, True, "a"),
        ("stop", None, True, False, "a<end>"),
        ("stop", END, False, False, "a"),
        ("length", None, False, False, "a<end>"),
        ("length", None, False, True, "a"),
    ],
)
def test_stop_token_visibility(
    reason: FinishReason, stop_reason: StopReason | None, include: bool, skip_special: bool, text: str
) -> None:
    shape = options(include_stop=include, skip_special=skip_special, logprobs=0)
    written = decode_all(shape, deltas_of([0, END], [1], reason, stop_reason))
    assert "".join(one.text for one in written) == text
    assert "".join(entry.text for one in written for entry in one.entries) == text
    assert [token for one in written for token in one.token_ids] == [0, END]
    assert (written[-1].finish_reason, written[-1].stop_reason) == (reason, stop_reason)
    assert written[0].finish_reason is None


def test_hidden_special_token_equal_to_stop_string_cuts_nothing() -> None:
    written = decode_all(options(stops=("<end>", "ax")), deltas_of([0, END], [1], "stop", "<end>"))
    assert [one.text for one in written] == ["", "a"]


def test_text_after_stop_string_is_dropped() -> None:
    """Also if it is an incomplete character, which would become U+FFFD."""
    tokens = [0, PIECES.index(b"c\xf0")]
    assert [one.text for one in decode_all(options(stops=("c",)), deltas_of(tokens, [1], "stop", "c"))] == ["a", ""]
    tokens = [0, PIECES.index(b"aba")]
    assert [one.text for one in decode_all(options(stops=("ab",)), deltas_of(tokens, [1], "stop", "ab"))] == ["", "a"]


def test_replacement_character_does_not_match_stop_string() -> None:
    """The engine compares bytes, which contain no U+FFFD; the text must not end where the engine continued."""
    written = decode_all(options(stops=("\ufffd",)), deltas_of([0, PIECES.index(b"\xff"), 1], [1, 2]))
    assert "".join(one.text for one in written) == "a\ufffdb"


def test_drop_space_removes_first_space() -> None:
    tokens = [PIECES.index(b"x y")]
    for drop, text in ((True, "x y"), (False, "x y")):
        shape = options(drop_space=drop, logprobs=0)
        assert decode_all(shape, deltas_of(tokens, []))[0].text == text
    state = start_detokenizer(options(drop_space=True), 0)
    assert state.shown.drop_space and state.unstopped.drop_space


def test_entries_include_sampled_token_in_alternatives() -> None:
    top = (TokenLogprob(5, -0.1), TokenLogprob(6, -0.2))
    delta = Delta(
        request_id=0,
        sample_index=0,
        token_ids=(6, 1),
        logprobs=(-0.2, -3.0),
        mask=(1, 1),
        versions=(0, 0),
        top_logprobs=(top, top),
    )
    shape = options(logprobs=2, echo=("héllo",))
    _, written = detokenize(start_detokenizer(shape, 0), delta, shape)
    assert written.entries == (
        LogprobEntry(6, "x y", -0.2, top, 5),
        LogprobEntry(1, "b", -3.0, (*top, TokenLogprob(1, -3.0)), 8),
    )


def test_prompt_entries() -> None:
    shape = options(logprobs=1, prompt_logprobs=2)
    top = (TokenLogprob(1, -0.1), TokenLogprob(2, -0.2))
    other = (TokenLogprob(3, -0.3), TokenLogprob(4, -0.4))
    entries = prompt_entries([BOS, 0, 11], [-1.0, -2.0], (top, other), shape)
    assert entries == (
        LogprobEntry(BOS, "", None, None, 0),
        LogprobEntry(0, "a", -1.0, (top[0], TokenLogprob(0, -1.0)), 0),
        LogprobEntry(11, "\ufffd", -2.0, (other[0], TokenLogprob(11, -2.0)), 1),
    )
    assert prompt_entries([0, 1], [-1.0], None, shape)[1].top == (TokenLogprob(1, -1.0),)


def test_token_text() -> None:
    assert token_text(PIECES.index("é".encode()), TOKENIZER) == "é"
    assert token_text(PIECES.index(b"\xff"), TOKENIZER) == "bytes:\\xff"
    assert token_text(PIECES.index(b"\xf0\x9f"), TOKENIZER) == "bytes:\\xf0\\x9f"
    assert token_text(UNKNOWN, TOKENIZER) == ""
    assert (token_bytes_of(END, TOKENIZER), token_bytes_of(UNKNOWN, TOKENIZER)) == (b"<end>", b"")
    assert visible_bytes(END, TOKENIZER, False) == b"<end>"
    assert visible_bytes(END, TOKENIZER, True) == b""
    assert visible_bytes(UNKNOWN, TOKENIZER, False) == b""
