"""The engine's own logits of scored tokens, for the gradient at the head.

Shapes: T tokens of a piece, K scored ones, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from nano_inference.core.step import RowState
from nano_inference.engine import InferenceEngine
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.step_input import ForwardInput, Span

BLOCK = 16


def logits_of(
    engine: InferenceEngine, texts: Sequence[Sequence[int]], starts: Sequence[int], width: int
) -> Callable[[int], Tensor]:
    """Return a function that returns the float32 logits [n, V] of the next n scored tokens, in order.

    They are the bits that sampling had, where rows do not depend on the batch. A forward pass scores at most `width`
    tokens of one text; it runs between the engine's steps with a cache of its own.
    """
    executor = engine.parts.executor
    assert executor is not None
    pairs = zip(texts, starts, strict=True)
    pieces = (piece for ids, start in pairs for piece in _pieces(engine, executor, ids, start, width))
    left: list[Tensor] = []

    def take(count: int) -> Tensor:
        while sum(map(len, left)) < count:
            left.append(next(pieces))
        joined = torch.cat(left)
        left[:] = [joined[count:]]
        return joined[:count]

    return take


def _pieces(
    engine: InferenceEngine, executor: Executor, ids: Sequence[int], start: int, width: int
) -> Iterator[Tensor]:
    """Yield the logits of the tokens of a text from `start` on, those of its prompt's last token first."""
    end, most = len(ids) - 1, engine.config.max_tokens_per_batch  # nothing was sampled after the last token
    if start > end:
        return
    dtype = engine.config.kv_cache_dtype
    cache = executor.cache.make(CacheSize(num_blocks=-(-end // BLOCK), block_size=BLOCK, dtype=dtype, num_states=1))
    # An answer has steps of its own: windows may restrict prompts only.
    cuts = [*range(0, start, most), *range(start, end, min(width, most)), end]
    for begin, stop in pairwise(cuts):
        kept = range(max(0, start - 1 - begin), stop - begin) or range(1)  # a step keeps some
        step = _step(ids, begin, stop, executor.device)
        windows = begin < start or not executor.program.has_full_decode
        logits_KV = engine.exclusively(partial(executor.forward, step, cache, kept, windows=windows))
        if stop >= start:
            yield logits_KV.clone()  # the executor's memory, of inference mode


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
