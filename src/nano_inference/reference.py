"""Log-probabilities of samples under a second set of weights: what a KL term or a distillation loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from nano_inference.engine import InferenceEngine
from nano_inference.types import TrainingSample


def with_ref_logprobs(
    samples: Sequence[TrainingSample], reference: InferenceEngine, *, temperature: float = 1.0
) -> list[TrainingSample]:
    """Return the samples with `ref_logprobs`: each completion token's log-probability in another engine.

    `reference` is any engine with the same tokens: `engine.copy()` made before training, or one on other files.
    `temperature` divides its logits, as the one that the samples were drawn with did. Forced tokens get 0.0. The
    samples are scored together; those of one prompt compute it once. Raises `BadRequest` when one is too long for it.
    """
    texts = [[*sample.prompt_tokens, *sample.completion_tokens] for sample in samples]
    starts = [len(sample.prompt_tokens) for sample in samples]
    scores = cast(list[list[float]], reference.score(texts, starts, temperature=temperature)) if texts else []
    return [
        replace(sample, ref_logprobs=tuple(lp if drawn else 0.0 for lp, drawn in zip(found, sample.mask, strict=True)))
        for sample, found in zip(samples, scores, strict=True)
    ]
