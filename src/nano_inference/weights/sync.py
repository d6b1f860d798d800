"""`WeightSyncManager`: gathers new weights beside the old ones and exchanges them between two steps."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from nano_inference.executors.protocol import Executor
from nano_inference.types import ModelError, UpdateBusy, UpdateState, WeightError, WeightLabel
from nano_inference.updates import UpdateRules
from nano_inference.weights.checksum import digest
from nano_inference.weights.gate import StepGate
from nano_inference.weights.staging import NamedWeights, Staging, pairs

_STEPS = 8
"""Steps over which a gathering is spread while the engine is busy: each then reads and writes an eighth of the weights
besides reading all of them."""
_SMALLEST_SHARE = 8 << 20

_log = logging.getLogger(__name__)


class WeightSyncManager:
    """Owns the update of an executor's weights under way, and the thread that gathers it.

    Two phases: everything is read, checked and packed beside the weights in force, then the two are exchanged as a
    whole, which the owner does between two steps. A failure before that leaves the old weights untouched.
    """

    def __init__(self, executor: Executor) -> None:
        self.version = 0
        """How many times weights were installed."""
        self.label: WeightLabel | None = None
        """What the trainer calls the weights in force."""
        self._executor = executor
        shapes = {spec.name: spec.shape for spec in executor.program.weights}
        tied = {other: shapes[name] for other, name in executor.program.tied_names.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(shapes | tied)
        """The names under which weights may come, and their shapes."""
        self._has_weights = True
        self._job: _Job | None = None

    @property
    def state(self) -> UpdateState:
        """Where the update stands: "idle", "staging", "staged" (waits for the exchange) or "failed"."""
        return "idle" if self._job is None else self._job.state()

    def start_sync(
        self,
        named: NamedWeights,
        *,
        rules: UpdateRules | None = None,
        label: WeightLabel | None = None,
        timeout: float | None = None,
        on_gathered: Callable[[], None] | None = None,
    ) -> None:
        """Begin to gather in a thread; the tensors must not change until the state is "staged".

        After `timeout` seconds the update is given up. The thread calls `on_gathered` at its end, however it ended.
        Raises `UpdateBusy` while another one is under way.
        """
        job = self._new_job(named, rules, label, timeout)
        job.on_end = on_gathered
        job.thread = threading.Thread(target=job.run, name="weight-staging", daemon=True)
        job.thread.start()

    def maybe_finish_sync(self) -> bool:
        """Install what is staged; whether there was anything to install. Raises the `WeightError` of a failed update.

        Only the engine's thread may call this, between two steps.
        """
        job = self._job
        state = self.state
        if job is None or state == "staging":
            return False
        if state == "failed":
            self._job = None
            raise job.take_failure()
        job.installs_as = self.version + 1
        self._exchange(job)
        return True

    def recover(self) -> None:
        """Complete what an interruption left half done in the engine's thread. Can be repeated.

        A gathering thread that waits for the step to end continues, and an exchange that was under way is completed.
        """
        job = self._job
        if job is not None:
            job.gate.recover()
            if job.installs_as is not None:
                self._exchange(job)

    def _exchange(self, job: _Job) -> None:
        """Put the staged weights in the place of those in force. Can be interrupted at any point and repeated."""
        assert job.staged is not None and job.installs_as is not None
        self._executor.commit(job.staged)
        self._has_weights = True
        self.version, self.label = job.installs_as, job.label
        self._job = None

    def sync_blocking(
        self, named: NamedWeights, *, rules: UpdateRules | None = None, label: WeightLabel | None = None
    ) -> int:
        """Gather in this thread and install; return the new version. Raises `UpdateBusy` or `WeightError`."""
        self.stage(named, rules=rules, label=label)
        self.maybe_finish_sync()
        return self.version

    def stage(self, named: NamedWeights, *, rules: UpdateRules | None = None, label: WeightLabel | None = None) -> None:
        """Gather in this thread; afterwards the update waits for `maybe_finish_sync`. Raises as `sync_blocking`."""
        job = self._new_job(named, rules, label, None)
        job.run()
        if job.error is not None:
            self._job = None
            raise job.take_failure()

    def label_next(self, label: WeightLabel) -> bool:
        """Name the weights of the update under way; whether there is one."""
        if self._job is not None:
            self._job.label = label
        return self._job is not None

    def expect_next(self, checksum: str) -> bool:
        """Say what the digest of the update under way must be, before its source has ended; whether there is one."""
        if self._job is not None:
            self._job.checksum = checksum
        return self._job is not None

    def begin_step(self) -> None:
        """Called by the engine's thread before a step: lets the gathering have its share first."""
        if self._job is not None:
            self._job.gate.begin_step()

    def end_step(self) -> None:
        """Called by the engine's thread after a step."""
        if self._job is not None:
            self._job.gate.end_step()

    def wait(self, timeout: float | None = None) -> UpdateState:
        """Wait until the gathering has ended, or for `timeout` seconds; return the state."""
        job = self._job
        if job is not None and job.thread is not None:
            job.thread.join(job.time_left(timeout))
        return self.state

    def cancel(self, wait: float = 0.0) -> bool:
        """Forget an update that is not installed yet; whether there was one.

        Its thread ends by itself, before its next piece or when its source gives the next tensor; `wait` for that so
        many seconds at most.
        """
        job, self._job = self._job, None
        if job is not None:
            job.is_cancelled.set()
            if job.thread is not None and wait:
                job.thread.join(wait)
        return job is not None

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to compute with; `sleep(discard=True)` leaves none."""
        return self._has_weights

    @property
    def dtype(self) -> str:
        """The precision that the weights are kept in."""
        return self._executor.weight_dtype

    def sleep(self, *, discard: bool) -> None:
        """Move the weights from a GPU to main memory, or drop them; on a CPU they stay unless dropped."""
        self._has_weights = self._has_weights and not discard
        self._executor.drop_spare()
        if discard:
            self._executor.discard_weights()
        else:
            self._executor.move_weights(torch.device("cpu"))

    def wake(self) -> None:
        """Move the weights back to where they are computed with."""
        self._executor.move_weights(self._executor.device)

    def checksum(self) -> str:
        """Return `weights_checksum` of the weights in force. Raises `WeightError` when they were discarded."""
        if not self._has_weights:
            raise WeightError("the weights were discarded")
        return digest(self._executor.weight_values())

    def _new_job(
        self, named: NamedWeights, rules: UpdateRules | None, label: WeightLabel | None, timeout: float | None
    ) -> _Job:
        """Take the one place there is for an update."""
        if self.state == "failed" and self._job is not None:
            _log.error("an update failed, and no call waited for it: %s", self._job.take_failure())
            self._job = None
        if self._job is not None and self._job.is_abandoned():
            self._job = None
        if self._job is not None:
            raise UpdateBusy(f"an update is {self._job.state()}; finish or cancel it first")
        if rules is not None and rules.partial and not self._has_weights:
            raise WeightError("partial: the weights were discarded, so all of them must come")
        self._job = _Job(self._executor, named, rules or UpdateRules(), label, timeout)
        return self._job


def _close_after(error: BaseException, source: Generator[tuple[object, object]]) -> None:
    """Let a source end whose reader has failed; what its end fails of must not take the place of the reason."""
    try:
        source.close()
    except Exception as further:
        _log.warning("after %r, the source of the weights failed to end: %s", str(error), further)


class _Job:
    """One update on its way: written by the thread that gathers, read by the engine's."""

    def __init__(
        self,
        executor: Executor,
        named: NamedWeights,
        rules: UpdateRules,
        label: WeightLabel | None,
        timeout: float | None,
    ) -> None:
        self._executor = executor
        self._named = named
        self._rules = rules
        self.checksum = rules.checksum
        self.label = label
        self.staged: Any = None
        """What the executor is to commit."""
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.on_end: Callable[[], None] | None = None
        self.installs_as: int | None = None
        """The version that it becomes, once its exchange has started."""
        self.is_cancelled = threading.Event()
        self._timeout = timeout
        self.gate = StepGate(max(_SMALLEST_SHARE, executor.weight_bytes // _STEPS))
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def run(self) -> None:
        """Gather, check, complete; an error is kept for the engine's thread."""
        try:
            self.staged = self._gather()
        except BaseException as error:
            self.error = self.error or error
            traceback.clear_frames(error.__traceback__)  # their locals hold the memory that was being filled
        finally:
            self.gate.finish()
            del self._named
            if self.on_end is not None:
                self.on_end()

    def _gather(self) -> Any:
        executor, rules = self._executor, self._rules
        pace = self._pace if self.thread else None
        staged = executor.stage(pace=pace, check_finite=not rules.allow_nonfinite)
        staging = Staging(executor.program, staged, rules)
        source = pairs(self._named)
        try:
            while (item := self._next(source)) is not None:
                staging.put(*item)
        except BaseException as error:
            _close_after(error, source)
            raise
        complete = staging.complete()
        found = None if self.checksum is None else digest(executor.staged_values(complete))
        if found != self.checksum:
            raise WeightError(f"checksum: the update has {found}, {self.checksum} was expected")
        return complete

    def _next(self, source: Iterator[tuple[object, object]]) -> tuple[object, object] | None:
        """Ask the source; what it raises becomes a `WeightError` with its cause."""
        self.gate.ask()
        try:
            return next(source, None)
        except (WeightError, MemoryError):
            raise
        except ModelError as error:
            raise WeightError(str(error)) from error
        except Exception as error:
            raise WeightError(f"the source of the weights failed: {type(error).__name__}: {error}") from error

    def _pace(self, num_bytes: int) -> None:
        """Wait for a turn; give up when the update was cancelled."""
        self.gate.pass_bytes(num_bytes)
        if self.is_cancelled.is_set():
            raise WeightError("the update was cancelled")

    def state(self) -> UpdateState:
        """A deadline that has passed is a failure, whatever the thread does later."""
        if self.error is None and self.staged is None and self._deadline and time.monotonic() > self._deadline:
            self.is_cancelled.set()
            self.error = WeightError(f"the weights did not come within {self._timeout:g} seconds")
        if self.error is not None:
            return "failed"
        return "staged" if self.staged is not None else "staging"

    def is_abandoned(self) -> bool:
        """Return True for a gathering that an interruption ended without a trace: it has no thread that runs."""
        is_running = self.thread is not None and self.thread.is_alive()
        return self.staged is None and self.error is None and not is_running

    def take_failure(self) -> BaseException:
        """Return what went wrong, once; anything unforeseen as the cause of a `WeightError`.

        The job keeps no reference: its error's traceback refers to the job, and the cycle would hold the caller's
        weights until a collection.
        """
        error, self.error = self.error, None
        assert error is not None
        is_callers_own = self.thread is None and not isinstance(error, Exception)
        if isinstance(error, WeightError) or is_callers_own:
            return error
        failure = WeightError(f"the update failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def time_left(self, timeout: float | None) -> float | None:
        """The shorter of a waiting time and the time until the deadline."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic()) + 1e-3
        return min((t for t in (timeout, left) if t is not None), default=None)
