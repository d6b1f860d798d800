"""CUDA: the parts of an executor with Triton kernels. `kernels` needs triton; nothing is imported here."""
