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

from nano_inference.executors.batch import Pooled, Sampled, Scored, Wanted, in_step_order, lay, split_at_answers, wanted
from nano_inference.executors.step_input import Laid
from nano_inference.logprobs import Normalise, at, floor_logprobs, top_logprobs
from nano_inference.models.program import Program
from nano_inference.sampling import Draw
from nano_inference.types import Row, RowResult, ScheduledBatch, TopLogprobs

_SCORE_ELEMENTS = 1 << 24
"""Logits that exist at once while a prompt is scored: [T, V] is never made whole."""

Sampler = Callable[[Tensor, Sequence[Row]], Draw]
"""Draws one token a row from float32 logits [B, V], which it may overwrite; `sampling.draw` is the one of spec 9."""
Result = TypeVar("Result")


class Forward(Protocol):
    """The forward pass of an executor over its own cache. Results may lie in memory that the next call overwrites."""

    program: Program
    device: torch.device

    def hidden(self, laid: Laid, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        """Return the residual [K, E] behind the last layer of the tokens `kept`, ascending.

        Without `windows` every token reads all keys before it; only a program with `has_full_decode` is asked for that.
        """

    def step_logits(self, laid: Laid, kept: Sequence[int]) -> Tensor:
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


def run_step(forward: Forward, batch: ScheduledBatch, sampler: Sampler, normalise: Normalise) -> dict[int, RowResult]:
    """Compute the rows, score what is asked for, draw; return a result for each row's id."""
    rows = in_step_order(batch.rows)
    laid = lay(rows)
    asked = wanted(rows, laid.spans)
    found = _find(forward, rows, laid, asked, sampler, normalise)
    last = {one.row: place for place, one in enumerate(asked.sampled)}
    return {row.id: _result(row, last.get(i), i, found) for i, row in enumerate(rows)}


def _find(
    forward: Forward, rows: tuple[Row, ...], laid: Laid, asked: Wanted, sampler: Sampler, normalise: Normalise
) -> _Found:
    """Compute the step; draw, score and pool what is asked for."""
    if forward.program.has_full_decode:
        hidden_KE = _hidden_in_parts(forward, rows, laid, asked.kept)
    elif asked.sampled and not asked.scored and not asked.pooled:
        logits_BV = forward.step_logits(laid, asked.kept)
        return _Found(sampler(logits_BV, [one.seen for one in asked.sampled]), {}, {})
    else:
        hidden_KE = forward.hidden(laid, asked.kept)
    scores = score_rows(forward, rows, asked.scored, hidden_KE, normalise)
    sums = _pool(forward, asked.pooled, hidden_KE)
    return _Found(_draw(forward, asked.sampled, hidden_KE, sampler), scores, sums)


def _hidden_in_parts(forward: Forward, rows: tuple[Row, ...], laid: Laid, kept: Sequence[int]) -> Tensor:
    """Return the hidden states [K, E] of the kept tokens where windows restrict the prompts' queries only."""
    found: list[Tensor] = []
    order: list[int] = []
    wanted_places = frozenset(kept)
    for part, windows in zip(split_at_answers(rows, laid), (True, False), strict=True):
        if not part.places:
            continue
        own = [index for index, place in enumerate(part.places) if place in wanted_places]
        found.append(forward.hidden(part.laid, own, windows=windows).clone())  # the next part overwrites it
        order += (part.places[index] for index in own)
    by_place = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.long, device=forward.device)
    return torch.cat(found)[by_place]


def _draw(forward: Forward, found: Sequence[Sampled], hidden_KE: Tensor, sampler: Sampler) -> Draw:
    """Draw each token from the logits of the one that it follows."""
    if not found:
        return Draw((), (), ())
    places = [one.place for one in found]
    are_all = places == list(range(hidden_KE.size(0)))  # as in most steps, whose hidden states need no copy
    hidden_BE = hidden_KE if are_all else hidden_KE[torch.tensor(places, device=forward.device)]
    return sampler(forward.logits(hidden_BE), [one.seen for one in found])


def _pool(forward: Forward, found: Sequence[Pooled], hidden_KE: Tensor) -> dict[int, tuple[float, ...]]:
    """Return the float32 sum of the final hidden states that each row pools; the norm sees all rows' at once."""
    if not found:
        return {}
    index_S = torch.tensor([index for one in found for index in one.indices], device=forward.device)
    final_SE = forward.final(hidden_KE[index_S]).float()
    parts = torch.split(final_SE, [len(one.indices) for one in found])
    sums = torch.stack([part.sum(dim=0) for part in parts]).tolist()
    return {one.row: tuple(total) for one, total in zip(found, sums, strict=True)}


def score_rows(
    forward: Forward, rows: Sequence[Row], found: Sequence[Scored], hidden_KE: Tensor, normalise: Normalise
) -> dict[int, Scores]:
    """Return the log-probabilities of known tokens for each row that wants any.

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
    scores: dict[int, Scores] = {}
    start = 0
    for known in found:
        end = start + len(known.targets)
        scores[known.row] = Scores(tuple(logprobs[start:end]), tuple(tops[start:end]), tuple(ranks[start:end]))
        start = end
    return scores


class _Targets(NamedTuple):
    """Known tokens of several rows, one after another, with what each row wants to know of them."""

    indices: list[int]
    """Which of the K hidden states they follow."""
    tokens: list[int]
    temperatures: list[float]
    num_tops: list[int]


def _pack(rows: Sequence[Row], found: Sequence[Scored]) -> _Targets:
    """Put the known tokens of all rows one after another."""
    packed = _Targets([], [], [], [])
    for known in found:
        row, size = rows[known.row], len(known.targets)
        packed.indices.extend(known.indices)
        packed.tokens.extend(known.targets)
        packed.temperatures.extend([row.params.temperature if row.logprobs_mode != "raw" else 1.0] * size)
        packed.num_tops.extend([row.params.prompt_logprobs or 0] * size)
    return packed


class Scores(NamedTuple):
    """What scoring found for one row."""

    logprobs: tuple[float, ...] = ()
    tops: tuple[TopLogprobs, ...] = ()
    ranks: tuple[int, ...] = ()


_NO_SCORES = Scores()


class _Found(NamedTuple):
    """What a step found: tokens drawn, scores and sums of hidden states by the place of their row in the step."""

    drawn: Draw
    scores: Mapping[int, Scores]
    sums: Mapping[int, tuple[float, ...]]


def _result(row: Row, last: int | None, place: int, found: _Found) -> RowResult:
    """Put one row's findings together; `last` is the place of its last token among those drawn."""
    scores, total, drawn = found.scores.get(place, _NO_SCORES), found.sums.get(place, ()), found.drawn
    if last is None:
        return RowResult(
            id=row.id, scores=scores.logprobs, score_tops=scores.tops, score_ranks=scores.ranks, pooled=total
        )
    places = slice(last - row.num_drafts, last + 1)
    return RowResult(
        id=row.id,
        tokens=drawn.tokens[places],
        logprobs=drawn.logprobs[places],
        top_logprobs=drawn.top_logprobs[places],
        extras=drawn.extras[places],
        scores=scores.logprobs,
        score_tops=scores.tops,
        score_ranks=scores.ranks,
        pooled=total,
    )
