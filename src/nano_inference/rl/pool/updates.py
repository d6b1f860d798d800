"""Installs new weights in all workers of a pool, or in none."""

from __future__ import annotations

import asyncio
import logging

from nano_inference.rl.pool.members import Member, Members
from nano_inference.rl.pool.worker import WorkerDied
from nano_inference.types import UpdateBusy, WeightError
from nano_inference.weights.updates import WeightUpdate

_log = logging.getLogger(__name__)


class Updates:
    """Owns the update in progress. Accessed on the pool's event loop."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._task: asyncio.Task[int] | None = None
        self._is_committing = False

    async def start(self, update: WeightUpdate) -> int:
        """Start an update; return the pool's future version. Raises `UpdateBusy` during another update."""
        if self._task is not None and not self._task.done():
            raise UpdateBusy("an update of the pool is in progress; finish or cancel it first")
        if self._task is not None and not self._task.cancelled() and (error := self._task.exception()) is not None:
            _log.error("an update of the pool failed, and no call waited for it: %s", error)
        self._task = asyncio.ensure_future(self._install(update))
        return self._members.version + 1

    async def finish(self, timeout: float | None = None) -> int:
        """Wait for the update in progress; return the installed version. Raises its error, once, and `TimeoutError`."""
        task = self._task
        if task is None:
            return self._members.version
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise TimeoutError(f"the update is still being gathered after {timeout} seconds")
        self._task = None
        return self._members.version if task.cancelled() else task.result()

    async def cancel(self) -> bool:
        """Cancel an update that the workers have not started to install; return whether there was one."""
        task = self._task
        if task is None or task.done() or self._is_committing:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _install(self, update: WeightUpdate) -> int:
        """Stage in all workers, then commit in all; discard everywhere if one fails, and replace those that are gone.

        Raises `WeightError`, `UpdateBusy`.
        """
        members = self._members
        async with members.lock:
            members.require_some()
            alive = members.alive
            try:
                outcomes = await asyncio.gather(
                    *(one.worker.call("stage", update) for one in alive), return_exceptions=True
                )
            except asyncio.CancelledError:
                await asyncio.shield(_discard(alive))
                raise
            pairs = list(zip(alive, outcomes, strict=True))
            failed = [(member, outcome) for member, outcome in pairs if isinstance(outcome, BaseException)]
            numbers = [(member, outcome) for member, outcome in pairs if not isinstance(outcome, BaseException)]
            if failed:
                await _discard([member for member, _ in numbers])
            version = members.version
            if not failed:
                self._is_committing = True
                try:
                    version = members.record(update, numbers)
                    done = await asyncio.gather(*(one.worker.call("commit") for one in alive), return_exceptions=True)
                finally:
                    self._is_committing = False
        for member, error in failed:
            if isinstance(error, WorkerDied):
                await members.replace(member, error)
        if failed:
            member, error = failed[0]
            name = member.worker.name
            kind = UpdateBusy if isinstance(error, UpdateBusy) else WeightError
            raise kind(f"{name}: {str(error).removeprefix(f'{name}: ')}; all workers keep version {version}") from error
        for member, outcome in zip(alive, done, strict=True):
            if isinstance(outcome, BaseException):  # the update is in force: the replacement gets it
                await members.replace(member, WorkerDied(f"{member.worker.name}: could not install: {outcome}"))
        return version


async def _discard(holding: list[Member]) -> None:
    await asyncio.gather(*(one.worker.call("discard") for one in holding), return_exceptions=True)
