"""Engines with the Triton kernels on CUDA, against other programs; skipped without a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="NO TRANSFORMERS: pip install transformers")
pytest.importorskip("tiktoken", reason="NO TIKTOKEN: pip install tiktoken")

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.config import Dtype, KernelsName
from tests.cuda.family_checks import HALF_BOUNDS, HALF_NAMES, float32_gap, half_gap
from tests.cuda.models import NAMES
from tests.models.hybrids import HYBRIDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA; torch sees no device"),
]


def open_engine(
    path: Path, *, dtype: Dtype, kernels: KernelsName = "auto", deterministic: bool = False
) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(
            model_path=str(path), device="cuda", dtype=dtype, kernels=kernels, deterministic=deterministic,
            kv_cache_bytes=64 << 20, max_batch_size=32, max_model_len=1024,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *HYBRIDS])
def test_float32_log_probabilities_are_within_1e_4_of_another_program(name: str, tmp_path: Path) -> None:
    """Transformers, or for nanochat a plain forward pass on the CPU."""
    assert float32_gap(name, tmp_path, partial(open_engine, dtype="float32")) <= 1e-4


@pytest.mark.parametrize("name", ["gemma2", "G4", "wide-values", "grouped"])
def test_deterministic_log_probabilities_are_within_1e_4_of_another_program(name: str, tmp_path: Path) -> None:
    assert float32_gap(name, tmp_path, partial(open_engine, dtype="float32", deterministic=True)) <= 1e-4


@pytest.mark.parametrize("dtype", HALF_BOUNDS)
@pytest.mark.parametrize("name", HALF_NAMES)
def test_half_precision_is_close_to_torch_in_the_same_precision(name: str, dtype: Dtype, tmp_path: Path) -> None:
    ours, plain = (partial(open_engine, dtype=dtype, kernels=kernels) for kernels in ("auto", "off"))
    assert half_gap(name, tmp_path, ours, plain) <= HALF_BOUNDS[dtype]
