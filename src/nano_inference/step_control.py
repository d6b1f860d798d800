"""`StepControl`: the part of an engine that pauses, sleeps, installs staged weights, and runs steps between these."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from nano_inference.calls import Calls, as_call
from nano_inference.checks import check_bool
from nano_inference.kv import KVManager
from nano_inference.runner import Runner
from nano_inference.state import EngineState
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
)
from nano_inference.weights.updates import Weights

_log = logging.getLogger(__name__)


class StepControl:
    """Owns the decision whether steps may run, and runs them: pauses, sleep, and the installation of staged weights."""

    def __init__(self, state: EngineState, runner: Runner, kv: KVManager, weights: Weights | None) -> None:
        """`weights` is None if they cannot be replaced."""
        self.calls = Calls(state)
        self._state = state
        state.also_repair(self._repair)
        self._runner = runner
        self._kv = kv
        self._weights = weights
        self._end: BaseException | None = None
        """Why the engine accepts no more work."""
        self._is_paused = False
        self._pause_clears: bool | None = None
        """Whether the waiting `pause("wait", blocking=False)` forgets all K/V; None if no pause waits."""
        self._is_asleep = False
        self._needs_memory = False
        """True if `sleep` or `wake` was interrupted."""
        self._installing: int | None = None
        """Version of the installation in progress."""
        self._on_running: OnRunning = "keep"
        """`WeightUpdate.on_running` of the update in progress."""
        self._failed_update: WeightError | None = None
        """Error of an update that `finish_update` has not raised yet."""

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts work, that is, was not shut down. Can be read from any thread."""
        return self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """Why the engine accepts no work; None while it does. Can be read from any thread."""
        return self._end or self._runner.failure

    @property
    def is_paused(self) -> bool:
        return self._is_paused and not self.is_pausing

    @property
    def is_pausing(self) -> bool:
        """Whether the engine will be paused when the started requests have ended."""
        return self._pause_clears is not None

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    @property
    def has_weights(self) -> bool:
        weights = self._weights  # read once: another thread may close the engine
        return weights is None or weights.has_weights

    @property
    def is_halted(self) -> bool:
        """Whether no step can run before `resume`, `wake` or a weight update."""
        return self.is_paused or self._is_asleep or not self.has_weights

    def _require_alive(self) -> None:
        if (failure := self.failure) is not None:
            raise EngineDead(f"the engine takes no more work: {failure}") from failure

    def _require_running(self) -> None:
        """Raise `EnginePaused` if waiting for a request would never end."""
        if self._is_asleep:
            raise EnginePaused("the engine is asleep; call wake() first")
        if self.is_paused:
            raise EnginePaused("the engine is paused; call resume() first")
        if not self.has_weights:
            self._install_staged()
        self._require_weights()

    def _require_weights(self) -> None:
        if not self.has_weights:
            raise EnginePaused("the weights were discarded; call update_weights() and finish_update() first")

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _tick(self) -> StepResult:
        """Install a staged update, then run a step unless the engine is halted."""
        ended = self._install_staged()
        self._pause_when_drained()
        if self.is_halted:
            return self._state.core.result(ended)
        weights = self._weights
        is_update_waiting = weights is not None and weights.state == "staged" and self._must_wait(weights)
        result = self._step(ended, admit_new=not (self.is_pausing or is_update_waiting))
        self._pause_when_drained()
        return result

    def _step(self, ended: Iterable[Delta], *, admit_new: bool) -> StepResult:
        """Run a step and deliver its deltas; `ended` are put in front of the result's."""
        weights = self._weights
        try:
            if weights is not None:
                weights.begin_step()
            is_urgent = weights is not None and weights.takes_turns
            result = self._state.step(admit_new=admit_new, is_urgent=is_urgent)
        finally:
            if weights is not None:
                weights.end_step()
        return result.after(ended)

    def _drain(self) -> None:
        """Run started requests to their end and start no others, also while paused."""
        while self._state.core.started_requests():
            self._require_awake_for_drain()
            self._step((), admit_new=False)

    def _require_awake_for_drain(self) -> None:
        if self._state.core.started_requests() and (self._is_asleep or not self.has_weights):
            raise EnginePaused("the engine is asleep, so started requests cannot end; call wake() first")

    # ---- pauses -----------------------------------------------------------------------------------------------------

    @as_call
    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None:
        """Stop running steps; new requests are queued. Can be repeated.

        "keep" suspends all requests; "wait" first runs started ones to their end, in `tick` with `blocking=False`
        (`is_pausing` until then); "abort" ends all. `clear_cache` forgets all K/V, which is recomputed later. Raises
        `BadRequest` for an unknown mode, `EnginePaused` if started requests cannot end because the engine is asleep.
        """
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        check_bool("clear_cache", clear_cache)
        check_bool("blocking", blocking)
        self._require_alive()
        if mode == "wait" and not blocking:
            self._require_awake_for_drain()
            self._pause_clears = clear_cache
            self._pause_when_drained()
            return
        if mode == "wait":
            self._drain()
        elif mode == "abort":
            self._state.change(lambda: self._state.end(None, keep_samples=True))
        self._pause_clears = None
        self._is_paused = True
        if clear_cache:
            self._state.change(self._state.core.forget_kv)

    def _pause_when_drained(self) -> None:
        """Complete a pause that waits if every started request has ended."""
        clear_cache = self._pause_clears
        if clear_cache is None or self._state.core.started_requests():
            return
        self._pause_clears = None
        self._is_paused = True
        if clear_cache:
            self._state.change(self._state.core.forget_kv)

    @as_call
    def cancel_pause(self) -> bool:
        """Cancel a `pause("wait", blocking=False)` that still waits; return whether there was one."""
        was_pausing, self._pause_clears = self.is_pausing, None
        return was_pausing

    @as_call
    def resume(self) -> None:
        """Allow steps after `pause`, or cancel a pause that still waits. Has no effect on a running engine."""
        self._require_alive()
        self._pause_clears = None
        self._is_paused = False

    @as_call
    def flush_cache(self) -> int:
        """Forget all cached prefixes; return the number of blocks freed. Held blocks are freed when released."""
        return self._state.change(self._kv.flush)

    # ---- sleep ------------------------------------------------------------------------------------------------------

    @as_call
    def sleep(self, *, discard_weights: bool = False) -> None:
        """Free the memory of the KV cache; requests stay, and recompute their K/V after `wake`.

        Weights move from CUDA to main memory. With `discard_weights` they are freed, also later in sleep, and no step
        runs before `update_weights` has replaced all of them.
        """
        check_bool("discard_weights", discard_weights)
        self._require_alive()
        if self.is_pausing:
            raise EnginePaused("the engine is pausing, and started requests could not end in sleep; resume() first")
        self._state.change(self._state.core.forget_kv)
        self._state.change(lambda: self._free_memory(discard_weights))

    @as_call
    def wake(self) -> None:
        """Allocate the memory that `sleep` freed. Has no effect if awake."""
        self._require_alive()
        if self._is_asleep:
            self._state.change(self._take_memory)

    def _free_memory(self, discard_weights: bool) -> None:
        """Free the memory of cache and weights. If interrupted, `_repair` allocates it again."""
        self._needs_memory = True
        self._runner.free_cache()
        if self._weights is not None:
            self._weights.sleep(discard=discard_weights)
        self._is_asleep = True
        self._needs_memory = False

    def _take_memory(self) -> None:
        """Undo `_free_memory`; repeatable."""
        self._needs_memory = True
        self._runner.restore_cache()
        if self._weights is not None:
            self._weights.wake()
        self._is_asleep = False
        self._needs_memory = False

    # ---- installation -----------------------------------------------------------------------------------------------

    def _install_staged(self) -> list[Delta]:
        """Install a staged update; return the last deltas of the requests that it aborted."""
        weights = self._weights
        if weights is None or weights.state in ("idle", "staging") or weights.is_held or self._must_wait(weights):
            return []
        return self._state.change(lambda: self._install(weights))

    def _install(self, weights: Weights) -> list[Delta]:
        """Install a staged update in the weights and in the core. Called in a transaction."""
        core = self._state.core
        self._installing = weights.version + 1
        try:
            weights.maybe_finish_sync()
        except WeightError as error:
            _log.error("a weight update was rejected, version %d stays installed: %s", core.version, error)
            self._failed_update, self._installing = error, None
            return []
        ended = core.install(weights.version, weights.label, self._on_running)
        self._state.deliver(ended)
        self._installing = None
        return ended

    def _must_wait(self, weights: Weights) -> bool:
        """Return whether an update must wait for started requests; without weights it cannot wait."""
        can_wait = weights.has_weights and not weights.is_held and weights.state != "failed"
        return self._on_running == "wait" and can_wait and bool(self._state.core.started_requests())

    def _repair(self) -> None:
        """Repair runner, weights and memory after an interrupted transaction. Can be interrupted and called again."""
        self._runner.recover()
        weights = self._weights
        if weights is not None:
            weights.recover()
        if self._needs_memory:
            self._take_memory()
        if weights is not None and self._installing is not None:
            if weights.version == self._installing:
                self._state.deliver(self._state.core.install(weights.version, weights.label, self._on_running))
            self._installing = None
