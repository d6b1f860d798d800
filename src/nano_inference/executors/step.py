"""One step of any executor: runs the forward pass (`Forward`), then scores, pools and draws.

Shapes: T tokens of the step, K kept tokens (those whose hidden states are needed), B draws, S tokens scored at once,
E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nano_inference.core.step import Row, RowResult
from nano_inference.executors.ahead import joined, sample_ahead
from nano_inference.executors.batch import Rows, Scored, drawn, in_step_order, split_at_answers, wanted
from nano_inference.executors.logprobs import floor_logprobs
from nano_inference.executors.sampling import Known, adjust_known, is_adjusted
from nano_inference.executors.vocabulary import Vocabulary
from nano_inference.models.program import Program
from nano_inference.types import TopLogprobs

SCORE_ELEMENTS = 1 << 24  # largest number of logits in memory while a prompt is scored, instead of all [T, V]

Sampler = Callable[[Tensor, Sequence[Row]], Sequence[RowResult]]
"""Draws one token per row from float32 logits [B, V], which it may overwrite; `sampling.draw` is the reference."""
Result = TypeVar("Result")


class Forward(Protocol):
    """An executor's forward pass over its own cache. The next call may overwrite the memory of a result."""

    program: Program
    device: torch.device

    def hidden(self, rows: Rows, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        """Return the residual [K, E] after the last layer for the tokens `kept` (ascending); rows in step order.

        `windows=False` lets every token attend to all earlier keys; only for programs with `has_full_decode`.
        """

    def step_logits(self, rows: Rows, kept: Sequence[int]) -> Tensor:
        """Return float32 logits [K, V] of the tokens `kept`: `hidden` and `logits` in one call."""

    def final(self, hidden_SE: Tensor) -> Tensor:
        """Apply the final norm to a residual [S, E]."""

    def logits(self, hidden_SE: Tensor, adapters: Sequence[int] = ()) -> Tensor:
        """Return float32 logits [S, V] of a residual, on a device that supports float64, which sampling needs.

        `adapters` are the numbers of the rows' adapters, 0 for none; () if no row has one.
        """


class InferenceMode:
    """Owns torch's inference mode during a step: an interruption while the `with` block exits can leave it on."""

    def __init__(self) -> None:
        self._mode: torch.inference_mode | None = None

    def run(self, work: Callable[[], Result]) -> Result:
        """Call `work` in inference mode. Turns torch's out-of-memory errors into `MemoryError`."""
        self._mode = torch.inference_mode()
        try:
            with self._mode:
                return work()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise MemoryError("a step needs more memory than there is") from error
            raise

    def recover(self) -> None:
        """Leave inference mode if an exception left it on."""
        if self._mode is not None:
            with suppress(AttributeError):  # raised if it was never entered
                self._mode.__exit__(None, None, None)
            self._mode = None


def run_step(forward: Forward, rows: Rows, sampler: Sampler, vocabulary: Vocabulary) -> dict[int, RowResult]:
    """Run the forward pass, score, pool and draw; return a result for each row's id.

    Runs again for rows that may sample more tokens (`sample_ahead`).
    """
    return sample_ahead(rows, lambda rows: _run_once(forward, rows, sampler, vocabulary))


def _run_once(forward: Forward, rows: Rows, sampler: Sampler, vocabulary: Vocabulary) -> dict[int, RowResult]:
    rows = in_step_order(rows)
    seen, places = drawn(rows)
    is_plain = all(row.score_from is None and row.pool_from is None for row in rows)
    if is_plain and seen and not forward.program.has_full_decode:
        return _by_row(rows, sampler(forward.step_logits(rows, places), seen))
    asked = wanted(rows, places)
    hidden_KE = _hidden(forward, rows, asked.kept)
    scores = score_rows(forward, rows, asked.scored, hidden_KE, vocabulary)
    sums = _pool(forward, asked.pooled, hidden_KE)
    drawn_rows: Sequence[RowResult] = ()
    if seen:
        are_all = asked.places == list(range(hidden_KE.size(0)))  # the usual case: no copy is needed
        hidden_BE = hidden_KE if are_all else hidden_KE[torch.tensor(asked.places, device=forward.device)]
        drawn_rows = sampler(forward.logits(hidden_BE, _adapters(seen)), seen)
    found = _by_row(rows, drawn_rows)
    for index in scores.keys() | sums.keys():
        row_id, own = rows[index].id, scores.get(index, RowResult(id=rows[index].id))
        found[row_id] = found[row_id]._replace(
            scores=own.scores, score_tops=own.score_tops, score_ranks=own.score_ranks, pooled=sums.get(index, ())
        )
    return found


def _adapters(rows: Sequence[Row]) -> list[int]:
    """Return the number of each row's adapter; empty if none has one."""
    return [row.adapter for row in rows] if any(row.adapter for row in rows) else []


def _by_row(rows: Rows, draws: Sequence[RowResult]) -> dict[int, RowResult]:
    """Return a result for each row's id: its draws concatenated in order; an empty result for a row without draws."""
    found: dict[int, RowResult] = {row.id: RowResult(id=row.id) for row in rows if not row.num_sampled}
    for one in draws:
        before = found.get(one.id)
        found[one.id] = one if before is None else joined(before, one)
    return found


def _hidden(forward: Forward, rows: Rows, kept: Sequence[int]) -> Tensor:
    """Return the hidden states [K, E] of the kept tokens; in two passes if windows restrict prompts only."""
    if not forward.program.has_full_decode:
        return forward.hidden(rows, kept)
    found: list[Tensor] = []
    order: list[int] = []
    wanted_places = frozenset(kept)
    for (part, places), windows in zip(split_at_answers(rows), (True, False), strict=True):
        if not part:
            continue
        own = [index for index, place in enumerate(places) if place in wanted_places]
        found.append(forward.hidden(part, own, windows=windows).clone())  # the next part overwrites it
        order += (places[index] for index in own)
    by_place = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.long, device=forward.device)
    return torch.cat(found)[by_place]


def _pool(forward: Forward, found: Mapping[int, range], hidden_KE: Tensor) -> dict[int, tuple[float, ...]]:
    """Return, for each row index, the float32 sum of its final hidden states; one call normalises those of all rows."""
    if not found:
        return {}
    index_S = torch.tensor([index for indices in found.values() for index in indices], device=forward.device)
    final_SE = forward.final(hidden_KE[index_S]).float()
    parts = torch.split(final_SE, [len(indices) for indices in found.values()])
    sums = torch.stack([part.sum(dim=0) for part in parts]).tolist()
    return {row: tuple(total) for row, total in zip(found, sums, strict=True)}


def score_rows(
    forward: Forward,
    rows: Sequence[Row],
    found: Mapping[int, Scored],
    hidden_KE: Tensor,
    vocabulary: Vocabulary,
    most_logits: int = SCORE_ELEMENTS,
) -> dict[int, RowResult]:
    """Return the log-probabilities of the targets in `found`, by row index.

    Targets of all rows share calls of the head, at most `most_logits` logits at a time, or those of one target.
    """
    indices: list[int] = []  # those of the targets of all rows, among the K hidden states that precede them
    tokens: list[int] = []
    drawn: list[Known | None] = []  # targets whose draws are repeated
    temperatures: list[float] = []
    num_tops: list[int] = []
    adapted: list[Row] = []  # the row of each target
    for index, known in found.items():
        row, size = rows[index], len(known.targets)
        indices += known.indices
        tokens += known.targets
        adapted += [row] * size
        if is_adjusted(row):
            drawn += [Known(row, known.first + place) for place in range(size)]
        else:
            drawn += [None] * size
        temperature = (row.score_params or row.params).temperature
        temperatures += [temperature if row.logprobs_mode != "raw" else 1.0] * size
        num_tops += [row.params.prompt_logprobs or 0] * size
    width = max(1, most_logits // forward.program.vocab_size)
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    ranks: list[int] = []
    for start in range(0, len(tokens), width):
        piece = slice(start, start + width)
        index_S, target_S = torch.tensor([indices[piece], tokens[piece]], device=forward.device)
        logits_SV = forward.logits(hidden_KE[index_S], _adapters(adapted[piece]))
        adjust_known(logits_SV, drawn[piece], vocabulary)
        normaliser = vocabulary.normalise(logits_SV, temperatures[piece])
        own_S1 = vocabulary.at(logits_SV, target_S.to(logits_SV.device))
        logprobs += floor_logprobs(normaliser.logprobs(own_S1).squeeze(-1)).tolist()
        ranks += vocabulary.ranks(logits_SV, own_S1)
        tops += vocabulary.tops(logits_SV, normaliser, num_tops[piece])
    scores: dict[int, RowResult] = {}
    start = 0
    for index, known in found.items():
        own = slice(start, start + len(known.targets))
        scores[index] = RowResult(
            id=rows[index].id,
            scores=tuple(logprobs[own]),
            score_tops=tuple(tops[own]),
            score_ranks=tuple(ranks[own]),
        )
        start = own.stop
    return scores
