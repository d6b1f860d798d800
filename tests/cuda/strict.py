"""`Strictly`: an engine on CPU tensors whose windows do only what a CUDA graph may record, and the same each time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference import EngineConfig
from nano_inference.executors.cuda.decode import EagerStepper, StepKey
from nano_inference.executors.cuda.launchers import Kernels
from tests.cuda.engines import open_cuda
from tests.cuda.plain import plain_kernels

VIEWS = frozenset({"view", "narrow", "slice", "transpose", "t", "as_strided", "alias", "detach", "select", "expand"})
_PRODUCTS = ("mm", "addmm")


class Recorder:
    """Wraps kernels: notes each launch with the addresses of its tensors and its numbers.

    They refuse the heads that the Triton kernels refuse.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_inside = self.is_stepping = False
        plain = plain_kernels()
        groups = {
            field.name: self.wrapped(getattr(plain, field.name))
            for field in dataclasses.fields(plain)
            if field.name != "has_fixed_heads"
        }
        self.kernels = Kernels(**groups)

    def wrapped(self, group: Any) -> Any:
        """Return functions of an object, whose calls are noted."""
        names = [name for name in dir(group) if callable(getattr(group, name)) and not name.startswith("_")]
        return SimpleNamespace(**{name: self._noting(name, getattr(group, name)) for name in names})

    def _noting(self, name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def run(*given: Any, **named: Any) -> None:
            if self.is_stepping:
                self.calls.append((name, tuple(_trace((given, sorted(named.items()))))))
            self.is_inside = True
            try:
                launch(*given, **named)
            finally:
                self.is_inside = False

        return run


def _trace(value: Any) -> Iterator[Any]:
    """Yield the address, shape and strides of each tensor in nested records, and every other value."""
    if isinstance(value, Tensor):
        yield (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _trace(one)
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from _trace(getattr(value, one.name))
    else:
        yield value


class LaunchesOnly(TorchDispatchMode):
    """Raises for every torch operation outside the kernels, except views and products into given memory.

    `may_copy` allows copies, too: those of ranks.
    """

    def __init__(self, recorder: Recorder, *, may_copy: bool = False) -> None:
        super().__init__()
        self._recorder, self._may_copy = recorder, may_copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = func.__name__.partition(".")
        is_launch = (name in _PRODUCTS and overload == "out") or (name == "copy_" and self._may_copy)
        if not self._recorder.is_inside:
            assert name in VIEWS or is_launch, f"a window calls {func}"
            if is_launch:
                self._recorder.calls.append((name, tuple(_trace((args, sorted(kwargs.items()))))))
        return func(*args, **(kwargs or {}))


class Strict(EagerStepper):
    """Runs steps under `LaunchesOnly`; every step with the same key must be the same launches on the same memory.

    Only the first `most_checks` of each key, if that is given: the check doubles the time of a step.
    """

    def __init__(
        self, step: Callable[[StepKey], None], recorder: Recorder, most_checks: int | None, *, may_copy: bool = False
    ) -> None:
        super().__init__(step)
        self._may_copy = may_copy
        self._recorder, self._most_checks = recorder, most_checks
        self._num_checks: Counter[StepKey] = Counter()
        self.seen: dict[StepKey, list[Any]] = {}
        self.num_replays = 0

    def replay(self, key: StepKey) -> None:
        self.num_replays += 1
        if self._most_checks is not None and self._num_checks[key] >= self._most_checks:
            super().replay(key)
        else:
            self._num_checks[key] += 1
            self._check(key)

    def _check(self, key: StepKey) -> None:
        self._recorder.calls, self._recorder.is_stepping = [], True
        try:
            with LaunchesOnly(self._recorder, may_copy=self._may_copy):
                super().replay(key)
        finally:
            self._recorder.is_stepping = False
        assert self._recorder.calls == self.seen.setdefault(key, self._recorder.calls)


class Strictly:
    """An engine whose windows are checked."""

    def __init__(self, path: Path, config: EngineConfig, most_checks: int | None = None) -> None:
        self.recorder, self.steppers, self._most_checks = Recorder(), [], most_checks
        self.engine = open_cuda(path, config, kernels=self.recorder.kernels, stepper=self._new)

    def _new(self, step: Callable[[StepKey], None], device: torch.device) -> Strict:
        self.steppers.append(Strict(step, self.recorder, self._most_checks))
        return self.steppers[-1]
