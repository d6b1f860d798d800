"""Engines that are divided among several GPUs, through NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="NO TRANSFORMERS: pip install transformers")

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.executors.cuda.decode import CapturedStepper, StepKey
from nano_inference.parallel.links import local_links
from tests.cuda.models import wide_heads
from tests.models.families import make_model

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PARAMS = SamplingParams(max_tokens=32, seed=3, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4] * 40]


def generated(path: Path, **options: Any) -> list[TrainingSample]:
    config = EngineConfig(str(path), device="cuda", dtype="float32", kv_cache_bytes=16 << 20, max_model_len=512)
    with InferenceEngine(replace(config, **options)) as engine:
        assert engine.parts.code == ("torch" if options.get("kernels") == "off" else "cuda")
        return engine.generate(PROMPTS, PARAMS, 2)


@needs_two
@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("name", ["llama-ratio1-untied", "gemma2"])
def test_two_devices_compute_what_one_does(name: str, kernels: str, tmp_path: Path) -> None:
    make_model(name, tmp_path, wide_heads(name))
    right, mine = (generated(tmp_path, kernels=kernels, tensor_parallel=size) for size in (1, 2))
    assert [one.completion_tokens for one in mine] == [one.completion_tokens for one in right]
    for one, other in zip(mine, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@needs_two
def test_bits_of_two_devices_do_not_depend_on_the_window(tmp_path: Path) -> None:
    make_model("gemma2", tmp_path)
    one, other = (generated(tmp_path, tensor_parallel=2, deterministic=True, lookahead=size) for size in (1, 16))
    assert [sample.logprobs for sample in one] == [sample.logprobs for sample in other]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device")
def test_a_graph_repeats_exchanges(tmp_path: Path) -> None:
    """With one rank, which any machine with a GPU can run."""
    device = torch.device("cuda", 0)
    links = local_links(tmp_path, 0, 1, device)
    x, out = torch.zeros(4, 6, device=device), torch.zeros(1, 4, 6, device=device)

    def step(key: StepKey) -> None:
        x.add_(1.0)
        links.data.add_in_place(x)
        links.data.gather_into(out, x)

    stepper = CapturedStepper(step, device)
    for count in range(1, 5):
        stepper.replay(StepKey(4, 1, False, False, False))
        assert out.unique().tolist() == [count]
    del stepper
    links.close()
