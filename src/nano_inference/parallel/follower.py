"""`Follower`: a rank other than 0. It executes rank 0's commands, and receives weights beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nano_inference.core.step import BlockCopy
from nano_inference.executors.protocol import CacheSize, Executor, Staged
from nano_inference.executors.staging import NotFinite
from nano_inference.loading.sources import WeightSource
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.parallel.group import Group
from nano_inference.parallel.links import Links
from nano_inference.parallel.messages import RowCoder, unpack
from nano_inference.parallel.shard import Shard, shard
from nano_inference.parallel.staged import part_of, source_of
from nano_inference.types import EngineDead
from nano_inference.weights.gate import StepGate, share_of

_UPDATES = frozenset({"stage", "item", "compare", "compared", "finish", "staged_values", "discard"})
"""Commands of a weight update, which have a group of their own if rank 0 sends the tensors."""
Fill = Callable[[Callable[[str, WeightSource], None]], None]
"""Calls its argument with (name, tensor) for every whole tensor of an update."""


@dataclass
class _Model:
    """An executor of this rank, and the state of what rank 0 sends for it."""

    executor: Executor
    rows: RowCoder = field(default_factory=RowCoder)
    staged: Staged | None = None  # the update that is being received
    fault: str = ""  # why this rank refuses it
    finished: Any = None  # the argument of `commit`
    gate: StepGate | None = None
    is_same: bool = True  # whether all tensors that were compared since the last question are equal


class Follower:
    """Owns this rank's executors and the thread that receives weights."""

    def __init__(self, executor: Executor, program: Program, links: Links, *, is_fed: bool) -> None:
        """`program` is the whole one. With `is_fed`, a thread receives updates; otherwise `serve` takes them."""
        self.links = links
        self.part: Shard = shard(program, links.rank, links.size)
        self._specs = {spec.name: spec for spec in self.part.program.weights}
        self._models = {0: _Model(executor)}
        self._is_fed = is_fed
        self._receiver = threading.Thread(target=self._receive_weights, name="weights", daemon=True)
        if is_fed:
            self._receiver.start()

    # ---- commands ---------------------------------------------------------------------------------------------------

    def serve(self, fill: Fill | None = None) -> Any:
        """Execute commands until rank 0 ends them; return the value that it sends at the end of a call.

        None if the engine was shut down. `fill` stages this rank's tensors of an update, unless rank 0 sends them.
        Raises `EngineDead` if another rank is lost, and any exception of a step, after which rank 0 loses this one.
        """
        try:
            return self._serve(fill)
        except BaseException:
            self.links.close(is_receiving=self._is_fed)
            raise

    def _serve(self, fill: Fill | None) -> Any:
        commands = self.links.commands
        while True:
            command, arguments = unpack(commands.next_message())
            if command == "stop":
                if self._is_fed:
                    self._receiver.join()  # rank 0 sends it the same command
                self.links.close()
                return None
            if command == "return":
                return arguments["value"]
            if command == "run":
                self._run(self._models[arguments["id"]], arguments)
            elif command in _UPDATES:
                self._receive(self._models[arguments["id"]], command, arguments, commands, fill)
            else:
                commands.exchange(_fault_of(partial(self._execute, command, arguments)))

    def _run(self, model: _Model, arguments: Mapping[str, Any]) -> None:
        rows = model.rows.read(arguments["rows"])
        copies = tuple(BlockCopy(*copy) for copy in arguments["copies"])
        gate = model.gate
        if gate is not None:
            gate.begin_step()
        try:
            model.executor.run(rows, copies, tuple(arguments["fresh"]))
        finally:
            if gate is not None:
                gate.end_step()

    def _execute(self, command: str, arguments: Mapping[str, Any]) -> None:
        if command == "ping":
            return
        model = self._models[arguments["id"]]
        executor = model.executor
        match command:
            case "new_cache":
                executor.new_cache(CacheSize(**arguments["size"]))
            case "free_cache":
                executor.free_cache()
            case "restore_cache":
                executor.restore_cache()
            case "commit":
                executor.commit(model.finished)
            case "drop_spare":
                executor.drop_spare()
            case "discard_weights":
                executor.discard_weights()
            case "move_weights":
                executor.move_weights(torch.device("cpu") if arguments["away"] else executor.device)
            case "copy":
                self._models[arguments["new"]] = _Model(executor.copy())
            case "forget":
                del self._models[arguments["id"]]
            case "free_bytes":
                self._send_number(executor.free_bytes(arguments["share"]))
            case "step_bytes":
                self._send_number(executor.step_bytes(arguments["block_size"]))
            case "values":
                ((_, tensor),) = executor.weight_values((arguments["name"],))
                self.links.commands.send(tensor.cpu(), 0)
            case _:
                raise ValueError(f"unknown command {command}")

    def _send_number(self, number: int) -> None:
        self.links.commands.gather(torch.tensor([number]))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _receive_weights(self) -> None:
        """Receive updates until the links are closed."""
        weights = self.links.weights
        try:
            while True:
                command, arguments = unpack(weights.next_message())
                if command == "stop":
                    return
                self._receive(self._models[arguments["id"]], command, arguments, weights, None)
        except EngineDead:
            return

    def _receive(
        self, model: _Model, command: str, arguments: Mapping[str, Any], group: Group, fill: Fill | None
    ) -> None:
        match command:
            case "stage":
                self._stage(model, arguments, fill)
            case "item" | "compare":
                spec = self._specs.get(arguments["name"])
                source = source_of(arguments, spec, self.part, group)
                if spec is not None and source is not None and command == "item":
                    self._put(model, spec, source)
                elif spec is not None and source is not None and model.staged is not None and not model.fault:
                    model.is_same &= model.staged.has_same(spec, source)
            case "compared":
                group.exchange("" if model.is_same else "differs")
                model.is_same = True
            case "finish":
                self._finish(model)
                group.exchange(model.fault)
            case "staged_values":
                assert model.finished is not None
                values = model.executor.staged_values(model.finished)
                group.send(next(tensor for name, tensor in values if name == arguments["name"]).cpu(), 0)
            case "discard":
                self._drop(model)

    def _stage(self, model: _Model, arguments: Mapping[str, Any], fill: Fill | None) -> None:
        self._drop(model)
        if arguments["paced"]:
            model.gate = StepGate(share_of(model.executor.weight_bytes))
        pace = None if model.gate is None else model.gate.wait_for_turn
        model.staged = model.executor.stage(pace=pace, check_finite=arguments["check_finite"])
        model.fault = "" if self._is_fed or fill is not None else "has not called update_weights"
        if fill is not None:
            try:
                fill(partial(self._put_whole, model))
            except Exception as error:
                model.fault = model.fault or f"{type(error).__name__}: {error}"

    def _put_whole(self, model: _Model, name: str, source: WeightSource) -> None:
        """Stage this rank's part of a tensor that every rank has; rank 0 checks names and shapes."""
        spec = self._specs.get(self.part.program.tied_names.get(name, name))
        if spec is not None:
            self._put(model, spec, part_of(source, self.part.cuts.get(spec.name)))

    def _put(self, model: _Model, spec: WeightSpec, source: WeightSource) -> None:
        """Stage one tensor; a refusal is reported when rank 0 asks."""
        if model.fault or model.staged is None:
            return
        try:
            model.staged.put(spec, source)
        except NotFinite as error:
            model.fault = f"{spec.name}: holds NaN or infinity (in the engine's {error})"
        except Exception as error:
            model.fault = f"{spec.name}: {type(error).__name__}: {error}"
        if model.gate is not None:
            model.gate.start_reading()

    def _finish(self, model: _Model) -> None:
        if model.staged is None:
            model.fault = model.fault or "has no update"
        if not model.fault:
            assert model.staged is not None
            model.fault = _fault_of(lambda: self._take(model))
        if model.gate is not None:
            model.gate.finish()
        model.gate = model.staged = None

    def _take(self, model: _Model) -> None:
        assert model.staged is not None
        model.finished = model.staged.finish()

    def _drop(self, model: _Model) -> None:
        if model.gate is not None:
            model.gate.finish()
        model.staged = model.finished = model.gate = None


def _fault_of(work: Callable[[], None]) -> str:
    """Call `work`; return the exception that it raised as text, or nothing. Raises `EngineDead`."""
    try:
        work()
    except EngineDead:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
