"""Loads a checkpoint's weights into an executor, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from nano_inference.executors.protocol import Executor
from nano_inference.loader.sources import HARMLESS_SUFFIX, WeightSource, check_names

LoadProgress = Callable[[int, int], None]
"""Callback receiving (bytes_done, bytes_total), counted as float32."""


@torch.no_grad()
def load_weights(executor: Executor, sources: Mapping[str, WeightSource], progress: LoadProgress | None = None) -> None:
    """Read and pack every weight of the executor's program and commit them.

    Raises `ModelError`, before reading, for a tensor that is unknown, missing or of another shape.
    """
    specs = {spec.name: spec for spec in executor.program.weights}
    ignored = executor.program.tied_names.keys()
    named = {n: s for n, s in sources.items() if n not in ignored and not n.endswith(HARMLESS_SUFFIX)}
    check_names({name: spec.shape for name, spec in specs.items()}, named)
    done, total = 0, 4 * sum(math.prod(spec.shape) for spec in specs.values())
    staged = executor.stage()
    for name, source in named.items():
        staged.put(specs[name], source)
        done += 4 * math.prod(source.shape)
        if progress is not None:
            progress(done, total)
    executor.commit(staged.finish())
