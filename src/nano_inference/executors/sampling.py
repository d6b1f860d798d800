"""Samples tokens from logits. Functions only; randomness is an argument.

Order: penalties, logit_bias, allowed ids and masks, temperature, top-k, top-p on the renormalised rest, min-p, then one
uniform inverts the CDF over tokens in ascending id order.

Reported log-probabilities are the log-softmax of the model's logits (mode "raw"), of the adjusted logits divided by the
temperature ("tempered"), or of what top-k, top-p and min-p leave of them ("processed"). At temperature 0 the last two
are that of the adjusted logits, undivided.

A row's result never depends on the other rows: rows without truncation are computed identically alone and among
truncated ones.

Shapes: B rows, V vocabulary, R a subset of the rows, N blocks of a vocabulary, C tokens of such a block, K best tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.core.seeds import uniform
from nano_inference.core.step import DrawExtras, Row, RowResult
from nano_inference.executors.logprobs import (
    COLDEST,
    Normalise,
    Normaliser,
    at,
    floor_logprobs,
    normalise,
    top_logprobs,
)
from nano_inference.executors.truncation import Truncation, truncate, truncation_of
from nano_inference.executors.vocabulary import Vocabulary
from nano_inference.types import SamplingMask, TokenLogprob, TopLogprobs

_CDF_BLOCK = 512


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


class WholeVocabulary:
    """Logits of all ids in one tensor; satisfies `Vocabulary`."""

    def __init__(self, normalise: Normalise = normalise) -> None:
        self.normalise = normalise

    def local(self, row: Row) -> Row:
        return row

    def largest(self, logits_BV: Tensor) -> Tensor:
        return logits_BV.amax(-1, keepdim=True)

    def argmax(self, logits_BV: Tensor) -> Tensor:
        return logits_BV.argmax(dim=-1)

    def truncate(self, logits_BV: Tensor, scaled_BV: Tensor, cuts: Sequence[Truncation]) -> None:
        truncate(logits_BV, scaled_BV, cuts)

    def size_of(self, logits_BV: Tensor) -> int:
        return logits_BV.size(-1)

    def ids_above_zero(self, scaled_V: Tensor) -> list[int]:
        return (scaled_V > -torch.inf).nonzero().flatten().tolist()

    def invert_cdf(self, scaled_BV: Tensor, uniform_B: Tensor) -> Tensor:
        return invert_cdf(scaled_BV, uniform_B)

    def at(self, logits_BV: Tensor, token_B: Tensor) -> Tensor:
        return at(logits_BV, token_B)

    def ranks(self, logits_BV: Tensor, own_B1: Tensor) -> list[int]:
        return (logits_BV > own_B1).sum(dim=-1).add_(1).tolist()

    def tops(self, logits_BV: Tensor, normaliser: Normaliser, counts: Sequence[int]) -> tuple[TopLogprobs, ...]:
        return top_logprobs(logits_BV, normaliser, counts)


WHOLE = WholeVocabulary()


def draw(logits_BV: Tensor, rows: Sequence[Row], vocabulary: Vocabulary = WHOLE) -> list[RowResult]:
    """Sample one token a row; `logits_BV` is float32 and is overwritten.

    A row's uniform is that of (seed, sample index, position after its last token).
    """
    temperatures, ones = [row.params.temperature for row in rows], [1.0] * len(rows)
    model = _keep(logits_BV, [row.params.raw_logprobs for row in rows], ones, vocabulary)
    raw = _keep(logits_BV, [_needs_raw(row) for row in rows], ones, vocabulary)
    for index, row in enumerate(rows):
        adjust_logits(logits_BV[index], vocabulary.local(row))
    argmax_B = vocabulary.argmax(logits_BV) if any(row.params.temperature == 0 for row in rows) else None
    is_tempered = [row.logprobs_mode == "tempered" and truncation_of(row).is_active for row in rows]
    tempered = _keep(logits_BV, is_tempered, temperatures, vocabulary)
    scaled_BV = scaled(logits_BV, temperatures, vocabulary)
    vocabulary.truncate(logits_BV, scaled_BV, [truncation_of(row) for row in rows])
    masks = sampling_masks(scaled_BV, rows, vocabulary)
    token_B = _choose(scaled_BV, argmax_B, rows, vocabulary)
    normaliser = vocabulary.normalise(logits_BV, temperatures)
    drawn_B = normaliser.logprobs(vocabulary.at(logits_BV, token_B)).squeeze(-1)
    for kept in (raw, tempered):
        if kept is not None:
            logits_BV[kept.rows] = kept.logits_RV
            normaliser = normaliser.with_rows(kept.rows, kept.normaliser)
    logprob_B = normaliser.logprobs(vocabulary.at(logits_BV, token_B)).squeeze(-1)
    logprob_B = logprob_B if raw is None else floor_logprobs(logprob_B)
    logprob_B = torch.where(drawn_B.isfinite(), logprob_B, drawn_B)  # if no token can be sampled, every mode reports it
    if model is not None:  # also if masking has hidden NaN in the unmodified logits
        raw_R = model.logprobs(token_B)
        logprob_B[model.rows] = torch.where(raw_R.isnan(), raw_R, logprob_B[model.rows])
    tops = vocabulary.tops(logits_BV, normaliser, [row.params.logprobs or 0 for row in rows])
    named = named_tokens(logits_BV, normaliser, [row.params.logprob_token_ids for row in rows], vocabulary)
    tops = tuple(map(add, named, tops)) if named else tops
    return results(rows, token_B.tolist(), logprob_B.tolist(), tops, _extras(rows, masks, model, token_B))


def named_tokens(
    logits_BV: Tensor, normaliser: Normaliser, ids: Sequence[Sequence[int]], vocabulary: Vocabulary
) -> list[TopLogprobs]:
    """Return the log-probabilities of the tokens that each row names, -9999 for impossible ones; [] if none does."""
    width = max(map(len, ids), default=0)
    if not width:
        return []
    id_BK = torch.tensor([[*row, *(0,) * (width - len(row))] for row in ids], device=logits_BV.device)
    value_BK = torch.stack(
        [normaliser.logprobs(vocabulary.at(logits_BV, id_B)).squeeze(-1) for id_B in id_BK.unbind(-1)], dim=-1
    )
    values = floor_logprobs(value_BK).tolist()
    return [tuple(map(TokenLogprob, row, found)) for row, found in zip(ids, values, strict=True)]


def _extras(
    rows: Sequence[Row], masks: Sequence[SamplingMask], model: _Kept | None, token_B: Tensor
) -> tuple[DrawExtras, ...]:
    if not any(row.params.raw_logprobs or row.params.sampling_mask for row in rows):
        return ()
    raw_logprobs: dict[int, float] = {}
    if model is not None:
        raw_R = floor_logprobs(model.logprobs(token_B))
        raw_logprobs = dict(zip(model.rows, raw_R.tolist(), strict=True))
    return tuple(DrawExtras(raw_logprobs.get(i), mask) for i, mask in enumerate(masks))


class Known(NamedTuple):
    """A token whose draw is repeated: its row, with `score_params` and the whole `history`, and its position."""

    row: Row
    position: int


def is_adjusted(row: Row) -> bool:
    """Return whether the draws of a row with `score_params` change its logits by more than the temperature."""
    params = row.score_params
    if params is None or row.logprobs_mode == "raw":
        return False
    is_cut = row.logprobs_mode == "processed" and truncation_of(row._replace(params=params)).is_active
    is_restricted = params.allowed_token_ids is not None or bool(params.min_tokens and row.stop_ids)
    return bool(row.history or params.logit_bias) or is_restricted or is_cut


def adjust_known(logits_BV: Tensor, known: Sequence[Known | None], vocabulary: Vocabulary) -> None:
    """Give logits, in place, the values that the log-probability of a draw is computed from; None leaves a row's."""
    seen: _Seen | None = None
    cut: list[tuple[int, Row]] = []
    for index, one in enumerate(known):
        if one is None:
            continue
        row, position = one
        assert row.score_params is not None
        is_banned = position - row.num_prompt < row.score_params.min_tokens
        draw_row = row._replace(
            params=row.score_params, history=(), banned=tuple(sorted(row.stop_ids)) if is_banned else ()
        )
        if row.history:
            if seen is None or seen.row is not row:
                seen = _Seen(row, logits_BV, vocabulary)
            seen.penalise(logits_BV[index], position)
        adjust_logits(logits_BV[index], vocabulary.local(draw_row))
        if row.logprobs_mode == "processed" and truncation_of(draw_row).is_active:
            cut.append((index, draw_row))
    if cut:
        places = [index for index, _ in cut]
        logits_RV = logits_BV[places]
        scaled_RV = scaled(logits_RV, [row.params.temperature for _, row in cut], vocabulary)
        vocabulary.truncate(logits_RV, scaled_RV, [truncation_of(row) for _, row in cut])
        logits_BV[places] = logits_RV


class _Seen:
    """Counts the tokens of a known text as its positions advance, for penalties: each costs its change only."""

    def __init__(self, row: Row, logits_BV: Tensor, vocabulary: Vocabulary) -> None:
        self.row, self._vocabulary = row, vocabulary
        self._end = 0  # tokens counted so far
        self._is_seen_V = torch.zeros(logits_BV.size(-1), dtype=torch.bool, device=logits_BV.device)
        self._count_V = torch.zeros(logits_BV.size(-1), dtype=torch.long, device=logits_BV.device)

    def penalise(self, logits_V: Tensor, position: int) -> None:
        """Apply what `penalise` applies with the tokens before a position, bit for bit; positions ascend."""
        row, params = self.row, self.row.score_params
        assert params is not None and position >= self._end
        self._is_seen_V[self._local(row.history[self._end : position])] = True
        for token in self._local(row.history[max(self._end, row.num_prompt) : position]):
            self._count_V[token] += 1
        self._end = position
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            changed_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V.copy_(torch.where(self._is_seen_V, changed_V, logits_V))
        if params.presence_penalty or params.frequency_penalty:
            reduced_V = logits_V - (params.presence_penalty + params.frequency_penalty * self._count_V)
            logits_V.copy_(torch.where(self._count_V > 0, reduced_V, logits_V))

    def _local(self, ids: Sequence[int]) -> list[int]:
        """Return ids as indices among the logits here."""
        return list(self._vocabulary.local(self.row._replace(history=tuple(ids), num_prompt=0)).history)


class _Kept(NamedTuple):
    """A copy of some rows' logits, from before they were modified."""

    rows: list[int]
    logits_RV: Tensor
    normaliser: Normaliser
    vocabulary: Vocabulary

    def logprobs(self, token_B: Tensor) -> Tensor:
        """Return these rows' log-probabilities [R] of one token for each of all rows."""
        return self.normaliser.logprobs(self.vocabulary.at(self.logits_RV, token_B[self.rows])).squeeze(-1)


def _keep(
    logits_BV: Tensor, is_wanted: Iterable[bool], temperatures: Sequence[float], vocabulary: Vocabulary
) -> _Kept | None:
    """Copy the wanted rows; return None without computing anything if there are none."""
    rows = [i for i, wanted in enumerate(is_wanted) if wanted]
    if not rows:
        return None
    logits_RV = logits_BV[rows]
    return _Kept(rows, logits_RV, vocabulary.normalise(logits_RV, [temperatures[i] for i in rows]), vocabulary)


def _choose(scaled_BV: Tensor, argmax_B: Tensor | None, rows: Sequence[Row], vocabulary: Vocabulary) -> Tensor:
    uniforms = [uniform(row.seed, row.sample_index, row.start + len(row.tokens)) for row in rows]
    uniform_B = torch.tensor(uniforms, dtype=torch.float64, device=scaled_BV.device)
    token_B = vocabulary.invert_cdf(scaled_BV, uniform_B)
    if argmax_B is None:
        return token_B
    is_greedy_B = torch.tensor([row.params.temperature == 0 for row in rows], device=scaled_BV.device)
    return torch.where(is_greedy_B, argmax_B, token_B)


def _needs_raw(row: Row) -> bool:
    """Return whether the row reports the unmodified distribution and samples from a modified one."""
    params = row.params
    is_restricted = params.allowed_token_ids is not None or row.mask is not None or bool(row.banned)
    is_adjusted = bool(row.history or params.logit_bias) or is_restricted or params.temperature not in (0, 1)
    return row.logprobs_mode == "raw" and (is_adjusted or truncation_of(row).is_active)


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
        byte = torch.frombuffer(bytearray(row.mask), dtype=torch.uint8)  # the lowest bit of the first one is id 0
        bits = (byte.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.flatten()[: logits_V.size(0)].nonzero().squeeze(-1)
        keep_only(logits_V, allowed.to(logits_V.device))
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


def scaled(logits_BV: Tensor, temperatures: Sequence[float], vocabulary: Vocabulary = WHOLE) -> Tensor:
    """Return each row divided by its temperature; the argument itself if all temperatures are 0 or 1.

    A row's largest logit is subtracted first, so that no temperature overflows float32.
    """
    if all(t in (0, 1) for t in temperatures):
        return logits_BV
    is_scaled_B1 = torch.tensor([t not in (0, 1) for t in temperatures], device=logits_BV.device).unsqueeze(-1)
    best_B1 = vocabulary.largest(logits_BV)
    scaled_BV = logits_BV - torch.where(is_scaled_B1 & best_B1.isfinite(), best_B1, 0.0)
    divisors = [max(t, COLDEST) if t else 1.0 for t in temperatures]
    scaled_BV /= torch.tensor(divisors, device=logits_BV.device).unsqueeze(-1)
    return scaled_BV


def sampling_masks(scaled_BV: Tensor, rows: Sequence[Row], vocabulary: Vocabulary = WHOLE) -> list[SamplingMask]:
    """Return the ids that each row can sample; None if not requested, and if no token is excluded."""
    masks: list[SamplingMask] = []
    for index, row in enumerate(rows):
        is_masked = row.params.allowed_token_ids is not None or row.mask is not None or bool(row.banned)
        is_wanted = row.params.sampling_mask and (is_masked or truncation_of(row).is_active)
        ids = vocabulary.ids_above_zero(scaled_BV[index]) if is_wanted else []
        masks.append(tuple(ids) if is_wanted and len(ids) < vocabulary.size_of(scaled_BV) else None)
    return masks


def invert_cdf(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return for each row the first token by id at which the cumulative probability exceeds its uniform."""
    num_rows, vocab_size = logits_BV.shape
    num_blocks = -(-vocab_size // _CDF_BLOCK)
    p_BV = torch.nn.functional.pad(_weights(logits_BV), (0, num_blocks * _CDF_BLOCK - vocab_size))
    p_BNC = p_BV.view(num_rows, num_blocks, _CDF_BLOCK)  # sums of blocks: no cumulative sum over the vocabulary
    mass_BN = p_BNC.sum(-1).double()
    cdf_BN = mass_BN.cumsum(-1)
    target_B1 = uniform_B.unsqueeze(-1) * cdf_BN[:, -1:]
    block_B1 = first_above(cdf_BN, target_B1, mass_BN)
    before_B1 = cdf_BN.gather(-1, block_B1) - mass_BN.gather(-1, block_B1)
    p_BC = p_BNC.gather(1, block_B1.unsqueeze(-1).expand(-1, -1, _CDF_BLOCK)).squeeze(1)
    inside_B1 = first_above(p_BC.cumsum(-1, dtype=torch.float64), target_B1 - before_B1, p_BC)
    return (block_B1 * _CDF_BLOCK + inside_B1).squeeze(-1)


def _weights(logits_BV: Tensor) -> Tensor:
    """Return sampling probabilities: softmax in float32. Log-probabilities are computed elsewhere.

    Their bits decide tokens of seeded requests, which releases must not change: `log_softmax` comes first.
    """
    return torch.softmax(torch.log_softmax(logits_BV, dim=-1), dim=-1)


def first_above(cdf_BN: Tensor, target_B1: Tensor, mass_BN: Tensor, *, is_reached: bool = False) -> Tensor:
    """Return the first index with cdf > target (>= with `is_reached`); without one, the last index with mass > 0."""
    is_below_BN = cdf_BN < target_B1 if is_reached else cdf_BN <= target_B1
    index_B1 = is_below_BN.sum(-1, keepdim=True)
    rank_N = torch.arange(1, mass_BN.size(-1) + 1, device=mass_BN.device)
    last_B1 = ((mass_BN > 0) * rank_N).amax(-1, keepdim=True) - 1
    return index_B1.minimum(last_B1).clamp_(min=0)
