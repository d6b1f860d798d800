"""One step of any executor: from a scheduled batch to what each row asked for.

An executor supplies the forward pass (`Forward`); this gathers the rows, scores, pools and draws.

Shapes: T tokens of the step, K those that anything is asked of, B rows that draw, S rows scored at once, E hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nano_inference.executors.batch import Rows, Scored, drawn, in_step_order, split_at_answers, wanted
from nano_inference.logprobs import Normalise, at, floor_logprobs, top_logprobs
from nano_inference.models.program import Program
from nano_inference.runner import Row, RowResult
from nano_inference.types import TopLogprobs

_SCORE_ELEMENTS = 1 << 24
"""Logits that exist at once while a prompt is scored: [T, V] is never made whole."""

Sampler = Callable[[Tensor, Sequence[Row]], Sequence[RowResult]]
"""Draws one token a row from float32 logits [B, V], which it may overwrite; `sampling.draw` is the one of spec 9."""
Result = TypeVar("Result")


class Forward(Protocol):
    """The forward pass of an executor over its own cache. Results may lie in memory that the next call overwrites."""

    program: Program
    device: torch.device

    def hidden(self, rows: Rows, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        """Return the residual [K, E] behind the last layer of the tokens `kept`, ascending; rows come in step order.

        Without `windows` every token reads all keys before it; only a program with `has_full_decode` is asked for that.
        """

    def step_logits(self, rows: Rows, kept: Sequence[int]) -> Tensor:
        """Return the float32 logits [K, V] of the tokens `kept`: `hidden` and `logits` at once."""

    def final(self, hidden_SE: Tensor) -> Tensor:
        """Return the residual behind the last norm, [S, E]."""

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V] of a residual, on a device that has float64, as sampling needs it."""


class InferenceMode:
    """Owns torch's inference mode during a step: an interruption on the way out of its block would leave it on."""

    def __init__(self) -> None:
        self._mode: torch.inference_mode | None = None

    def run(self, work: Callable[[], Result]) -> Result:
        """Do some work in inference mode. Raises `MemoryError` when it needs more memory than there is.

        Torch says so in errors of its own, on a CPU in a plain `RuntimeError`.
        """
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
            with suppress(AttributeError):  # it was never entered
                self._mode.__exit__(None, None, None)
            self._mode = None


def run_step(forward: Forward, rows: Rows, sampler: Sampler, normalise: Normalise) -> dict[int, RowResult]:
    """Compute the rows, score what is asked for, draw; return a result for each row's id."""
    rows = in_step_order(rows)
    seen, places = drawn(rows)
    is_plain = all(row.score_from is None and row.pool_from is None for row in rows)
    if is_plain and seen and not forward.program.has_full_decode:
        return _by_row(rows, sampler(forward.step_logits(rows, places), seen))
    asked = wanted(rows, places)
    hidden_KE = _hidden(forward, rows, asked.kept)
    scores = score_rows(forward, rows, asked.scored, hidden_KE, normalise)
    sums = _pool(forward, asked.pooled, hidden_KE)
    found = _by_row(rows, _draw(forward, seen, asked.places, hidden_KE, sampler))
    return found | {
        rows[index].id: _with_findings(found[rows[index].id], scores.get(index), sums.get(index, ()))
        for index in scores.keys() | sums.keys()
    }


def _by_row(rows: Rows, draws: Sequence[RowResult]) -> dict[int, RowResult]:
    """Return a result for each row's id: its draws in one, in order; nothing for a row without any."""
    found: dict[int, RowResult] = {row.id: RowResult(id=row.id) for row in rows if not row.num_sampled}
    for one in draws:
        before = found.get(one.id)
        found[one.id] = one if before is None else _joined(before, one)
    return found


def _joined(first: RowResult, second: RowResult) -> RowResult:
    """Return the tokens of two results of one row as one."""
    return first._replace(
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        extras=first.extras + second.extras,
    )


def _with_findings(found: RowResult, scores: RowResult | None, total: tuple[float, ...]) -> RowResult:
    """Add what scoring and pooling found to a row's draws."""
    if scores is None:
        return found._replace(pooled=total)
    return found._replace(
        scores=scores.scores, score_tops=scores.score_tops, score_ranks=scores.score_ranks, pooled=total
    )


def _hidden(forward: Forward, rows: Rows, kept: Sequence[int]) -> Tensor:
    """Return the hidden states [K, E] of the kept tokens; in two parts where windows restrict prompts only."""
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


def _draw(
    forward: Forward, seen: Sequence[Row], places: Sequence[int], hidden_KE: Tensor, sampler: Sampler
) -> Sequence[RowResult]:
    """Draw each token from the logits of the one that it follows."""
    if not seen:
        return ()
    are_all = places == list(range(hidden_KE.size(0)))  # as in most steps, whose hidden states need no copy
    hidden_BE = hidden_KE if are_all else hidden_KE[torch.tensor(places, device=forward.device)]
    return sampler(forward.logits(hidden_BE), seen)


def _pool(forward: Forward, found: Mapping[int, range], hidden_KE: Tensor) -> dict[int, tuple[float, ...]]:
    """Return the float32 sum of the final hidden states that each row pools; the norm sees all rows' at once."""
    if not found:
        return {}
    index_S = torch.tensor([index for indices in found.values() for index in indices], device=forward.device)
    final_SE = forward.final(hidden_KE[index_S]).float()
    parts = torch.split(final_SE, [len(indices) for indices in found.values()])
    sums = torch.stack([part.sum(dim=0) for part in parts]).tolist()
    return {row: tuple(total) for row, total in zip(found, sums, strict=True)}


def score_rows(
    forward: Forward, rows: Sequence[Row], found: Mapping[int, Scored], hidden_KE: Tensor, normalise: Normalise
) -> dict[int, RowResult]:
    """Return the log-probabilities of known tokens for the index of each row that wants any.

    All rows' positions go through the head together, a bounded piece of [S, V] at a time.
    """
    targets = _pack(rows, found)
    width = max(1, _SCORE_ELEMENTS // forward.program.vocab_size)
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    ranks: list[int] = []
    for start in range(0, len(targets.tokens), width):
        piece = slice(start, start + width)
        index_S, target_S = torch.tensor([targets.indices[piece], targets.tokens[piece]], device=forward.device)
        logits_SV = forward.logits(hidden_KE[index_S])
        normaliser = normalise(logits_SV, targets.temperatures[piece])
        own_S1 = at(logits_SV, target_S.to(logits_SV.device))
        logprobs += floor_logprobs(normaliser.logprobs(own_S1).squeeze(-1)).tolist()
        ranks += (logits_SV > own_S1).sum(dim=-1).add_(1).tolist()
        tops += top_logprobs(logits_SV, normaliser, targets.num_tops[piece])
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


class _Targets(NamedTuple):
    """Known tokens of several rows, one after another, with what each row wants to know of them."""

    indices: list[int]
    """Which of the K hidden states they follow."""
    tokens: list[int]
    temperatures: list[float]
    num_tops: list[int]


def _pack(rows: Sequence[Row], found: Mapping[int, Scored]) -> _Targets:
    """Put the known tokens of all rows one after another."""
    packed = _Targets([], [], [], [])
    for index, known in found.items():
        row, size = rows[index], len(known.targets)
        packed.indices.extend(known.indices)
        packed.tokens.extend(known.targets)
        packed.temperatures.extend([row.params.temperature if row.logprobs_mode != "raw" else 1.0] * size)
        packed.num_tops.extend([row.params.prompt_logprobs or 0] * size)
    return packed
