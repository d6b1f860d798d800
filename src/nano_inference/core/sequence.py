"""`Sequence`, the mutable state of one sample, and the functions that change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nano_inference.core.matchers import advance_matcher, allows_one, allows_others, mask_of, step_program
from nano_inference.core.step import Row, RowState
from nano_inference.support.checks import float32
from nano_inference.support.frozen import FrozenDict
from nano_inference.types import (
    BadRequest,
    Delta,
    EngineRequest,
    FinishReason,
    LogprobsMode,
    Matcher,
    Prefill,
    SamplingMask,
    SamplingParams,
    StopReason,
    TokenLogprob,
    TokenProgram,
    TopLogprobs,
    TrainingSample,
    WeightLabel,
)

NO_LABELS: Mapping[int, WeightLabel] = FrozenDict()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample in progress: the prompt, and every token sampled or forced after it."""

    id: int
    """Ascending in order of arrival."""
    request: EngineRequest
    """Checked; shared by all samples of the request."""
    request_id: int
    sample_index: int
    seed: int
    max_new_tokens: int
    """`params.max_tokens`, limited by the model's length and the cache."""
    lineage: str | None
    """See `TrainingSample.lineage`."""
    stop_ids: frozenset[int]
    """The request's stop tokens and, unless it ignores them, the model's end tokens."""
    tokens: list[int]
    leader: Sequence | None = None
    """The request's sample that scores the prompt for all, the first at the start; None in this one itself."""
    matcher: Matcher | None = None
    program_state: object = None
    logprobs_mode: LogprobsMode = "processed"
    token_mask: bytes | None = None
    """The matcher's mask for the next token."""

    num_computed: int = 0
    """Tokens whose K/V is in the cache."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    """Whole blocks that were published."""
    version: int = 0
    """Version of the weights when computation of its K/V started; -1 if its adapter has changed since."""
    adapter: int = 0
    """The number of its adapter, see `core.adapters`; 0 without one."""
    state: RowState | None = None
    """The slots of its next row; None while it waits, and without recurrent states."""
    snapshots_at: tuple[int, ...] = ()
    """Numbers of tokens after which its state is kept as a snapshot, ascending."""
    reach: int = 0
    """Tokens whose K/V was cached when it started, of models with recurrent states."""
    num_cached: int | None = None
    """Prompt tokens that were cached when it first started; None before."""
    num_preemptions: int = 0

    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    adapter_versions: list[WeightLabel] = field(default_factory=list)
    """Empty without an adapter."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Empty unless requested; () means the sampled token alone (see `_tops`)."""
    raw_logprobs: list[float] = field(default_factory=list)
    """Empty unless requested."""
    sampling_masks: list[SamplingMask] = field(default_factory=list)
    """Empty unless requested."""
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of prompt tokens."""
    score_tops: list[TopLogprobs] = field(default_factory=list)
    score_ranks: list[int] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)
    """Sum of the hidden states of `num_pooled` positions."""
    num_pooled: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None

    num_prompt: int = field(init=False)
    """Number of prompt tokens."""
    has_penalties: bool = field(init=False)
    """Whether penalties make sampling depend on earlier tokens."""

    def __post_init__(self) -> None:
        params = self.request.score_params or self.request.params
        self.num_prompt = len(self.request.prompt)
        self.has_penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)

    @property
    def num_new(self) -> int:
        """Number of tokens after the prompt, forced ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_new(self) -> int:
        """Most tokens it may still add."""
        return self.max_new_tokens + self.num_prompt - len(self.tokens)

    @property
    def can_speculate(self) -> bool:
        """Whether several tokens can be sampled in one step: no matcher or penalty depends on those before."""
        return self.matcher is None and not self.has_penalties and self.max_new > 1

    @property
    def max_ahead(self) -> int:
        """Most tokens to sample in one step: 1 if the second depends on the first, by a penalty or a mask.

        Before `min_tokens`, those that are sampled under the same ban of stop tokens. A token program or a matcher that
        interferes later makes `append_result` drop the tokens after it, which a recurrent state cannot forget.
        """
        can_interfere = self.matcher is not None or self.request.program is not None
        if self.token_mask is not None or self.has_penalties or (self.state is not None and can_interfere):
            return 1
        min_tokens = self.request.params.min_tokens
        num_banned = min_tokens and min_tokens - self.num_new
        return num_banned if num_banned > 0 and self.stop_ids else self.max_new

    @property
    def banned(self) -> tuple[int, ...]:
        """The stop tokens before `min_tokens`; none if the matcher allows no other token."""
        min_tokens = self.request.params.min_tokens
        if not min_tokens or self.num_new >= min_tokens:
            return ()
        if self.token_mask is not None and not allows_others(self.token_mask, self.stop_ids):
            return ()
        return tuple(sorted(self.stop_ids))

    @property
    def next_score(self) -> int | None:
        """The next prompt position to score; None if there is none, or if `leader` scores the prompt."""
        request = self.request
        if request.params.prompt_logprobs is None or self.leader is not None:
            return None
        position = max(1, request.score_start) + len(self.scores)
        return position if position < self.num_prompt else None

    @property
    def first_uncached(self) -> int | None:
        """The first position to compute even if it is cached, to score or pool it; None if there is none.

        The last position of a prompt is computed in any case.
        """
        if self.request.params.pooling == "mean":
            return self.num_pooled
        scored = self.next_score
        return None if scored is None else scored - 1

    @property
    def must_restart(self) -> bool:
        """Whether scores or an embedding are incomplete, and must be computed under a single version of the weights."""
        return self.next_score is not None or self.request.params.pooling is not None

    def pool_from(self, end: int) -> int | None:
        """Return the first position that a row up to `end` adds to the embedding; None if it adds nothing."""
        pooling = self.request.params.pooling
        if pooling is None:
            return None
        first = max(self.num_computed, self.num_pooled if pooling == "mean" else self.num_prompt - 1)
        return first if first < end else None


# ---- start ----------------------------------------------------------------------------------------------------------


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
    adapter: int = 0,
) -> list[Sequence]:
    """Return the n sequences of a checked request. The first one scores the prompt for all.

    `logprobs_mode` applies if the request has none. Raises what the request's matcher or program raises at its start,
    and `ValueError` for an invalid mask.
    """
    params = request.params
    sampled = request.score_params or params
    stop_ids = stop_ids_of(sampled, eos_token_ids)
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
                logprobs_mode=sampled.logprobs_mode or logprobs_mode,
                token_mask=mask_of(matcher) if matcher else None,
                adapter=adapter,
            )
        )
    if request.partial is not None:
        _resume(sequences[0], request.partial)
    return sequences


def stop_ids_of(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens after which a sample ends, which `min_tokens` bans."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def _resume(seq: Sequence, partial: TrainingSample) -> None:
    """Advance a new sequence to the end of an unfinished sample: tokens, columns, matcher and program."""
    if seq.logprobs_mode != partial.logprobs_mode:
        raise BadRequest("partial", f"its logprobs are {partial.logprobs_mode}, {seq.logprobs_mode} is requested")
    seq.sample_index = partial.sample_index
    seq.num_preemptions = partial.num_preemptions
    seq.tokens += partial.completion_tokens
    seq.mask += partial.mask
    seq.logprobs += partial.logprobs
    seq.versions += partial.token_versions
    seq.adapter_versions += partial.adapter_versions
    if seq.request.params.logprobs is not None:
        seq.top_logprobs += partial.top_logprobs or ((),) * len(partial.completion_tokens)
    seq.raw_logprobs += partial.raw_logprobs or ()
    seq.sampling_masks += partial.sampling_masks or ()
    without_choice: set[int] = set()
    if seq.matcher is not None:
        try:
            for place, token in enumerate(partial.completion_tokens):
                if seq.request.program is not None and allows_one(mask_of(seq.matcher)):
                    without_choice.add(place)
                advance_matcher(seq.matcher, token)
            seq.token_mask = mask_of(seq.matcher)
        except ValueError as error:
            raise BadRequest("partial", f"{error}") from error
    if seq.request.program is not None:
        seq.program_state = _replay_program(seq.request.program, partial, without_choice)


def _replay_program(program: TokenProgram, partial: TrainingSample, without_choice: set[int]) -> object:
    """Return a program's state after a sample, which must contain the tokens that the program forces.

    `without_choice` are places where the matcher allowed one token: their mask is 0 although the program received them.
    """
    state = program.start()
    due: list[int] = []
    for place, (token, is_sampled) in enumerate(zip(partial.completion_tokens, partial.mask, strict=True)):
        is_received = bool(is_sampled) or (not due and place in without_choice)
        if is_received == bool(due) or (due and due.pop(0) != token):
            raise BadRequest("partial", "its tokens are not those that the program forces")
        if is_received:
            state, forced = step_program(program, state, token, None)
            due = list(forced)
    if due:
        raise BadRequest("partial", "ends inside tokens that the program forces")
    return state


def clear_prompt_results(seq: Sequence) -> None:
    """Delete the prompt's scores and pooled hidden states, which are then computed again from the start."""
    seq.scores.clear()
    seq.score_tops.clear()
    seq.score_ranks.clear()
    seq.pooled.clear()
    seq.num_pooled = 0


def pass_on_scoring(seq: Sequence, others: Iterable[Sequence]) -> None:
    """Let another sample of the request score the rest of the prompt, after `seq` ended without having done so."""
    heir = None
    for other in others:
        if other.leader is seq:
            other.leader = heir
            heir = heir or other
    if heir is not None:
        heir.scores, heir.score_tops, heir.score_ranks = [*seq.scores], [*seq.score_tops], [*seq.score_ranks]


def finish(seq: Sequence, reason: FinishReason, stop_reason: StopReason | None) -> None:
    """Set the reasons; a stop replaces a length that the same token reached."""
    seq.finish_reason = reason
    seq.stop_reason = stop_reason


# ---- conversions ----------------------------------------------------------------------------------------------------


def to_row(seq: Sequence, num_tokens: int, num_sampled: int, drafts: tuple[int, ...]) -> Row:
    """Return the runner's input: the next `num_tokens` tokens, then the draft tokens."""
    request, tokens, num_prompt = seq.request, seq.tokens, seq.num_prompt
    start, end = seq.num_computed, seq.num_computed + num_tokens
    return Row(  # by position, which takes a third of the time
        seq.id,
        (*tokens[start:end], *drafts),
        tokens[start - 1] if start else -1,
        start,
        tuple(seq.blocks),
        num_sampled,
        request.params,
        seq.logprobs_mode,
        seq.seed,
        seq.sample_index + request.beginning.sample_index,
        seq.request_id,
        seq.banned if num_sampled else (),
        seq.token_mask if num_sampled else None,
        tuple(tokens) if (num_sampled or request.score_params) and seq.has_penalties else (),
        num_prompt - request.beginning.num_tokens,
        seq.next_score,
        num_prompt,
        request.score_params,
        tokens[end] if end < len(tokens) else -1,
        seq.pool_from(end),
        num_drafts=len(drafts),
        stop_ids=seq.stop_ids,
        state=seq.state,
        adapter=seq.adapter,
    )


def to_delta(seq: Sequence, num_added: int, version: int, labels: Mapping[int, WeightLabel] = NO_LABELS) -> Delta:
    """Return the last `num_added` tokens, with the whole sample if it has ended."""
    start = seq.num_new - num_added
    params = seq.request.params
    return Delta(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        token_ids=tuple(seq.tokens[seq.num_prompt + start :]),
        logprobs=tuple(seq.logprobs[start:]),
        mask=tuple(seq.mask[start:]),
        versions=tuple(seq.versions[start:]),
        adapter_versions=tuple(seq.adapter_versions[start:]),
        top_logprobs=_tops(seq, start),
        raw_logprobs=tuple(seq.raw_logprobs[start:]) if params.raw_logprobs else None,
        sampling_masks=tuple(seq.sampling_masks[start:]) if params.sampling_mask else None,
        sample=to_sample(seq, version, labels) if seq.finish_reason else None,
        prefill=_prefill(seq) if seq.request.reports_prefill and not start else None,
    )


def _prefill(seq: Sequence) -> Prefill:
    scores = _prompt_scores(seq) if seq.num_new or seq.finish_reason else (None, None)
    return Prefill(seq.num_cached or 0, min(seq.num_computed, seq.num_prompt), *scores)


def _prompt_scores(seq: Sequence) -> tuple[tuple[float, ...] | None, tuple[TopLogprobs, ...] | None]:
    """Return the prompt's log-probabilities and alternatives that are finite, if they are requested."""
    scorer, count = seq.leader or seq, seq.request.params.prompt_logprobs
    end = _num_finite(scorer.scores)
    if count is None:
        return None, None
    return tuple(scorer.scores[:end]), tuple(scorer.score_tops[:end]) if count else None


def to_sample(seq: Sequence, version: int, labels: Mapping[int, WeightLabel] = NO_LABELS) -> TrainingSample:
    """Return a finished sequence as a frozen record. `version` is the installed one, `labels` the trainer's names.

    If a prompt score is not finite, the sample ends as "abort" with the scores before it; if the embedding is not
    finite, as "abort" without one.
    """
    assert seq.finish_reason is not None
    params, partial = seq.request.params, seq.request.partial
    scorer = seq.leader or seq
    scored = params.prompt_logprobs is not None
    num_scores = _num_finite(scorer.scores)
    prompt_logprobs, prompt_tops = _prompt_scores(seq)
    embedding, error = _embedding(seq)
    if num_scores < len(scorer.scores):
        error = "the prompt's log-probabilities are not finite"
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
        finish_reason=seq.finish_reason if error is None else "abort",
        stop_reason=seq.stop_reason if error is None else error,
        seed=seq.seed,
        version_labels=labels if partial is None else {**partial.version_labels, **labels},
        adapter=seq.request.adapter,
        adapter_versions=tuple(seq.adapter_versions),
        logprobs_mode=seq.logprobs_mode,
        top_logprobs=_tops(seq, 0),
        raw_logprobs=tuple(seq.raw_logprobs) if params.raw_logprobs else None,
        sampling_masks=tuple(seq.sampling_masks) if params.sampling_mask else None,
        prompt_logprobs=prompt_logprobs,
        prompt_top_logprobs=prompt_tops,
        prompt_ranks=tuple(scorer.score_ranks[:num_scores]) if scored and scorer.score_ranks else None,
        embedding=embedding,
        num_cached_tokens=seq.num_cached or 0,
        num_preemptions=seq.num_preemptions,
    )


def _tops(seq: Sequence, start: int) -> tuple[TopLogprobs, ...] | None:
    """Return the requested alternatives of the tokens from `start` on, at least the sampled token itself."""
    if seq.request.params.logprobs is None:
        return None
    columns = (seq.top_logprobs[start:], seq.tokens[seq.num_prompt + start :], seq.logprobs[start:], seq.mask[start:])
    return tuple(
        top or ((TokenLogprob(token, logprob),) if is_sampled else ())
        for top, token, logprob, is_sampled in zip(*columns, strict=True)
    )


def _embedding(seq: Sequence) -> tuple[tuple[float, ...] | None, str | None]:
    """Return the mean of the pooled hidden states, and why a sequence that reached its length lacks it."""
    if seq.request.params.pooling is None or seq.finish_reason != "length":
        return None, None
    if not seq.pooled:
        return None, "the runner reports no hidden states"
    mean = float32(total / seq.num_pooled for total in seq.pooled)
    return (mean, None) if all(map(math.isfinite, mean)) else (None, "the prompt's hidden states are not finite")


def _num_finite(scores: list[float]) -> int:
    """Return how many scores precede the first that is not finite."""
    return next((i for i, score in enumerate(scores) if not math.isfinite(score)), len(scores))
