"""Compiled code for the CPU. Imports nothing of ours.

`c/` is plain C, compiled with the machine's own compiler at first use (`compile`) and called through ctypes
(`library`). `matrix` packs weights for it, `program` describes a forward pass as a list of operations, `native` runs
such a list in C. Tests compare the C with `tests/kernels/reference.py`, the same operations in torch.
"""
