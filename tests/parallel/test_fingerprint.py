"""The digest by which ranks compare their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.sources import TensorSource
from nano_inference.parallel.fingerprint import MOST_BYTES, fingerprint
from tests.models.families import make_model

NAME = "model.layers.1.mlp.down_proj.weight"
WIDE: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 512}
"""`NAME` has 96 KiB, which are sampled."""


def of(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    return fingerprint(checkpoint.config, checkpoint.sources)


@pytest.mark.parametrize(
    ("place", "is_seen"), [(0, True), (-1, True), (3600, True), (12_288, False)], ids=["start", "end", "span", "gap"]
)
def test_one_other_value_is_seen_inside_the_sample(place: int, is_seen: bool, tmp_path: Path) -> None:
    make_model("llama-ratio1-untied", tmp_path, WIDE)
    before = of(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights[NAME].nbytes > 2 * MOST_BYTES
    weights[NAME].view(-1)[place] += 1
    save_file(weights, tmp_path / "model.safetensors")
    assert (of(tmp_path) != before) == is_seen


def test_a_scaled_tensor_is_seen_in_every_kind_of_source(tmp_path: Path) -> None:
    make_model("llama-ratio1-untied", tmp_path, WIDE)
    checkpoint = open_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    held = {name: TensorSource(value) for name, value in weights.items()}
    assert fingerprint(checkpoint.config, held) == fingerprint(checkpoint.config, checkpoint.sources)
    for name, value in weights.items():
        other = held | {name: TensorSource(value * 1.01)}
        assert fingerprint(checkpoint.config, other) != fingerprint(checkpoint.config, held)
    assert fingerprint(checkpoint.config, held | {NAME: TensorSource(torch.zeros(1))}) != fingerprint(
        checkpoint.config, held
    )
