"""nanochat's sampling: one `torch.multinomial` over all rows for each column of tokens.

`torch.multinomial` of one sample is argmax(p / q), with q a matrix of exponential random numbers that does not depend
on p. A row's random numbers therefore depend only on the number of rows and its column. `Columns` draws these matrices
in order and keeps each until every row has used its line. So tokens equal those of upstream's loop, also for rows that
are ahead (a tool's tokens are computed as one chunk) and after rows have ended.

Shapes: B rows of a call, V vocabulary, K candidates of a row (V, or top-k), S rows that are sampled now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_inference.core.step import Row, RowResult
from nano_inference.executors.logprobs import at, normalise
from nano_inference.executors.sampling import draw, results

KEPT_BYTES = 32 << 20  # most bytes of random numbers kept per call


def candidates(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the candidates' probabilities [B, K] and ids [B, K], or None for all ids.

    Candidates outside top-p have probability 0; the others are not renormalised, which sampling does not need.
    """
    ids_BK = None
    if top_k is not None and top_k > 0:
        logits_BV, ids_BK = torch.topk(logits_BV, min(top_k, logits_BV.size(-1)), dim=-1)
    p_BK = torch.softmax(logits_BV / temperature, dim=-1)
    if top_p is not None and top_p < 1:
        sorted_BK, order_BK = p_BK.sort(dim=-1, descending=True, stable=True)
        before_BK = sorted_BK.double().cumsum(-1) - sorted_BK
        is_outside_BK = torch.zeros_like(p_BK, dtype=torch.bool).scatter_(-1, order_BK, before_BK >= top_p)
        p_BK = p_BK.masked_fill(is_outside_BK, 0.0)
    return p_BK, ids_BK


def sample_next_token(
    logits: Tensor,
    rng: torch.Generator | None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Sample one token per row from `logits` [B, V]; return [B, 1] int64. Temperature 0 is argmax, top_k 0 no filter.

    Raises `AssertionError` for a negative temperature, as upstream does.
    """
    assert temperature >= 0.0, "temperature must be non-negative"
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    p_BK, ids_BK = candidates(logits, temperature, top_k, top_p)
    choice_B1 = torch.multinomial(p_BK, num_samples=1, generator=rng)
    return choice_B1 if ids_BK is None else ids_BK.gather(1, choice_B1)


class Columns:
    """Owns the generator of one call, and the random numbers that some row may still need.

    If a row is far ahead of the others (its tool wrote a long result), only the generator's state before each column is
    kept, a thousandth of the size, and the numbers are drawn again.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        device: torch.device,
        *,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`kept_bytes`: most bytes of random numbers to keep; two columns are always kept."""
        self._kept_bytes = kept_bytes
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._rng = torch.Generator(device=device).manual_seed(seed)
        self._next = [0] * num_rows  # first column that each row may still need; -1 for a row that has ended
        self._states: dict[int, Tensor] = {}  # generator state before each column that may still be needed
        self._numbers: dict[int, Tensor] = {}  # latest columns, in order of drawing
        self._num_drawn = 0

    def choose(self, logits_SV: Tensor, rows: Sequence[int], columns: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Sample for `rows`, each at its column; return tokens [S] and log-probabilities [S]."""
        if self.temperature == 0.0:
            token_S1 = logits_SV.argmax(dim=-1, keepdim=True)
            normaliser = normalise(logits_SV, [1.0] * len(rows))
            return token_S1[:, 0], normaliser.logprobs(at(logits_SV, token_S1[:, 0]))[:, 0]
        p_SK, ids_SK = candidates(logits_SV, self.temperature, self.top_k, self.top_p)
        choice_S1 = (p_SK / self._numbers_of(rows, columns, p_SK)).argmax(dim=-1, keepdim=True)
        logprob_S = (p_SK.gather(-1, choice_S1)[:, 0] / p_SK.sum(-1)).log()
        token_S1 = choice_S1 if ids_SK is None else ids_SK.gather(-1, choice_S1)
        for row, column in zip(rows, columns, strict=True):
            self._next[row] = column  # not column + 1: an interrupted step is repeated
        first = min((column for column in self._next if column >= 0), default=self._num_drawn)
        for kept in (self._numbers, self._states):
            for column in [column for column in kept if column < first]:
                del kept[column]
        return token_S1[:, 0], logprob_S

    def end(self, row: int) -> None:
        """Record that a row has ended and needs no more columns."""
        self._next[row] = -1

    def _numbers_of(self, rows: Sequence[int], columns: Sequence[int], like_SK: Tensor) -> Tensor:
        if len(rows) == len(self._next) and len(set(columns)) == 1 and list(rows) == list(range(len(rows))):
            return self._column(columns[0], like_SK)  # the usual case, without a copy
        q_SK = torch.empty_like(like_SK)
        for column in dict.fromkeys(columns):
            places = [place for place, other in enumerate(columns) if other == column]
            q_SK[places] = self._column(column, like_SK)[[rows[place] for place in places]]
        return q_SK

    def _column(self, column: int, like_SK: Tensor) -> Tensor:
        """Return a column's random numbers [B, K], in dtype and device of `like_SK`; draw earlier ones first."""
        while self._num_drawn <= column:
            self._states[self._num_drawn] = self._rng.get_state()
            self._keep(self._num_drawn, self._draw(like_SK))
            self._num_drawn += 1
        if column not in self._numbers:
            now = self._rng.get_state()
            self._rng.set_state(self._states[column])
            self._keep(column, self._draw(like_SK))
            self._rng.set_state(now)
        return self._numbers[column]

    def _draw(self, like_SK: Tensor) -> Tensor:
        """Return the numbers [B, K] that `exponential_` would draw, and leave the generator as it would."""
        numbers_BK = like_SK.new_empty(len(self._next), like_SK.size(-1))
        if numbers_BK.device.type != "cpu":
            return numbers_BK.exponential_(1, generator=self._rng)
        uniform_K = torch.empty(like_SK.size(-1), dtype=torch.float64)
        for numbers_K in numbers_BK:  # 2.5 times as fast: exponential_ computes one logarithm at a time
            numbers_K.copy_(uniform_K.uniform_(generator=self._rng).neg_().log1p_().neg_())
        return numbers_BK

    def _keep(self, column: int, numbers_BK: Tensor) -> None:
        """Keep a column's numbers, and delete the oldest columns beyond the limit."""
        self._numbers[column] = numbers_BK
        while len(self._numbers) > max(2, self._kept_bytes // numbers_BK.nbytes):
            del self._numbers[next(iter(self._numbers))]


class ColumnSampler:
    """Samples for an engine: by `Columns` for registered requests, by `sampling.draw` for others."""

    def __init__(self) -> None:
        self._calls: dict[int, Columns] = {}

    def open(self, request_id: int, columns: Columns) -> None:
        """Register the columns of a request."""
        self._calls[request_id] = columns

    def close(self, request_id: int) -> None:
        """Unregister a request."""
        self._calls.pop(request_id, None)

    def __call__(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        """Sample one token per row; implements `executors.step.Sampler`."""
        if len({row.request_id for row in rows}) == 1:
            return self._draw(logits_BV, rows)  # the usual case, without a copy of the logits
        found: dict[int, RowResult] = {}
        for request_id in dict.fromkeys(row.request_id for row in rows):
            places = [i for i, row in enumerate(rows) if row.request_id == request_id]
            found |= zip(places, self._draw(logits_BV[places], [rows[i] for i in places]), strict=True)
        return [found[i] for i in range(len(rows))]

    def _draw(self, logits_SV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        columns = self._calls.get(rows[0].request_id)
        if columns is None:
            return draw(logits_SV, rows)
        places = [row.start + len(row.tokens) - row.num_prompt for row in rows]
        token_S, logprob_S = columns.choose(logits_SV, [row.sample_index for row in rows], places)
        return results(rows, token_S.tolist(), logprob_S.tolist())
