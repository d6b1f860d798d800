"""What computes a model: one Protocol, an executor for torch on any device and one for the CPU kernels.

`protocol` says what an executor does, `step` what they do alike in a step, `staging` what they do alike with new
weights. A family's forward pass is data (`models.program`); each executor compiles it to its own form.
"""
