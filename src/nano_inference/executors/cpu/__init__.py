"""The CPU executor: lowers programs to the C kernels' operations and packs weights for them."""
