"""The launchers in plain torch pass the cases of the Triton kernels, on a CPU."""

from __future__ import annotations

import pytest
import torch

from nano_inference.executors.cuda.launchers import plain_kernels
from nano_inference.executors.cuda.plain.uniform import uniform_of
from tests.cuda.all_cases import all_cases
from tests.cuda.case import Case
from tests.cuda.sampler_cases import uniform_arguments, uniforms_differ

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", list(all_cases()), ids=lambda case: case.name)
def test_plain_launcher_matches_reference(case: Case) -> None:
    assert case.run(plain_kernels(), CPU) <= case.bound


def test_uniforms_have_the_bits_of_the_reference() -> None:
    assert uniforms_differ(uniform_of(*uniform_arguments())) == 0
