"""`Sequence`, the one mutable record of the house, and the transitions on it as functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import SupportsIndex

from nano_inference.checks import float32
from nano_inference.frozen import FrozenDict
from nano_inference.runner import DrawExtras
from nano_inference.types import (
    BadRequest,
    Delta,
    EngineRequest,
    FinishReason,
    LogprobsMode,
    Matcher,
    SamplingMask,
    StopReason,
    TokenLogprob,
    TokenProgram,
    TopLogprobs,
    TrainingSample,
    WeightLabel,
)

NO_LABELS: Mapping[int, WeightLabel] = FrozenDict()
NO_EXTRAS = DrawExtras()
_FORCED = DrawExtras(raw_logprob=0.0, sampling_mask=())


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens: a prompt and all that was drawn or forced after it."""

    id: int
    """Rises with age of arrival: the youngest has the highest."""
    request: EngineRequest
    """Checked; all samples of a request have the same one."""
    request_id: int
    sample_index: int
    seed: int
    """What its draws depend on besides sample index and position."""
    max_new_tokens: int
    """`params.max_tokens` cut to the room there is."""
    lineage: str | None
    """Whose weight versions are counted."""
    stop_ids: frozenset[int]
    """The request's stop tokens and, unless it ignores them, the model's end tokens."""
    tokens: list[int]
    leader: Sequence | None = None
    """The request's first sample, which scores the prompt for all; None for the first itself."""
    matcher: Matcher | None = None
    program_state: object = None
    logprobs_mode: LogprobsMode = "processed"
    """Which distribution its log-probabilities speak of."""
    token_mask: bytes | None = None
    """What the matcher allows next."""

    num_computed: int = 0
    """Tokens whose K/V is in the cache."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    """Whole blocks that were published."""
    version: int = 0
    """The weights its K/V was begun under."""
    num_cached: int | None = None
    """Prompt tokens that the cache gave at first admission."""
    num_preemptions: int = 0

    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    """Empty unless asked for."""
    sampling_masks: list[SamplingMask] = field(default_factory=list)
    """Empty unless asked for."""
    scores: list[float] = field(default_factory=list)
    score_tops: list[TopLogprobs] = field(default_factory=list)
    score_ranks: list[int] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)
    """The sum of the hidden states of `num_pooled` positions."""
    num_pooled: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens that came with the request."""
        return len(self.request.prompt)

    @property
    def num_new(self) -> int:
        """Tokens added since, forced ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_new(self) -> int:
        """Tokens it may still add."""
        return self.max_new_tokens - self.num_new

    @property
    def counts_history(self) -> bool:
        """Whether a penalty makes its draws depend on which tokens came before."""
        params = self.request.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)

    @property
    def may_draft(self) -> bool:
        """Whether its tokens can be drawn several at a time: each knows nothing of those before but by the model."""
        return self.matcher is None and not self.counts_history and self.max_new > 1

    @property
    def banned(self) -> tuple[int, ...]:
        """The stop tokens while `min_tokens` bans them; none where the matcher allows nothing else."""
        if self.num_new >= self.request.params.min_tokens:
            return ()
        if self.token_mask is not None and not _allows_besides(self.token_mask, self.stop_ids):
            return ()
        return tuple(sorted(self.stop_ids))

    @property
    def next_score(self) -> int | None:
        """The next prompt position to score; None when there is none left (or a leader scores for us)."""
        request = self.request
        if request.params.prompt_logprobs is None or self.leader is not None:
            return None
        position = max(1, request.score_start) + len(self.scores)
        return position if position < self.num_prompt else None

    @property
    def next_wanted(self) -> int | None:
        """The first position to compute whatever the cache has, for what is found there; None when there is none.

        The last position of all is computed in any case.
        """
        if self.request.params.pooling == "mean":
            return self.num_pooled if self.num_pooled < self.num_prompt else None
        scored = self.next_score
        return None if scored is None else scored - 1

    def pool_from(self, end: int) -> int | None:
        """Return the first position that a row up to `end` adds to the embedding; None when it adds nothing."""
        pooling = self.request.params.pooling
        if pooling is None:
            return None
        first = max(self.num_computed, self.num_pooled if pooling == "mean" else self.num_prompt - 1)
        return first if first < end else None


def start_sequences(
    request: EngineRequest,
    *,
    request_id: int,
    first_id: int,
    seed: int,
    max_new_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
    logprobs_mode: LogprobsMode = "processed",
    lineage: str | None = None,
) -> list[Sequence]:
    """Make the n sequences of a checked request; they share its prompt, and the first scores it for all.

    `logprobs_mode` is the engine's, for a request that names none. Raises what the request's matcher or program raises
    at its start, and `ValueError` for a mask that is not one.
    """
    params = request.params
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    sequences: list[Sequence] = []
    for index in range(request.num_samples):
        matcher = request.make_matcher() if request.make_matcher else None
        sequences.append(
            Sequence(
                id=first_id + index,
                request=request,
                request_id=request_id,
                sample_index=index,
                seed=seed,
                max_new_tokens=max_new_tokens,
                lineage=lineage,
                stop_ids=stop_ids,
                tokens=list(request.prompt),
                leader=sequences[0] if sequences else None,
                matcher=matcher,
                program_state=request.program.start() if request.program else None,
                logprobs_mode=params.logprobs_mode or logprobs_mode,
                token_mask=mask_of(matcher) if matcher else None,
            )
        )
    if request.partial is not None:
        _go_on(sequences[0], request.partial)
    return sequences


def _go_on(seq: Sequence, partial: TrainingSample) -> None:
    """Bring a new sequence to where an unfinished sample ended: tokens, columns, matcher and program."""
    if seq.logprobs_mode != partial.logprobs_mode:
        raise BadRequest(f"partial: its logprobs are {partial.logprobs_mode}, {seq.logprobs_mode} is asked for")
    seq.sample_index = partial.sample_index
    seq.num_preemptions = partial.num_preemptions
    seq.tokens += partial.completion_tokens
    seq.mask += partial.mask
    seq.logprobs += partial.logprobs
    seq.versions += partial.token_versions
    seq.top_logprobs += partial.top_logprobs or ((),) * len(partial.completion_tokens)
    seq.raw_logprobs += partial.raw_logprobs or ()
    seq.sampling_masks += partial.sampling_masks or ()
    without_choice: frozenset[int] = frozenset()
    if seq.matcher is not None:
        try:
            without_choice = _follow(seq, seq.matcher, partial)
        except ValueError as error:
            raise BadRequest(f"partial: {error}") from error
    if seq.request.program is not None:
        seq.program_state = _replayed(seq.request.program, partial, without_choice)


def follow_again(seq: Sequence) -> None:
    """Give a sequence a new matcher that has seen its tokens. Raises what the matcher raises.

    The old one may have seen a token that was taken back. `seq.matcher` is assigned last: until then it is None.
    """
    if seq.request.make_matcher is None or seq.matcher is not None:
        return
    matcher = seq.request.make_matcher()
    for token in seq.tokens[seq.num_prompt :]:
        verdict_of(matcher, token)
    seq.token_mask = mask_of(matcher)
    seq.matcher = matcher


def _follow(seq: Sequence, matcher: Matcher, partial: TrainingSample) -> frozenset[int]:
    """Let the matcher see a sample's tokens; return where it left no choice, which only a program must know."""
    without_choice: set[int] = set()
    for place, token in enumerate(partial.completion_tokens):
        if seq.request.program is not None and _leaves_one(mask_of(matcher)):
            without_choice.add(place)
        verdict_of(matcher, token)
    seq.token_mask = mask_of(matcher)
    return frozenset(without_choice)


def _replayed(program: TokenProgram, partial: TrainingSample, without_choice: frozenset[int]) -> object:
    """Return a program's state after the tokens of a sample, which must hold what the program forces.

    A token that a matcher left no choice in is forced, but not by the program, which has seen it like a drawn one.
    """
    state = program.start()
    due: list[int] = []
    for place, (token, is_sampled) in enumerate(zip(partial.completion_tokens, partial.mask, strict=True)):
        is_seen = bool(is_sampled) or (not due and place in without_choice)
        if is_seen == bool(due) or (due and due.pop(0) != token):
            raise BadRequest("partial: its tokens are not those that the program forces")
        if is_seen:
            state, forced = step_program(program, state, token, None)
            due = list(forced)
    if due:
        raise BadRequest("partial: ends inside tokens that the program forces")
    return state


def advance(
    seq: Sequence,
    token: int,
    logprob: float,
    top: TopLogprobs,
    version: int,
    extras: DrawExtras = NO_EXTRAS,
    *,
    vocab_size: int | None = None,
) -> int:
    """Append one drawn token and whatever it forces; set `finish_reason` when the sample ends; return how many.

    A token that the matcher left no choice in was not drawn by the model, whatever the runner did: it counts as forced.
    Raises `ValueError`, and appends none of the forced tokens, when one of them lies outside the vocabulary.
    """
    before = seq.num_new
    if _leaves_one(seq.token_mask):
        _append(seq, token, 0.0, (), version, _FORCED, sampled=False)
    else:
        _append(seq, token, logprob, top or (TokenLogprob(token, logprob),), version, extras, sampled=True)
    if token in seq.stop_ids and (seq.finish_reason != "stop" or seq.stop_reason == token):
        named = token in frozenset(seq.request.params.stop_token_ids)
        finish(seq, "stop", token if named else None)
    program = seq.request.program
    if program is not None and seq.finish_reason is None:
        seq.program_state, forced = step_program(program, seq.program_state, token, vocab_size)
        for forced_token in forced:
            if seq.finish_reason is None:
                _append(seq, forced_token, 0.0, (), version, _FORCED, sampled=False)
    return seq.num_new - before


def step_program(
    program: TokenProgram, state: object, token: int, vocab_size: int | None
) -> tuple[object, tuple[int, ...]]:
    """Return a program's next state and the tokens it forces, as plain integers.

    Raises `ValueError` when it returns anything else, or a token outside the vocabulary.
    """
    answer: object = program.step(state, token)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ValueError(f"the token program's step must return (state, tokens), got {answer!r}")
    state, forced = answer
    if isinstance(forced, str | bytes) or not isinstance(forced, Iterable):
        raise ValueError(f"the token program must force a tuple of token ids, got {forced!r}")
    ids = tuple(_plain_int("the token program forced", one) for one in forced)
    outside = next((one for one in ids if one < 0 or (vocab_size is not None and one >= vocab_size)), None)
    if outside is not None:
        limit = "" if vocab_size is None else f" of {vocab_size}"
        raise ValueError(f"the token program forced {outside}, outside the vocabulary{limit}")
    return state, ids


def mask_of(matcher: Matcher) -> bytes | None:
    """Return a matcher's mask. Raises `ValueError` for what is neither None nor bytes, and for no bytes."""
    mask: object = matcher.mask()
    if mask is None or (type(mask) is bytes and mask):
        return mask
    raise ValueError(f"the matcher's mask must be None or bytes, at least one, got {mask!r:.80}")


def verdict_of(matcher: Matcher, token: int) -> StopReason | None:
    """Let a matcher see a token; return why it stops the sample, or None. Raises `ValueError` for another verdict."""
    verdict: object = matcher.advance(token)
    if verdict is None or isinstance(verdict, str):
        return verdict
    return _plain_int("the matcher's verdict is", verdict)


def _plain_int(what: str, value: object) -> int:
    """Return an integer of any library as Python's own. Raises `ValueError` for what is none, and for a bool."""
    try:
        if not isinstance(value, bool) and isinstance(value, SupportsIndex):
            return operator.index(value)
    except TypeError:  # an array of several numbers
        pass
    raise ValueError(f"{what} {value!r}, which is not an integer")


def _append(
    seq: Sequence, token: int, logprob: float, top: TopLogprobs, version: int, extras: DrawExtras, *, sampled: bool
) -> None:
    """Append one token; let the matcher see it; end the sample when it matched or the length is reached.

    Before `min_tokens` a stop string does not end it; a verdict that is a token does: nothing can follow that one.
    """
    _append_extras(seq, extras)  # first: when it fails, nothing is out of step
    seq.tokens.append(token)
    seq.mask.append(int(sampled))
    seq.logprobs.append(logprob)
    seq.versions.append(version)
    seq.top_logprobs.append(top)
    if seq.matcher is not None:
        verdict = verdict_of(seq.matcher, token)
        if verdict is not None and (isinstance(verdict, int) or seq.num_new > seq.request.params.min_tokens):
            finish(seq, "stop", verdict)
            return
        seq.token_mask = mask_of(seq.matcher)
    if seq.max_new <= 0:
        finish(seq, "length", None)


def _leaves_one(mask: bytes | None) -> bool:
    """Whether a matcher's mask allows exactly one token."""
    bits = int.from_bytes(mask or b"", "little")
    return bits != 0 and bits & (bits - 1) == 0


def _allows_besides(mask: bytes, tokens: frozenset[int]) -> bool:
    """Whether a mask allows anything besides these tokens."""
    bits = bytearray(mask)
    for token in tokens:
        if token < 8 * len(bits):
            bits[token // 8] &= ~(1 << token % 8)
    return any(bits)


def _append_extras(seq: Sequence, extras: DrawExtras) -> None:
    """Keep what the request asked to know of a token besides its log-probability."""
    params = seq.request.params
    if params.raw_logprobs:
        assert extras.raw_logprob is not None, "the runner reported no raw log-probability"
        seq.raw_logprobs.append(extras.raw_logprob)
    if params.sampling_mask:
        seq.sampling_masks.append(extras.sampling_mask)


def add_pooled(seq: Sequence, total: tuple[float, ...], num_positions: int) -> None:
    """Add the sum of the hidden states of further positions."""
    seq.pooled = [a + b for a, b in zip(seq.pooled or [0.0] * len(total), total, strict=True)]
    seq.num_pooled += num_positions


def forget_found(seq: Sequence) -> None:
    """Forget what was found of the prompt: it is scored or pooled again from its start."""
    seq.scores.clear()
    seq.score_tops.clear()
    seq.score_ranks.clear()
    seq.pooled.clear()
    seq.num_pooled = 0


def finish(seq: Sequence, reason: FinishReason, stop_reason: StopReason | None) -> None:
    """End the sample; a stop outranks a length reached by the same token."""
    seq.finish_reason = reason
    seq.stop_reason = stop_reason


def to_delta(seq: Sequence, num_added: int, version: int, labels: Mapping[int, WeightLabel] = NO_LABELS) -> Delta:
    """Return what the last `num_added` tokens brought, with the whole sample when it ended."""
    start = seq.num_new - num_added
    params = seq.request.params
    return Delta(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        token_ids=tuple(seq.tokens[seq.num_prompt + start :]),
        logprobs=tuple(seq.logprobs[start:]),
        mask=tuple(seq.mask[start:]),
        versions=tuple(seq.versions[start:]),
        top_logprobs=tuple(seq.top_logprobs[start:]) if params.logprobs is not None else None,
        raw_logprobs=tuple(seq.raw_logprobs[start:]) if params.raw_logprobs else None,
        sampling_masks=tuple(seq.sampling_masks[start:]) if params.sampling_mask else None,
        sample=to_sample(seq, version, labels) if seq.finish_reason else None,
    )


def to_sample(seq: Sequence, version: int, labels: Mapping[int, WeightLabel] = NO_LABELS) -> TrainingSample:
    """Freeze a finished sequence; `version` are the weights in force now, `labels` what the trainer called versions.

    A prompt whose scores are not numbers ends as "abort" and keeps those before the first such; one whose embedding is
    not has none.
    """
    assert seq.finish_reason is not None
    params, partial = seq.request.params, seq.request.partial
    scorer = seq.leader or seq
    scored = params.prompt_logprobs is not None
    num_scores = _num_before_nan(scorer.scores)
    embedding = _embedding(seq)
    flaw = (
        _flaw(seq, embedding) if num_scores == len(scorer.scores) else "the prompt's log-probabilities are not finite"
    )
    return TrainingSample(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        prompt_tokens=tuple(seq.request.prompt),
        completion_tokens=tuple(seq.tokens[seq.num_prompt :]),
        logprobs=tuple(seq.logprobs),
        mask=tuple(seq.mask),
        token_versions=tuple(seq.versions),
        weight_version=min(seq.versions, default=version),
        lineage=seq.lineage,
        finish_reason=seq.finish_reason if flaw is None else "abort",
        stop_reason=seq.stop_reason if flaw is None else flaw,
        seed=seq.seed,
        version_labels=labels if partial is None else {**partial.version_labels, **labels},
        logprobs_mode=seq.logprobs_mode,
        top_logprobs=tuple(seq.top_logprobs) if params.logprobs is not None else None,
        raw_logprobs=tuple(seq.raw_logprobs) if params.raw_logprobs else None,
        sampling_masks=tuple(seq.sampling_masks) if params.sampling_mask else None,
        prompt_logprobs=tuple(scorer.scores[:num_scores]) if scored else None,
        prompt_top_logprobs=tuple(scorer.score_tops[:num_scores]) if scored and params.prompt_logprobs else None,
        prompt_ranks=tuple(scorer.score_ranks[:num_scores]) if scored and scorer.score_ranks else None,
        embedding=embedding,
        num_cached_tokens=seq.num_cached or 0,
        num_preemptions=seq.num_preemptions,
    )


def _embedding(seq: Sequence) -> tuple[float, ...] | None:
    """Return the mean of what was pooled, once that is all and when it is finite."""
    if seq.request.params.pooling is None or seq.finish_reason != "length" or not seq.pooled:
        return None
    mean = float32(total / seq.num_pooled for total in seq.pooled)
    return mean if all(map(math.isfinite, mean)) else None


def _flaw(seq: Sequence, embedding: tuple[float, ...] | None) -> str | None:
    """Return why a sequence that has run to its end lacks the embedding it was asked for."""
    if seq.request.params.pooling is None or seq.finish_reason != "length" or embedding is not None:
        return None
    return "the prompt's hidden states are not finite" if seq.pooled else "the runner reports no hidden states"


def _num_before_nan(scores: list[float]) -> int:
    """Return how many scores stand before the first that is no finite number."""
    return next((i for i, score in enumerate(scores) if not math.isfinite(score)), len(scores))
