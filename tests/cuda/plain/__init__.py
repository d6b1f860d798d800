"""The launchers of `kernels` in plain torch, with the same signatures and results, on any device.

Shapes are static, nothing is copied between devices and no value is read on the host, so that a step of these functions
can be captured in a CUDA graph, and tested on a CPU. Results are written to the arguments.
"""

from nano_inference.executors.cuda.launchers import Kernels


def plain_kernels() -> Kernels:
    """Return the implementation in plain torch, for any device."""
    from tests.cuda.plain import adapt, attend, multiply, operate, recur, sample

    return Kernels(attend, operate, multiply, recur, adapt, sample, has_fixed_heads=False)
