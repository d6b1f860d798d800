"""Parameters, state and buffers of the sampler, which the CUDA kernels and their plain counterparts share.

Shapes: B rows, S slots, V vocabulary, N chunks of the vocabulary, P rows of a table, X stop tokens of a slot,
W = ceil(V / 32) words of a mask, K top tokens or entries of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024  # tokens of the vocabulary per program
MOST_TOKENS = 1 << 19  # largest supported vocabulary
REPORTS = {"raw": 0, "tempered": 1, "processed": 2}
WANTS_RAW = 4
RUNNING, STOPPED, FULL = 0, 1, 2  # values of `Slots.state`: stopped by a token, or by the number of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Sampling parameters and state of each slot, all contiguous. int32 unless stated otherwise."""

    temperature: Tensor  # float32 [S]; 0 is greedy
    top_k: Tensor  # 0: off
    top_p: Tensor  # float64; 1: off
    min_p: Tensor  # float64; 0: off
    report: Tensor  # `REPORTS` of the log-probability mode, plus `WANTS_RAW` if the raw one is wanted too
    repetition: Tensor  # float32, as are the next two: `SamplingParams.repetition_penalty`, and so on
    presence: Tensor
    frequency: Tensor
    count_row: Tensor  # row of `Tables.count`; -1: no penalties. No two slots may share one.
    bias_row: Tensor  # row of `Tables.bias`; -1: none
    mask_row: Tensor  # row of `Tables.mask`; -1: none
    seed: Tensor  # int64: the bits of the unsigned seed
    sample: Tensor  # index of the sample in its request
    num_tops: Tensor
    stop: Tensor  # [S, X]: tokens that end the sample, then -1
    min_tokens: Tensor  # stop tokens are banned before so many tokens
    max_tokens: Tensor
    token: Tensor  # the token that the step computes
    previous: Tensor  # the token before it
    position: Tensor  # its position; the drawn token's is one more
    num_new: Tensor  # tokens drawn so far
    state: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of the vocabulary's size for requests that need them."""

    count: Tensor  # int32 [P, V]: twice the occurrences in the output, plus one if the prompt has the token
    bias: Tensor  # float32 [P, V]: added to the logits; -inf excludes a token (ids that are not allowed)
    mask: Tensor  # int32 [P, W]: bit i % 32 of word i // 32 is 1 if token i is allowed (`Matcher.mask`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Buffers of one step, and its results. Contents need no initialisation."""

    work: Tensor  # adjusted logits, float32 [B, V]
    best: Tensor  # float32 [B, N], as `raw_best`
    raw_best: Tensor
    raw_mass: Tensor  # float64 [B, N], as `mass` and `kept`
    mass: Tensor  # σ e^((x - best of the chunk) / T) of a chunk's tokens
    kept: Tensor
    cut_key: Tensor  # int64 [B]: see `select.cut_row`
    cut_id: Tensor
    normaliser: Tensor  # float64 [B, 5]: see `kernels/sampler.py`
    token: Tensor  # int32 [B]: the drawn tokens
    logprob: Tensor  # float32 [B]: their log-probabilities in the slot's mode; NaN if no token can be drawn
    raw_logprob: Tensor  # float32 [B]: under the unmodified logits, where the slot wants it or its mode is raw
    top_id: Tensor  # int32 [B, K]: the most probable tokens in descending order, then -1
    top_logprob: Tensor


def new_scratch(num_rows: int, vocab_size: int, num_tops: int, device: torch.device) -> Scratch:
    """Allocate the buffers for steps of `num_rows` rows. Raises `ValueError` if the vocabulary is too large."""
    if vocab_size > MOST_TOKENS:
        raise ValueError(f"the sampler supports vocabularies of {MOST_TOKENS} tokens, got {vocab_size}")
    shape = (num_rows, -(-vocab_size // CHUNK))

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Scratch(
        work=new((num_rows, vocab_size), torch.float32),
        best=new(shape, torch.float32),
        raw_best=new(shape, torch.float32),
        raw_mass=new(shape, torch.float64),
        mass=new(shape, torch.float64),
        kept=new(shape, torch.float64),
        cut_key=new((num_rows,), torch.int64),
        cut_id=new((num_rows,), torch.int32),
        normaliser=new((num_rows, 5), torch.float64),
        token=new((num_rows,), torch.int32),
        logprob=new((num_rows,), torch.float32),
        raw_logprob=new((num_rows,), torch.float32),
        top_id=new((num_rows, num_tops), torch.int32),
        top_logprob=new((num_rows, num_tops), torch.float32),
    )
