"""The Triton kernels on CUDA: the comparisons of tests/cuda on a real device; skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs CUDA; torch sees no device", allow_module_level=True)
pytest.importorskip("triton", reason="NO TRITON: pip install -e '.[cuda]'")

from nano_inference.executors.cuda.launchers import triton_kernels
from tests.cuda import triton_cases
from tests.cuda.all_cases import all_cases
from tests.cuda.case import DEVICE_SLACK, Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [*all_cases(), *triton_cases.cases()], ids=lambda case: case.name)
def test_kernel_matches_reference(case: Case) -> None:
    assert case.run(triton_kernels(), torch.device("cuda")) <= DEVICE_SLACK * case.bound
