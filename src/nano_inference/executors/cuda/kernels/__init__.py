"""Triton kernels for Hopper GPUs (sm_90a), each with a launcher. The modules import triton; this one does not.

A launcher checks its arguments and starts one kernel on the current stream. It allocates nothing and waits for nothing,
so that a CUDA graph can capture it. On CPU tensors it runs in Triton's interpreter (`TRITON_INTERPRET=1`), which tests
use. `configurations` lists what can be compiled ahead of time. docs/cuda.md has the formulas.
"""
