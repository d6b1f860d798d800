"""`FrozenDict`: an immutable mapping for frozen records.

Unlike `types.MappingProxyType` it works with `hash`, `copy`, `pickle`, `json` and `dataclasses.asdict`.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class FrozenDict(dict[Key, Value]):
    """An immutable dict. Hashable if its values are; equal to any dict with the same items."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> FrozenDict[Key, Value]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDict[Key, Value]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a FrozenDict is immutable; make a dict of it first")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
