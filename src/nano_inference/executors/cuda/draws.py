"""`DrawMemory`: draws tokens from logits with the CUDA sampler, for passes that are no windows.

Shapes: B rows, V vocabulary, N top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.executors.cuda.launchers import SamplingKernels
from nano_inference.executors.cuda.sample_records import RUNNING, Scratch
from nano_inference.executors.cuda.slots import (
    SlotMemory,
    excluded_by_bias,
    needs_reference,
    tops_of,
    write_params,
    write_stops,
)
from nano_inference.executors.cuda.vocabulary import VocabularyTables
from nano_inference.executors.sampling import draw as reference_draw
from nano_inference.executors.sampling import results
from nano_inference.executors.truncation import truncation_of
from nano_inference.runner import DrawExtras, Row, RowResult
from nano_inference.types import TopLogprobs


class DrawMemory:
    """Owns slots for draws of as many rows at a time as `scratch` has."""

    def __init__(self, kernels: SamplingKernels, scratch: Scratch, vocab_size: int) -> None:
        self._kernels, self._scratch = kernels, scratch
        num_rows, device = scratch.token.size(0), scratch.token.device
        self._slots = SlotMemory(num_rows, 0, 1, device)
        self._vocabulary = VocabularyTables(vocab_size, device, num_rows)

    def draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        """Sample one token a row from float32 logits, as `sampling.draw` does."""
        special = [index for index, row in enumerate(rows) if needs_reference(row)]
        found: dict[int, RowResult] = {}
        if special:
            some = reference_draw(logits_BV[special], [rows[index] for index in special])
            found = dict(zip(special, some, strict=True))
        plain = [index for index in range(len(rows)) if index not in found]
        for start in range(0, len(plain), self._slots.num_slots):
            piece = plain[start : start + self._slots.num_slots]
            logits_PV = logits_BV if len(piece) == len(rows) else logits_BV[piece]
            drawn = self._draw(logits_PV, [rows[index] for index in piece])
            found |= zip(piece, drawn, strict=True)
        return [found[index] for index in range(len(rows))]

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        scratch, slots = self._scratch, self._slots.slots
        for slot, row in enumerate(rows):
            self._write(slot, row)
        self._slots.push()
        slot_B, tables = self._slots.slot_S.narrow(0, 0, len(rows)), self._vocabulary.tables
        has_cut, has_tops = any(truncation_of(row).is_active for row in rows), any(row.params.logprobs for row in rows)
        self._kernels.adjust(scratch, logits_BV, slot_B, slots, tables)
        if has_cut:
            self._kernels.cut(scratch, slot_B, slots)
        self._kernels.draw(scratch, logits_BV, slot_B, slots, has_cut=has_cut)
        if has_tops:
            self._kernels.tops(scratch, logits_BV, slot_B, slots, has_cut=has_cut)
        return self._read(rows, has_tops=has_tops)

    def _write(self, slot: int, row: Row) -> None:
        """Write all parameters and tables of a row."""
        fields, vocabulary = self._slots.fields, self._vocabulary
        write_params(fields, slot, row)
        write_stops(fields, slot, row.banned)
        fields["min_tokens"][slot] = 1 if row.banned else 0
        fields["num_new"][slot] = 0
        fields["state"][slot] = RUNNING
        fields["position"][slot] = row.start + len(row.tokens) - 1
        fields["bias_row"][slot] = vocabulary.write_bias(slot, row.params, excluded_by_bias(row))
        fields["mask_row"][slot] = vocabulary.write_mask(slot, row.mask)
        fields["count_row"][slot] = vocabulary.write_counts(slot, row)

    def _read(self, rows: Sequence[Row], *, has_tops: bool) -> list[RowResult]:
        scratch, size = self._scratch, len(rows)
        floats = (scratch.logprob[:size].view(torch.int32), scratch.raw_logprob[:size].view(torch.int32))
        words_3B = torch.stack((scratch.token[:size], *floats)).cpu()
        tokens = words_3B[0].tolist()
        logprobs, raw_logprobs = (words_3B[index].view(torch.float32).tolist() for index in (1, 2))
        tops: list[TopLogprobs] = []
        if has_tops:
            tops += map(tops_of, scratch.top_id[:size].tolist(), scratch.top_logprob[:size].tolist())
        extras: list[DrawExtras] = []
        if any(row.params.raw_logprobs for row in rows):
            extras = [
                DrawExtras(value if row.params.raw_logprobs else None)
                for row, value in zip(rows, raw_logprobs, strict=True)
            ]
        return results(rows, tokens, logprobs, tops, extras)
