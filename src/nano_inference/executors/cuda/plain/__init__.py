"""The launchers of `kernels` in plain torch, with the same signatures and results, on any device.

Shapes are static, nothing is copied between devices and no value is read on the host, so that a step of these functions
can be captured in a CUDA graph, and tested on a CPU. Results are written to the arguments.
"""
