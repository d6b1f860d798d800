"""`Delivered`: what a stream has yielded, so that a repetition on another worker continues it."""

from __future__ import annotations

from collections import Counter, defaultdict

from nano_inference.pool.translation import without_first
from nano_inference.types import Delta, EngineDead


class Delivered:
    """Owns the tokens of one stream that its reader has, by sample index."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()
        self._position: Counter[int] = Counter()  # tokens of each sample since `restart`

    def restart(self) -> None:
        """The job starts again on another worker."""
        self._position.clear()

    def unseen(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the reader does not have, or None.

        Raises `EngineDead` if the repetition differs from what the reader has: the weights have changed.
        """
        index = delta.sample_index
        if index in self._ended:
            return None
        known, start = self._tokens[index], self._position[index]
        repeated = tuple(known[start : start + len(delta.token_ids)])
        end = self._position[index] = start + len(delta.token_ids)
        is_shorter = delta.sample is not None and end < len(known)
        if delta.token_ids[: len(repeated)] != repeated or is_shorter:
            raise EngineDead(
                f"request {delta.request_id}: its worker died and the weights have changed since, so that the stream "
                "cannot be continued; start it again"
            )
        new = without_first(delta, len(repeated))
        known += new.token_ids
        if delta.sample is not None:
            self._ended.add(index)
        return new if new.token_ids or new.sample is not None else None
