"""`VocabularyTables`: counts, biases and masks of the slots whose requests have penalties, biases or matchers.

Shapes: P slots, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nano_inference.core.step import Row
from nano_inference.executors.cuda.sample_records import Tables
from nano_inference.types import SamplingParams


class VocabularyTables:
    """Owns one row of each table per slot, allocated once: captured graphs have the addresses."""

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 1) -> None:
        self.vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((num_slots, width), dtype=dtype, device=device)

        self.tables = Tables(
            count=zeros(vocab_size, torch.int32),
            bias=zeros(vocab_size, torch.float32),
            mask=zeros(self._num_words, torch.int32),
        )

    def write_counts(self, slot: int, row: Row) -> int:
        """Write twice the occurrences of each token in the output, plus one if the prompt has it.

        Return the row of the table, as the other functions do; -1: the request has no penalties.
        """
        if not row.history:
            return -1
        counts = np.zeros(self.vocab_size, np.int32)
        np.add.at(counts, np.array(row.history[row.num_prompt :], np.int64), 2)
        counts[np.array(row.history[: row.num_prompt], np.int64)] |= 1
        return _written(self.tables.count, slot, counts)

    def write_bias(self, slot: int, params: SamplingParams, banned: Iterable[int] = ()) -> int:
        """Write the bias of each token, -inf for those that are not allowed; -1: no token has one."""
        excluded = tuple(banned)
        if not params.logit_bias and params.allowed_token_ids is None and not excluded:
            return -1
        values = np.zeros(self.vocab_size, np.float32)
        if params.logit_bias:
            values[np.array(list(params.logit_bias), np.int64)] = list(params.logit_bias.values())
        if params.allowed_token_ids is not None:
            is_allowed = np.zeros(self.vocab_size, bool)
            is_allowed[np.array(sorted(params.allowed_token_ids), np.int64)] = True
            values[~is_allowed] = -np.inf
        values[np.array(excluded, np.int64)] = -np.inf
        return _written(self.tables.bias, slot, values)

    def write_mask(self, slot: int, mask: bytes | None) -> int:
        """Write a matcher's mask; -1: none."""
        if mask is None:
            return -1
        padded = mask[: 4 * self._num_words].ljust(4 * self._num_words, b"\0")
        return _written(self.tables.mask, slot, np.frombuffer(padded, np.int32).copy())


def _written(table_PN: Tensor, slot: int, values: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> int:
    table_PN[slot].copy_(torch.from_numpy(values))
    return slot
