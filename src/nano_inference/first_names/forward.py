"""`model_forward`, for the tensors of a step as the core has it, and for plain lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from nano_inference.executors import forward
from nano_inference.executors.batch import build, in_step_order, offsets
from nano_inference.executors.cpu.store import KernelStore
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.step_input import ForwardInput
from nano_inference.executors.torch.store import KVStore
from nano_inference.runner import Row
from nano_inference.types import SamplingParams

_BLOCK_SIZE = 16


def model_forward(
    model: Executor,
    inputs: ForwardInput | Sequence[int] | Sequence[Sequence[int]],
    cache: KVStore | KernelStore | None = None,
) -> Tensor:
    """Return float32 logits [T, V] of every token; the rows of several lists follow each other in the order given.

    `inputs` is a list of ids, several such lists, or a `ForwardInput`, which needs the `cache` whose slots it names.
    Lists are computed from position 0 into the first blocks of `cache`, or else by `model.copy()` with a cache of its
    own. Raises `ValueError` naming the argument.
    """
    if isinstance(inputs, ForwardInput):
        if cache is None:
            raise ValueError("cache: a ForwardInput needs the cache whose slots it names")
        return forward.model_forward(model, inputs, cache)
    texts = _texts_of(inputs, model)
    block_size = _BLOCK_SIZE if cache is None else cache.block_size
    counts = [-(-len(text) // block_size) for text in texts]
    if cache is None:
        owner: Any = model.copy()
        owner.new_cache(CacheSize(num_blocks=sum(counts), block_size=block_size))
        model, cache = owner, owner.store
    elif sum(counts) > cache.num_blocks:
        raise ValueError(f"cache: has {cache.num_blocks} blocks of {block_size} tokens, {sum(counts)} are needed")
    tables = [tuple(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]
    rows = tuple(_row(index, text, table) for index, (text, table) in enumerate(zip(texts, tables, strict=True)))
    ordered = in_step_order(rows)
    logits_TV = forward.model_forward(model, build(ordered, block_size, model.device), cache)
    start_of = {row.id: start for row, start in zip(ordered, offsets(ordered), strict=True)}
    return logits_TV[[start_of[row.id] + place for row in rows for place in range(len(row.tokens))]]


def _texts_of(inputs: Sequence[int] | Sequence[Sequence[int]], model: Executor) -> list[tuple[int, ...]]:
    """Return the lists of ids. Raises `ValueError` for an empty or too long one, or an id that the model lacks."""
    given: list[Any] = list(inputs)
    if given and not isinstance(given[0], Sequence):
        given = [given]
    if not given or not all(isinstance(one, Sequence) and len(one) for one in given):
        raise ValueError("inputs must be a list of token ids, or lists of them, none of them empty")
    size, longest = model.config.vocab_size, model.config.max_positions
    for text in given:
        if len(text) > longest:
            raise ValueError(f"inputs must have at most {longest} tokens, the model's positions, got {len(text)}")
        for token in text:
            if type(token) is not int or not 0 <= token < size:
                raise ValueError(f"inputs must be integers in [0, {size - 1}], got {token!r}")
    return [tuple(text) for text in given]


def _row(index: int, text: tuple[int, ...], table: tuple[int, ...]) -> Row:
    """Return a row that computes a whole text and samples nothing."""
    return Row(
        id=index,
        tokens=text,
        prev_token=-1,
        start=0,
        blocks=table,
        num_sampled=0,
        params=SamplingParams(),
        logprobs_mode="raw",
        seed=0,
        sample_index=0,
    )
