"""Appends what a step sampled to a `Sequence`: tokens, forced tokens, stop conditions, prompt results."""

from __future__ import annotations

import math

from nano_inference.core.matchers import advance_matcher, allows_one, mask_of, step_program
from nano_inference.core.sequence import Sequence, finish
from nano_inference.core.step import DrawExtras, Row, RowResult
from nano_inference.types import TopLogprobs

_FORCED = DrawExtras(raw_logprob=0.0, sampling_mask=())
_NO_EXTRAS = DrawExtras()


def append_result(seq: Sequence, row: Row, result: RowResult, version: int, vocab_size: int) -> int:
    """Append a row's sampled tokens up to one that ends the sample, forces tokens or rejects a draft; return how many.

    Tokens after it were sampled without knowing it, and are dropped: a later step samples them again at the same
    positions. K/V exists for the row's tokens and for every appended token that the executor computed.
    """
    seq.num_computed = row.start + len(row.tokens) - row.num_drafts
    if row.num_drafts or seq.matcher is not None or seq.request.program is not None:
        num_added = _append_one_by_one(seq, row, result, version, vocab_size)
    else:
        num_added = append_many(seq, result, version)
        if num_added:
            seq.num_computed += min(num_added, len(result.tokens) - 1)
    if seq.finish_reason is None and seq.num_computed >= len(seq.tokens):
        if seq.max_new <= 0:
            finish(seq, "length", None)
        else:  # the last token is computed again: what was sampled after it was dropped
            seq.num_computed = len(seq.tokens) - 1
    return num_added


def append_many(seq: Sequence, result: RowResult, version: int) -> int:
    """Append the tokens of a sequence without matcher and program up to the first that ends it; return how many.

    A log-probability that is not finite ends it as "abort" before its token.
    """
    tokens, logprobs = result.tokens, result.logprobs
    is_finite = math.isfinite(sum(logprobs))
    if not is_finite:
        tokens = tokens[: next((i for i, one in enumerate(logprobs) if not math.isfinite(one)), len(tokens))]
    stop = None
    if seq.stop_ids and not seq.stop_ids.isdisjoint(tokens):
        end = next(place for place, token in enumerate(tokens) if token in seq.stop_ids) + 1
        tokens, stop = tokens[:end], tokens[end - 1]
    count = len(tokens)
    params = seq.request.params
    if params.logprobs is not None:
        seq.top_logprobs += (result.top_logprobs or ((),) * len(result.tokens))[:count]
    if params.raw_logprobs:
        seq.raw_logprobs += [_raw_logprob(one) for one in result.extras[:count]]
    if params.sampling_mask:
        seq.sampling_masks += [one.sampling_mask for one in result.extras[:count]]
    seq.tokens += tokens
    seq.mask += (1,) * count
    seq.logprobs += logprobs[:count]
    seq.versions += (version,) * count
    if stop is not None:
        _stop(seq, stop)
    elif count < len(result.tokens):
        _abort_undrawable(seq)
    elif count and seq.max_new <= 0:
        finish(seq, "length", None)
    return count


def _append_one_by_one(seq: Sequence, row: Row, result: RowResult, version: int, vocab_size: int) -> int:
    """Append sampled tokens one by one, and those that each forces; return how many were appended."""
    num_added = 0
    computed = row.tokens[len(row.tokens) - row.num_drafts :] if row.num_drafts else result.tokens[:-1]
    tops = result.top_logprobs or ((),) * len(result.tokens)
    extras = result.extras or (_NO_EXTRAS,) * len(result.tokens)
    sampled = zip(result.tokens, result.logprobs, tops, extras, strict=True)
    for place, (token, logprob, top, extra) in enumerate(sampled):
        if not math.isfinite(logprob):
            _abort_undrawable(seq)
            break
        before = seq.num_new
        try:
            advance(seq, token, logprob, top, version, extra, vocab_size=vocab_size)
        except Exception as error:  # a matcher or program that raises ends its own sample only
            finish(seq, "abort", f"{type(error).__name__}: {error}")
        num_added += seq.num_new - before
        has_kv = place < len(computed) and token == computed[place]
        seq.num_computed += has_kv
        is_masked = seq.token_mask is not None  # the tokens after it were sampled without the mask
        if seq.finish_reason or seq.num_new - before > 1 or not has_kv or is_masked:
            break
    return num_added


def advance(
    seq: Sequence,
    token: int,
    logprob: float,
    top: TopLogprobs,
    version: int,
    extras: DrawExtras = _NO_EXTRAS,
    *,
    vocab_size: int | None = None,
) -> int:
    """Append a sampled token and the tokens it forces; set `finish_reason` at the end; return the number of tokens.

    If the matcher allowed only this token, it counts as forced. Raises `ValueError`, and appends no forced token, if
    one of them is outside the vocabulary.
    """
    before = seq.num_new
    if allows_one(seq.token_mask):
        _append(seq, token, 0.0, (), version, _FORCED, sampled=False)
    else:
        _append(seq, token, logprob, top, version, extras, sampled=True)
    if token in seq.stop_ids and (seq.finish_reason != "stop" or seq.stop_reason == token):
        _stop(seq, token)
    program = seq.request.program
    if program is not None and seq.finish_reason is None:
        seq.program_state, forced = step_program(program, seq.program_state, token, vocab_size)
        for forced_token in forced:
            if seq.finish_reason is None:
                _append(seq, forced_token, 0.0, (), version, _FORCED, sampled=False)
    return seq.num_new - before


def _append(
    seq: Sequence, token: int, logprob: float, top: TopLogprobs, version: int, extras: DrawExtras, *, sampled: bool
) -> None:
    """Append one token, pass it to the matcher, and finish the sample on a match or at its length.

    Before `min_tokens` a stop string does not finish it; a stop reason that is a token does: nothing can follow it.
    """
    params = seq.request.params
    if params.raw_logprobs:
        seq.raw_logprobs.append(_raw_logprob(extras))  # first, because it may raise: the columns stay aligned
    if params.sampling_mask:
        seq.sampling_masks.append(extras.sampling_mask)
    if params.logprobs is not None:
        seq.top_logprobs.append(top)
    seq.tokens.append(token)
    seq.mask.append(int(sampled))
    seq.logprobs.append(logprob)
    seq.versions.append(version)
    if seq.matcher is not None:
        reason = advance_matcher(seq.matcher, token)
        if reason is not None and (isinstance(reason, int) or seq.num_new > params.min_tokens):
            finish(seq, "stop", reason)
            return
        seq.token_mask = mask_of(seq.matcher)
    if seq.max_new <= 0:
        finish(seq, "length", None)


def _raw_logprob(extras: DrawExtras) -> float:
    assert extras.raw_logprob is not None, "the runner reported no raw log-probability"
    return extras.raw_logprob


def _stop(seq: Sequence, token: int) -> None:
    """Finish a sample at a stop token, which is its stop reason if the request named it."""
    finish(seq, "stop", token if token in seq.request.params.stop_token_ids else None)


def _abort_undrawable(seq: Sequence) -> None:
    finish(seq, "abort", "no token can be drawn: the logits are not finite or all tokens are forbidden")


def append_prompt_results(seq: Sequence, row: Row, result: RowResult) -> None:
    """Append the prompt's log-probabilities, and add the hidden states that the row pooled."""
    if result.scores:
        seq.scores += result.scores
        seq.score_tops += result.score_tops
        seq.score_ranks += result.score_ranks
    if row.pool_from is not None:
        total = result.pooled
        seq.pooled = [a + b for a, b in zip(seq.pooled or [0.0] * len(total), total, strict=True)]
        seq.num_pooled += row.start + len(row.tokens) - row.pool_from
