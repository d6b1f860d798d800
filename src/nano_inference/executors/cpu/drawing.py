"""Draws tokens with the CPU kernels; `sampling.draw` is the reference.

Torch never computes with a whole row of logits here: its threads wait for each other by spinning, which takes
milliseconds a call beside busy processes.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from nano_inference.core.seeds import uniform
from nano_inference.core.step import DrawExtras, Row, RowResult
from nano_inference.executors.cpu import native
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.cpu.native import Special
from nano_inference.executors.logprobs import Normalise, Normaliser, divisors_of
from nano_inference.executors.sampling import WholeVocabulary, draw, results
from nano_inference.executors.truncation import is_in_kernels, truncation_of
from nano_inference.types import TokenLogprob, TopLogprobs


class KernelSampler:
    """Samples with the C kernels; satisfies `executors.step.Sampler`. A row's result does not depend on the others."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._vocabulary = WholeVocabulary(kernel_normalise(library))

    def __call__(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        """Draw one token per row; may overwrite the logits."""
        unknown = [i for i, row in enumerate(rows) if not is_in_kernels(truncation_of(row))]
        if not unknown:
            return self._draw(logits_BV, rows)
        known = [i for i in range(len(rows)) if i not in unknown]
        drawn = draw(logits_BV[unknown], [rows[i] for i in unknown], self._vocabulary)
        found = dict(zip(unknown, drawn, strict=True))
        if known:
            found |= zip(known, self._draw(logits_BV[known], [rows[i] for i in known]), strict=True)
        return [found[i] for i in range(len(rows))]

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        vocab_size = logits_BV.size(-1)
        special = [None if is_plain(row) else _special(row, vocab_size) for row in rows]
        is_all_plain = not any(special)
        tokens, logprobs = native.draw(
            self._library,
            logits_BV,
            [row.params.temperature for row in rows],
            [uniform(row.seed, row.sample_index, row.start + len(row.tokens)) for row in rows],
            [row.logprobs_mode == "raw" for row in rows],
            () if is_all_plain else special,
        )
        if is_all_plain:
            return results(rows, tokens, logprobs)
        tops: list[TopLogprobs] = []
        extras: list[DrawExtras] = []
        for one in special:
            if one is None:
                tops.append(())
                extras.append(DrawExtras())
                continue
            named = zip(one.named, one.named_logprobs, strict=True)
            tops.append(tuple(TokenLogprob(*pair) for pairs in (named, one.tops) for pair in pairs))
            kept = tuple(one.kept) if one.wants_kept and len(one.kept) < vocab_size else None
            extras.append(DrawExtras(one.raw_logprob if one.wants_raw else None, kept))
        wants_extras = any(row.params.raw_logprobs or row.params.sampling_mask for row in rows)
        return results(rows, tokens, logprobs, tops, extras if wants_extras else [])


def is_plain(row: Row) -> bool:
    """Return True if a row uses no sampling parameter but the temperature and reports only the log-probability."""
    params = row.params
    is_adjusted = row.history or params.logit_bias or params.allowed_token_ids is not None or row.banned
    wants_more = params.logprobs or params.logprob_token_ids or params.raw_logprobs or params.sampling_mask
    return not (is_adjusted or row.mask is not None or wants_more or truncation_of(row).is_active)


def _special(row: Row, vocab_size: int) -> Special:
    params, cut = row.params, truncation_of(row)
    output = Counter(row.history[row.num_prompt :])
    is_restricted = params.allowed_token_ids is not None or row.mask is not None or bool(row.banned)
    return Special(
        report=row.logprobs_mode,
        top_k=cut.top_k,
        top_p=cut.top_p,
        min_p=cut.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        times=dict.fromkeys(row.history, 0) | output,
        bias={**params.logit_bias, **dict.fromkeys(row.banned, -np.inf)},
        mask=_allowed(row, vocab_size),
        named=params.logprob_token_ids,
        num_tops=params.logprobs or 0,
        wants_raw=params.raw_logprobs,
        wants_kept=params.sampling_mask and (is_restricted or cut.is_active),
    )


def _allowed(row: Row, vocab_size: int) -> bytes | None:
    """Return a bit mask of the ids that both the matcher's mask and `allowed_token_ids` allow; None without either."""
    if row.params.allowed_token_ids is None:
        return row.mask
    is_allowed_V = np.zeros(vocab_size, np.bool_)
    is_allowed_V[list(row.params.allowed_token_ids)] = True
    bits = np.packbits(is_allowed_V, bitorder="little").tobytes()
    if row.mask is None:
        return bits
    both = int.from_bytes(bits, "little") & int.from_bytes(row.mask, "little")
    return both.to_bytes(len(bits), "little")


def kernel_normalise(library: Library) -> Normalise:
    """Return a `Normalise` that uses the CPU kernels."""

    def normalise(logits_BV: Tensor, temperatures: Sequence[float]) -> Normaliser:
        best_B, log_mass_B = native.normalise(library, logits_BV, temperatures)
        return Normaliser(best_B.double().unsqueeze(-1), divisors_of(temperatures), log_mass_B.unsqueeze(-1))

    return normalise
