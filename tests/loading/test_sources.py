"""`TensorSource`, `check_names` and `load_into`."""

from __future__ import annotations

import re

import pytest
import torch

from nano_inference.loading.sources import TensorSource, load_into
from nano_inference.types import ModelError


def sources(*names: str) -> list[tuple[str, TensorSource]]:
    return [(name, TensorSource(torch.full((2, 3), float(i)))) for i, name in enumerate(names)]


def slots(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), -1.0) for name in names}


def test_load_into_fills_views_of_a_parameter() -> None:
    fused = torch.nn.Parameter(torch.full((4, 3), -1.0))
    load_into({"a": fused[:2], "b": fused[2:]}, sources("a", "b"))
    assert torch.equal(fused, torch.tensor([0.0, 0.0, 1.0, 1.0]).unsqueeze(1).expand(4, 3))


def test_tensor_source_converts_the_dtype() -> None:
    target = {"a": torch.empty(2, 3, dtype=torch.bfloat16)}
    values = torch.randn(2, 3)
    source = TensorSource(values)
    assert (source.shape, source.dtype) == ((2, 3), "float32")
    load_into(target, [("a", source)])
    assert torch.equal(target["a"], values.bfloat16())


def test_unknown_name_is_rejected() -> None:
    with pytest.raises(ModelError, match="the checkpoint has b, which the model does not have"):
        load_into(slots("a"), sources("a", "b"))


def test_other_shape_is_rejected_without_broadcasting() -> None:
    target = {"a": torch.full((4, 3), -1.0)}
    for shape in ((2, 3), (3, 4), (1, 3), (3,)):
        with pytest.raises(ModelError, match=re.escape(f"a: the checkpoint has the shape {shape}, the model (4, 3)")):
            load_into(target, [("a", TensorSource(torch.zeros(shape)))])
    assert target["a"].eq(-1).all()


def test_at_most_five_missing_names_are_listed() -> None:
    with pytest.raises(ModelError, match=r"lacks 2 tensors: b, c$"):
        load_into(slots("a", "b", "c"), sources("a"))
    with pytest.raises(ModelError, match=r"lacks 7 tensors: a, b, c, d, e and 2 more$"):
        load_into(slots(*"abcdefg"), [])
