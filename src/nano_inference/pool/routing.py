"""`PrefixRouter`: sends requests with a common prefix, and turns of one session, to the same worker. No torch.

A worker's KV cache can be reused only there, so a prompt goes where its longest known prefix was sent before, unless
that worker has much more unfinished work than the one with the least.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TypeVar

from nano_inference.checks import check_int, check_number

Key = TypeVar("Key")
_DIGEST_BYTES = 8
_MOST_BLOCKS = 1024
"""The longest prefix that is remembered, in blocks."""


class PrefixRouter:
    """Owns the homes of prefixes and sessions, and each worker's unfinished work. Deterministic; not thread-safe."""

    def __init__(
        self, num_workers: int, *, block_size: int = 16, imbalance: float = 1.25, max_entries: int = 1 << 18
    ) -> None:
        """Route among workers 0 to `num_workers` - 1.

        A worker with more than `imbalance` times the least work, and the request's cost more, gets no further request.
        At most `max_entries` prefixes and as many sessions are remembered; the least recently used are forgotten.
        Raises `ValueError` naming an argument out of range.
        """
        check_int("num_workers", num_workers, 1)
        check_int("block_size", block_size, 1)
        check_number("imbalance", imbalance, 1, 1e9)
        check_int("max_entries", max_entries, 1)
        self._block_size, self._imbalance, self._max_entries = block_size, imbalance, max_entries
        self._loads: dict[int, int] = dict.fromkeys(range(num_workers), 0)
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()
        self._sessions: OrderedDict[str, int] = OrderedDict()

    @property
    def loads(self) -> dict[int, int]:
        """Return the unfinished work of each worker."""
        return dict(self._loads)

    def place(self, tokens: Sequence[int], cost: int, session: str | None = None) -> int:
        """Return the worker for a prompt and add `cost` to its work, for example the tokens to compute and to sample.

        Raises `ValueError` if there are no workers.
        """
        if not self._loads:
            raise ValueError("there are no workers")
        keys = list(self._keys(tokens))
        worker = self._home(keys, session)
        lightest = min(self._loads, key=self._loads.__getitem__)
        if worker is None or self._loads[worker] > self._imbalance * self._loads[lightest] + cost:
            worker = lightest
        for key in keys:
            _remember(self._prefixes, key, worker, self._max_entries)
        if session is not None:
            _remember(self._sessions, session, worker, self._max_entries)
        self._loads[worker] += cost
        return worker

    def finish(self, worker: int, cost: int) -> None:
        """Subtract the cost of a request that has ended; ignored for a worker that was removed."""
        if worker in self._loads:
            self._loads[worker] = max(0, self._loads[worker] - cost)

    def remove(self, worker: int) -> None:
        """Send nothing to a worker any more; its prefixes and sessions find new homes."""
        self._loads.pop(worker, None)

    def add(self, worker: int) -> None:
        """Send requests to a worker that is new, or has an empty cache."""
        self._loads.setdefault(worker, 0)

    def _home(self, keys: Sequence[bytes], session: str | None) -> int | None:
        """Return the worker of the session, else of the longest known prefix."""
        known = self._sessions.get(session) if session is not None else None
        if known in self._loads:
            return known
        homes = (self._prefixes.get(key) for key in reversed(keys))
        return next((home for home in homes if home in self._loads), None)

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield a digest for prefixes of 1, 2, 4, … blocks and for the whole prompt, the shortest first."""
        data = array("q", tokens)
        digest, end, size = blake2b(digest_size=_DIGEST_BYTES), 0, self._block_size
        while size < len(data) and size <= _MOST_BLOCKS * self._block_size:
            digest.update(data[end:size])
            yield digest.digest()
            end, size = size, size * 2
        digest.update(data[end:])
        yield digest.digest()


def _remember(homes: OrderedDict[Key, int], key: Key, worker: int, most: int) -> None:
    homes[key] = worker
    homes.move_to_end(key)
    if len(homes) > most:
        homes.popitem(last=False)
