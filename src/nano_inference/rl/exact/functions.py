"""Log-probabilities with the engine's values and a gradient: `train_logprobs` and `exact_values`.

Shapes: N scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from nano_inference.core.admission import score_starts, scoring_requests
from nano_inference.core.sequence import stop_ids_of
from nano_inference.engine import InferenceEngine
from nano_inference.rl.exact.backward import with_recomputed_gradient
from nano_inference.rl.exact.policy import Policy, exact_executor
from nano_inference.rl.exact.program import Texts
from nano_inference.types import BadRequest, SamplingParams, TrainingSample


@torch.compiler.disable  # type: ignore[untyped-decorator]
def train_logprobs(
    policy: Policy,
    samples: Sequence[TrainingSample] | Sequence[Sequence[int]],
    starts: Sequence[int] | None = None,
    *,
    temperature: float = 1.0,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Return the log-probabilities of samples' tokens, concatenated [N] float32: the engine's bits, differentiable.

    `samples`, or texts and the position `starts` of each one's first scored token, at least 1. A sample's forced tokens
    (mask 0) are 0 and have no gradient. The distribution is that of `temperature`, or of `params`, as in
    `InferenceEngine.score`. `values` [N] skips scoring where they are known.
    The forward pass is the engine's, with the weights of `Policy.sync`; the backward pass recomputes the model's
    program in torch, in the parameters' precision (float32 at least), and differs from an exact gradient by about 1e-6.
    Where the engine rounds its weights, they are recomputed as rounded, and the gradient at the logits is that of the
    engine's own (`Policy`), as it is with top-k, top-p and min-p, so that the tokens kept are those of sampling.
    Raises `StaleWeights`, and `BadRequest` for a sample of several versions of the weights.
    """
    policy.check()
    texts, first, mask_N = _texts_of(samples, starts)
    requests = scoring_requests(texts, first, temperature, params)
    mode = policy.engine.config.logprobs_mode
    sampled = [one.score_params or SamplingParams() for one in requests]
    sampled = [replace(one, logprobs_mode=one.logprobs_mode or mode) for one in sampled]
    if values is None:
        values = _scored(policy.engine, texts, first, temperature, params)
        policy.check()  # an update that was staged is installed by the steps of scoring
    elif values.shape != mask_N.shape:
        raise BadRequest("values", f"must be [{len(mask_N)}], one for each token, got {list(values.shape)}")
    asked = Texts(texts, first, sampled, [stop_ids_of(one, policy.engine.limits.eos_token_ids) for one in sampled])
    device = policy.leaves[0].device
    mask_N = mask_N.to(device)
    values = torch.where(mask_N, values.to(device, torch.float32), 0.0)
    return with_recomputed_gradient(values, mask_N, policy, asked)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exact_values(
    engine: InferenceEngine,
    samples: Sequence[TrainingSample],
    *,
    mine: Tensor,
    temperature: float = 1.0,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> Tensor:
    """Return the engine's log-probabilities of all sampled tokens, in order, with the gradient of `mine`.

    `mine` [N] are the trainer's own: of any model, adapter or wrapper with the engine's weights. Scored anew, so that a
    comparison with `TrainingSample.logprobs` is a check. Raises as `train_logprobs` does, except for stale weights.
    """
    exact_executor(engine)
    texts, starts, mask_N = _texts_of(samples, None)
    values = _scored(engine, texts, starts, temperature, params)[mask_N]
    return with_values(mine, values)


def with_values(mine: Tensor, values: Tensor) -> Tensor:
    """Return `values` with the gradient of `mine`, float32 on its device. Raises `BadRequest` for another shape."""
    if mine.shape != values.shape:
        raise BadRequest(
            "mine", f"must have the shape {list(values.shape)} of the sampled tokens, got {list(mine.shape)}"
        )
    return cast(Tensor, _Replaced.apply(mine, values.to(mine.device, torch.float32)))  # type: ignore[no-untyped-call]


def _texts_of(
    samples: Sequence[TrainingSample] | Sequence[Sequence[int]], starts: Sequence[int] | None
) -> tuple[list[list[int]], list[int], Tensor]:
    """Return texts, starts and, for each token from there on, whether it was sampled."""
    if not samples:
        raise BadRequest("samples", "must not be empty")
    if starts is not None:
        texts = [list(cast(Sequence[int], ids)) for ids in samples]
        if len(score_starts(starts, len(texts))) != len(texts) or any(start < 1 for start in starts):
            raise BadRequest("starts", f"must be one position >= 1 for each of {len(texts)} texts, got {starts!r}")
        count = sum(max(0, len(ids) - start) for ids, start in zip(texts, starts, strict=True))
        return texts, list(starts), torch.ones(count, dtype=torch.bool)
    given = cast(Sequence[TrainingSample], samples)
    for index, one in enumerate(given):
        if not isinstance(one, TrainingSample):
            raise BadRequest("samples", f"must be TrainingSamples, or texts with starts, got {type(one).__name__}")
        if len(set(one.token_versions)) > 1:
            raise BadRequest(
                "samples",
                f"sample {index} was sampled with the weights {sorted(set(one.token_versions))}: no one model has its "
                "log-probabilities; leave it out, or give texts and starts",
            )
    mask = list(chain.from_iterable(one.mask for one in given))
    return (
        [[*one.prompt_tokens, *one.completion_tokens] for one in given],
        [len(one.prompt_tokens) for one in given],
        torch.tensor(mask, dtype=torch.bool),
    )


def _scored(
    engine: InferenceEngine,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    temperature: float,
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> Tensor:
    found = engine.score(texts, starts, temperature=temperature, params=params)
    return torch.tensor(list(chain.from_iterable(cast(list[list[float]], found))), dtype=torch.float32)


class _Replaced(torch.autograd.Function):
    """Values of one tensor, gradient of another."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = mine.dtype
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None
