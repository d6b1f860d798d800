"""Loads a checkpoint's weights into an executor, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from nano_inference.executors.protocol import Executor
from nano_inference.loading.sources import WeightSource, check_names
from nano_inference.models.program import Program

LoadProgress = Callable[[int, int], None]  # callback receiving (bytes_done, bytes_total), counted as float32


def known_sources(program: Program, sources: Mapping[str, WeightSource]) -> dict[str, WeightSource]:
    """Return the sources of a program's weights, without tied ones.

    Raises `ModelError` for a tensor that is unknown, missing or of another shape.
    """
    named = {name: source for name, source in sources.items() if name not in program.tied_names}
    check_names({spec.name: spec.shape for spec in program.weights}, named)
    return named


@torch.no_grad()
def load_weights(executor: Executor, sources: Mapping[str, WeightSource], progress: LoadProgress | None = None) -> None:
    """Read and pack every weight of the executor's program and commit them.

    Raises `ModelError`, before reading, as `known_sources` does.
    """
    named = known_sources(executor.program, sources)
    specs = {spec.name: spec for spec in executor.program.weights}
    done, total = 0, 4 * sum(math.prod(spec.shape) for spec in specs.values())
    staged = executor.weights.stage()
    for name, source in named.items():
        staged.put(specs[name], source)
        done += 4 * math.prod(source.shape)
        if progress is not None:
            progress(done, total)
    executor.weights.commit(staged.finish())
