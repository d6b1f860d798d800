"""The trainers' process groups, by name; joined in threads, because to meet a trainer may take minutes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nano_inference.server.errors import ApiError
from nano_inference.server.rl.feed import Source
from nano_inference.server.rl.threads import in_thread
from nano_inference.types import WeightError

MAX_GROUPS = 8
_SHOWN_FAULTS = 5
_log = logging.getLogger("nano_inference.server")


class Groups:
    """Owns the groups. On the event loop."""

    def __init__(self, timeout: float, own: Callable[[], Mapping[str, tuple[int, ...]]]) -> None:
        """`own` returns the names and shapes of the model's weights."""
        self._timeout = timeout
        self._own = own
        self._groups: dict[str, Any] = {}
        """Name -> `PlainGroup`: its module imports torch, for which a server that only starts does not wait."""
        self._joining: dict[str, asyncio.Task[None]] = {}
        """What waits for a trainer; to cancel it is to give it up."""

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
        """Meet a trainer, who is rank 0; an older group of that name is left, one that still waits is given up.

        Raises `ApiError`: 400 for what makes no sense and when nobody comes, 409 for one that is given up.
        """
        if len((self._groups.keys() | self._joining.keys()) - {name}) >= MAX_GROUPS:
            raise ApiError(409, f"there are {MAX_GROUPS} groups already; destroy one first", code="busy")
        if not 1 <= rank < world_size:
            text = f"rank_offset must be in [1, world_size), got {rank} of {world_size}: rank 0 is the trainer's"
            raise ApiError(400, text, param="rank_offset")
        self.leave(name)
        given_up = threading.Event()

        def meet() -> Any:
            from nano_inference.weights.plain import PlainGroup

            return PlainGroup(
                address,
                port,
                rank=rank,
                world_size=world_size,
                name=name,
                backend=backend,
                timeout=self._timeout,
                given_up=given_up,
            )

        meeting = asyncio.ensure_future(self._keep(name, meet))
        meeting.add_done_callback(lambda _: given_up.set())
        await self._wait(name, meeting)

    async def _keep(self, name: str, meet: Callable[[], Any]) -> None:
        """Meet a trainer in a thread and keep the group; one that comes after this was cancelled is closed."""
        self._groups[name] = await in_thread(meet, lambda group: group.close())

    async def _wait(self, name: str, meeting: asyncio.Task[None]) -> None:
        self._joining[name] = meeting
        try:
            await asyncio.wait({meeting})
        finally:
            meeting.cancel()
            if self._joining.get(name) is meeting:
                del self._joining[name]
        if meeting.cancelled():
            raise ApiError(409, f"group_name: {name!r} was given up for a newer one, or was left", code="superseded")
        try:
            meeting.result()
        except (ValueError, WeightError) as error:
            raise ApiError(400, str(error), code="no_group") from None

    def leave(self, name: str) -> bool:
        """Leave a group, or give up one of that name that waits for its trainer; whether there was either."""
        group, meeting = self._groups.pop(name, None), self._joining.pop(name, None)
        if group is not None:
            group.close()
        if meeting is not None:
            meeting.cancel()
        return group is not None or meeting is not None

    def leave_all(self) -> int:
        """Leave every group, and give up those that are being joined; return how many there were."""
        return sum(self.leave(name) for name in self._groups.keys() | self._joining.keys())

    def receive(
        self, name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], dtypes_field: str
    ) -> Source:
        """Return the tensors that the trainer is about to broadcast. Raises `ApiError` naming what is wrong.

        What the model cannot use is received all the same, so that the group stays in step, and refused then; the log
        has it at once.
        """
        from nano_inference.weights.plain import misfits, plain_specs

        group = self._groups.get(name)
        if group is None:
            raise ApiError(400, f"there is no group {name!r}; join one first", param="group_name", code="no_group")
        try:
            specs = plain_specs(names, dtypes, shapes, dtypes_field)
        except ValueError as error:
            raise ApiError(400, str(error), param=dtypes_field) from None
        own = self._own()
        if faults := misfits(specs, own):
            shown = "; ".join(faults[:_SHOWN_FAULTS])
            _log.warning("an update will be refused once its tensors have come, %d of them: %s", len(faults), shown)
        source: Source = group.receive(specs, own)
        return source
