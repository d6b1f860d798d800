"""`Control`: the commands of an engine without requests. `StepControl` has those of pauses and sleep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nano_inference.calls import as_call
from nano_inference.checks import check_bool
from nano_inference.files import path_of
from nano_inference.kv import KVManager
from nano_inference.runner import Runner
from nano_inference.state import EngineState
from nano_inference.step_control import StepControl
from nano_inference.types import BadRequest, OnRunning, UpdateBusy, WeightError, WeightInfo, WeightLabel
from nano_inference.weights.updates import NamedWeights, Weights, WeightUpdate, check_weight_label, update_of


class Control(StepControl):
    """Base of `InferenceEngine`: updates weights. Commands are calls of it."""

    def __init__(
        self,
        state: EngineState,
        runner: Runner,
        kv: KVManager,
        weights: Weights | None,
        read_directory: Callable[[str | Path], NamedWeights],
    ) -> None:
        """`read_directory` keeps torch out of this module; for the other arguments see `StepControl`."""
        super().__init__(state, runner, kv, weights)
        self._read_directory = read_directory

    @property
    def control(self) -> Control:
        """This engine."""
        return self

    @property
    def _updatable_weights(self) -> Weights:
        """The owner of the weights. Raises `BadRequest` if the engine has none that can be updated."""
        self._require_alive()
        if self._weights is None:
            raise BadRequest("this engine has no weights that can be updated")
        return self._weights

    @as_call
    def update_weights(
        self,
        weights: NamedWeights | str | Path,
        *,
        blocking: bool = False,
        on_running: OnRunning | None = None,
        version: WeightLabel | None = None,
        partial: bool = False,
        allow_nonfinite: bool = False,
        checksum: str | None = None,
        timeout: float | None = None,
        on_gathered: Callable[[], None] | None = None,
        hold: bool = False,
    ) -> int:
        """Replace the weights between two steps; return the version that they get.

        `weights` are (Hugging Face name, tensor) pairs, a state dict, a directory or `WeightGroup.receive()`. All are
        gathered and checked before installation; on an error the old weights stay. With `blocking`, installs before it
        returns and raises `WeightError`. Otherwise a thread gathers and `tick` installs; do not modify the tensors
        until then; `finish_update` waits and raises the error; an argument of another form is refused at once.
        With `hold`, gathered weights wait for `commit_update`, and steps continue with the old ones. `on_running` is
        "recompute" by default with `blocking`, else "keep"; `version` is the trainer's label; `UpdateRules` and
        `WeightUpdate` document the others. Raises
        `UpdateBusy` during another update, `BadRequest`, `EngineDead` if a rank is lost.
        """
        self._require_alive()
        update = update_of(
            weights,
            blocking=blocking,
            on_running=on_running,
            version=version,
            partial=partial,
            allow_nonfinite=allow_nonfinite,
            checksum=checksum,
            timeout=timeout,
            on_gathered=on_gathered,
            hold=hold,
        )
        return self._install_update(update) if blocking else self.start_update(update)

    @as_call
    def start_update(self, update: WeightUpdate) -> int:
        """Gather new weights in a thread; return their future version. Raises `UpdateBusy`."""
        weights, on_running = self._updatable_weights, self._on_running
        try:
            self._on_running = update.on_running
            weights.start_sync(
                self._source_of(update),
                rules=update.rules,
                label=update.label,
                timeout=update.timeout,
                on_gathered=update.on_gathered,
                hold=update.hold,
            )
            self._failed_update = None
        except UpdateBusy:
            self._on_running = on_running
            raise
        except BaseException:
            weights.cancel()  # an interrupted update must not be installed later
            raise
        return weights.version + 1

    def _install_update(self, update: WeightUpdate) -> int:
        weights, on_running = self._updatable_weights, self._on_running
        try:
            self._on_running = update.on_running
            weights.stage(self._source_of(update), rules=update.rules, label=update.label, hold=update.hold)
            self._failed_update = None
            return weights.version + 1 if update.hold else self.finish_update()
        except UpdateBusy:
            self._on_running = on_running
            raise
        except BaseException:
            weights.cancel()  # an interrupted update must not be installed later
            raise

    def _source_of(self, update: WeightUpdate) -> NamedWeights:
        """Return the pairs of an update. Raises `WeightError` if its directory does not exist."""
        if not isinstance(update.weights, str | Path):
            return update.weights
        path = path_of(update.weights, "weights")
        if not path.is_dir():
            raise WeightError(f"{path}: no such directory")
        return self._read_directory(path)

    @as_call
    def finish_update(self, timeout: float | None = None) -> int:
        """Wait until the update in progress is gathered, install it unless it is held; return the installed version.

        With on_running="wait", started requests end first. Raises `WeightError`; `TimeoutError` after `timeout` s.
        """
        weights = self._updatable_weights
        if weights.wait(timeout) == "staging":
            raise TimeoutError(f"the update is still being gathered after {timeout} seconds")
        if weights.state == "staged" and self._must_wait(weights):
            self._drain()
        self._install_staged()
        if self._failed_update is not None:
            try:
                raise self._failed_update
            finally:
                self._failed_update = None  # no local variable: its traceback would reference itself
        return self._state.core.version

    @as_call
    def commit_update(self, *, blocking: bool = True) -> int:
        """Install a held update: as `finish_update` does, or in `tick` without `blocking`. Raises `BadRequest` too."""
        weights = self._updatable_weights
        check_bool("blocking", blocking)
        if not weights.release() and self._failed_update is None:
            raise BadRequest("no weight update is in progress that could be committed")
        return self.finish_update() if blocking else weights.version + 1

    @as_call
    def cancel_update(self) -> bool:
        """Cancel an update that is not installed yet; return whether there was one."""
        return self._updatable_weights.cancel()

    @as_call
    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None:
        """Set the trainer's label of the installed weights, or with `are_next` of the update in progress.

        Raises `BadRequest` for an invalid label, or if no update is in progress.
        """
        weights, core = self._updatable_weights, self._state.core
        check_weight_label(label)
        if not are_next:
            weights.label = core.labels[core.version] = label
        elif not weights.label_next(label):
            raise BadRequest("no weight update is in progress that could be labelled")

    @as_call
    def expect_checksum(self, checksum: str) -> None:
        """Set the expected `weights_checksum` of the update in progress. Raises `BadRequest` if there is none."""
        if not self._updatable_weights.expect_next(checksum):
            raise BadRequest("no weight update is in progress that could be checked")

    def weight_info(self) -> WeightInfo:
        """Return the installed version, its label, and the state of the latest update."""
        core = self._state.core
        weights = self._weights  # read once: another thread may close the engine
        state = "idle" if weights is None else weights.state
        return WeightInfo(core.version, core.labels.get(core.version), state)

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the accepted weight names and their shapes. Can be called from any thread."""
        weights = self._weights  # read once: another thread may close the engine
        return {} if weights is None else weights.shapes

    def weights_dtype(self) -> str:
        """Return the precision in which the weights are stored, such as float32."""
        return self._updatable_weights.dtype

    @as_call
    def weights_checksum(self) -> str:
        """Return `weights_checksum` of the installed weights, to compare with the trainer's."""
        return self._updatable_weights.checksum()
