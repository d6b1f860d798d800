"""Compiled code for the CPU, and its twins in torch. Imports nothing of ours.

`c/` is plain C, compiled with the machine's own compiler at first use (`compile`) and called through ctypes
(`library`). `matrix` packs weights for it, `program` describes a forward pass as a list of operations, `native` runs
such a list in C, `twin` in torch: slow, obvious, and what the C is tested against.
"""
