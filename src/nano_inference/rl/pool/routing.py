"""`PrefixRouter`: sends requests with a common prefix, and turns of one session, to the same worker. No torch.

A worker's KV cache can be reused only there, so a prompt goes where its longest known prefix was sent before, unless
that worker has much more unfinished work than the one with the least.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import TypeVar

from nano_inference.support.checks import check_int, check_number

Key = TypeVar("Key")
_DIGEST_BYTES = 8
_BYTES_PER_TOKEN = 4  # estimate for prompts given as text
_MOST_BLOCKS = 1024  # the longest prefix that is remembered, in blocks


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
        self._num_placed = 0
        self._placed = dict.fromkeys(range(num_workers), -1)
        """The number of the last request that each worker got: of equal loads, the longest unused worker is chosen."""
        self._heap = [(0, -1, worker) for worker in range(num_workers)]
        """Every (load, last request, worker), and old ones, which are skipped."""
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()
        self._sessions: OrderedDict[str, int] = OrderedDict()

    @property
    def loads(self) -> dict[int, int]:
        """Return the unfinished work of each worker."""
        return dict(self._loads)

    def place(
        self, tokens: Sequence[int], cost: int, session: str | None = None, *, avoid: Collection[int] = ()
    ) -> int:
        """Return the worker for a prompt and add `cost` to its work, for example the tokens to compute and to sample.

        `tokens` are ids below 2^63, or the bytes of a text. Workers in `avoid` are not chosen. Raises `ValueError` if
        there are no others.
        """
        lightest = self._lightest(avoid)
        keys = list(self._keys(tokens))
        worker = self._sessions.get(session) if session is not None else None
        if worker not in self._loads:  # not the session's worker: that of the longest known prefix
            homes = (self._prefixes.get(key) for key in reversed(keys))
            worker = next((home for home in homes if home in self._loads), None)
        if worker is None or worker in avoid or self._loads[worker] > self._imbalance * self._loads[lightest] + cost:
            worker = lightest
        for key in keys:
            _remember(self._prefixes, key, worker, self._max_entries)
        if session is not None:
            _remember(self._sessions, session, worker, self._max_entries)
        self._placed[worker] = self._num_placed
        self._num_placed += 1
        self._set_load(worker, self._loads[worker] + cost)
        return worker

    def finish(self, worker: int, cost: int) -> None:
        """Subtract the cost of a request that has ended; ignored for a worker that was removed."""
        if worker in self._loads:
            self._set_load(worker, max(0, self._loads[worker] - cost))

    def remove(self, worker: int) -> None:
        """Send nothing to a worker any more; its prefixes and sessions find new homes."""
        self._loads.pop(worker, None)

    def add(self, worker: int) -> None:
        """Send requests to a worker that is new, or has an empty cache."""
        if worker not in self._loads:
            self._placed.setdefault(worker, -1)
            self._set_load(worker, 0)

    def _lightest(self, avoid: Collection[int]) -> int:
        """Return the worker with the least work, of several the one that got a request least recently."""
        if avoid:
            others = [worker for worker in self._loads if worker not in avoid]
            if not others:
                raise ValueError("there are no workers")
            return min(others, key=lambda worker: (self._loads[worker], self._placed[worker], worker))
        while self._heap:
            load, placed, worker = self._heap[0]
            if self._loads.get(worker) == load and self._placed[worker] == placed:
                return worker
            heappop(self._heap)
        raise ValueError("there are no workers")

    def _set_load(self, worker: int, load: int) -> None:
        """Store a worker's work; the heap's older entries of it are skipped later."""
        self._loads[worker] = load
        heappush(self._heap, (load, self._placed[worker], worker))
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._heap = [(work, self._placed[one], one) for one, work in self._loads.items()]
            heapify(self._heap)

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield a digest for prefixes of 1, 2, 4, … blocks and for the whole prompt, the shortest first."""
        is_text = isinstance(tokens, bytes)
        data = tokens if isinstance(tokens, bytes) else array("q", tokens)
        block_size = self._block_size * (_BYTES_PER_TOKEN if is_text else 1)
        digest, end, size = blake2b(b"t" if is_text else b"", digest_size=_DIGEST_BYTES), 0, block_size
        while size < len(data) and size <= _MOST_BLOCKS * block_size:
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
