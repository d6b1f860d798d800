"""Executors run a model's forward pass: one Protocol, implemented in torch (any device) and in C (CPU kernels).

`protocol` defines `Executor`; `step` and `staging` hold the code that executors share for steps and weight updates.
The forward pass is data (`models.program`), which each executor compiles.
"""
