"""`Control`: pauses, sleep, updates of the weights, and the step between two of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nano_inference.books import Books
from nano_inference.calls import Calls, as_call
from nano_inference.checks import check_bool
from nano_inference.kv import KVManager
from nano_inference.runner import ClosedRunner, Runner
from nano_inference.types import (
    PAUSE_MODES,
    BadRequest,
    Delta,
    EngineDead,
    EnginePaused,
    OnRunning,
    PauseMode,
    StepResult,
    WeightError,
    WeightInfo,
    WeightLabel,
)
from nano_inference.updates import Weights, WeightUpdate, check_weight_label

_log = logging.getLogger(__name__)


class _Pausing(NamedTuple):
    """A pause that waits for what has begun to end."""

    clear_cache: bool


class Control:
    """Owns whether steps may run, and runs them. `InferenceEngine` documents its commands; a server uses it directly.

    Each command is a call of its engine: `EngineBusy` from a second thread, or from inside a step.
    """

    def __init__(self, books: Books, calls: Calls, runner: Runner, kv: KVManager, weights: Weights | None) -> None:
        """`weights` is None where there are none that could be replaced."""
        self.calls = calls
        self._books = books
        books.also_repair(self.repair)
        self._runner = runner
        self._kv = kv
        self._weights = weights
        self._end: BaseException | None = None
        """Why no more work is taken."""
        self._is_paused = False
        self._pausing: _Pausing | None = None
        self._is_asleep = False
        self._is_memory_torn = False
        """Whether `sleep` or `wake` was left half done."""
        self._installing: int | None = None
        """The version that is being installed; None between two installations."""
        self._on_running: OnRunning = "keep"
        """What the update under way does to requests that have begun."""
        self._failed_update: WeightError | None = None
        """What went wrong with an update that no call has waited for yet."""

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether work is taken."""
        return self._end is None

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._is_paused and self._pausing is None

    @property
    def is_pausing(self) -> bool:
        """Whether what has begun runs to its end, and the engine will be paused then."""
        return self._pausing is not None

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` holds the engine."""
        return self._is_asleep

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to compute with."""
        weights = self._weights  # once: another thread may close the engine meanwhile
        return weights is None or weights.has_weights

    @property
    def is_halted(self) -> bool:
        """Whether no step may run before a command resumes or wakes the engine, or brings weights."""
        return self.is_paused or self._is_asleep or not self.has_weights

    def require_alive(self) -> None:
        """Raise `EngineDead` after `refuse_work`."""
        if self._end is not None:
            raise EngineDead(f"the engine takes no more work: {self._end}") from self._end

    def require_running(self) -> None:
        """Raise `EnginePaused` where waiting would be for what does not come."""
        if self._is_asleep:
            raise EnginePaused("the engine sleeps; call wake() first")
        if self.is_paused:
            raise EnginePaused("the engine is paused; call resume() first")
        if not self.has_weights:
            self._install_staged()
        self.require_weights()

    def require_weights(self) -> None:
        """Raise `EnginePaused` while there are no weights."""
        if not self.has_weights:
            raise EnginePaused("the weights were discarded; call update_weights() and finish_update() first")

    def refuse_work(self) -> None:
        """Take no more work."""
        self._end = self._end or EngineDead("the engine was shut down")

    def close(self) -> None:
        """Take no more work, and release what computes."""
        self.refuse_work()
        self._runner, self._weights = ClosedRunner(), None

    # ---- steps ------------------------------------------------------------------------------------------------------

    def tick(self) -> StepResult:
        """Install weights that are ready, then run a step unless the engine is halted."""
        ended = self._install_staged()
        self._pause_when_drained()
        if self.is_halted:
            return self._books.core.idle_result(ended)
        result = self._step(ended, admit_new=not self._is_draining())
        self._pause_when_drained()
        return result

    def _step(self, ended: Iterable[Delta], *, admit_new: bool) -> StepResult:
        """Let the core run a step, and deliver what it gave; `ended` goes before it in the result."""
        weights = self._weights
        try:
            if weights is not None:
                weights.begin_step()
            result = self._books.step(admit_new=admit_new)
        finally:
            if weights is not None:
                weights.end_step()
        return result.after(ended)

    def _is_draining(self) -> bool:
        """Whether a pause or an update waits for what has begun to end."""
        weights = self._weights
        is_waiting = weights is not None and weights.state == "staged" and self._must_wait(weights)
        return self._pausing is not None or is_waiting

    def _drain(self) -> None:
        """Run what has begun to its end, and start nothing new; paused or not."""
        while self._books.core.begun_requests():
            self._require_awake_for_drain()
            self._step((), admit_new=False)

    def _require_awake_for_drain(self) -> None:
        """Raise `EnginePaused` where requests that have begun cannot end."""
        if self._books.core.begun_requests() and (self._is_asleep or not self.has_weights):
            raise EnginePaused("the engine sleeps, so nothing that has begun can end; call wake() first")

    # ---- pauses -----------------------------------------------------------------------------------------------------

    @as_call
    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None:
        """Stop running steps: `InferenceEngine.pause`."""
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        check_bool("clear_cache", clear_cache)
        check_bool("blocking", blocking)
        self.require_alive()
        if mode == "wait" and not blocking:
            self._require_awake_for_drain()
            self._pausing = _Pausing(clear_cache=clear_cache)
            self._pause_when_drained()
            return
        if mode == "wait":
            self._drain()
        elif mode == "abort":
            self._books.change(lambda: self._books.end(None, keep_samples=True))
        self._pausing = None
        self._is_paused = True
        if clear_cache:
            self._forget_kv()

    def _pause_when_drained(self) -> None:
        """Pause when that was asked for and everything that had begun has ended."""
        if self._pausing is None or self._books.core.begun_requests():
            return
        pausing, self._pausing = self._pausing, None
        self._is_paused = True
        if pausing.clear_cache:
            self._forget_kv()

    @as_call
    def cancel_pause(self) -> bool:
        """Cancel a pause that still waits; return True if there was one."""
        was_pausing, self._pausing = self._pausing is not None, None
        return was_pausing

    @as_call
    def resume(self) -> None:
        """Run steps again after `pause`, or cancel a pause that waits."""
        self.require_alive()
        self._pausing = None
        self._is_paused = False

    @as_call
    def flush_cache(self) -> int:
        """Forget all cached prefixes; return how many blocks are free by that."""
        return self._books.change(self._kv.flush)

    def _forget_kv(self) -> None:
        """Take back all blocks, and forget what they hold."""

        def forget() -> None:
            self._books.core.preempt_all()
            self._kv.flush()

        self._books.change(forget)

    # ---- sleep ------------------------------------------------------------------------------------------------------

    @as_call
    def sleep(self, *, discard_weights: bool = False) -> None:
        """Give memory back: `InferenceEngine.sleep`."""
        check_bool("discard_weights", discard_weights)
        self.require_alive()
        if self._pausing is not None:
            raise EnginePaused("the engine is pausing, and a sleeping one would never end what has begun")
        self._forget_kv()
        self._books.change(lambda: self._free_memory(discard_weights))

    @as_call
    def wake(self) -> None:
        """Take the memory that `sleep` gave back."""
        self.require_alive()
        if self._is_asleep:
            self._books.change(self._take_memory)

    def _free_memory(self, discard_weights: bool) -> None:
        """Give the memory of the cache, and perhaps of the weights, back. Interrupted, it is taken again."""
        self._is_memory_torn = True
        self._runner.free_cache()
        if self._weights is not None:
            self._weights.sleep(discard=discard_weights)
        self._is_asleep = True
        self._is_memory_torn = False

    def _take_memory(self) -> None:
        """Take the memory back that `_free_memory` gave. Can be repeated after an interruption."""
        self._is_memory_torn = True
        self._runner.restore_cache()
        if self._weights is not None:
            self._weights.wake()
        self._is_asleep = False
        self._is_memory_torn = False

    # ---- weights ----------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The owner of the weights. Raises `BadRequest` where there are none that could be updated."""
        self.require_alive()
        if self._weights is None:
            raise BadRequest("this engine was made without weights that could be updated")
        return self._weights

    @as_call
    def start_update(self, update: WeightUpdate) -> int:
        """Gather new weights in a thread; return the version that they will be. Raises `UpdateBusy`."""
        weights = self.weights
        weights.start_sync(
            update.weights,
            rules=update.rules,
            label=update.label,
            timeout=update.timeout,
            on_gathered=update.on_gathered,
        )
        self._on_running, self._failed_update = update.on_running, None
        return weights.version + 1

    @as_call
    def install_update(self, update: WeightUpdate) -> int:
        """Gather new weights here and install them; return their version. Raises `UpdateBusy` and `WeightError`."""
        weights = self.weights
        weights.stage(update.weights, rules=update.rules, label=update.label)
        self._on_running, self._failed_update = update.on_running, None
        try:
            return self.finish_update()
        except BaseException:
            weights.cancel()  # what was interrupted here must not be installed later
            raise

    @as_call
    def finish_update(self, timeout: float | None = None) -> int:
        """Wait for the update under way and install it: `InferenceEngine.finish_update`."""
        weights = self.weights
        if weights.wait(timeout) == "staging":
            raise TimeoutError(f"the update is still being gathered after {timeout} seconds")
        if weights.state == "staged" and self._must_wait(weights):
            self._drain()
        self._install_staged()
        if self._failed_update is not None:
            try:
                raise self._failed_update
            finally:
                self._failed_update = None  # and no local variable: its traceback would refer to itself
        return self._books.core.version

    @as_call
    def cancel_update(self) -> bool:
        """Forget an update that is not installed yet; whether there was one."""
        return self.weights.cancel()

    @as_call
    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None:
        """Give the weights in force, or those of the update under way, a trainer's name."""
        weights, core = self.weights, self._books.core
        check_weight_label(label)
        if not are_next:
            weights.label = core.labels[core.version] = label
        elif not weights.label_next(label):
            raise BadRequest("no update is under way that could be named")

    @as_call
    def expect_checksum(self, checksum: str) -> None:
        """Say what the digest of the update under way must be."""
        if not self.weights.expect_next(checksum):
            raise BadRequest("no update is under way that could be checked")

    def weight_info(self) -> WeightInfo:
        """Return the version in force, its label, and where an update stands."""
        core = self._books.core
        weights = self._weights  # once: another thread may close the engine meanwhile
        state = "idle" if weights is None else weights.state
        return WeightInfo(core.version, core.labels.get(core.version), state)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names under which weights may come, and their shapes; from whatever thread."""
        weights = self._weights  # once: another thread may close the engine meanwhile
        return {} if weights is None else weights.shapes

    def weights_dtype(self) -> str:
        """Return the precision that the weights in force are kept in, such as float32."""
        return self.weights.dtype

    @as_call
    def weights_checksum(self) -> str:
        """Return `weights_checksum` of the weights in force."""
        return self.weights.checksum()

    def _install_staged(self) -> list[Delta]:
        """Install an update that is ready; return the last deltas of the requests that it ended."""
        weights = self._weights
        if weights is None or weights.state in ("idle", "staging") or self._must_wait(weights):
            return []
        return self._books.change(lambda: self._install(weights))

    def _install(self, weights: Weights) -> list[Delta]:
        """Install what is staged, in the weights and in the core. Called inside a section."""
        core = self._books.core
        self._installing = weights.version + 1
        try:
            weights.maybe_finish_sync()
        except WeightError as error:
            _log.error("an update was refused, version %d serves on: %s", core.version, error)
            self._failed_update, self._installing = error, None
            return []
        ended = core.install(weights.version, weights.label, self._on_running)
        self._books.deliver(ended)
        self._installing = None
        return ended

    def _must_wait(self, weights: Weights) -> bool:
        """Whether an update waits for requests to end; without weights none can, and none has K/V that matters."""
        is_waiting = self._on_running == "wait" and weights.has_weights and weights.state != "failed"
        return is_waiting and bool(self._books.core.begun_requests())

    def repair(self) -> None:
        """Repair what an interrupted section may have left besides queues and mailboxes. Can be repeated."""
        self._runner.recover()
        weights = self._weights
        if weights is not None:
            weights.recover()
        if self._is_memory_torn:
            self._take_memory()
        if weights is not None and self._installing is not None:
            if weights.version == self._installing:
                self._books.deliver(self._books.core.install(weights.version, weights.label, self._on_running))
            self._installing = None
