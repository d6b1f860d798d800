"""The end of a program: log-probabilities of known tokens from logits, with the gradients of the sampler's adjustments.

Shapes: C known tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.core.step import Row
from nano_inference.executors.sampling import WHOLE, Known, adjust_known, is_adjusted
from nano_inference.models.program import Program
from nano_inference.rl.exact.program import Texts

ELEMENTS = 1 << 22
"""Most logits in memory at a time in the backward pass."""


def head_width(program: Program) -> int:
    """Return the most tokens whose logits are in memory at a time."""
    return max(1, ELEMENTS // program.vocab_size)


def logprobs_of(logits_CV: Tensor, target_C: Tensor, known: Sequence[Known], exact_CV: Tensor | None) -> Tensor:
    """Return the log-probabilities [C] of known tokens; `exact_CV` are the engine's logits, if it has to have them."""
    if exact_CV is not None:  # exact values, and the gradient of the head that was computed again
        logits_CV = exact_CV.to(logits_CV) + (logits_CV - logits_CV.detach())
    logits_CV = _adjusted(logits_CV, known)
    divisors = [(row.params.temperature or 1.0) if row.logprobs_mode != "raw" else 1.0 for row, _ in known]
    if any(divisor != 1 for divisor in divisors):
        logits_CV = logits_CV / logits_CV.new_tensor(divisors).unsqueeze(-1)
    return logits_CV.log_softmax(-1).gather(-1, target_C.unsqueeze(-1)).squeeze(-1)


def known_of(texts: Texts) -> list[Known]:
    """Return each scored token with the row that sampled it."""
    found: list[Known] = []
    for ids, start, params, stop_ids in zip(texts.ids, texts.starts, texts.params, texts.stop_ids, strict=True):
        is_penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        assert params.logprobs_mode is not None
        row = Row(
            id=0,
            tokens=(),
            prev_token=-1,
            start=0,
            blocks=(),
            num_sampled=0,
            params=params,
            logprobs_mode=params.logprobs_mode,
            seed=0,
            sample_index=0,
            history=tuple(ids) if is_penalised else (),
            num_prompt=start,
            score_params=params,
            stop_ids=stop_ids,
        )
        found += [Known(row, position) for position in range(start, len(ids))]
    return found


def _adjusted(logits_CV: Tensor, known: Sequence[Known]) -> Tensor:
    """Return logits as the sampler adjusts them, differentiable.

    The sampler's functions run on a copy. Each changes a logit to factor * logit + constant, or excludes the token.
    """
    if not any(is_adjusted(one.row) for one in known):
        return logits_CV
    exact_CV = logits_CV.detach()
    adjusted_CV = exact_CV.float().clone()
    adjust_known(adjusted_CV, [one if is_adjusted(one.row) else None for one in known], WHOLE)
    factor_CV = torch.ones_like(logits_CV)
    for factor_V, logits_V, (row, position) in zip(factor_CV, exact_CV, known, strict=True):
        penalty = row.params.repetition_penalty
        if penalty != 1 and row.logprobs_mode != "raw":
            seen = torch.tensor(sorted(set(row.history[:position])), device=logits_V.device)
            factor_V[seen] = torch.where(logits_V[seen] > 0, 1 / penalty, penalty).to(factor_V.dtype)
    is_excluded_CV = adjusted_CV == -torch.inf
    constant_CV = (adjusted_CV - exact_CV * factor_CV).masked_fill(is_excluded_CV, 0.0)
    return (logits_CV * factor_CV + constant_CV).masked_fill(is_excluded_CV, -torch.inf)
