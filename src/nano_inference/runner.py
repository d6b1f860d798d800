"""Runs one step on the device: the only place where a plan meets tensors.

Shapes: T tokens of the step, K those that anything is asked of (kv heads in a store's names), B rows that draw, S rows
scored at once, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from nano_inference.attention import Backend, ForwardInput, Laid, SdpaBackend, StepContext
from nano_inference.batch import (
    Pooled,
    Sampled,
    Scored,
    Wanted,
    as_tensors,
    in_step_order,
    lay,
    split_at_answers,
    wanted,
)
from nano_inference.kernels.native import Cache
from nano_inference.kv.kernel_store import KernelStore
from nano_inference.kv.store import KVStore
from nano_inference.logprobs import Normalise, at, floor_logprobs, kernel_normalise, normalise, top_logprobs
from nano_inference.models.build import Model
from nano_inference.models.config import ModelConfig
from nano_inference.models.kernel import KernelModel
from nano_inference.models.nanochat import norm
from nano_inference.models.packed import AnyModel
from nano_inference.sampling import Draw, draw
from nano_inference.types import EngineDead, Row, RowResult, ScheduledBatch, TopLogprobs

_SCORE_ELEMENTS = 1 << 24
"""Logits that exist at once while a prompt is scored: [T, V] is never made whole."""


Sampler = Callable[[Tensor, Sequence[Row]], Draw]
"""Draws one token a row from float32 logits [B, V], which it may overwrite; `sampling.draw` is the one of spec 9."""


class Runner(Protocol):
    """What the engine needs: a step in, drawn tokens out."""

    def run(self, batch: ScheduledBatch) -> Mapping[int, RowResult]:
        """Compute the rows' K/V and draw what they ask for; a result for each row's id."""

    def free_cache(self) -> None:
        """Give the memory of the KV cache back."""

    def restore_cache(self) -> None:
        """Take it again, empty."""

    def recover(self) -> None:
        """Undo what an interrupted `run` left behind in this thread. Can be interrupted and called again."""


class ModelRunner:
    """Owns the model, the bytes of the KV cache and the attention backend."""

    def __init__(
        self,
        model: AnyModel,
        store: KVStore | KernelStore,
        backend: Backend,
        device: torch.device,
        sampler: Sampler = draw,
    ) -> None:
        """A `KernelModel` goes with a `KernelStore`; it has no use for the backend."""
        self.model = model
        self.store = store
        self.backend = backend
        self.device = device
        self.sampler = sampler
        self._mode: torch.inference_mode | None = None
        self._normalise = normalise_of(model)

    def install(self, model: AnyModel) -> None:
        """Compute with that model from the next step on."""
        self.model = model

    def free_cache(self) -> None:
        """Give the memory of the KV cache back."""
        self.store.free()

    def restore_cache(self) -> None:
        """Take it again, empty."""
        self.store.restore()

    def recover(self) -> None:
        """Leave inference mode, which an exception on the way out of its `with` block leaves switched on."""
        self.store.recover()
        if self._mode is not None:
            with suppress(AttributeError):  # it was never entered
                self._mode.__exit__(None, None, None)
            self._mode = None

    def run(self, batch: ScheduledBatch) -> dict[int, RowResult]:
        """Copy blocks, compute the rows, score what is asked for, draw. Raises `MemoryError` when there is too little.

        Torch says so in errors of its own, on a CPU in a plain `RuntimeError`.
        """
        try:
            return self._run(batch)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise MemoryError("a step needs more memory than there is") from error
            raise

    def _run(self, batch: ScheduledBatch) -> dict[int, RowResult]:
        rows = in_step_order(batch.rows)
        laid = lay(rows)
        asked = wanted(rows, laid.spans)
        self._mode = torch.inference_mode()
        with self._mode:
            self.store.prepare(batch.fresh, batch.copies)
            found = self._find(rows, laid, asked)
        last = {one.row: place for place, one in enumerate(asked.sampled)}
        return {row.id: _result(row, last.get(i), i, found) for i, row in enumerate(rows)}

    def _find(self, rows: Sequence[Row], laid: Laid, asked: Wanted) -> _Found:
        """Compute the step; draw, score and pool what is asked for."""
        model = self.model
        if has_full_decode(model.config):
            hidden_KE = self._compute_in_parts(rows, laid, asked.kept)
        elif isinstance(model, KernelModel) and asked.sampled and not asked.scored and not asked.pooled:
            logits_BV = model.run_to_logits(laid, asked.kept, _kernel_cache(self.store))
            return _Found(self.sampler(logits_BV, [one.seen for one in asked.sampled]), {}, {})
        else:
            hidden_KE = self._compute(laid, asked.kept)
        scores, sums = self._score(rows, asked.scored, hidden_KE), self._pool(asked.pooled, hidden_KE)
        return _Found(self._draw(asked.sampled, hidden_KE), scores, sums)

    def _compute_in_parts(self, rows: Sequence[Row], laid: Laid, kept: Sequence[int]) -> Tensor:
        """Return the hidden states [K, E] of the kept tokens where windows cut the prompts' queries only."""
        found: list[Tensor] = []
        order: list[int] = []
        wanted_places = frozenset(kept)
        for part, windows in zip(split_at_answers(tuple(rows), laid), (True, False), strict=True):
            if not part.places:
                continue
            own = [index for index, place in enumerate(part.places) if place in wanted_places]
            found.append(self._compute(part.laid, own, windows=windows).clone())  # the next part overwrites it
            order += (part.places[index] for index in own)
        by_place = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.long, device=self.device)
        return torch.cat(found)[by_place]

    def _compute(self, laid: Laid, kept: Sequence[int], *, windows: bool = True) -> Tensor:
        """Return the hidden states [K, E] of the tokens that are kept."""
        if isinstance(self.model, KernelModel):
            return self.model.run(laid, kept, _kernel_cache(self.store), windows=windows)
        step = as_tensors(laid, self.store.block_size, self.device)
        hidden_TE = forward(self.model, step, self.store, self.backend, windows=windows)
        are_all = len(kept) == hidden_TE.size(0)
        return hidden_TE if are_all else hidden_TE[torch.tensor(kept, dtype=torch.long, device=self.device)]

    def _draw(self, found: Sequence[Sampled], hidden_KE: Tensor) -> Draw:
        """Draw each token from the logits of the one that it follows."""
        if not found:
            return Draw((), (), ())
        places = [one.place for one in found]
        are_all = places == list(range(hidden_KE.size(0)))  # as in most steps, whose hidden states need no copy
        hidden_BE = hidden_KE if are_all else hidden_KE[torch.tensor(places, device=self.device)]
        return self.sampler(self.model.head(hidden_BE), [one.seen for one in found])

    def _pool(self, found: Sequence[Pooled], hidden_KE: Tensor) -> dict[int, tuple[float, ...]]:
        """Return the float32 sum of the final hidden states that each row pools; the norm sees all rows' at once."""
        if not found:
            return {}
        index_S = torch.tensor([index for one in found for index in one.indices], device=self.device)
        final_SE = final_hidden(self.model, hidden_KE[index_S]).float()
        parts = torch.split(final_SE, [len(one.indices) for one in found])
        sums = torch.stack([part.sum(dim=0) for part in parts]).tolist()
        return {one.row: tuple(total) for one, total in zip(found, sums, strict=True)}

    def _score(self, rows: Sequence[Row], found: Sequence[Scored], hidden_KE: Tensor) -> dict[int, Scores]:
        """Return the log-probabilities of known tokens for each row that wants any.

        All rows' positions stand together and go through the head a bounded piece of [S, V] at a time.
        """
        targets = _pack(rows, found)
        width = max(1, _SCORE_ELEMENTS // self.model.config.vocab_size)
        logprobs: list[float] = []
        tops: list[TopLogprobs] = []
        ranks: list[int] = []
        for start in range(0, len(targets.tokens), width):
            piece = slice(start, start + width)
            index_S, target_S = torch.tensor([targets.indices[piece], targets.tokens[piece]], device=self.device)
            logits_SV = self.model.head(hidden_KE[index_S])
            normaliser = self._normalise(logits_SV, targets.temperatures[piece])
            own_S1 = at(logits_SV, target_S)
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


class ClosedRunner:
    """Stands where a runner was, after an engine let go of its model."""

    def run(self, batch: ScheduledBatch) -> Mapping[int, RowResult]:
        """Refuse."""
        raise EngineDead("the engine was shut down")

    def free_cache(self) -> None:
        """There is none."""

    def restore_cache(self) -> None:
        """There is none."""

    def recover(self) -> None:
        """There is nothing to undo."""


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


def _kernel_cache(store: KVStore | KernelStore) -> Cache:
    """Return the memory that the kernels read; only their own store has it."""
    assert isinstance(store, KernelStore)
    return store.cache


def normalise_of(model: AnyModel) -> Normalise:
    """Return what computes log-sum-exps beside a model: the kernels where it has them, else torch."""
    return kernel_normalise(model.library) if isinstance(model, KernelModel) else normalise


def final_hidden(model: AnyModel, hidden_SE: Tensor) -> Tensor:
    """Return hidden states [S, E] after the model's last norm, as its head reads them; nanochat's has no weights."""
    if isinstance(model, KernelModel):
        return model.final(hidden_SE)
    if model.config.nanochat is not None:
        return norm(hidden_SE, model.config.norm_eps)
    final: Tensor = cast(nn.Module, model).get_submodule("norm")(hidden_SE)
    return final


def has_full_decode(config: ModelConfig) -> bool:
    """Whether windows cut the prompts' queries only, so that K/V depends on where a prompt ends."""
    return config.nanochat is not None and config.nanochat.has_full_decode


def forward(
    model: AnyModel, step: ForwardInput, store: KVStore | KernelStore, backend: Backend, *, windows: bool = True
) -> Tensor:
    """Return the hidden states [T, E] of a step; its K/V is in the store afterwards.

    Without `windows` (torch models only) every token sees all keys before it.
    """
    if isinstance(model, KernelModel):
        return model.forward(step, _kernel_cache(store))
    assert isinstance(store, KVStore)
    context = StepContext(
        step=step,
        store=store,
        backend=backend,
        plans=_plans(model, step, store.block_size, backend, windows=windows),
        ropes=tuple(table.at(step.position_T, store.k_LSKD.dtype) for table in model.ropes),
    )
    return model(step.token_T, context)


def _plans(
    model: Model, step: ForwardInput, block_size: int, backend: Backend, *, windows: bool
) -> dict[int | None, Any]:
    """Return the backend's plan for each of the model's windows; one that nothing in the step exceeds is none."""
    longest = max(span.end for span in step.spans)
    sizes = {layer.window for layer in model.config.layers}
    cutting = {size: size if windows and size is not None and size < longest else None for size in sizes}
    plans = {window: backend.plan(step, block_size, window) for window in set(cutting.values())}
    return {window: plans[effective] for window, effective in cutting.items()}


def model_forward(
    model: AnyModel, inputs: ForwardInput, cache: KVStore | KernelStore, backend: Backend | None = None
) -> Tensor:
    """Return float32 logits [T, V] of every token of a step: the slow, whole form of what the runner does."""
    with torch.inference_mode():
        return model.head(forward(model, inputs, cache, backend or SdpaBackend()))
