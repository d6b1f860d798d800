"""`Adapters`: which adapters are in memory, under which names, and which requests use them. Numbers only, no tensors.

Each load of an adapter has a number of its own, which the engine never uses again: K/V is found under this number, so
that K/V of an adapter that was replaced is never read. The number 0 is the model without an adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field

from nano_inference.types import AdapterInfo, BadRequest, UpdateBusy, WeightLabel


@dataclass(slots=True)
class _Loaded:
    """An adapter in memory, and the open requests that use it."""

    info: AdapterInfo
    users: set[int] = field(default_factory=set)


class Adapters:
    """Owns the names and numbers of at most `most` adapters that take at most `most_bytes` of memory together."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._last = 0
        self._loaded: dict[int, _Loaded] = {}
        """Those in memory by number: the current one of each name, and others that requests still use."""
        self._current: OrderedDict[str, int] = OrderedDict()  # name -> number, the least recently used first

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that a request can name, in the order of their loads."""
        found = [self._loaded[number] for number in sorted(self._current.values())]
        return tuple(one.info._replace(num_requests=len(one.users)) for one in found)

    def number_of(self, name: str | None) -> int:
        """Return the current number of a name, 0 for None. Raises `BadRequest` if no such adapter is loaded."""
        if name is None:
            return 0
        if not isinstance(name, str) or name not in self._current:
            known = ", ".join(sorted(self._current)) or "none"
            raise BadRequest("adapter", f"{name!r} is not loaded, or was evicted; loaded: {known}")
        return self._current[name]

    def version_of(self, number: int) -> WeightLabel:
        """Return the trainer's name for an adapter in memory."""
        return self._loaded[number].info.version

    # ---- requests ---------------------------------------------------------------------------------------------------

    def use(self, number: int, request_id: int) -> None:
        """Note that a request uses an adapter; does nothing for 0."""
        if number:
            self._loaded[number].users.add(request_id)

    def leave(self, number: int, request_id: int) -> None:
        """Note that a request uses an adapter no longer; does nothing for 0."""
        if number:
            one = self._loaded[number]
            one.users.discard(request_id)
            if self._current.get(one.info.name) == number:
                self._current.move_to_end(one.info.name)

    # ---- loads ------------------------------------------------------------------------------------------------------

    def room_for(self, name: str, num_bytes: int, staying: Set[int]) -> list[str]:
        """Return the idle adapters that must be unloaded for another one to fit, the least recently used first.

        `staying` are the requests that would keep their adapter of this name. Raises `BadRequest` if it can never fit,
        and `UpdateBusy` if requests use too many others.
        """
        if num_bytes > self.most_bytes:
            raise BadRequest("adapter", f"{name!r} has {num_bytes} bytes, adapter_memory is {self.most_bytes}")
        others = {other: number for other, number in self._current.items() if other != name}
        used = {n for n, one in self._loaded.items() if (one.users & staying if one.info.name == name else one.users)}
        left = {number: self._loaded[number].info.num_bytes for number in used.union(others.values())}
        idle = [other for other, number in others.items() if number not in used]
        evicted: list[str] = []
        while len(left) >= self.most or sum(left.values()) + num_bytes > self.most_bytes:
            if len(evicted) == len(idle):
                limits = f"max_adapters={self.most} and adapter_memory={self.most_bytes}"
                raise UpdateBusy(f"adapter {name!r} does not fit beside those that requests use: {limits}; try later")
            evicted.append(idle[len(evicted)])
            del left[others[evicted[-1]]]
        return evicted

    def next_number(self) -> int:
        """Return a number that was never returned before."""
        self._last += 1
        return self._last

    def put(self, number: int, info: AdapterInfo) -> None:
        """Make an adapter its name's current one; requests that use the one before keep it."""
        self._loaded[number] = _Loaded(info)
        self._current[info.name] = number
        self._current.move_to_end(info.name)

    def unload(self, name: str) -> bool:
        """Forget a name; return whether it was known. Requests that use the adapter keep it."""
        return self._current.pop(name, None) is not None

    def take_unused(self) -> list[int]:
        """Forget the numbers that neither a name nor a request needs, and return them: their memory can be freed."""
        current = set(self._current.values())
        unused = [number for number, one in self._loaded.items() if number not in current and not one.users]
        for number in unused:
            del self._loaded[number]
        return unused
