"""The compiled C kernels: programs lowered to their operations, weights packed for them."""
