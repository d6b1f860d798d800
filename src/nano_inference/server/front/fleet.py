"""`Fleet`: where the replicas are, which of them accept requests, and which request goes to which."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from nano_inference.rl.pool.routing import PrefixRouter
from nano_inference.server.front.placement import Placement

State = Literal["starting", "ready", "unreachable", "draining", "stopped"]


@dataclass(slots=True)
class Member:
    """One replica. `url` is empty until it has listened once."""

    url: str = ""
    state: State = "starting"
    num_open: int = 0  # requests that wait for its response or read it


class Fleet:
    """Owns the members and the router. All methods are called on the event loop."""

    def __init__(self, size: int) -> None:
        self.members = [Member() for _ in range(size)]
        self._router = PrefixRouter(size)
        for index in range(size):
            self._router.remove(index)
        self._changed = asyncio.Event()

    @property
    def ready(self) -> list[int]:
        """Replicas that accept requests."""
        return [index for index, member in enumerate(self.members) if member.state == "ready"]

    @property
    def num_open(self) -> int:
        """Open requests of all replicas."""
        return sum(member.num_open for member in self.members)

    def set_ready(self, index: int, url: str) -> None:
        """Send requests to a replica at `url`."""
        member = self.members[index]
        member.url, member.state = url, "ready"
        self._router.add(index)
        self._notify()

    def set_away(self, index: int, state: State) -> None:
        """Send no further request to a replica; open ones are unaffected."""
        assert state != "ready"
        self.members[index].state = state
        self._router.remove(index)
        self._notify()

    @contextmanager
    def place(self, placement: Placement, avoid: Collection[int] = ()) -> Iterator[int | None]:
        """Yield the replica for a request, which counts as open until the block ends.

        Yields None if no replica outside `avoid` accepts requests.
        """
        if all(index in avoid for index in self.ready):
            yield None
            return
        index = self._router.place(placement.tokens, placement.cost, placement.session, avoid=avoid)
        member = self.members[index]
        member.num_open += 1
        try:
            yield index
        finally:
            member.num_open -= 1
            self._router.finish(index, placement.cost)
            self._notify()

    async def wait_idle(self, index: int) -> None:
        """Wait until a replica has no open requests."""
        while self.members[index].num_open:
            await self._changed.wait()

    async def wait_ready(self, index: int) -> None:
        """Wait until a replica accepts requests."""
        while self.members[index].state != "ready":
            await self._changed.wait()

    async def wait_other(self, index: int) -> None:
        """Wait until a replica other than `index` accepts requests."""
        while not set(self.ready) - {index}:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
