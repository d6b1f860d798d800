"""The CPU executor: lowers programs to operations of C kernels, packs weights for them, and calls them.

`c/` is plain C, compiled with the machine's compiler at first use (`compile`) and called through ctypes (`library`).
`matrix` packs weights, `program` defines the kernels' operations, `native` runs a list of them in C. Tests compare the
kernels with `tests/kernels/reference.py`, the same operations in torch.
"""
