"""The trainers' process groups, by name; joined in threads, because to meet a trainer may take minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from nano_inference.server.errors import ApiError
from nano_inference.server.rl.feed import Source
from nano_inference.server.rl.threads import in_thread
from nano_inference.types import WeightError

MAX_GROUPS = 8


class Groups:
    """Owns the groups. On the event loop."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._groups: dict[str, Any] = {}
        """Name -> `PlainGroup`: its module imports torch, for which a server that only starts does not wait."""
        self._joining: set[str] = set()

    async def join(
        self,
        name: str,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: Literal["gloo", "nccl"],
    ) -> None:
        """Meet a trainer, who is rank 0; an older group of that name is left.

        Raises `ApiError`: 400 for what makes no sense and when nobody comes, 409 while a group of that name is joined.
        """
        if name in self._joining:
            raise ApiError(409, f"group_name: {name!r} is being joined", param="group_name", code="busy")
        if name not in self._groups and len(self._groups) + len(self._joining) >= MAX_GROUPS:
            raise ApiError(409, f"there are {MAX_GROUPS} groups already; destroy one first", code="busy")
        if not 1 <= rank < world_size:
            text = f"rank_offset must be in [1, world_size), got {rank} of {world_size}: rank 0 is the trainer's"
            raise ApiError(400, text, param="rank_offset")
        self.leave(name)

        def meet() -> Any:
            from nano_inference.weights.plain import PlainGroup

            return PlainGroup(
                address, port, rank=rank, world_size=world_size, name=name, backend=backend, timeout=self._timeout
            )

        self._joining.add(name)
        try:
            self._groups[name] = await in_thread(meet, lambda group: group.close())
        except (ValueError, WeightError) as error:
            raise ApiError(400, str(error), code="no_group") from None
        finally:
            self._joining.discard(name)

    def leave(self, name: str) -> bool:
        """Leave a group; whether there was one."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def leave_all(self) -> int:
        """Leave every group; return how many there were."""
        return sum(self.leave(name) for name in tuple(self._groups))

    def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], dtypes_field: str
    ) -> Source:
        """Return the tensors that the trainer is about to broadcast. Raises `ApiError` naming what is wrong."""
        from nano_inference.weights.plain import plain_specs

        group = self._groups.get(name)
        if group is None:
            raise ApiError(400, f"there is no group {name!r}; join one first", param="group_name", code="no_group")
        try:
            source: Source = group.receive(plain_specs(names, dtypes, shapes, dtypes_field))
        except ValueError as error:
            raise ApiError(400, str(error), param=dtypes_field) from None
        return source
