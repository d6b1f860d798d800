"""The comparisons of tests/gpu, of some models on CPU tensors with plain kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from nano_inference import InferenceEngine
from nano_inference.executors.cuda.launchers import Kernels
from tests.cuda.engines import open_cuda
from tests.cuda.family_checks import HALF_BOUNDS, half_gap
from tests.cuda.models import config_of
from tests.cuda.plain import plain_kernels

pytestmark = pytest.mark.slow


def open_ours(path: Path, *, dtype: str = "float32", kernels: Kernels | None = None) -> InferenceEngine:
    return open_cuda(path, config_of(path), dtype=getattr(torch, dtype), kernels=kernels or plain_kernels())


def open_torch(path: Path, *, dtype: str) -> InferenceEngine:
    return InferenceEngine(config_of(path, dtype=dtype, kernels="off"))


@pytest.mark.parametrize(("name", "dtype"), [("G4", "bfloat16"), ("gemma2", "bfloat16"), ("qwen2-ratio7", "float16")])
def test_half_precision_is_close_to_torch_in_the_same_precision(name: str, dtype: str, tmp_path: Path) -> None:
    ours, plain = partial(open_ours, dtype=dtype), partial(open_torch, dtype=dtype)
    assert half_gap(name, tmp_path, ours, plain) <= HALF_BOUNDS[dtype]
