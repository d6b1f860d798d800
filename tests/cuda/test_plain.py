"""The launchers in plain torch pass the cases of the Triton kernels, on a CPU, and could run in a CUDA graph."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nano_inference.executors.cuda.launchers import triton_kernels
from tests.cuda.all_cases import all_cases
from tests.cuda.guards import call_guarded, guarded, launchers_of
from tests.cuda.plain import plain_kernels
from tests.cuda.plain.uniform import uniform_of
from tests.cuda.sampler_cases import uniform_arguments, uniforms_differ

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_launchers_match_references_and_neither_wait_for_the_device_nor_copy_between_devices() -> None:
    called: set[str] = set()
    kernels = guarded(plain_kernels(), called)
    found = {case.name: (case.run(kernels, CPU), case.bound) for case in all_cases()}
    assert not {name: one for name, one in found.items() if not one[0] <= one[1]}
    assert called == {name for _, name, _ in launchers_of(plain_kernels())} and len(called) == 27


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x[0].item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.add_(torch.tensor([1.0])),
        lambda x: x + torch.arange(3),
        lambda x: x.copy_(torch.arange(3)),
    ],
)
def test_the_guard_refuses_what_a_graph_cannot_capture(waits: Callable[[Tensor], object]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        call_guarded(waits, torch.ones(3))
    call_guarded(lambda x: x.add_(1).masked_fill(x > 0, 2.0), torch.ones(3))


def test_uniforms_have_the_bits_of_the_reference() -> None:
    assert uniforms_differ(uniform_of(*uniform_arguments())) == 0


def test_triton_kernels_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=r"^CUDA kernels need Triton: pip install 'nano-inference\[cuda\]'$"):
        triton_kernels()
