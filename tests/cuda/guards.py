"""Launchers under a guard: a call fails if it would wait for the device or copy between devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nano_inference.executors.cuda import launchers
from nano_inference.executors.cuda.launchers import Kernels

_REFUSED = ("_local_scalar_dense", "nonzero", "item", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique")
"""Operators that read values on the host or have outputs of a shape that depends on values; tensors from numbers."""


class NoSynchronisation(TorchDispatchMode):
    """Raises `AssertionError` for operators that a CUDA graph cannot capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name.rstrip("_") not in _REFUSED and not name.startswith("unique"), name
        if name in ("index", "index_put", "index_put_"):
            assert all(one is None or one.dtype != torch.bool for one in args[1]), f"{name} with a mask"
        if name in ("copy_", "_to_copy"):
            target = args[1].device if name == "copy_" else (kwargs or {}).get("device") or args[0].device
            assert torch.device(target) == args[0].device, f"{name} between devices"
        return func(*args, **(kwargs or {}))


def launchers_of(kernels: Kernels) -> Iterator[tuple[str, str, Callable[..., None]]]:
    """Yield group, name and function of each launcher."""
    groups = (field for field in dataclasses.fields(Kernels) if str(field.type).endswith("Kernels"))
    for field in groups:
        for name in vars(getattr(launchers, str(field.type))):
            if not name.startswith("_"):
                yield field.name, name, getattr(getattr(kernels, field.name), name)


def guarded(kernels: Kernels, called: set[str]) -> Kernels:
    """Return launchers that are called by `call_guarded`; their names go to `called`."""

    def wrap(name: str, launcher: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            called.add(name)
            call_guarded(launcher, *args, **kwargs)

        return call

    groups: dict[str, dict[str, Any]] = {}
    for group, name, launcher in launchers_of(kernels):
        groups.setdefault(group, {})[name] = wrap(name, launcher)
    wrapped: dict[str, Any] = {group: SimpleNamespace(**members) for group, members in groups.items()}
    return dataclasses.replace(kernels, **wrapped)


def call_guarded(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call a function under `NoSynchronisation`: on meta tensors, which have no values, and then on the arguments."""
    with NoSynchronisation():
        function(*map(on_meta, args), **{key: on_meta(value) for key, value in kwargs.items()})
        function(*args, **kwargs)


def on_meta(value: Any) -> Any:
    """Return the argument with its tensors, or those of its fields, on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_meta, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: on_meta(getattr(value, name)) for name in names})
    return value
