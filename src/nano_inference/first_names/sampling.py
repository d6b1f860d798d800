"""`sample_with_logprobs`: one draw from logits, for programs that have no requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor

from nano_inference.executors.sampling import invert_cdf, scaled
from nano_inference.executors.truncation import NO_TRUNCATION, Truncation, truncate
from nano_inference.logprobs import at, normalise
from nano_inference.types import SMALLEST_TEMPERATURE


def _check(name: str, values: Iterable[float] | None, is_valid: Callable[[float], bool], rule: str) -> None:
    """Raise `ValueError` for the first value that is not valid."""
    for index, value in enumerate(map(float, () if values is None else values)):
        if not is_valid(value):
            raise ValueError(f"{name} must be {rule}, got {value} for row {index}")


def sample_with_logprobs(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    *,
    top_ks: Sequence[int] | None = None,
    top_ps: Sequence[float] | None = None,
    min_ps: Sequence[float] | None = None,
    uniforms_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token a row; return tokens [B] int64 and their log-probabilities [B] float32 after truncation.

    Temperature 0 is argmax, with the log-probability of temperature 1; so is one below float32's smallest normal
    number. Without `uniforms_B` ([B] in [0, 1)), uses torch's default generator. Raises `ValueError` naming the
    argument if shapes disagree, a value is outside its range, or a row's largest logit is not finite.
    """
    if logits_BV.dim() != 2 or temperatures_B.shape != (logits_BV.size(0),):
        shapes = f"{tuple(logits_BV.shape)} and {tuple(temperatures_B.shape)}"
        raise ValueError(f"logits must be [B, V] and temperatures [B], got {shapes}")
    num_rows = logits_BV.size(0)
    for name, values in {"top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps, "uniforms_B": uniforms_B}.items():
        if values is not None and len(values) != num_rows:
            raise ValueError(f"{name} must hold one value for each of {num_rows} rows, got {len(values)}")
    temperatures_B = temperatures_B.masked_fill((temperatures_B >= 0) & (temperatures_B < SMALLEST_TEMPERATURE), 0)
    temperatures = temperatures_B.tolist()
    _check("temperatures", temperatures, lambda t: 0 <= t < float("inf"), "finite and >= 0")
    _check("top_ks", top_ks, lambda k: int(k) == k, "integers")
    _check("top_ps", top_ps, lambda p: 0 < p <= 1, "in (0, 1]")
    _check("min_ps", min_ps, lambda p: 0 <= p <= 1, "in [0, 1]")
    _check("uniforms_B", uniforms_B, lambda u: 0 <= u < 1, "in [0, 1)")
    logits_BV = logits_BV.to(torch.float32, copy=True)
    _check("the largest logit of each row", logits_BV.amax(-1), isfinite, "finite")
    argmax_B = logits_BV.argmax(dim=-1)
    scaled_BV = scaled(logits_BV, temperatures)
    cuts = [NO_TRUNCATION] * num_rows
    for index in range(num_rows):
        if temperatures[index]:
            top_k = 0 if top_ks is None else max(0, int(top_ks[index]))
            top_p = 1.0 if top_ps is None else float(top_ps[index])
            cuts[index] = Truncation(top_k, top_p, 0.0 if min_ps is None else float(min_ps[index]))
    truncate(logits_BV, scaled_BV, cuts)
    if uniforms_B is None:
        uniforms_B = torch.rand(num_rows, dtype=torch.float64, device=logits_BV.device)
    token_B = torch.where(temperatures_B == 0, argmax_B, invert_cdf(scaled_BV, uniforms_B.double()))
    return token_B, normalise(logits_BV, temperatures).logprobs(at(logits_BV, token_B)).squeeze(-1)
