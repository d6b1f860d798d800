"""Draws tokens with the CPU kernels (rows that use only a temperature) or with `sampling.draw` (all other rows).

The choice depends on the row's own parameters only, so its token does not depend on the other rows of the batch.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from nano_inference.executors.sampling import WholeVocabulary, draw, results
from nano_inference.executors.truncation import truncation_of
from nano_inference.kernels import native
from nano_inference.kernels.library import Library
from nano_inference.logprobs import Normalise, Normaliser, divisors_of
from nano_inference.runner import Row, RowResult
from nano_inference.seeds import uniform

Draw = Callable[[Tensor, Sequence[Row], WholeVocabulary], Sequence[RowResult]]
"""The type of `sampling.draw`."""


class KernelSampler:
    """Samples with the C kernels; satisfies `executors.step.Sampler`."""

    def __init__(self, library: Library, draw_special: Draw = draw) -> None:
        """`draw_special` draws the rows that the kernels cannot; see `sampling.draw`."""
        self._library = library
        self._draw_special = draw_special
        self._vocabulary = WholeVocabulary(kernel_normalise(library))

    def __call__(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        """Draw one token per row; may overwrite the logits."""
        plain = [i for i, row in enumerate(rows) if is_plain(row)]
        if len(plain) == len(rows):
            return self._draw_plain(logits_BV, rows)
        special = [i for i, row in enumerate(rows) if not is_plain(row)]
        drawn = self._draw_special(logits_BV[special], [rows[i] for i in special], self._vocabulary)
        found = dict(zip(special, drawn, strict=True))
        if plain:
            found |= zip(plain, self._draw_plain(logits_BV[plain], [rows[i] for i in plain]), strict=True)
        return [found[i] for i in range(len(rows))]

    def _draw_plain(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        tokens, logprobs = native.draw(
            self._library,
            logits_BV,
            [row.params.temperature for row in rows],
            [uniform(row.seed, row.sample_index, row.start + len(row.tokens)) for row in rows],
            [row.logprobs_mode == "raw" for row in rows],
        )
        return results(rows, tokens, logprobs)


def is_plain(row: Row) -> bool:
    """Return True if a row uses no sampling parameter but the temperature and reports only the log-probability."""
    params = row.params
    is_adjusted = row.history or params.logit_bias or params.allowed_token_ids is not None or row.banned
    wants_more = params.logprobs or params.logprob_token_ids or params.raw_logprobs or params.sampling_mask
    return not (is_adjusted or row.mask is not None or wants_more or truncation_of(row).is_active)


def kernel_normalise(library: Library) -> Normalise:
    """Return a `Normalise` that uses the CPU kernels."""
    return partial(_normalise_by_kernels, library)


def _normalise_by_kernels(library: Library, logits_BV: Tensor, temperatures: Sequence[float]) -> Normaliser:
    best_B, log_mass_B = native.normalise(library, logits_BV, temperatures)
    return Normaliser(best_B.double().unsqueeze(-1), divisors_of(temperatures), log_mass_B.unsqueeze(-1))
