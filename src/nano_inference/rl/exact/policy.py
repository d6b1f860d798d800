"""`Policy`: a trainer's parameters and an engine with the same weights; raises if they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.engine import InferenceEngine
from nano_inference.executors.protocol import Executor
from nano_inference.rl.exact.program import unsupported
from nano_inference.types import BadRequest, SamplingParams

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class StaleWeights(RuntimeError):
    """The parameters, or the engine's weights, changed since `Policy.sync`."""


def exact_executor(engine: InferenceEngine) -> Executor:
    """Return the engine's executor. Raises `BadRequest` naming the option if its rows depend on the batch."""
    if engine.config.tensor_parallel > 1:
        raise BadRequest("tensor_parallel", "must be 1: sums over ranks are not those of one process")
    executor = engine.parts.executor
    if executor is None:
        raise BadRequest("engine", "has no executor of its own")
    if executor.device.type == "cpu" and executor.code == "torch":
        raise BadRequest("kernels", "must not be off: torch's products depend on the number of rows")
    if executor.device.type != "cpu" and not engine.config.deterministic:
        raise BadRequest("deterministic", "must be true on this device: its products depend on the number of rows")
    return executor


class Policy:
    """Owns the link between parameters and an engine: installs them, and notices when one of both changes."""

    def __init__(
        self,
        engine: InferenceEngine,
        parameters: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        by_layer: bool = True,
        exact_head: bool | None = None,
    ) -> None:
        """`parameters` are a module's, or named ones, by the names that `update_weights` takes; tied ones once.

        `optimizer`, one or several: each step counts as a change, also a fused one's, which torch's counters of changes
        miss. A parameter that is replaced by another object in its module is not seen: make a new policy. `by_layer`
        keeps one residual a layer for the backward pass, computes the rest again, and stores each layer's gradients
        before the next layer's exist. `exact_head`: the gradient at the logits is onehot - softmax of the engine's own
        logits, which a second forward pass of the engine computes; None: where the engine rounds weights or computes in
        half precision.
        Raises `BadRequest` for an engine that is not exact, for dropout in training, for a module wrapped by
        `DistributedDataParallel`, for an operation without gradient, and for missing parameters.
        """
        executor = exact_executor(engine)
        self.program = executor.program
        missing = unsupported(self.program)
        if missing:
            raise BadRequest("engine", f"its model has operations without a gradient: {', '.join(missing)}")
        if isinstance(parameters, nn.Module):
            _check_module(parameters)
            parameters = parameters.named_parameters()
        named = {name.replace("_orig_mod.", ""): value for name, value in dict(parameters).items()}  # compiled modules
        own = {executor.config.names.own(name): value for name, value in named.items()}
        known = {self.program.tied_names.get(name, name): value for name, value in own.items() if name is not None}
        self.names = tuple(spec.name for spec in self.program.weights)
        absent = [name for name in self.names if name not in known]
        if absent:
            raise BadRequest("parameters", f"lack {len(absent)} of the model's weights, the first is {absent[0]}")
        self.engine, self.by_layer = engine, by_layer
        self._executor = executor
        self._is_rounded = executor.weights.dtype != "float32"
        self._has_exact_head = self._is_rounded if exact_head is None else exact_head
        self._leaf_of = {name: known[name] for name in self.names}
        self._named = named
        self._installed: tuple[Any, ...] | None = None  # `state` after the last `sync`
        self._num_changes = 0  # changes that were reported
        for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
            one.register_step_post_hook(lambda *_: self.changed())

    def sync(self) -> int:
        """Install the parameters in the engine if they changed; return the version. Call after each optimizer step."""
        if self._installed is None or self._installed != self.state():
            self.engine.update_weights({name: value.detach() for name, value in self._named.items()}, blocking=True)
            self._installed = self.state()
        return self.engine.weight_info().version

    def changed(self) -> None:
        """Report a change of parameters that torch does not count, such as one through `.data`."""
        self._installed = None
        self._num_changes += 1

    def check(self) -> None:
        """Raise `StaleWeights` if the engine does not have the parameters of now."""
        if self._installed is None:
            raise StaleWeights("the parameters have changed, or were never installed: call sync()")
        if self._installed != self.state():
            raise StaleWeights("the parameters or the engine's weights have changed: call sync()")

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(self._leaf_of.values())

    def leaves_of(self, names: Iterable[str]) -> list[Tensor]:
        """Return parameters by the program's names."""
        return [self._leaf_of[name] for name in names]

    def computed(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return parameters as the engine has them, in float64 or float32, in which the backward pass computes."""
        leaves = {name: self._leaf_of[name].detach() for name in names}
        if self._is_rounded:
            stored = dict(self._executor.weights.values(names))
            return {name: stored[name].to(leaf.device, torch.float32, copy=True) for name, leaf in leaves.items()}
        return {name: leaf if leaf.dtype == torch.float64 else leaf.float() for name, leaf in leaves.items()}

    def needs_logits(self, params: Sequence[SamplingParams]) -> bool:
        """Return whether the backward pass has the engine's own logits."""
        restricted = (one for one in params if one.logprobs_mode == "processed")
        is_restricted = any(one.top_k or one.top_p < 1 or one.min_p for one in restricted)
        return self._has_exact_head or is_restricted

    def state(self) -> tuple[Any, ...]:
        """Return what changes with the weights: the engine's version, the number of reported changes, and each
        parameter's memory and count of in-place changes.
        """
        counters = ((leaf.data_ptr(), leaf._version) for leaf in self.leaves)
        return (self.engine.weight_info().version, self._num_changes, *counters)


def _check_module(module: nn.Module) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise BadRequest(
            "parameters", "a DistributedDataParallel module's gradients would not be averaged; use exact_values"
        )
    for name, part in module.named_modules():
        if isinstance(part, _DROPOUTS) and part.p > 0 and part.training:
            raise BadRequest(
                "parameters", f"{name} drops values in training, which the engine does not; call eval() or set p=0"
            )
    config = getattr(module, "config", None)  # of Transformers, whose attention_dropout is no module
    for name, value in ({} if config is None else vars(config)).items():
        if module.training and "dropout" in name and isinstance(value, float) and value > 0:
            text = f"config.{name} is {value:g} in training, the engine drops nothing: call eval()"
            raise BadRequest("parameters", text)
