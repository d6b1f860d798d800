"""`ShardedVocabulary`: sampling from logits of which each rank has the ids of its `VocabularyPart`.

The ranks exchange maxima, sums of blocks, histograms and single logits, never rows of logits, and all compute the same
results. Sums over ranks are added in their order.

Shapes: B rows, V logits of this rank, R a subset of the rows, T ranks, N blocks of the largest part, C ids of a block,
K best tokens, H buckets of a histogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nano_inference.core.step import Row
from nano_inference.executors.logprobs import Normaliser, at, best_places, normalise, tops_of
from nano_inference.executors.sampling import first_above
from nano_inference.executors.truncation import Truncation
from nano_inference.parallel.links import Group
from nano_inference.parallel.shard import VocabularyPart, vocabulary_part
from nano_inference.types import TopLogprobs

_BLOCK = 512
_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the digits by which `_threshold` compares 32-bit values


class ShardedVocabulary:
    """One rank's part of a vocabulary; satisfies `vocabulary.Vocabulary`, which documents the methods."""

    def __init__(self, group: Group, part: VocabularyPart) -> None:
        self._group, self._part = group, part
        self._num_blocks = -(-vocabulary_part(part.total, 0, group.size).size // _BLOCK)

    def local(self, row: Row) -> Row:
        params, part, mask = row.params, self._part, row.mask
        if mask is not None:
            mask = mask[part.start // 8 : -(-part.stop // 8)].ljust(-(-part.size // 8), b"\0")  # it may end early
        if params.logit_bias:
            bias = {t - part.start: v for t, v in params.logit_bias.items() if part.start <= t < part.stop}
            params = replace(params, logit_bias=bias)
        if params.allowed_token_ids is not None:
            allowed = self._own(tuple(params.allowed_token_ids))
            params = replace(params, allowed_token_ids=allowed or None)
            mask = mask if allowed else bytes(-(-part.size // 8))
        prompt = self._own(row.history[: row.num_prompt])
        return row._replace(
            params=params,
            history=prompt + self._own(row.history[row.num_prompt :]),
            num_prompt=len(prompt),
            mask=mask,
            banned=self._own(row.banned),
        )

    def _own(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of ids among this rank's logits, without those of other ranks."""
        start, stop = self._part.start, self._part.stop
        return tuple(token - start for token in ids if start <= token < stop)

    def size_of(self, logits_BV: Tensor) -> int:
        return self._part.total

    def largest(self, logits_BV: Tensor) -> Tensor:
        return self._group.gather(logits_BV.amax(-1, keepdim=True)).amax(0)

    def argmax(self, logits_BV: Tensor) -> Tensor:
        id_B = logits_BV.argmax(-1) + self._part.start
        both_T2B = self._group.gather(torch.stack((logits_BV.amax(-1).double(), id_B.double())))
        owner_B = both_T2B[:, 0].argmax(0)
        return both_T2B[:, 1].gather(0, owner_B.unsqueeze(0)).squeeze(0).long()

    def normalise(self, logits_BV: Tensor, temperatures: Sequence[float]) -> Normaliser:
        own = normalise(logits_BV, temperatures)
        best_TB1, log_mass_TB1 = self._group.gather(torch.stack((own.best, own.log_mass))).unbind(1)
        best_B1 = best_TB1.amax(0)
        share_TB1 = (log_mass_TB1 + (best_TB1 - best_B1) / own.temperature).exp()
        mass_B1 = torch.where(best_TB1 == -torch.inf, 0, share_TB1).sum(0)
        return Normaliser(best_B1, own.temperature, torch.where(best_B1 == -torch.inf, torch.nan, mass_B1.log()))

    def at(self, logits_BV: Tensor, token_B: Tensor) -> Tensor:
        own_B = (token_B - self._part.start).clamp(0, logits_BV.size(-1) - 1)
        owner_B = token_B // vocabulary_part(self._part.total, 0, self._group.size).size
        return self._of_owner(at(logits_BV, own_B), owner_B.unsqueeze(-1))

    def _of_owner(self, value: Tensor, owner: Tensor) -> Tensor:
        return self._group.gather(value).gather(0, owner.unsqueeze(0)).squeeze(0)

    def ranks(self, logits_BV: Tensor, own_B1: Tensor) -> list[int]:
        return self._group.gather((logits_BV > own_B1).sum(dim=-1)).sum(0).add_(1).tolist()

    def invert_cdf(self, scaled_BV: Tensor, uniform_B: Tensor) -> Tensor:
        num_rows, size = scaled_BV.shape
        weight_BV = (scaled_BV - self.largest(scaled_BV)).exp()
        p_BV = torch.nn.functional.pad(weight_BV, (0, self._num_blocks * _BLOCK - size))
        p_BNC = p_BV.view(num_rows, self._num_blocks, _BLOCK)
        mass_TBN = self._group.gather(p_BNC.sum(-1).double())
        mass_BN = mass_TBN.transpose(0, 1).reshape(num_rows, -1)
        cdf_BN = mass_BN.cumsum(-1)
        target_B1 = uniform_B.unsqueeze(-1) * cdf_BN[:, -1:]
        block_B1 = first_above(cdf_BN, target_B1, mass_BN)
        before_B1 = cdf_BN.gather(-1, block_B1) - mass_BN.gather(-1, block_B1)
        own_B1 = block_B1 % self._num_blocks
        p_BC = p_BNC.gather(1, own_B1.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
        inside_B1 = first_above(p_BC.cumsum(-1, dtype=torch.float64), target_B1 - before_B1, p_BC)
        token_B1 = (own_B1 * _BLOCK + inside_B1).clamp(max=size - 1) + self._part.start
        return self._of_owner(token_B1, block_B1 // self._num_blocks).squeeze(-1)

    def ids_above_zero(self, scaled_V: Tensor) -> list[int]:
        own_K = (scaled_V > -torch.inf).nonzero().flatten() + self._part.start
        counts = self._group.gather(torch.tensor([len(own_K)], device=own_K.device)).flatten().tolist()
        found_TK = self._group.gather(torch.nn.functional.pad(own_K, (0, max(counts) - len(own_K))))
        return [token for ids, count in zip(found_TK.tolist(), counts, strict=True) for token in ids[:count]]

    def tops(self, logits_BV: Tensor, normaliser: Normaliser, counts: Sequence[int]) -> tuple[TopLogprobs, ...]:
        width = max(counts, default=0)
        if not width:
            return ((),) * len(counts)
        place_K2 = best_places(logits_BV, counts)
        row_K, id_K = place_K2.unbind(-1)
        found_3K = torch.stack((row_K.double(), (id_K + self._part.start).double(), logits_BV[row_K, id_K].double()))
        room = len(counts) * width
        padded = torch.nn.functional.pad(found_3K, (0, room - found_3K.size(1)), value=-1.0)
        every_3K = self._group.gather(padded).transpose(0, 1).reshape(3, -1)
        every_3K = every_3K[:, every_3K[0] >= 0]
        return tops_of(every_3K[:2].t().long(), every_3K[2].float(), normaliser, counts)

    def truncate(self, logits_BV: Tensor, scaled_BV: Tensor, cuts: Sequence[Truncation]) -> None:
        active = [index for index, cut in enumerate(cuts) if cut.is_active]
        if not active:
            return
        kept_RV = self._kept(scaled_BV[active], [cuts[index] for index in active])
        for values_BV in (scaled_BV, logits_BV) if scaled_BV is not logits_BV else (scaled_BV,):
            values_BV[active] = values_BV[active].masked_fill_(~kept_RV, -torch.inf)

    def _kept(self, scaled_RV: Tensor, cuts: Sequence[Truncation]) -> Tensor:
        """Return which logits each row's truncation keeps."""
        total, device = self._part.total, scaled_RV.device
        weight_RV = (scaled_RV.double() - self.largest(scaled_RV).double()).exp()
        kept_RV = torch.ones_like(scaled_RV, dtype=torch.bool)
        if any(cut.top_k for cut in cuts):
            counts = [float(min(cut.top_k or total, total)) for cut in cuts]
            target_R1 = torch.tensor(counts, dtype=torch.float64, device=device).unsqueeze(-1)
            kept_RV = self._best(scaled_RV, kept_RV.double(), target_R1)
        if any(cut.top_p < 1 for cut in cuts):
            mass_RV = torch.where(kept_RV, weight_RV, 0)
            share_R1 = torch.tensor([cut.top_p for cut in cuts], dtype=torch.float64, device=device).unsqueeze(-1)
            target_R1 = share_R1 * self._group.gather(mass_RV.sum(-1, keepdim=True)).sum(0)
            is_cut_R1 = share_R1 < 1
            best_RV = self._best(scaled_RV.masked_fill(~kept_RV, -torch.inf), mass_RV, target_R1)
            kept_RV = torch.where(is_cut_R1, best_RV & kept_RV, kept_RV)
        lowest_R1 = torch.tensor([cut.min_p for cut in cuts], dtype=torch.float64, device=device).unsqueeze(-1)
        return kept_RV & (weight_RV >= lowest_R1)

    def _best(self, value_RV: Tensor, weight_RV: Tensor, target_R1: Tensor) -> Tensor:
        """Return the fewest best values of each row whose weights add up to its target, lowest ids among equal ones."""
        bits_RV = (value_RV + 0.0).view(torch.int32).long()  # the sum has no -0
        key_RV = torch.where(bits_RV < 0, ~bits_RV, bits_RV + (1 << 31))  # ordered as the values are
        last_R1, above_R1, mass_R1 = self._threshold(key_RV, weight_RV, target_R1)
        equal_RV = key_RV == last_R1
        equal_TR1 = self._group.gather(equal_RV.sum(-1, keepdim=True))
        each_R1 = mass_R1 / equal_TR1.sum(0)
        missing_R1 = torch.where(each_R1 > 0, (target_R1 - above_R1) / each_R1, 1).ceil().clamp(min=1)
        before_R1 = equal_TR1[: self._group.rank].sum(0)
        return (key_RV > last_R1) | (equal_RV & (equal_RV.cumsum(-1) + before_R1 <= missing_R1))

    def _threshold(self, key_RV: Tensor, weight_RV: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the key at which the weights, added from the largest key down, reach each row's target.

        Also returns the weight of larger keys and that of this key, [R, 1] each. Radix selection: one histogram of
        weights for each digit, added over the ranks.
        """
        last_R1 = torch.zeros_like(key_RV[:, :1])
        above_R1 = torch.zeros_like(target_R1)
        mass_R1 = above_R1
        for shift, bits in _DIGITS:
            is_here_RV = (key_RV >> (shift + bits)) == last_R1
            digit_RV = (key_RV >> shift) & ((1 << bits) - 1)
            own_RH = weight_RV.new_zeros(len(key_RV), 1 << bits)
            own_RH.scatter_add_(1, digit_RV, torch.where(is_here_RV, weight_RV, 0))
            mass_RH = self._group.gather(own_RH).sum(0)
            down_RH = mass_RH.flip(-1).cumsum(-1)
            index_R1 = first_above(down_RH, target_R1 - above_R1, mass_RH.flip(-1), is_reached=True)
            mass_R1 = mass_RH.flip(-1).gather(-1, index_R1)
            above_R1 = above_R1 + down_RH.gather(-1, index_R1) - mass_R1
            last_R1 = (last_R1 << bits) | ((1 << bits) - 1 - index_R1)
        return last_R1, above_R1, mass_R1
