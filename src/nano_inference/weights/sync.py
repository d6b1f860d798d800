"""`WeightSyncManager`: stages new weights next to the current ones and swaps them between two steps."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_inference.executors.protocol import Executor, Staged
from nano_inference.models.names import WeightShapes
from nano_inference.support.checks import check_int
from nano_inference.support.files import path_of
from nano_inference.types import (
    EngineDead,
    OnRunning,
    UpdateBusy,
    UpdateCancelled,
    UpdateState,
    WeightError,
    WeightLabel,
)
from nano_inference.weights.checksum import digest
from nano_inference.weights.directory import weights_in
from nano_inference.weights.gate import StepGate, share_of
from nano_inference.weights.group import WeightGroup
from nano_inference.weights.staging import Staging, as_given, check_source, differs, pairs
from nano_inference.weights.updates import NamedWeights, WeightUpdate

_log = logging.getLogger(__name__)


class WeightSyncManager:
    """Owns the current update of an executor's weights, and its staging thread.

    Two phases: staging (all tensors are read, checked and packed next to the current weights), then the swap, which the
    engine thread does between two steps. A failure during staging leaves the current weights unchanged.
    """

    def __init__(self, executor: Executor, process_group: WeightGroup | None = None) -> None:
        """With `process_group`, `start_sync()` receives the weights that its rank 0 sends."""
        self.version = 0  # that of the current weights: the number of completed updates, unless `release` gave another
        self.label: WeightLabel | None = None  # the trainer's label of the current weights
        self._executor = executor
        self._group = process_group
        shapes = {spec.name: spec.shape for spec in executor.program.weights}
        tied = {other: shapes[name] for other, name in executor.program.tied_names.items()}
        self.shapes = WeightShapes(shapes | tied, executor.config.names)
        """Shapes of all weights by name, aliases of tied weights included."""
        self._has_weights = True
        self._job: _Job | None = None

    @property
    def pending_sync(self) -> bool:
        """Return True while an update is in progress."""
        return self.state != "idle"

    @property
    def state(self) -> UpdateState:
        """Return the update's state: "idle", "staging", "staged" (ready to swap) or "failed"."""
        return "idle" if self._job is None else self._job.state()

    def start_sync(self, update: WeightUpdate | NamedWeights | None = None) -> None:
        """Gather an update, or only its tensors, in a thread; they must not change until the state is "staged".

        Without an argument, receives them from the process group.

        The thread calls `on_gathered` when it ends, also after a failure. With `hold`, gathered weights wait for
        `release`. Raises `UpdateBusy` if another update is in progress, and `WeightError` for what is no source.
        """
        if update is None:
            if self._group is None:
                raise ValueError("update: there are no weights, and no process group that sends them")
            update = self._group.receive()
        self._job = job = self._new_job(update)
        job.thread = threading.Thread(target=job.run, name="weight-staging", daemon=True)
        try:
            job.thread.start()
        except BaseException:  # an update whose thread never started is not in progress
            self._job = None
            job.is_cancelled.set()
            raise

    def maybe_finish_sync(self) -> bool:
        """Swap in staged weights unless they are held; return True if the weights changed.

        Raises a failed update's `WeightError`. Call from the engine thread only, between two steps.
        """
        job = self._job
        state = self.state
        if job is None or state == "staging" or self.is_held:
            return False
        if state == "failed":
            self._job = None
            raise job.take_failure()
        self._executor.weights.commit(job.staged)
        self._has_weights = True
        self.version, self.label = job.version or self.version + 1, job.update.label
        self._job = None
        return True

    def sync_blocking(self, update: WeightUpdate | NamedWeights) -> int:
        """Gather in this thread and swap; return the new version. Raises `UpdateBusy` or `WeightError`."""
        self.stage(update)
        self.maybe_finish_sync()
        return self.version

    def stage(self, update: WeightUpdate | NamedWeights) -> None:
        """Gather in this thread; `maybe_finish_sync` swaps, with `hold` after `release`. Raises as `sync_blocking`."""
        self._job = job = self._new_job(update)
        job.run()
        if job.error is not None:
            self._job = None
            raise job.take_failure()

    def require_idle(self) -> None:
        """Raise `UpdateBusy` if an update is in progress; drop one that failed."""
        if self.state == "failed" and self._job is not None:
            _log.error("an update failed, and no call waited for it: %s", self._job.take_failure())
            self._job = None
        if self._job is not None:
            raise UpdateBusy(f"an update is {self._job.state()}; finish or cancel it first")

    @property
    def on_running(self) -> OnRunning:
        """Return what the update in progress does to started requests; "keep" if there is none."""
        return "keep" if self._job is None else self._job.update.on_running

    @property
    def takes_turns(self) -> bool:
        """Return True while an update is gathered between steps: the end of a step lets it continue."""
        return self._job is not None and self._job.takes_turns and self.state == "staging"

    @property
    def is_held(self) -> bool:
        """Return True while staged weights wait for `release`."""
        return self._job is not None and self._job.update.hold and self.state == "staged"

    def release(self, version: int | None = None) -> bool:
        """Let `maybe_finish_sync` swap in an update with `hold`; return True if there is an update.

        The weights get this version, or the next one. Raises `BadRequest` unless it is above the current one.
        """
        if version is not None:
            check_int("version", version, self.version + 1)
        if self._job is not None:
            self._job.update, self._job.version = replace(self._job.update, hold=False), version
        return self._job is not None

    def label_next(self, label: WeightLabel) -> bool:
        """Set the label of the update in progress; return True if there is one."""
        if self._job is not None:
            self._job.update = replace(self._job.update, label=label)
        return self._job is not None

    def expect_next(self, checksum: str) -> bool:
        """Set the expected checksum of the update in progress, before its source ends; return True if there is one."""
        if self._job is not None:
            self._job.update = replace(self._job.update, checksum=checksum)
        return self._job is not None

    def begin_step(self) -> None:
        """Called by the engine thread before a step: lets the staging thread copy its share first."""
        if self._job is not None and self._job.takes_turns:
            self._job.gate.begin_step()

    def end_step(self) -> None:
        """Called by the engine thread after a step."""
        if self._job is not None:
            self._job.gate.end_step()

    def wait(self, timeout: float | None = None) -> UpdateState:
        """Wait until staging has ended, at most `timeout` seconds; return the state."""
        job = self._job
        if job is not None and job.thread is not None:
            left = None if job.deadline is None else max(0.0, job.deadline - time.monotonic()) + 1e-3
            job.thread.join(min((t for t in (timeout, left) if t is not None), default=None))
        return self.state

    def cancel(self, wait: float = 0.0) -> bool:
        """Drop the update in progress; return True if there was one.

        Its thread ends before its next piece, or when its source yields the next tensor; wait for that at most `wait`
        seconds.
        """
        job, self._job = self._job, None
        if job is not None:
            job.is_cancelled.set()
            if job.thread is not None and wait:
                job.thread.join(wait)
            job.discard()
        return job is not None

    @property
    def has_weights(self) -> bool:
        """Return False after `sleep(discard=True)`, until an update installs all weights."""
        return self._has_weights

    @property
    def dtype(self) -> str:
        """Return the precision in which weights are stored."""
        return self._executor.weights.dtype

    def sleep(self, *, discard: bool) -> None:
        """Free the weights if `discard`, else move them from a GPU to main memory."""
        self._has_weights = self._has_weights and not discard
        self._executor.weights.drop_spare()
        if discard:
            self._executor.weights.discard()
        else:
            self._executor.weights.move(torch.device("cpu"))

    def wake(self) -> None:
        """Move the weights back to the executor's device."""
        self._executor.weights.move(self._executor.device)

    def checksum(self) -> str:
        """Return `weights_checksum` of the current weights. Raises `WeightError` if they were discarded."""
        if not self._has_weights:
            raise WeightError("the weights were discarded")
        return _digest(self._executor, self._executor.weights.values())

    def _new_job(self, given: WeightUpdate | NamedWeights) -> _Job:
        """Return the job of a new update. Raises as `require_idle`, and `WeightError` for no source."""
        self.require_idle()
        update = given if isinstance(given, WeightUpdate) else WeightUpdate(weights=given)
        if update.partial and not self._has_weights:
            raise WeightError("partial: the weights were discarded, so an update must contain all of them")
        named = update.weights
        if isinstance(named, str | Path):
            path = path_of(named, "weights")
            if not path.is_dir():
                raise WeightError(f"{path}: no such directory")
            named = weights_in(path)
        check_source(named)
        return _Job(self._executor, update, named)


def _digest(executor: Executor, values: Iterable[tuple[str, Tensor]]) -> str:
    """Return the checksum of weights of an executor, in the order of updates."""
    return digest((name, as_given(name, value, executor.config.names)) for name, value in values)


class _Job:
    """One update in progress: written by the staging thread, read by the engine thread."""

    def __init__(self, executor: Executor, update: WeightUpdate, named: NamedWeights) -> None:
        self._executor = executor
        self.update = replace(update, weights={})  # the tensors are referred to only while they are gathered
        self._named = named
        self.version: int | None = None  # see `WeightSyncManager.release`
        self.staged: Any = None  # the argument of `Weights.commit`
        self._gathered: Staged | None = None  # the owner of the complete update
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.is_cancelled = threading.Event()
        self.takes_turns = executor.steps_share_processors
        self.gate = StepGate(share_of(executor.weights.num_bytes))
        self.deadline = None if update.timeout is None else time.monotonic() + update.timeout

    def run(self) -> None:
        """Stage the update; store an error for the engine thread."""
        try:
            self.staged = self._stage()
        except BaseException as error:
            self.error = self.error or error
            traceback.clear_frames(error.__traceback__)  # their locals keep the partly filled memory alive
        finally:
            self.gate.finish()
            del self._named
            if self.thread is not None and self.update.on_gathered is not None:
                self.update.on_gathered()

    def _stage(self) -> Any:
        executor, update = self._executor, self.update
        pace = self._pace if self.thread and self.takes_turns else None
        staged = executor.weights.stage(pace=pace, check_finite=not update.allow_nonfinite)
        staging = Staging(executor.program, executor.config.names, staged, is_partial=update.partial)
        source = pairs(self._named)
        try:
            while True:
                self.gate.start_reading()
                self._check_cancelled()
                item = next(source, None)
                self._check_cancelled()
                if item is None:
                    break
                staging.put(*item)
            complete = staging.complete()
            for tied, name in staging.only_aliases.items() if update.partial else ():
                # A new head came without its embedding, which stays as it is: the two must be equal.
                new = next(value for found, value in executor.weights.staged_values(complete) if found == tied)
                if not all(torch.equal(new, old) for _, old in executor.weights.values((tied,))):
                    raise differs(name, tied)
            expected = self.update.checksum  # it may be set while the weights are gathered
            checksum = None if expected is None else _digest(executor, executor.weights.staged_values(complete))
            if checksum != expected:
                raise WeightError(f"checksum: the update has {checksum}, {expected} was expected")
        except BaseException as error:
            try:
                source.close()
            except Exception as further:  # `error` remains the reported one
                _log.warning("after %r, the source of the weights failed to end: %s", str(error), further)
            staged.discard()
            raise
        self._gathered = staged
        return complete

    def discard(self) -> None:
        """Drop an update that is gathered and will not be installed."""
        if self._gathered is not None:
            self._gathered.discard()

    def _pace(self, num_bytes: int) -> None:
        """Wait until no step runs. Raises `WeightError` if the update was cancelled."""
        self.gate.wait_for_turn(num_bytes)
        self._check_cancelled()

    def _check_cancelled(self) -> None:
        if self.is_cancelled.is_set():
            raise UpdateCancelled("the update was cancelled")

    def state(self) -> UpdateState:
        """Return the state; once the deadline has passed it stays "failed"."""
        if self.error is None and self.staged is None and self.deadline and time.monotonic() > self.deadline:
            self.is_cancelled.set()
            self.error = WeightError(f"the weights were not complete within {self.update.timeout or 0:g} seconds")
        if self.error is not None:
            return "failed"
        return "staged" if self.staged is not None else "staging"

    def take_failure(self) -> BaseException:
        """Return and clear the error; wrap unexpected exceptions in `WeightError`, but for `EngineDead`.

        The job keeps no reference to it: the traceback refers to the job, and the cycle would keep the caller's weights
        alive until a garbage collection.
        """
        error, self.error = self.error, None
        assert error is not None
        is_callers_own = self.thread is None and not isinstance(error, Exception)
        if isinstance(error, WeightError | EngineDead) or is_callers_own:
            return error
        failure = WeightError(f"the update failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
