"""The engine's own logits of whole sequences, for the gradient at the head.

Shapes: T tokens of a piece, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nano_inference.core.step import RowState
from nano_inference.engine import InferenceEngine
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.executor import new_store as new_cpu_store
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.step_input import ForwardInput, Span
from nano_inference.executors.torch.executor import new_store

BLOCK = 16


def logits_of(
    engine: InferenceEngine, texts: Sequence[Sequence[int]], starts: Sequence[int], width: int
) -> Callable[[int], Tensor]:
    """Return a function that returns the float32 logits [n, V] of the next n scored tokens, in order.

    They are the bits that sampling had, where rows do not depend on the batch. `width` bounds the tokens of a forward
    pass, which runs between the engine's steps with a cache of its own.
    """
    executor = engine.parts.executor
    assert executor is not None
    width = min(width, engine.config.max_tokens_per_batch)
    pieces = _pieces(engine, executor, texts, starts, width)
    left: list[Tensor] = []

    def take(count: int) -> Tensor:
        while sum(map(len, left)) < count:
            left.append(next(pieces))
        joined = torch.cat(left)
        left[:] = [joined[count:]]
        return joined[:count]

    return take


def _pieces(
    engine: InferenceEngine, executor: Executor, texts: Sequence[Sequence[int]], starts: Sequence[int], width: int
) -> Iterator[Tensor]:
    """Yield the logits of scored tokens, those of one text after those of the other."""
    for ids, begin in zip(texts, starts, strict=True):
        ids = ids[:-1]  # the last token's logits are of a token that nobody sampled
        cache = _cache_for(engine, executor, len(ids))
        for start in range(0, len(ids), width):
            step = _step(ids, start, min(start + width, len(ids)), executor.device)
            logits_TV = engine.exclusively(partial(executor.forward, step, cache))
            yield logits_TV[max(0, begin - 1 - start) :].clone()  # the executor's memory, of inference mode


def _cache_for(engine: InferenceEngine, executor: Executor, num_tokens: int) -> Any:
    size = CacheSize(num_blocks=-(-num_tokens // BLOCK), block_size=BLOCK, num_states=1)
    dtype = executor.cache.dtype(engine.config.kv_cache_dtype)
    if isinstance(executor, CpuExecutor):
        return new_cpu_store(executor.program, executor.library, size, dtype)
    return new_store(executor.program, size.num_blocks, BLOCK, dtype, executor.device, size.num_states)


def _step(ids: Sequence[int], start: int, end: int, device: torch.device) -> ForwardInput:
    """Return tokens of one sequence, whose K/V are in the blocks 0, 1, … of a cache, its state in slot 0."""
    position_T = torch.arange(start, end, device=device)
    before = -1 if start == 0 else ids[start - 1]
    return ForwardInput(
        token_T=torch.tensor(ids[start:end], device=device),
        prev_T=torch.tensor([before, *ids[start : end - 1]], device=device),
        position_T=position_T,
        slot_T=position_T,
        spans=(Span(0, end - start, start, tuple(range(-(-len(ids) // BLOCK))), RowState(0, 0)),),
    )
