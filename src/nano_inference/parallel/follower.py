"""`Follower`: a rank other than 0. It executes rank 0's commands, and receives weights beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nano_inference.core.step import BlockCopy
from nano_inference.executors.protocol import Executor, Staged
from nano_inference.executors.staging import NotFinite
from nano_inference.loading.sources import WeightSource
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.parallel.adapters import receive_part
from nano_inference.parallel.links import Announced, Group, Links
from nano_inference.parallel.rows import Sent, SentRows
from nano_inference.parallel.shard import Shard, shard
from nano_inference.parallel.staged import part_of, source_of
from nano_inference.types import EngineDead
from nano_inference.weights.gate import StepGate, share_of

_UPDATES = frozenset({"stage", "item", "compare", "finish", "staged_values", "cancel"})
"""Commands of a weight update, which have a group of their own if rank 0 sends the tensors."""
Fill = Callable[[Callable[[str, WeightSource], None]], None]
"""Calls its argument with (name, tensor) for every whole tensor of an update."""


@dataclass
class _Model:
    """An executor of this rank, and the state of what rank 0 sends for it."""

    executor: Executor
    sent: SentRows = field(default_factory=SentRows)
    staged: Staged | None = None  # the update that is being received
    fault: str = ""  # why this rank refuses it
    finished: Any = None  # the argument of `commit`
    gate: StepGate | None = None


class Follower:
    """Owns this rank's executors and the thread that receives weights."""

    def __init__(self, executor: Executor, program: Program, links: Links, *, is_fed: bool) -> None:
        """`program` is the whole one. With `is_fed`, a thread receives updates; otherwise `serve` takes them."""
        self.links = links
        self.part: Shard = shard(program, links.rank, links.size)
        self._specs = {spec.name: spec for spec in self.part.program.weights}
        self._names = executor.config.names
        self._models = {0: _Model(executor)}
        self._is_fed = is_fed
        self._receiver = threading.Thread(target=self._receive_weights, name="weights", daemon=True)
        if is_fed:
            self._receiver.start()

    def serve(self, fill: Fill | None = None) -> Any:
        """Execute commands until rank 0 ends them; return the value that it sends at the end of a call.

        None if the engine was shut down. `fill` stages this rank's tensors of an update, unless rank 0 sends them.
        Raises `EngineDead` if another rank is lost, and any exception of a step, after which rank 0 loses this one.
        """
        commands = self.links.commands
        try:
            while True:
                command, number, *arguments = commands.next_message()
                if command == "stop":
                    if self._is_fed:
                        self._receiver.join()  # rank 0 sends it the same command
                    self.links.close()
                    return None
                if command == "return":
                    return arguments[0]
                if command == "run":
                    self._run(self._models[number], *arguments)
                elif command in _UPDATES:
                    self._update(self._models[number], command, commands, fill, *arguments)
                else:
                    commands.exchange(_fault_of(partial(self._execute, command, number, *arguments)))
        except BaseException:
            self.links.close(is_receiving=self._is_fed)
            raise

    def _run(self, model: _Model, sent: list[Sent], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> None:
        gate = model.gate
        if gate is not None:
            gate.begin_step()
        try:
            model.executor.run(model.sent.read(sent), copies, fresh)
        finally:
            if gate is not None:
                gate.end_step()

    def _execute(self, command: str, number: int, argument: Any = None) -> None:
        model = self._models[number]
        executor, commands = model.executor, self.links.commands
        match command:
            case "ping":
                pass
            case "step_bytes" | "free_bytes":
                component: Any = executor if command == "step_bytes" else executor.cache
                commands.gather(torch.tensor([getattr(component, command)(argument)]))
            case "warm_up":
                executor.warm_up(lambda done, total: None)
            case "allocate":
                executor.cache.allocate(argument)
            case "free" | "restore":
                getattr(executor.cache, command)()
            case "drop_spare" | "discard":
                getattr(executor.weights, command)()
            case "commit":
                executor.weights.commit(model.finished)
            case "move":
                executor.weights.move(torch.device("cpu") if argument == "away" else executor.device)
            case "values":
                ((_, tensor),) = executor.weights.values((argument,))
                commands.send(tensor.cpu(), 0)
            case "commit_adapter":
                key, about = argument
                executor.commit_adapter(key, executor.stage_adapter(receive_part(about, self._specs, commands)))
            case "drop_adapter":
                executor.drop_adapter(argument)
            case "copy":
                self._models[argument] = _Model(executor.copy())
            case "forget":
                del self._models[number]
            case _:
                raise ValueError(f"unknown command {command}")

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _receive_weights(self) -> None:
        weights = self.links.weights
        try:
            while True:
                command, number, *arguments = weights.next_message()
                if command == "stop":
                    return
                self._update(self._models[number], command, weights, None, *arguments)
        except EngineDead:
            return

    def _update(self, model: _Model, command: str, group: Group, fill: Fill | None, argument: Any = None) -> None:
        """Execute a command of an update. A refusal is reported when rank 0 asks."""
        match command:
            case "stage":
                self._stage(model, fill, **argument)
            case "item" | "compare":
                self._receive(model, command, group, argument)
            case "finish":
                if model.staged is None:
                    model.fault = model.fault or "has no update"
                elif not model.fault:
                    staged = model.staged

                    def finish() -> None:
                        model.finished = staged.finish()

                    model.fault = _fault_of(finish)
                if model.gate is not None:
                    model.gate.finish()
                model.gate = model.staged = None
                group.exchange(model.fault)
            case "staged_values":
                values = model.executor.weights.staged_values(model.finished)
                group.send(next(tensor for name, tensor in values if name == argument).cpu(), 0)
            case "cancel":
                self._drop(model)

    def _stage(self, model: _Model, fill: Fill | None, check_finite: bool, paced: bool) -> None:
        """Start an update; with `fill`, stage this rank's parts of the tensors that every rank has."""
        self._drop(model)
        if paced:
            model.gate = StepGate(share_of(model.executor.weights.num_bytes))
        pace = None if model.gate is None else model.gate.wait_for_turn
        model.staged = model.executor.weights.stage(pace=pace, check_finite=check_finite)
        model.fault = "" if self._is_fed or fill is not None else "has not called update_weights"

        def put(name: str, source: WeightSource) -> None:  # rank 0 checks names and shapes
            own = self._names.own(name)
            spec = None if own is None else self._specs.get(self.part.program.tied_names.get(own, own))
            if spec is not None:
                self._put(model, spec, part_of(source, self.part.cuts.get(spec.name)))

        if fill is not None:
            fault = _fault_of(lambda: fill(put))
            model.fault = model.fault or fault

    def _receive(self, model: _Model, command: str, group: Group, about: Announced) -> None:
        """Receive this rank's part of a tensor, if it has one; stage it, or reply whether it equals the staged one."""
        spec, is_same = self._specs.get(about.name), True
        if spec is not None:
            source = source_of(about, spec, self.part.cuts.get(spec.name), group)
            if command == "item":
                self._put(model, spec, source)
            elif model.staged is not None and not model.fault:
                is_same = model.staged.has_same(spec, source)
        if command == "compare":
            group.exchange("" if is_same else "differs")

    def _put(self, model: _Model, spec: WeightSpec, source: WeightSource) -> None:
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
