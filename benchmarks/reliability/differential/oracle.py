"""What a draw must report, in float64, from Transformers' float32 logits: the documented order, implemented again.

Penalties, logit_bias, allowed ids and masks, temperature, top-k, top-p on the renormalised rest, min-p, one uniform.
Shapes: V vocabulary, K kept positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import transformers
from torch import Tensor

from nano_inference.types import LogprobsMode, SamplingParams

TOLERANCE = 1e-4
"""Largest difference of a log-probability, in nats. Whatever lies so near to a border may be on either side of it."""
_MASK64 = 2**64 - 1


class Oracle:
    """Owns the models of a world's versions."""

    def __init__(self, models: Mapping[int, transformers.PreTrainedModel]) -> None:
        self.models = models

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], versions: Sequence[int], num_kept: int) -> Tensor:
        """Return the float32 logits [K, V] of the last positions; each position's K/V is of its own version.

        A recurrent state was advanced by the version of each position in turn.
        """
        if len(set(versions)) == 1:
            model = self.models[versions[0]]
            out = model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=num_kept)
            return out.logits[0].float()
        config = self.models[versions[0]].config
        has_states = "linear_attention" in (getattr(config, "layer_types", None) or ())
        cache = transformers.DynamicCache(config=config) if has_states else transformers.DynamicCache()
        parts: list[Tensor] = []
        start = 0
        for version, run in groupby(versions):
            end = start + len(list(run))
            kept = max(0, num_kept - (len(tokens) - end))
            piece = torch.tensor([list(tokens[start:end])])
            out = self.models[version](
                piece, cache=cache, use_cache=True, logits_to_keep=max(1, min(kept, end - start))
            )
            if kept:
                parts.append(out.logits[0].float())
            start = end
        return torch.cat(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawContext:
    """What a draw depends on in addition to the logits."""

    params: SamplingParams
    mode: LogprobsMode
    history: Sequence[int]
    """Prompt and completion before the draw."""
    num_prompt: int
    """How many of `history` the presence and frequency penalties leave out."""
    banned: frozenset[int] = frozenset()
    mask: bytes | None = None
    uniform: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a log-probability must lie."""

    low: float
    high: float


class Distribution:
    """The distributions of one draw, [V] float64. Truncation keeps `certain` tokens and may keep `possible` ones."""

    def __init__(self, logits_V: Tensor, context: DrawContext) -> None:
        self.context = context
        params = context.params
        self.is_greedy = params.temperature == 0
        logits_V = logits_V.double()
        self.raw_V = torch.log_softmax(logits_V, -1)
        self.adjusted_V = adjusted(logits_V, context)
        self.tempered_V = torch.log_softmax(self.adjusted_V / (params.temperature or 1.0), -1)
        allowed_V = self.tempered_V > -torch.inf
        if self.is_greedy:
            self.certain_V = self.possible_V = allowed_V
        else:
            self.certain_V, self.possible_V = truncated(self.tempered_V, params)
        self._set_mass()

    def _set_mass(self) -> None:
        p_V = self.tempered_V.exp()
        fewest = float(p_V[self.possible_V].min()) if bool(self.possible_V.any()) else 0.0
        self.least = max(float(p_V[self.certain_V].sum()), fewest)
        self.most = float(p_V[self.possible_V].sum())

    def accept_mask(self, ids: Sequence[int] | None) -> bool:
        """Take the reported ids as the truth where the oracle is in doubt; False when they cannot be that."""
        reported_V = torch.ones_like(self.certain_V)
        if ids is not None:
            reported_V = torch.zeros_like(self.certain_V)
            reported_V[torch.tensor(ids, dtype=torch.long)] = True
        is_ok = bool((self.certain_V & ~reported_V).sum() == 0) and bool((reported_V & ~self.possible_V).sum() == 0)
        if is_ok:
            self.certain_V = self.possible_V = reported_V
            self._set_mass()
        return is_ok

    def interval(self, token: int) -> Interval | None:
        """Return where the token's log-probability lies in the mode that is reported; None where it has none."""
        if self.context.mode == "raw":
            value = float(self.raw_V[token])
            return Interval(value, value)
        value = float(self.tempered_V[token])
        if self.context.mode == "processed":
            if not self.possible_V[token]:
                return None
            return Interval(value - _log(self.most), value - _log(self.least))
        return Interval(value, value) if value > float("-inf") else None

    def is_drawable(self, token: int) -> bool:
        """Whether the draw may have come to this token: the best, or the one at the uniform."""
        if self.is_greedy:
            return float(self.adjusted_V.max() - self.adjusted_V[token]) <= TOLERANCE
        if not self.possible_V[token]:
            return False
        p_V = torch.where(self.possible_V, self.tempered_V, -torch.inf).exp() / self.most
        before, own = float(p_V[:token].sum()), float(p_V[token])
        slack = TOLERANCE + (self.most - self.least) / self.least
        return before - slack <= self.context.uniform <= before + own + slack

    def top(self) -> Tensor:
        """Return the values by which alternatives are ordered, [V]; -inf where a token is left out."""
        if self.context.mode == "raw":
            return self.raw_V
        if self.context.mode == "processed":
            return torch.where(self.possible_V, self.tempered_V, -torch.inf) - _log(self.most)
        return self.tempered_V


def _log(mass: float) -> float:
    return float(torch.tensor(mass, dtype=torch.float64).log())


def adjusted(logits_V: Tensor, context: DrawContext) -> Tensor:
    """Return the logits after penalties, bias, allowed ids, mask and bans; -inf where a token is forbidden."""
    params = context.params
    out_V = logits_V.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(context.history)))
        value = out_V[seen]
        out_V[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    for token, count in Counter(context.history[context.num_prompt :]).items():
        out_V[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        out_V[token] += bias
    forbidden_V = torch.zeros_like(out_V, dtype=torch.bool)
    if params.allowed_token_ids is not None:
        forbidden_V[:] = True
        forbidden_V[torch.tensor(sorted(params.allowed_token_ids))] = False
    if context.mask is not None:
        forbidden_V |= ~unpacked(context.mask, out_V.size(0))
    if context.banned:
        forbidden_V[torch.tensor(sorted(context.banned))] = True
    return out_V.masked_fill(forbidden_V, -torch.inf)


def unpacked(mask: bytes, vocab_size: int) -> Tensor:
    """Return a mask's bits as booleans, lowest id in the lowest bit of the first byte."""
    byte_N = torch.tensor(list(mask), dtype=torch.int16)
    bit_N8 = (byte_N[:, None] >> torch.arange(8, dtype=torch.int16)) & 1
    return bit_N8.flatten()[:vocab_size].bool()


def truncated(tempered_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return which tokens truncation keeps for certain, and which it keeps at most."""
    allowed_V = tempered_V > -torch.inf
    certain_V, possible_V = allowed_V.clone(), allowed_V.clone()
    if (params.top_k and params.top_k < tempered_V.size(0)) or params.top_p < 1:
        value_V, order_V = tempered_V.sort(descending=True, stable=True)
        rank_V = torch.arange(1, value_V.size(0) + 1)
        num_top = min(params.top_k or value_V.size(0), value_V.size(0))
        cum_V = value_V.exp().cumsum(-1)
        before_V = (cum_V - value_V.exp()) / cum_V[num_top - 1]  # mass of the likelier ones among the top k
        sure_V = (rank_V <= num_top) & (before_V < params.top_p - TOLERANCE)
        maybe_V = (rank_V <= num_top) & (before_V < params.top_p + TOLERANCE) if params.top_p < 1 else rank_V <= num_top
        if params.top_p == 1:
            sure_V = rank_V <= num_top
        sure_V, maybe_V = _blurred(value_V, sure_V, maybe_V)
        certain_V[order_V] &= sure_V
        possible_V[order_V] &= maybe_V
    if params.min_p > 0:
        border = float(tempered_V.max()) + _log(params.min_p)
        certain_V &= tempered_V > border + TOLERANCE
        possible_V &= tempered_V > border - TOLERANCE
    return certain_V, possible_V


def _blurred(value_V: Tensor, sure_V: Tensor, maybe_V: Tensor) -> tuple[Tensor, Tensor]:
    """Let sorted values that nearly tie with a border be on either side of it."""
    num_sure, num_maybe = int(sure_V.sum()), int(maybe_V.sum())
    if num_sure < value_V.size(0):
        sure_V = sure_V & (value_V > value_V[num_sure] + TOLERANCE)
    if num_maybe:
        maybe_V = maybe_V | (value_V > value_V[num_maybe - 1] - TOLERANCE)
    return sure_V, maybe_V


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return the number in [0, 1) of a draw: three rounds of splitmix64's finaliser, 53 bits kept."""
    state = 0
    for number in (seed, sample_index, position):
        state = ((state ^ (number & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / 2**53
