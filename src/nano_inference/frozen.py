"""`FrozenDict`: a mapping for frozen records, which `hash`, `copy`, `pickle`, `json` and `dataclasses.asdict` accept.

`types.MappingProxyType` does not: none of the five works on a record that holds one.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class FrozenDict(dict[Key, Value]):
    """A dict that cannot change. Hashable when its values are; equal to any dict with the same items."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> FrozenDict[Key, Value]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDict[Key, Value]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a FrozenDict cannot change; make a dict of it first")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
