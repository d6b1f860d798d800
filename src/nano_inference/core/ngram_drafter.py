"""N-gram drafting: proposes the tokens that followed the last occurrence of a sample's final tokens.

Occurrences are searched in the prompt and in all samples of the request. A step samples at the position of each draft
token, so a wrong draft costs time and never changes an output token. Integers only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nano_inference.core.drafting import Draft

SHORTEST = 2  # tokens that must match before an occurrence counts
LONGEST = 8  # most tokens compared: a longer match predicts little better
CANDIDATES = 8  # occurrences examined, the most recent first: bounds the work, not the correctness
FIRST_CHANCE = 0.6  # acceptance that is assumed for a sample before its first draft was verified
RATE = 0.125  # weight of each new outcome in the running estimate of acceptance


class Occurrence(NamedTuple):
    """An earlier occurrence: `tokens[:end]` of a text ends in `length` tokens that match."""

    tokens: Sequence[int]
    end: int
    length: int


class TextIndex:
    """Finds earlier occurrences of a text's last tokens in several texts that only grow.

    The callers own the texts. The index takes three integers for each indexed token and one dictionary entry for each
    distinct pair of tokens: at most about 150 bytes a token.
    """

    def __init__(self) -> None:
        self._texts: list[Sequence[int]] = []
        self._last: dict[int, int] = {}  # key of two tokens -> entry of their last occurrence in the arrays
        self._text_of = array("i")
        self._end_of = array("i")
        self._previous = array("i")  # entry of the previous occurrence of the same two tokens; -1 if there is none

    def add_text(self, tokens: Sequence[int]) -> int:
        """Register a text without indexing it; return its number."""
        self._texts.append(tokens)
        return len(self._texts) - 1

    def extend(self, text: int, start: int) -> int:
        """Index the pairs of a text that end at position `start` or later; return the `start` of the next call.

        A pair is indexed only when a token follows it, so the last pair of a text is left out.
        """
        tokens = self._texts[text]
        start = max(SHORTEST, start)
        for end in range(start, len(tokens)):
            key = _key(tokens, end)
            self._previous.append(self._last.get(key, -1))
            self._last[key] = len(self._text_of)
            self._text_of.append(text)
            self._end_of.append(end)
        return max(start, len(tokens))

    def find(self, tokens: Sequence[int]) -> Occurrence | None:
        """Return the occurrence with the longest match, the most recent of equals; None without a match of two."""
        if len(tokens) < SHORTEST:
            return None
        entry = self._last.get(_key(tokens, len(tokens)), -1)
        best: Occurrence | None = None
        for _ in range(CANDIDATES):
            if entry < 0:
                break
            text, end = self._texts[self._text_of[entry]], self._end_of[entry]
            length, most = SHORTEST, min(LONGEST, end, len(tokens))  # the last two tokens are known to be equal
            while length < most and text[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if best is None or length > best.length:
                best = Occurrence(text, end, length)
            if length == LONGEST:
                break
            entry = self._previous[entry]
        return best


def _key(tokens: Sequence[int], end: int) -> int:
    """Return the two tokens before `end` as one number."""
    return tokens[end - 2] << 32 | tokens[end - 1]


def continuation(found: Occurrence, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return at most `limit` tokens that follow an occurrence; a text that ends before is assumed to be periodic."""
    following = list(found.tokens[found.end : found.end + limit])
    if found.tokens is tokens:
        period = len(tokens) - found.end
        while len(following) < limit:
            following.append(following[-period])
    return tuple(following)


@dataclass(slots=True, kw_only=True)
class _Request:
    """State shared by the samples of one request."""

    index: TextIndex
    num_prompt: int
    num_open: int = 0
    is_prompt_indexed: bool = False


@dataclass(slots=True, kw_only=True)
class _Sample:
    """State of one sample."""

    request: _Request
    tokens: Sequence[int]
    text: int
    num_indexed: int = 0
    draft: tuple[int, ...] = ()
    drafted_at: int = 0  # length of the sample when `draft` was made
    chance: float = FIRST_CHANCE
    is_disabled: bool = False


class NgramDrafter:
    """Satisfies `Drafter`. Owns the text index of each open request, freed when the request's last sample ends.

    Each sample has a running estimate of acceptance, updated from every draft, computed in a step or not: a low one
    causes no computation, and it rises again when the sample starts to repeat itself.
    """

    def __init__(self, limit: int) -> None:
        """Propose at most `limit` tokens at a time."""
        self._limit = limit
        self._requests: dict[int, _Request] = {}
        self._samples: dict[int, _Sample] = {}

    def open(self, sample_id: int, request_id: int, tokens: Sequence[int], num_prompt: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(index=TextIndex(), num_prompt=num_prompt)
        request.num_open += 1
        self._samples[sample_id] = _Sample(request=request, tokens=tokens, text=request.index.add_text(tokens))

    def close(self, sample_id: int, request_id: int) -> None:
        """Forget a sample; its text stays indexed for the others of its request."""
        sample = self._samples.pop(sample_id, None)
        if sample is None:
            return
        sample.request.num_open -= 1
        if not sample.request.num_open:
            del self._requests[request_id]
        elif sample.num_indexed:
            _index_new_tokens(sample)

    def disable(self, sample_id: int) -> None:
        self._samples[sample_id].is_disabled = True

    def draft(self, sample_id: int) -> Draft:
        """Return draft tokens for a sample. Updates acceptance from its previous draft."""
        sample = self._samples.get(sample_id)
        if sample is None or sample.is_disabled:
            return Draft()
        # Compare the last draft with the sampled tokens, up to the first mismatch.
        sampled = sample.tokens[sample.drafted_at : sample.drafted_at + len(sample.draft)]
        for drafted, token in zip(sample.draft, sampled, strict=False):
            is_accepted = drafted == token
            sample.chance += RATE * (is_accepted - sample.chance)
            if not is_accepted:
                break
        _index_new_tokens(sample)
        found = sample.request.index.find(sample.tokens)
        sample.draft = () if found is None else continuation(found, sample.tokens, self._limit)
        sample.drafted_at = len(sample.tokens)
        return Draft(sample.draft, sample.chance)

    def last_draft(self, sample_id: int) -> tuple[int, ...]:
        return self._samples[sample_id].draft


def _index_new_tokens(sample: _Sample) -> None:
    """Index the tokens added since the last call; the first sample of a request also indexes the prompt."""
    request = sample.request
    if not sample.num_indexed:
        sample.num_indexed = request.num_prompt + 1 if request.is_prompt_indexed else SHORTEST
        request.is_prompt_indexed = True
    sample.num_indexed = request.index.extend(sample.text, sample.num_indexed)
