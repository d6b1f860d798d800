"""Samples tokens from logits. Functions only; randomness is an argument.

Order: penalties, logit_bias, allowed ids and masks, temperature, top-k, top-p on the renormalised rest, min-p, then one
uniform inverts the CDF over tokens in ascending id order.

Reported log-probabilities are the log-softmax of the model's logits (mode "raw"), of the adjusted logits divided by the
temperature ("tempered"), or of what top-k, top-p and min-p leave of them ("processed"). At temperature 0 all three are
that of the adjusted logits, undivided.

A row's result never depends on the other rows: rows without truncation are computed identically alone and among
truncated ones.

Shapes: B rows, V vocabulary, R a subset of the rows, N blocks of a vocabulary, C tokens of such a block, K best tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.logprobs import COLDEST, Normalise, Normaliser, at, floor_logprobs, normalise, top_logprobs
from nano_inference.runner import DrawExtras, Row, RowResult
from nano_inference.types import SamplingMask, TopLogprobs

_MASK64 = 2**64 - 1
_CDF_BLOCK = 512
_TOP_P_WIDTH = 1024
"""Best tokens selected first for top-p; if their probability is too small, the whole row is sorted."""


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments.

    Three rounds of splitmix64's finaliser (Steele, Lea & Flood 2014), one for each argument, 53 bits kept.
    """
    state = _mix(seed & _MASK64)
    state = _mix(state ^ (sample_index & _MASK64))
    state = _mix(state ^ (position & _MASK64))
    return (state >> 11) / 2**53


def _mix(state: int) -> int:
    """Return one step of splitmix64: add the golden gamma, then mix the bits."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def derive_seed(seed: int, request_id: int) -> int:
    """Return the seed of a request without one, from the engine's: different for each request, equal in each run."""
    return _mix(_mix(seed & _MASK64) ^ request_id)


def results(
    rows: Sequence[Row],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[TopLogprobs] = (),
    extras: Sequence[DrawExtras] = (),
) -> list[RowResult]:
    """Return the results of rows with one token each; `tops` and `extras` may be empty if no row needs them."""
    none = ((),) * len(rows)
    drawn = zip(rows, tokens, logprobs, tops or none, zip(extras) if extras else none, strict=True)
    return [RowResult(row.id, (token,), (logprob,), (top,), extra) for row, token, logprob, top, extra in drawn]


def draw(logits_BV: Tensor, rows: Sequence[Row], normalise: Normalise = normalise) -> list[RowResult]:
    """Sample one token a row; `logits_BV` is float32 and is overwritten.

    A row's uniform is that of (seed, sample index, position after its last token).
    """
    temperatures, ones = [row.params.temperature for row in rows], [1.0] * len(rows)
    model = _keep(logits_BV, [row.params.raw_logprobs for row in rows], ones, normalise)
    raw = _keep(logits_BV, [_needs_raw(row) for row in rows], ones, normalise)
    for index, row in enumerate(rows):
        adjust_logits(logits_BV[index], row)
    argmax_B = logits_BV.argmax(dim=-1) if any(row.params.temperature == 0 for row in rows) else None
    is_tempered = [row.logprobs_mode == "tempered" and truncation_of(row).is_active for row in rows]
    tempered = _keep(logits_BV, is_tempered, temperatures, normalise)
    scaled_BV = scaled(logits_BV, temperatures)
    truncate(logits_BV, scaled_BV, [truncation_of(row) for row in rows])
    masks = sampling_masks(scaled_BV, rows)
    token_B = _choose(scaled_BV, argmax_B, rows)
    normaliser = normalise(logits_BV, temperatures)
    drawn_B = normaliser.logprobs(at(logits_BV, token_B)).squeeze(-1)
    for kept in (raw, tempered):
        if kept is not None:
            logits_BV[kept.rows] = kept.logits_RV
            normaliser = normaliser.with_rows(kept.rows, kept.normaliser)
    logprob_B = normaliser.logprobs(at(logits_BV, token_B)).squeeze(-1)
    logprob_B = logprob_B if raw is None else floor_logprobs(logprob_B)
    logprob_B = torch.where(drawn_B.isfinite(), logprob_B, drawn_B)  # if no token can be sampled, every mode reports it
    if model is not None:  # also if masking has hidden NaN in the unmodified logits
        raw_R = model.logprobs(token_B)
        logprob_B[model.rows] = torch.where(raw_R.isnan(), raw_R, logprob_B[model.rows])
    tops = top_logprobs(logits_BV, normaliser, [row.params.logprobs or 0 for row in rows])
    return results(rows, token_B.tolist(), logprob_B.tolist(), tops, _extras(rows, masks, model, token_B))


def _extras(
    rows: Sequence[Row], masks: Sequence[SamplingMask], model: _Kept | None, token_B: Tensor
) -> tuple[DrawExtras, ...]:
    """Return the optional results of all rows; empty if no row requests any."""
    if not any(row.params.raw_logprobs or row.params.sampling_mask for row in rows):
        return ()
    raw_logprobs: dict[int, float] = {}
    if model is not None:
        raw_R = floor_logprobs(model.logprobs(token_B))
        raw_logprobs = dict(zip(model.rows, raw_R.tolist(), strict=True))
    return tuple(DrawExtras(raw_logprobs.get(i), mask) for i, mask in enumerate(masks))


class _Kept(NamedTuple):
    """A copy of some rows' logits, from before they were modified."""

    rows: list[int]
    logits_RV: Tensor
    normaliser: Normaliser

    def logprobs(self, token_B: Tensor) -> Tensor:
        """Return these rows' log-probabilities [R] of one token for each of all rows."""
        return self.normaliser.logprobs(at(self.logits_RV, token_B[self.rows])).squeeze(-1)


def _keep(
    logits_BV: Tensor, is_wanted: Iterable[bool], temperatures: Sequence[float], normalise: Normalise
) -> _Kept | None:
    """Copy the wanted rows; return None without computing anything if there are none."""
    rows = [i for i, wanted in enumerate(is_wanted) if wanted]
    if not rows:
        return None
    logits_RV = logits_BV[rows]
    return _Kept(rows, logits_RV, normalise(logits_RV, [temperatures[i] for i in rows]))


def _choose(scaled_BV: Tensor, argmax_B: Tensor | None, rows: Sequence[Row]) -> Tensor:
    """Return each row's token: at its uniform, or the best at temperature 0."""
    uniforms = [uniform(row.seed, row.sample_index, row.start + len(row.tokens)) for row in rows]
    token_B = invert_cdf(scaled_BV, torch.tensor(uniforms, dtype=torch.float64, device=scaled_BV.device))
    if argmax_B is None:
        return token_B
    is_greedy_B = torch.tensor([row.params.temperature == 0 for row in rows], device=scaled_BV.device)
    return torch.where(is_greedy_B, argmax_B, token_B)


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

    Temperature 0 is argmax, with the log-probability of temperature 1. Without `uniforms_B` ([B] in [0, 1)), uses
    torch's default generator. Raises `ValueError` if shapes disagree.
    """
    if logits_BV.dim() != 2 or temperatures_B.shape != (logits_BV.size(0),):
        shapes = f"{tuple(logits_BV.shape)} and {tuple(temperatures_B.shape)}"
        raise ValueError(f"logits must be [B, V] and temperatures [B], got {shapes}")
    num_rows = logits_BV.size(0)
    for name, values in {"top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps, "uniforms_B": uniforms_B}.items():
        if values is not None and len(values) != num_rows:
            raise ValueError(f"{name} must hold one value for each of {num_rows} rows, got {len(values)}")
    temperatures = temperatures_B.tolist()
    if not all(0 <= t < float("inf") for t in temperatures):
        raise ValueError(f"temperatures must be finite and >= 0, got {temperatures}")
    logits_BV = logits_BV.to(torch.float32, copy=True)
    argmax_B = logits_BV.argmax(dim=-1)
    scaled_BV = scaled(logits_BV, temperatures)
    cuts = [_NO_TRUNCATION] * num_rows
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


def _needs_raw(row: Row) -> bool:
    """Return whether the row reports the unmodified distribution and samples from a modified one.

    At temperature 0 all modes are the same by definition: the log-softmax of the adjusted logits.
    """
    params = row.params
    if row.logprobs_mode != "raw" or params.temperature == 0:
        return False
    is_adjusted = bool(row.history or params.logit_bias or params.allowed_token_ids or row.mask or row.banned)
    return is_adjusted or params.temperature != 1 or truncation_of(row).is_active


def adjust_logits(logits_V: Tensor, row: Row) -> None:
    """Apply penalties, bias, allowed ids, the matcher's mask and banned ids to one row, in place."""
    params = row.params
    if row.history:
        penalise(logits_V, row)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
    if params.allowed_token_ids is not None:
        keep_only(logits_V, torch.tensor(sorted(params.allowed_token_ids), device=logits_V.device))
    if row.mask is not None:
        keep_only(logits_V, unpack_mask(row.mask, logits_V.size(0)).to(logits_V.device))
    if row.banned:
        logits_V[torch.tensor(row.banned, device=logits_V.device)] = -torch.inf


def penalise(logits_V: Tensor, row: Row) -> None:
    """Apply the repetition penalty to prompt and output, the presence and frequency penalties to output, in place."""
    params = row.params
    seen = torch.tensor(sorted(set(row.history)), device=logits_V.device)
    if params.repetition_penalty != 1:
        score = logits_V[seen]
        logits_V[seen] = torch.where(score > 0, score / params.repetition_penalty, score * params.repetition_penalty)
    output = Counter(row.history[row.num_prompt :])
    if output and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(output), device=logits_V.device)
        counts = torch.tensor(list(output.values()), device=logits_V.device)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts


def keep_only(logits_V: Tensor, ids: Tensor) -> None:
    """Set all logits except these to -inf, in place."""
    kept = logits_V[ids]
    logits_V.fill_(-torch.inf)
    logits_V[ids] = kept


def unpack_mask(mask: bytes, vocab_size: int) -> Tensor:
    """Return the ids of set bits; the lowest bit of the first byte is id 0."""
    byte = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (byte.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[:vocab_size].nonzero().squeeze(-1)


def scaled(logits_BV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return each row divided by its temperature; the argument itself if all temperatures are 0 or 1.

    A row's largest logit is subtracted first, so that no temperature overflows float32.
    """
    if all(t in (0, 1) for t in temperatures):
        return logits_BV
    is_scaled_B1 = torch.tensor([t not in (0, 1) for t in temperatures], device=logits_BV.device).unsqueeze(-1)
    best_B1 = logits_BV.amax(-1, keepdim=True)
    scaled_BV = logits_BV - torch.where(is_scaled_B1 & best_B1.isfinite(), best_B1, 0.0)
    divisors = [max(t, COLDEST) if t else 1.0 for t in temperatures]
    scaled_BV /= torch.tensor(divisors, device=logits_BV.device).unsqueeze(-1)
    return scaled_BV


@dataclass(frozen=True, slots=True)
class Truncation:
    """A row's truncation parameters."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def is_active(self) -> bool:
        """Whether any token can be excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


_NO_TRUNCATION = Truncation(0, 1.0, 0.0)


def truncation_of(row: Row) -> Truncation:
    """Return a row's truncation; none at temperature 0."""
    if row.params.temperature == 0:
        return _NO_TRUNCATION
    return Truncation(row.params.top_k, row.params.top_p, row.params.min_p)


def truncate(logits_BV: Tensor, scaled_BV: Tensor, cuts: Sequence[Truncation]) -> None:
    """Set the logits that each row's truncation excludes to -inf, in both tensors, in place."""
    for index, cut in enumerate(cuts):
        if cut.is_active:
            truncate_row(scaled_BV[index], cut)
            if scaled_BV is not logits_BV:
                logits_BV[index].masked_fill_(scaled_BV[index] == -torch.inf, -torch.inf)


def truncate_row(logits_V: Tensor, cut: Truncation) -> None:
    """Apply top-k, then top-p of the rest, then min-p to one tempered row, in place. The lowest id wins a tie."""
    vocab_size = logits_V.size(0)
    num_top = min(cut.top_k or vocab_size, vocab_size)
    best = logits_V.max()
    if num_top < vocab_size or cut.top_p < 1:
        value_K = _best_values(logits_V, num_top, cut.top_p)
        count = min(num_top, value_K.size(0))
        if cut.top_p < 1:
            mass_K = (value_K.double() - best.double()).exp().cumsum(-1)
            total = mass_K[count - 1] if count == num_top < vocab_size else _mass(logits_V, best)
            count = int((mass_K[:count] < cut.top_p * total).sum()) + 1
        keep_best(logits_V, value_K[: min(count, num_top)])
    if cut.min_p > 0:
        logits_V[(logits_V.double() - best.double()).exp() < cut.min_p] = -torch.inf


def _best_values(logits_V: Tensor, num_top: int, top_p: float) -> Tensor:
    """Return the largest values, sorted: at least as many as top-k and top-p need."""
    if num_top < logits_V.size(0):
        return logits_V.topk(num_top).values
    width = min(_TOP_P_WIDTH, num_top)
    value_K = logits_V.topk(width).values
    best = value_K[0]
    if width == num_top or (value_K.double() - best.double()).exp().sum() >= top_p * _mass(logits_V, best):
        return value_K
    return logits_V.sort(descending=True).values


def _mass(logits_V: Tensor, best: Tensor) -> Tensor:
    """Return the sum of exp(logit - best) over the row, in float64."""
    return (logits_V.double() - best.double()).exp().sum()


def sampling_masks(logits_BV: Tensor, rows: Sequence[Row]) -> list[SamplingMask]:
    """Return the ids that each row can sample; None if not requested, and if no token is excluded."""
    masks: list[SamplingMask] = []
    for index, row in enumerate(rows):
        is_masked = row.params.allowed_token_ids is not None or row.mask is not None or bool(row.banned)
        is_wanted = row.params.sampling_mask and (is_masked or truncation_of(row).is_active)
        ids = (logits_BV[index] > -torch.inf).nonzero().flatten().tolist() if is_wanted else ()
        masks.append(tuple(ids) if is_wanted and len(ids) < logits_BV.size(-1) else None)
    return masks


def keep_best(logits_V: Tensor, best_K: Tensor) -> None:
    """Keep the len(best_K) largest logits, whose sorted values are `best_K`; lowest ids first among equals."""
    last = best_K[-1]
    num_equal = int((best_K == last).sum())
    equal_V = logits_V == last
    if int(equal_V.sum()) > num_equal:
        equal_V &= equal_V.cumsum(0) <= num_equal
    logits_V.masked_fill_(~((logits_V > last) | equal_V), -torch.inf)


def invert_cdf(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return for each row the first token by id at which the cumulative probability exceeds its uniform."""
    num_rows, vocab_size = logits_BV.shape
    num_blocks = -(-vocab_size // _CDF_BLOCK)
    p_BV = torch.nn.functional.pad(_weights(logits_BV), (0, num_blocks * _CDF_BLOCK - vocab_size))
    p_BNC = p_BV.view(num_rows, num_blocks, _CDF_BLOCK)  # sums of blocks: no cumulative sum over the vocabulary
    mass_BN = p_BNC.sum(-1).double()
    cdf_BN = mass_BN.cumsum(-1)
    target_B1 = uniform_B.unsqueeze(-1) * cdf_BN[:, -1:]
    block_B1 = _first_above(cdf_BN, target_B1, mass_BN)
    before_B1 = cdf_BN.gather(-1, block_B1) - mass_BN.gather(-1, block_B1)
    p_BC = p_BNC.gather(1, block_B1.unsqueeze(-1).expand(-1, -1, _CDF_BLOCK)).squeeze(1)
    inside_B1 = _first_above(p_BC.cumsum(-1, dtype=torch.float64), target_B1 - before_B1, p_BC)
    return (block_B1 * _CDF_BLOCK + inside_B1).squeeze(-1)


def _weights(logits_BV: Tensor) -> Tensor:
    """Return sampling probabilities: softmax in float32. Log-probabilities are computed elsewhere.

    Their bits decide tokens of seeded requests, which releases must not change: `log_softmax` comes first.
    """
    return torch.softmax(torch.log_softmax(logits_BV, dim=-1), dim=-1)


def _first_above(cdf_BN: Tensor, target_B1: Tensor, mass_BN: Tensor) -> Tensor:
    """Return the first index with cdf > target; if rounding leaves none, the last index with mass > 0."""
    index_B1 = (cdf_BN <= target_B1).sum(-1, keepdim=True)
    rank_N = torch.arange(1, mass_BN.size(-1) + 1, device=mass_BN.device)
    last_B1 = ((mass_BN > 0) * rank_N).amax(-1, keepdim=True) - 1
    return index_B1.minimum(last_B1).clamp_(min=0)
