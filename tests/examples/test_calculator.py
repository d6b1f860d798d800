"""The training script of the packaged model writes files that nanochat's loaders read."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.nanochat import GPT
from nano_inference.text.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("calculator_data")


@pytest.mark.slow
def test_a_few_steps_write_a_checkpoint_of_g4(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_calculator.py"), "--out", str(tmp_path), "--threads", "1"]
    command += ["--steps", "3", "--tokens", "512", "--validation", "1", "--examples", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.inferred is not None and checkpoint.inferred.constants.generation == "G4"
    assert checkpoint.inferred.warnings == () and checkpoint.config.vocab_size == 265
    assert load_tokenizer(checkpoint.tokenizer).eos_ids == checkpoint.config.eos_token_ids == (260, 256)
    assert (tmp_path / "model_000003.pt").stat().st_size < 6_000_000


def test_the_trained_module_and_ours_compute_the_same(tmp_path: Path, data: ModuleType) -> None:
    script = importlib.import_module("train_calculator")
    torch.manual_seed(0)
    model = script.Model(script.CONFIG).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    ids = torch.randint(0, 265, (1, 200))
    ours = GPT.from_state_dict(model.state_dict(), dict(script.CONFIG))
    with torch.no_grad():
        assert torch.allclose(ours.forward(ids), model(ids)[..., :265], atol=1e-4)
