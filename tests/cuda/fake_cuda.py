"""CUDA tensors without values, in a process without CUDA: for use in `FakeTensorMode`.

There, an operation on tensors of two devices raises, and so does one that reads a value.

Shapes: T tokens, N outputs and K inputs of a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda.strict import VIEWS

CUDA = torch.device("cuda", 0)


class Products(TorchFunctionMode):
    """Matrix products into given memory: checks what they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.mm, torch.addmm):
            return func(*args, **(kwargs or {}))
        *bias, x_TK, weight_KN = args
        out_TN = kwargs["out"]
        assert {(one.device, one.dtype) for one in (*args, out_TN)} == {(CUDA, x_TK.dtype)}
        assert out_TN.shape == (x_TK.size(0), weight_KN.size(1)) and x_TK.size(1) == weight_KN.size(0)
        assert all(one.shape == out_TN.shape[1:] for one in bias)
        return out_TN


class Transfers(Products):
    """Also copies between devices, and what else needs a CUDA library even on tensors without values: shapes only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            assert args[0].shape == torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0]
        if func in (Tensor.float, Tensor.contiguous, Tensor.to):
            given = torch.float32 if func is Tensor.float else (*args, None)[1]
            device = given if isinstance(given, torch.device) else args[0].device
            dtype = given if isinstance(given, torch.dtype) else args[0].dtype
            return torch.empty(args[0].shape, dtype=dtype, device=device)
        if func is Tensor.__getitem__:
            return _taken(*args)
        return super().__torch_function__(func, types, args, kwargs)


def _taken(x: Tensor, index: Any) -> Tensor:
    """Return x[index]."""
    meta = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if isinstance(index, Tensor):
        assert index.device == x.device
        shape = meta[torch.empty(index.shape, dtype=torch.long, device="meta")].shape
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    view = meta[index]
    return x.as_strided(view.size(), view.stride(), x.storage_offset() + view.storage_offset())


class DeviceLaunchesOnly(TorchDispatchMode):
    """Raises for every operation on the device except views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = func.namespace != "aten" or func.__name__.partition(".")[0] in VIEWS
        tensors = (one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor))
        assert is_view or not any(one.device == CUDA for one in tensors), f"a window calls {func}"
        return result
