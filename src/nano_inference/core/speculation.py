"""`Speculator`: connects the core's sequences to a drafter. The core verifies the draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nano_inference.core.drafting import MakeDrafter
from nano_inference.core.scheduler import SeqView
from nano_inference.core.sequence import Sequence


class Speculator:
    """Owns a drafter of at most `limit` draft tokens for a row; 0 turns speculation off."""

    def __init__(self, make_drafter: MakeDrafter, limit: int) -> None:
        self._limit = limit
        self._drafter = make_drafter(limit)

    def open(self, seq: Sequence) -> None:
        """Register a new sequence. All sequences of a request are registered before any of them runs."""
        if self._limit and seq.can_speculate:
            self._drafter.open(seq.id, seq.request_id, seq.tokens, seq.num_prompt)

    def close(self, seq: Sequence) -> None:
        self._drafter.close(seq.id, seq.request_id)

    def with_drafts(self, running: Seq[Sequence], views: list[SeqView]) -> list[SeqView]:
        """Return the views with the number of draft tokens and their acceptance, for rows that only decode."""
        if not self._limit:
            return views
        found: list[SeqView] = []
        for seq, view in zip(running, views, strict=True):
            if view.num_tokens - view.num_computed == 1 and not seq.banned:
                draft = self._drafter.draft(seq.id)
                view = view._replace(num_drafts=len(draft.tokens), draft_chance=draft.chance)
            found.append(view)
        return found

    def drafts(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Return the first `count` draft tokens that `with_drafts` proposed for a sequence."""
        return self._drafter.last_draft(seq.id)[:count] if count else ()

    def disable(self, seq: Sequence) -> None:
        self._drafter.disable(seq.id)
