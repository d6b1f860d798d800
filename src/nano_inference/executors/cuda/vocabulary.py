"""`VocabularyTables`: rows of the vocabulary's size for slots with penalties, biases or masks.

Shapes: P rows of a table, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from nano_inference.executors.cuda.sample_records import Tables
from nano_inference.runner import Row
from nano_inference.types import SamplingParams


class RowTable:
    """Owns one table and assigns its rows to slots; grows by doubling."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.table_PN = torch.zeros((1, width), dtype=dtype, device=device)
        self._row_of: dict[int, int] = {}
        self._free = [0]

    def take(self, slot: int) -> int:
        """Return the row of a slot, assigning one first if it has none."""
        if slot not in self._row_of:
            if not self._free:
                self._grow()
            self._row_of[slot] = self._free.pop()
        return self._row_of[slot]

    def drop(self, slot: int) -> None:
        """Free the row of a slot, if it has one."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def write(self, slot: int, values: npt.NDArray[np.int32] | npt.NDArray[np.float32]) -> int:
        """Write a slot's row; return its number."""
        row = self.take(slot)
        self.table_PN[row].copy_(torch.from_numpy(values))
        return row

    def _grow(self) -> None:
        old_PN = self.table_PN
        size = old_PN.size(0)
        self.table_PN = torch.zeros((2 * size, old_PN.size(1)), dtype=old_PN.dtype, device=old_PN.device)
        self.table_PN[:size].copy_(old_PN)
        self._free += range(size, 2 * size)


class VocabularyTables:
    """Owns the tables of counts, biases and masks."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self.count = RowTable(vocab_size, torch.int32, device)
        self.bias = RowTable(vocab_size, torch.float32, device)
        self.mask = RowTable(self._num_words, torch.int32, device)

    @property
    def tables(self) -> Tables:
        """Return the tables; their addresses change when one grows."""
        return Tables(self.count.table_PN, self.bias.table_PN, self.mask.table_PN)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the tables."""
        return tuple(rows.table_PN.data_ptr() for rows in (self.count, self.bias, self.mask))

    def drop(self, slot: int) -> None:
        """Free all rows of a slot."""
        for rows in (self.count, self.bias, self.mask):
            rows.drop(slot)

    def write_counts(self, slot: int, row: Row) -> int:
        """Write twice the occurrences of each token in the output, plus one if the prompt has it; -1: no penalties."""
        if not row.history:
            self.count.drop(slot)
            return -1
        counts = np.zeros(self.vocab_size, np.int32)
        np.add.at(counts, np.array(row.history[row.num_prompt :], np.int64), 2)
        counts[np.array(row.history[: row.num_prompt], np.int64)] |= 1
        return self.count.write(slot, counts)

    def write_bias(self, slot: int, params: SamplingParams, banned: Iterable[int] = ()) -> int:
        """Write the bias of each token, -inf for those that are not allowed; -1: no token has one."""
        excluded = tuple(banned)
        if not params.logit_bias and params.allowed_token_ids is None and not excluded:
            self.bias.drop(slot)
            return -1
        values = np.zeros(self.vocab_size, np.float32)
        if params.logit_bias:
            values[np.array(list(params.logit_bias), np.int64)] = list(params.logit_bias.values())
        if params.allowed_token_ids is not None:
            is_allowed = np.zeros(self.vocab_size, bool)
            is_allowed[np.array(sorted(params.allowed_token_ids), np.int64)] = True
            values[~is_allowed] = -np.inf
        values[np.array(excluded, np.int64)] = -np.inf
        return self.bias.write(slot, values)

    def write_mask(self, slot: int, mask: bytes | None) -> int:
        """Write a matcher's mask; -1: none."""
        if mask is None:
            self.mask.drop(slot)
            return -1
        padded = mask[: 4 * self._num_words].ljust(4 * self._num_words, b"\0")
        return self.mask.write(slot, np.frombuffer(padded, np.int32).copy())
