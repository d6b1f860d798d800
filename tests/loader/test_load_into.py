"""The door: every slot filled once, and every disagreement named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny_models import make_model, save, weights_of

from nano_inference.loader.checkpoint import open_checkpoint
from nano_inference.loader.sources import TensorSource, load_into
from nano_inference.types import ModelError


def sources(*names: str) -> list[tuple[str, TensorSource]]:
    return [(name, TensorSource(torch.full((2, 3), float(i)))) for i, name in enumerate(names)]


def slots(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), -1.0) for name in names}


def test_slots_are_views_of_a_fused_parameter() -> None:
    fused = torch.nn.Parameter(torch.full((4, 3), -1.0))
    load_into({"a": fused[:2], "b": fused[2:]}, sources("a", "b"))
    assert torch.equal(fused, torch.tensor([0.0, 0.0, 1.0, 1.0]).unsqueeze(1).expand(4, 3))


def test_a_trainers_tensor_is_converted() -> None:
    target = {"a": torch.empty(2, 3, dtype=torch.bfloat16)}
    values = torch.randn(2, 3)
    source = TensorSource(values)
    assert (source.shape, source.dtype) == ((2, 3), "float32")
    load_into(target, [("a", source)])
    assert torch.equal(target["a"], values.bfloat16())


def test_progress_hears_the_bytes_written(tmp_path: Path) -> None:
    model = make_model("llama")
    checkpoint = open_checkpoint(save(model, tmp_path))
    target = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in weights_of(model).items()}
    heard: list[int] = []
    load_into(target, checkpoint.tensors(), progress=heard.append)
    assert sum(heard) == 2 * model.num_parameters()
    assert len(heard) == len(target)
    assert all(torch.equal(target[name], tensor.bfloat16()) for name, tensor in weights_of(model).items())


def test_an_unknown_name_is_refused_unless_it_is_harmless() -> None:
    with pytest.raises(ModelError, match="the checkpoint has b, which the model has not"):
        load_into(slots("a"), sources("a", "b"))
    load_into(slots("a"), sources("a", "b"), ignore={"b"})
    load_into(slots("a"), sources("a", "model.layers.3.self_attn.rotary_emb.inv_freq"))


def test_ignore_does_not_skip_what_the_model_has() -> None:
    target = slots("a")
    load_into(target, sources("a"), ignore={"a"})
    assert target["a"].eq(0).all()


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ModelError, match="a twice"):
        load_into(slots("a"), sources("a", "a"))


def test_another_shape_is_refused_and_nothing_is_broadcast() -> None:
    target = {"a": torch.full((4, 3), -1.0)}
    for shape in ((2, 3), (3, 4), (1, 3), (3,)):
        with pytest.raises(ModelError, match=re.escape(f"a: the checkpoint has the shape {shape}, the model (4, 3)")):
            load_into(target, [("a", TensorSource(torch.zeros(shape)))])
    assert target["a"].eq(-1).all()


def test_missing_names_are_listed_up_to_five() -> None:
    with pytest.raises(ModelError, match=r"lacks 2 tensors: b, c$"):
        load_into(slots("a", "b", "c"), sources("a"))
    with pytest.raises(ModelError, match=r"lacks 7 tensors: a, b, c, d, e and 2 more$"):
        load_into(slots(*"abcdefg"), [])
