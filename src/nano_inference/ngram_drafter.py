"""Guesses at the next tokens of a sample, out of what its request has said so far, and how many are worth computing.

A guess is what followed, not long ago, on the tokens that a sample ends in: in its prompt, in itself, or in another
sample of its request. A step computes it behind the sample's last token and draws at each of its positions, so that a
wrong one costs a little work and never changes a token. Plain integers; nothing here is measured in seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

SHORTEST = 2
"""Tokens that must agree before a place counts as an occurrence of the same text."""
LONGEST = 8
"""No more are compared: a longer agreement says little more."""
CANDIDATES = 8
"""Places looked at, the most recent first: a bound on the work, not on correctness."""
FIRST_CHANCE = 0.6
"""How good a sample's guesses are thought to be before there were any."""
RATE = 0.125
"""Share of that estimate which each outcome replaces."""
CPU_WEIGHT_TOKENS, CUDA_WEIGHT_TOKENS = 6, 128
"""Tokens whose arithmetic takes as long as reading the weights. On a CPU, steps of 1 to 24 tokens took what 5 (int8) to
10 (weights as the file has them) would explain; on CUDA it is reckoned from what devices multiply and read."""


class Guess(NamedTuple):
    """Tokens that may come next, and the chance of each to be right when those before it are."""

    tokens: tuple[int, ...] = ()
    chance: float = 0.0


class Offer(NamedTuple):
    """How many tokens of a guess a row could compute, and what is thought of them."""

    limit: int
    chance: float


def choose_drafts(offers: Sequence[Offer], num_tokens: int, room: int, weight_tokens: int) -> list[int]:
    """Return how many guessed tokens each row computes in a step that computes `num_tokens` in any case.

    A step of n tokens is taken to last n + w: w, `weight_tokens`, is how many tokens' arithmetic takes as long as
    reading the weights once. All tokens that are computed in any case are worth 1; the j-th of a guess is worth
    chance^j, which is how probable it is to be kept. The likeliest token that is left is added as long as that raises
    worth over duration, that is, while chance^j · (n + w) > worth, and `room` tokens at most. With few tokens in a step
    even doubtful guesses pay; with many, only nearly certain ones.
    """
    counts = [0] * len(offers)
    heap = [(-offer.chance, index) for index, offer in enumerate(offers) if offer.limit > 0]
    heapify(heap)
    worth, duration = float(num_tokens), num_tokens + weight_tokens
    while heap and room > 0 and -heap[0][0] * duration > worth:
        chance, index = heap[0]
        counts[index] += 1
        room, worth, duration = room - 1, worth - chance, duration + 1
        if counts[index] < offers[index].limit:
            heapreplace(heap, (chance * offers[index].chance, index))
        else:
            heappop(heap)
    return counts


class Place(NamedTuple):
    """Where the same tokens stood before: `tokens[:end]` of a text ends in `length` of them."""

    tokens: Sequence[int]
    end: int
    length: int


class TextIndex:
    """Finds where the last tokens of a text stood before, among several texts that only grow.

    The texts themselves are the callers'. Beside them it has, for every token read, three numbers in arrays, and for
    every pair of tokens an entry in a dictionary: some 150 bytes for a token at most.
    """

    def __init__(self) -> None:
        self._texts: list[Sequence[int]] = []
        self._last: dict[int, int] = {}
        """Two tokens as one number -> where they stood last: an index into the arrays."""
        self._text_of = array("i")
        self._end_of = array("i")
        self._before = array("i")
        """Where the same two tokens stood before that; -1 when they did not."""

    def add_text(self, tokens: Sequence[int]) -> int:
        """Take a further text, none of it read yet; return its number."""
        self._texts.append(tokens)
        return len(self._texts) - 1

    def read(self, text: int, start: int) -> int:
        """Note what each two tokens of a text are followed by, from its first `start` tokens on; return where to go on.

        A place is noted once something follows, so the end of a text is not yet one.
        """
        tokens = self._texts[text]
        start = max(SHORTEST, start)
        for end in range(start, len(tokens)):
            key = _key(tokens, end)
            self._before.append(self._last.get(key, -1))
            self._last[key] = len(self._text_of)
            self._text_of.append(text)
            self._end_of.append(end)
        return max(start, len(tokens))

    def find(self, tokens: Sequence[int]) -> Place | None:
        """Return where most of the last tokens stood before, the most recent such place; None when not even two did."""
        if len(tokens) < SHORTEST:
            return None
        place = self._last.get(_key(tokens, len(tokens)), -1)
        best: Place | None = None
        for _ in range(CANDIDATES):
            if place < 0:
                break
            text, end = self._texts[self._text_of[place]], self._end_of[place]
            length = _agreement(tokens, text, end)
            if best is None or length > best.length:
                best = Place(text, end, length)
            if length == LONGEST:
                break
            place = self._before[place]
        return best


def _key(tokens: Sequence[int], end: int) -> int:
    """Return the two tokens before `end` as one number."""
    return tokens[end - 2] << 32 | tokens[end - 1]


def _agreement(tokens: Sequence[int], text: Sequence[int], end: int) -> int:
    """Return how many of the last tokens are those of `text` before `end`, two of which are known to be."""
    length = SHORTEST
    most = min(LONGEST, end, len(tokens))
    while length < most and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def what_followed(place: Place, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return what follows a place, `limit` tokens at most.

    Where the place is in the text that is to go on, its end is no obstacle: text that repeats goes on repeating.
    """
    found = list(place.tokens[place.end : place.end + limit])
    if place.tokens is tokens:
        period = len(tokens) - place.end
        while len(found) < limit:
            found.append(found[-period])
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class _Group:
    """What the samples of one request have in common."""

    index: TextIndex
    num_prompt: int
    num_open: int = 0
    has_prompt: bool = False
    """Whether the prompt was read, by whichever sample came first."""


@dataclass(slots=True, kw_only=True)
class _Line:
    """One sample."""

    group: _Group
    tokens: Sequence[int]
    text: int
    num_read: int = 0
    guess: tuple[int, ...] = ()
    guessed_at: int = 0
    """How long the sample was when `guess` was made."""
    chance: float = FIRST_CHANCE
    is_barred: bool = False


class NgramDrafter:
    """Owns what open requests are guessed from; a request's part is given up when its last sample ends.

    Each sample has an estimate of how often a guessed token is right when those before it were. It learns from every
    guess, computed or not, because what was drawn instead says the same: a sample whose guesses do not pay costs no
    computing, and is found out when it begins to repeat itself.
    """

    def __init__(self, limit: int) -> None:
        """Guess at most `limit` tokens at a time."""
        self._limit = limit
        self._groups: dict[int, _Group] = {}
        self._lines: dict[int, _Line] = {}

    @property
    def num_requests(self) -> int:
        """Requests of which something is kept."""
        return len(self._groups)

    def open(self, sample_id: int, request_id: int, tokens: Sequence[int], num_prompt: int) -> None:
        """Follow a new sample, whose list of tokens is the caller's and grows. All samples of a request come first."""
        group = self._groups.get(request_id)
        if group is None:
            group = self._groups[request_id] = _Group(index=TextIndex(), num_prompt=num_prompt)
        group.num_open += 1
        self._lines[sample_id] = _Line(group=group, tokens=tokens, text=group.index.add_text(tokens))

    def close(self, sample_id: int, request_id: int) -> None:
        """Follow a sample no longer; what it said serves the others of its request. One that is not known is none."""
        line = self._lines.pop(sample_id, None)
        if line is None:
            return
        line.group.num_open -= 1
        if not line.group.num_open:
            del self._groups[request_id]
        elif line.num_read:
            self._read(line)

    def bar(self, sample_id: int) -> None:
        """Guess nothing more about a sample."""
        self._lines[sample_id].is_barred = True

    def guess(self, sample_id: int) -> Guess:
        """Return what may come next in a sample; nothing for one that is not known. Learns from the guess before."""
        line = self._lines.get(sample_id)
        if line is None or line.is_barred:
            return Guess()
        _learn(line)
        self._read(line)
        place = line.group.index.find(line.tokens)
        line.guess = () if place is None else what_followed(place, line.tokens, self._limit)
        line.guessed_at = len(line.tokens)
        return Guess(line.guess, line.chance)

    def last_guess(self, sample_id: int) -> tuple[int, ...]:
        """Return the tokens of the last guess about a sample."""
        return self._lines[sample_id].guess

    def _read(self, line: _Line) -> None:
        """Read what a sample has added, and the prompt when nobody has."""
        if not line.num_read:
            line.num_read = line.group.num_prompt + 1 if line.group.has_prompt else SHORTEST
            line.group.has_prompt = True
        line.num_read = line.group.index.read(line.text, line.num_read)


def _learn(line: _Line) -> None:
    """Compare the last guess with what came, up to the first token that is wrong."""
    came = line.tokens[line.guessed_at : line.guessed_at + len(line.guess)]
    for guessed, token in zip(line.guess, came, strict=False):
        is_right = guessed == token
        line.chance += RATE * (is_right - line.chance)
        if not is_right:
            break
