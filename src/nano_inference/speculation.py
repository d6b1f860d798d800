"""`Speculation`: what the core needs of speculative decoding. `ngram_drafter` drafts tokens, the core accepts them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from nano_inference.ngram_drafter import NgramDrafter
from nano_inference.sequence import Sequence
from nano_inference.types import SeqView


class Speculation(Protocol):
    """Proposes draft tokens for running sequences."""

    def open(self, seq: Sequence) -> None:
        """Take a new sequence. All sequences of a request come before any of them runs."""

    def close(self, seq: Sequence) -> None:
        """Forget a sequence that has ended; an unknown one is ignored."""

    def restart(self, live: Iterable[Sequence]) -> None:
        """Replace all sequences by these, after an interrupted step."""

    def offered(self, running: Seq[Sequence], views: list[SeqView]) -> list[SeqView]:
        """Return the views of the running sequences with how many draft tokens each has, and how good they are."""

    def drafts(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Return the first `count` draft tokens that were offered for a sequence."""

    def bar(self, seq: Sequence) -> None:
        """Offer nothing more for a sequence."""


class NoSpeculation:
    """Speculation that is off."""

    def open(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def close(self, seq: Sequence) -> None:
        """Nothing was kept."""

    def restart(self, live: Iterable[Sequence]) -> None:
        """Nothing was kept."""

    def offered(self, running: Seq[Sequence], views: list[SeqView]) -> list[SeqView]:
        """Return the views as they are: without draft tokens."""
        return views

    def drafts(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Return none; more are never asked for."""
        assert not count, "no draft tokens were offered"
        return ()

    def bar(self, seq: Sequence) -> None:
        """Nothing is offered in any case."""


class NgramSpeculation:
    """Owns a `NgramDrafter`: draft tokens are what followed on the same tokens before."""

    def __init__(self, limit: int) -> None:
        """Offer at most `limit` draft tokens at a time."""
        self._limit = limit
        self.drafter = NgramDrafter(limit)

    def open(self, seq: Sequence) -> None:
        """Follow a sequence whose tokens can be drawn several at a time."""
        if seq.may_draft:
            self.drafter.open(seq.id, seq.request_id, seq.tokens, seq.num_prompt)

    def close(self, seq: Sequence) -> None:
        """Follow it no longer."""
        self.drafter.close(seq.id, seq.request_id)

    def restart(self, live: Iterable[Sequence]) -> None:
        """Follow these sequences with nothing learnt yet."""
        self.drafter = NgramDrafter(self._limit)
        for seq in live:
            self.open(seq)

    def offered(self, running: Seq[Sequence], views: list[SeqView]) -> list[SeqView]:
        """Return the views with draft tokens for the rows that only draw."""
        found: list[SeqView] = []
        for seq, view in zip(running, views, strict=True):
            if view.num_tokens - view.num_computed == 1 and not seq.banned:
                guess = self.drafter.guess(seq.id)
                view = view._replace(num_drafts=len(guess.tokens), draft_chance=guess.chance)
            found.append(view)
        return found

    def drafts(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Return the first tokens of the last guess."""
        return self.drafter.last_guess(seq.id)[:count] if count else ()

    def bar(self, seq: Sequence) -> None:
        """Guess nothing more about a sequence."""
        self.drafter.bar(seq.id)
