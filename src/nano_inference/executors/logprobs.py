"""Log-probabilities of logits: the only torch code that computes a log-sum-exp.

Sums of exponentials are float64: torch's float32 sums on a CPU are biased, by 2.7e-5 over 262,144 logits. A
log-probability is rounded to float32 once, from float64. Its error is at most half an ulp, or 1e-6 with the CPU kernels
(executors/cpu/c/sample.h), for any vocabulary size.

Shapes: B rows, V vocabulary, K entries of each row, R a subset of the rows, N blocks of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.types import TokenLogprob, TopLogprobs

COLDEST = 1e-30  # minimum temperature: any below leaves only the best token, and 1e-50 is 0 in float32
_IMPOSSIBLE = -9999.0
"""Replaces -inf for unmodified logits: JSON has no infinity, and it would break a trainer's sums. As in SkyRL."""
_BLOCK = 512
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 17, 1 << 24
"""Logits converted to float64 at a time; on a CPU the copy fits into the cache."""


class Normaliser(NamedTuple):
    """Parameters that convert logits to log-probabilities of softmax(logits / temperature); float64 [B, 1] each."""

    best: Tensor  # the largest logit
    temperature: Tensor
    log_mass: Tensor
    """log of the sum of e^((logit - best) / temperature); NaN if the logits contain NaN, +inf or nothing above -inf."""

    def logprobs(self, logits_BK: Tensor) -> Tensor:
        """Return the log-probabilities of selected logits of each row, float32 [B, K]."""
        return (((logits_BK.double() - self.best) / self.temperature) - self.log_mass).float()

    def rows(self, index_R: Tensor | Sequence[int]) -> Normaliser:
        """Return the normaliser of some rows."""
        return Normaliser(*(part[index_R] for part in self))

    def with_rows(self, index_R: Sequence[int], other: Normaliser) -> Normaliser:
        """Return a normaliser with these rows replaced by the rows of another."""
        index = torch.tensor(index_R, device=self.best.device)
        return Normaliser(*(part.index_copy(0, index, own) for part, own in zip(self, other, strict=True)))


Normalise = Callable[[Tensor, Sequence[float]], Normaliser]
"""Computes the normaliser of float32 logits [B, V] and one temperature a row; temperature 0 counts as 1."""


def normalise(logits_BV: Tensor, temperatures: Sequence[float]) -> Normaliser:
    """Compute the normaliser in torch. A row's result does not depend on the other rows."""
    best_B1 = logits_BV.amax(-1, keepdim=True).double()
    divisor_B1 = divisors_of(temperatures).to(logits_BV.device)
    mass_B1 = torch.empty_like(best_B1)
    elements = _CPU_ELEMENTS if logits_BV.device.type == "cpu" else _DEVICE_ELEMENTS
    num_rows = max(1, elements // logits_BV.size(-1))
    for start in range(0, logits_BV.size(0), num_rows):
        piece = slice(start, start + num_rows)
        weight_RV = logits_BV[piece].double().sub_(best_B1[piece]).div_(divisor_B1[piece]).exp_()
        mass_B1[piece] = _row_sums(weight_RV)
    return Normaliser(best_B1, divisor_B1, mass_B1.log_())


def divisors_of(temperatures: Sequence[float]) -> Tensor:
    """Return temperatures as divisors [B, 1], float64 with float32 values, none 0."""
    divisors = [max(temperature, COLDEST) if temperature else 1.0 for temperature in temperatures]
    return torch.tensor(divisors, dtype=torch.float32).double().unsqueeze(-1)


def _row_sums(weight_RV: Tensor) -> Tensor:
    """Return the sum of each row [R, 1], in blocks: torch's sum of a long row depends on the number of threads."""
    num_rows, vocab_size = weight_RV.shape
    num_blocks = vocab_size // _BLOCK
    whole_RNC = weight_RV[:, : num_blocks * _BLOCK].view(num_rows, num_blocks, _BLOCK)
    rest_RC = weight_RV[:, num_blocks * _BLOCK :]
    return whole_RNC.sum(-1).sum(-1, keepdim=True) + rest_RC.sum(-1, keepdim=True)


def at(values_BV: Tensor, token_B: Tensor) -> Tensor:
    """Return one entry of each row, [B, 1]."""
    return values_BV.gather(-1, token_B.unsqueeze(-1))


def floor_logprobs(logprob_B: Tensor) -> Tensor:
    """Return the log-probabilities with -inf replaced by -9999."""
    return torch.where(logprob_B == -torch.inf, _IMPOSSIBLE, logprob_B)


def top_logprobs(logits_BV: Tensor, normaliser: Normaliser, counts: Sequence[int]) -> tuple[TopLogprobs, ...]:
    """Return each row's `counts` most probable tokens, lowest id first among equal logits.

    Excludes tokens of probability 0, and all tokens of a row whose logits contain NaN.
    """
    if not max(counts, default=0):
        return ((),) * len(counts)
    place_K2 = best_places(logits_BV, counts)
    return tops_of(place_K2, logits_BV[place_K2[:, 0], place_K2[:, 1]], normaliser, counts)


def best_places(logits_BV: Tensor, counts: Sequence[int]) -> Tensor:
    """Return (row, id) of each row's `counts` largest logits, ascending; the lowest ids among equal ones."""
    vocab_size = logits_BV.size(-1)
    width = min(max(counts), vocab_size)
    count_B1 = torch.tensor([min(count, vocab_size) for count in counts], device=logits_BV.device).unsqueeze(-1)
    last_B1 = logits_BV.topk(width, dim=-1).values.gather(-1, (count_B1 - 1).clamp_(min=0))
    above_BV, equal_BV = logits_BV > last_B1, logits_BV == last_B1
    equal_BV &= equal_BV.cumsum(-1, dtype=torch.int32) <= count_B1 - above_BV.sum(-1, keepdim=True)
    return (above_BV | equal_BV).nonzero()


def tops_of(
    place_K2: Tensor, logit_K: Tensor, normaliser: Normaliser, counts: Sequence[int]
) -> tuple[TopLogprobs, ...]:
    """Return the `counts` best of some (row, id) pairs of each row, ids ascending; see `top_logprobs`."""
    is_valid_K = normaliser.log_mass.isfinite().squeeze(-1)[place_K2[:, 0]]
    place_K2, logit_K = place_K2[is_valid_K], logit_K[is_valid_K]
    value_K = normaliser.rows(place_K2[:, 0]).logprobs(logit_K.unsqueeze(-1)).squeeze(-1)
    tops: list[list[tuple[float, TokenLogprob]]] = [[] for _ in counts]
    for (row, token), logit, value in zip(place_K2.tolist(), logit_K.tolist(), value_K.tolist(), strict=True):
        if value > -torch.inf:
            tops[row].append((logit, TokenLogprob(token, value)))
    ranked = (sorted(top, key=lambda pair: -pair[0]) for top in tops)
    return tuple(tuple(one for _, one in top[:count]) for top, count in zip(ranked, counts, strict=True))
