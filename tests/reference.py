"""Log-probabilities of samples under a second set of weights, for a KL term or a distillation loss."""

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

    `reference` is an engine with the same vocabulary, such as an `engine.copy()` made before training. `temperature`
    divides its logits and should be that of the samples. Forced tokens get 0.0. All samples are scored together, and a
    shared prompt is computed once. Raises `BadRequest` if a sample is too long for `reference`.
    """
    texts = [[*sample.prompt_tokens, *sample.completion_tokens] for sample in samples]
    starts = [len(sample.prompt_tokens) for sample in samples]
    scores = cast(list[list[float]], reference.score(texts, starts, temperature=temperature)) if texts else []
    return [
        replace(sample, ref_logprobs=tuple(lp if drawn else 0.0 for lp, drawn in zip(found, sample.mask, strict=True)))
        for sample, found in zip(samples, scores, strict=True)
    ]
