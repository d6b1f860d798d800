"""The CPU kernels."""

from __future__ import annotations

import pytest
import torch

from nano_inference.build import pick_kernels
from nano_inference.config import EngineConfig
from nano_inference.executors.cpu.library import Library


@pytest.fixture(scope="session")
def library() -> Library:
    found = pick_kernels(EngineConfig(model_path="x", device="cpu"), torch.device("cpu"))
    assert found is not None, "these tests need a C compiler"
    return found
