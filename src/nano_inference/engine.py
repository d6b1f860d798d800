"""`InferenceEngine`: owns the queues, the blocks and the runner. Every decision is made by a function that it calls.

A step is four calls: plan (pure, counts only), apply (the cache gives blocks), run (the only place with tensors),
commit (append tokens, publish blocks, tell the callers). The engine knows nothing about text.
"""

from __future__ import annotations

import math
import secrets
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Self

from nano_inference.assemble import EngineParts, assemble
from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.door import Limits, MatcherFactory, admit
from nano_inference.kv import Hit
from nano_inference.sampling import derive_seed
from nano_inference.scheduling import schedule
from nano_inference.sequence import Sequence, advance, finish, start_sequences, to_delta, to_sample
from nano_inference.types import (
    BadRequest,
    BlockCopy,
    Delta,
    EngineDead,
    Request,
    Row,
    RowResult,
    SamplingParams,
    ScheduledBatch,
    SchedulerOutput,
    SeqView,
    StepResult,
    StepStats,
    TokenProgram,
    TrainingSample,
    Work,
)

Progress = Callable[[StepResult], None]


class InferenceEngine:
    """Runs requests on one model. Not thread-safe: one thread drives it. A context manager."""

    def __init__(self, config: EngineConfig, *, parts: EngineParts | None = None) -> None:
        self.config = config
        self.parts = assemble(config) if parts is None else parts
        """What was built from the configuration; tests bring their own."""
        self._kv = self.parts.kv
        self._limits = SchedulerConfig(
            max_batch_size=config.max_batch_size,
            max_tokens_per_batch=config.max_tokens_per_batch,
            block_size=self._kv.block_size,
            lookahead=self.parts.lookahead,
        )
        self._door = Limits(
            vocab_size=self.parts.vocab_size,
            max_model_len=self.parts.max_model_len,
            num_blocks=self._kv.num_blocks,
            block_size=self._kv.block_size,
        )
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: list[Sequence] = []
        self._live: dict[int, list[Sequence]] = {}
        """Request id -> its sequences that have not ended."""
        self._mailboxes: dict[int, deque[Delta]] = {}
        """Deltas of the requests that `generate` and `stream` wait for."""
        self._finished: list[TrainingSample] = []
        """Samples of other requests, for `step`."""
        self._next_request = 0
        self._next_sequence = 0
        self._version = 0
        self._error: BaseException | None = None

    # ---- asking -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        num_samples: int | None = None,
        progress: Progress | None = None,
    ) -> list[TrainingSample]:
        """Return the samples of all prompts, prompt-major: the n samples of a prompt stand together, in order.

        One `SamplingParams` serves all prompts, or one for each. Raises `BadRequest` before anything runs when any of
        them is refused. An exception on the way (Ctrl-C) aborts what was asked here and passes on.
        """
        count = num_samples_per_prompt if num_samples is None else num_samples
        each = _one_for_each(prompts, sampling_params)
        requests = [
            self._admit(prompt, params, count, offset=i)
            for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        return self._finish_all(requests, progress)

    def stream(
        self, prompt: Seq[int], sampling_params: SamplingParams | None = None, num_samples_per_prompt: int = 1
    ) -> Iterator[Delta]:
        """Yield what each step adds to the samples of one prompt; closing the iterator aborts them.

        The request is checked and queued at the call, not at the first `next`.
        """
        request = self._admit(prompt, sampling_params or SamplingParams(), num_samples_per_prompt)
        self._enqueue(request, claimed=True)
        return self._deltas(request)

    def add_request(
        self,
        prompt: Seq[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        salt: str = "",
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
    ) -> int:
        """Queue a request and return its id; its samples come back from `step`. Raises `BadRequest`."""
        request = self._admit(
            prompt,
            sampling_params or SamplingParams(),
            num_samples,
            salt=salt,
            make_matcher=make_matcher,
            program=program,
        )
        self._enqueue(request, claimed=False)
        return request.id

    def score(
        self, token_ids: Seq[int] | Seq[Seq[int]], start: int = 0, *, temperature: float = 1.0
    ) -> list[float] | list[list[float]]:
        """Return the log-probability of each token from position max(start, 1) on, teacher-forced.

        One list of ids gives one list, a list of them a list for each. Cached prefixes before `start` are used.
        `temperature` divides the logits first (0 counts as 1).
        """
        if start < 0:
            raise BadRequest(f"start must be >= 0, got {start}")
        single = bool(token_ids) and isinstance(token_ids[0], int)
        texts: Seq[Seq[int]] = [token_ids] if single else token_ids  # type: ignore[list-item, assignment]
        params = SamplingParams(temperature=temperature, max_tokens=0, prompt_logprobs=0, logprobs_mode="tempered")
        requests = [self._admit(ids, params, 1, offset=i, score_start=start) for i, ids in enumerate(texts)]
        scores = [list(sample.prompt_logprobs or ()) for sample in self._finish_all(requests, None)]
        return scores[0] if single else scores

    def abort(self, request_id: int) -> tuple[TrainingSample, ...]:
        """End a request now and return its unfinished samples, with what they have, as "abort".

        Works for waiting, prefilling and running requests. An unknown or finished id gives nothing.
        """
        samples = []
        for seq in self._live.pop(request_id, []):
            finish(seq, "abort", None)
            self._leave(seq)
            delta = to_delta(seq, 0, self._version)
            samples.append(to_sample(seq, self._version))
            if request_id in self._mailboxes:
                self._mailboxes[request_id].append(delta)
        return tuple(samples)

    # ---- driving ----------------------------------------------------------------------------------------------------

    def has_pending(self) -> bool:
        """Whether `step` has anything to do or to give."""
        return bool(self._waiting or self._running or self._finished)

    def step(self) -> list[TrainingSample]:
        """Run one step; return the samples of `add_request`s that ended."""
        if self._waiting or self._running:
            self.tick()
        finished, self._finished = self._finished, []
        return finished

    def tick(self) -> StepResult:
        """Run one step and return all it did: what `step`, `stream` and `generate` are made of.

        A failure inside kills the engine: this call raises its cause, later ones `EngineDead`. An interruption
        (Ctrl-C) while the model computes harms nothing: those rows are computed again.
        """
        self._require_alive()
        try:
            hits: dict[int, Hit] = {}
            plan = schedule(self._waiting_views(hits), self._running_views(), self._kv.num_free_blocks(), self._limits)
            assert plan.work or plan.preempted_seqs or not (self._waiting or self._running), "a step without work"
            rows, batch = self._apply(plan, hits)
            results = self._run(rows, batch)
            return self._commit(plan, rows, batch, results)
        except Exception as error:
            self._error = error
            raise

    def flush_cache(self) -> int:
        """Forget all cached prefixes; idle blocks are free at once, held ones when released. Returns how many."""
        return self._kv.flush()

    def get_weight_version(self) -> int:
        """Return how many times weights were installed since the start."""
        return self._version

    def shutdown(self) -> None:
        """Abort everything and let go of model and cache; later calls raise `EngineDead`. May be called twice."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._error = self._error or EngineDead("the engine was shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _admit(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        num_samples: int,
        *,
        offset: int = 0,
        salt: str = "",
        score_start: int = 0,
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
    ) -> Request:
        """Check a request at the door; `offset` counts those checked before it and not yet queued."""
        self._require_alive()
        request_id = self._next_request + offset
        if make_matcher is None and params.stop and self.parts.stop_matcher:
            make_matcher = self.parts.stop_matcher(tuple(params.stop))
        return admit(
            request_id,
            prompt,
            params,
            self._door,
            seed=self._seed_of(params, request_id),
            num_samples=num_samples,
            salt=salt,
            score_start=score_start,
            make_matcher=make_matcher,
            program=program,
        )

    def _seed_of(self, params: SamplingParams, request_id: int) -> int:
        """The request's own seed, or one derived from the engine's, or the operating system's entropy."""
        if params.seed is not None:
            return params.seed
        if self.config.seed is not None:
            return derive_seed(self.config.seed, request_id)
        return secrets.randbits(64)

    def _enqueue(self, request: Request, *, claimed: bool) -> None:
        """Put a request's sequences at the end of the queue."""
        sequences = start_sequences(request, self._next_sequence, self.parts.eos_token_ids)
        self._next_request = request.id + 1
        self._next_sequence += len(sequences)
        self._waiting.update((seq.id, seq) for seq in sequences)
        self._live[request.id] = sequences
        if claimed:
            self._mailboxes[request.id] = deque()

    def _finish_all(self, requests: Seq[Request], progress: Progress | None) -> list[TrainingSample]:
        """Queue requests, run until all have ended, return their samples in order."""
        for request in requests:
            self._enqueue(request, claimed=True)
        try:
            while any(request.id in self._live for request in requests):
                result = self.tick()
                if progress is not None:
                    progress(result)
        finally:
            samples = [sample for request in requests for sample in self._collect(request)]
        return samples

    def _collect(self, request: Request) -> list[TrainingSample]:
        """Close a claimed request's mailbox, aborting what has not ended; return its samples in order."""
        self.abort(request.id)
        samples = [delta.sample for delta in self._mailboxes.pop(request.id) if delta.sample is not None]
        return sorted(samples, key=lambda sample: sample.sample_index)

    def _deltas(self, request: Request) -> Iterator[Delta]:
        """Yield a claimed request's deltas as they come."""
        mailbox = self._mailboxes[request.id]
        try:
            while request.id in self._live or mailbox:
                if not mailbox:
                    self.tick()
                while mailbox:
                    yield mailbox.popleft()
        finally:
            self._collect(request)

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDead(f"the engine takes no more work: {self._error}") from self._error

    # ---- plan -------------------------------------------------------------------------------------------------------

    def _running_views(self) -> list[SeqView]:
        """Counts of the running sequences, oldest first. Private blocks are counted only when blocks are scarce."""
        size = self._kv.block_size
        wanted = self._limits.max_tokens_per_batch + len(self._running) * (size + self._limits.lookahead)
        is_scarce = self._kv.num_free_blocks() * size < wanted
        return [
            SeqView(
                id=seq.id,
                num_tokens=len(seq.tokens),
                num_computed=seq.num_computed,
                num_blocks=len(seq.blocks),
                num_private=self._kv.num_private(seq.blocks) if is_scarce else 0,
                next_key=self._next_key(seq, seq.num_computed, seq.blocks),
                max_new=seq.max_new,
            )
            for seq in self._running
        ]

    def _waiting_views(self, hits: dict[int, Hit]) -> Iterator[SeqView]:
        """Counts of the waiting sequences with what the cache would give them, noted in `hits`; lazy."""
        size = self._kv.block_size
        for seq in self._waiting.values():
            scored = seq.next_score
            known = seq.tokens if scored is None else seq.tokens[:scored]
            hit = hits[seq.id] = self._kv.peek(known, (self._version, seq.request.salt))
            num_computed = len(hit.blocks) * size + hit.partial_tokens
            yield SeqView(
                id=seq.id,
                num_tokens=len(seq.tokens),
                num_computed=num_computed,
                num_blocks=len(hit.blocks),
                idle_hit=hit.num_idle,
                next_key=self._next_key(seq, num_computed, hit.blocks),
                max_new=seq.max_new,
            )

    def _next_key(self, seq: Sequence, num_computed: int, blocks: Seq[int]) -> object:
        """Name the block that a sequence computes next by the block before it and its tokens.

        A prompt that its first sample still scores is named by the request: the others wait for the scores.
        """
        if (seq.leader or seq).next_score is not None:
            return seq.request.id
        if len(seq.tokens) - num_computed <= 1:
            return None
        size = self._kv.block_size
        start = num_computed // size * size
        parent = blocks[start // size - 1] if start else -1
        return (seq.request.salt, parent, *seq.tokens[start : start + size])

    # ---- apply ------------------------------------------------------------------------------------------------------

    def _apply(self, plan: SchedulerOutput, hits: dict[int, Hit]) -> tuple[list[Sequence], ScheduledBatch]:
        """Give back the blocks of the preempted, hold and take those of the scheduled, write the rows down."""
        by_id = {seq.id: seq for seq in self._running}
        for sequence_id in plan.preempted_seqs:
            self._preempt(by_id[sequence_id])
        admitted = [self._waiting[work.id] for work in plan.work if work.id in self._waiting]
        for seq in admitted:  # every hold before any take: a take may evict what nobody holds
            self._start(seq, hits[seq.id])
        by_id |= {seq.id: seq for seq in admitted}
        for work in plan.work:
            by_id[work.id].blocks += self._kv.take(work.num_blocks)
        copies = tuple(_copy_of(seq, hits[seq.id]) for seq in admitted if hits[seq.id].partial_tokens)
        rows = tuple(self._row(by_id[work.id], work) for work in plan.work)
        return [by_id[work.id] for work in plan.work], ScheduledBatch(rows=rows, copies=copies)

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """Move a waiting sequence among the running, with what the cache gives it."""
        del self._waiting[seq.id]
        insort(self._running, seq, key=lambda other: other.id)
        seq.blocks = self._kv.hold(hit)
        seq.num_published = len(hit.blocks)
        seq.num_computed = len(hit.blocks) * self._kv.block_size + hit.partial_tokens
        seq.version = self._version
        if seq.num_cached is None:
            seq.num_cached = seq.num_computed

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks and put it back at the head of the queue."""
        self._running.remove(seq)
        self._release(seq)
        seq.num_preemptions += 1
        self._waiting[seq.id] = seq
        self._waiting.move_to_end(seq.id, last=False)

    def _release(self, seq: Sequence) -> None:
        """Give a sequence's blocks back to the cache."""
        self._kv.release(seq.blocks)
        seq.blocks, seq.num_computed, seq.num_published = [], 0, 0

    def _row(self, seq: Sequence, work: Work) -> Row:
        """Write down one sequence's part of the step."""
        params = seq.request.params
        start, end = seq.num_computed, seq.num_computed + work.num_tokens
        has_penalty = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        draws = work.num_sampled > 0
        return Row(
            id=seq.id,
            tokens=tuple(seq.tokens[start:end]),
            prev_token=seq.tokens[start - 1] if start else -1,
            start=start,
            blocks=tuple(seq.blocks),
            num_sampled=work.num_sampled,
            params=params,
            logprobs_mode=params.logprobs_mode or self.config.logprobs_mode,
            seed=seq.request.seed,
            sample_index=seq.sample_index,
            banned=tuple(sorted(seq.stop_ids)) if draws and seq.num_new < params.min_tokens else (),
            mask=seq.matcher.mask() if draws and seq.matcher else None,
            history=tuple(seq.tokens) if draws and has_penalty else (),
            num_prompt=seq.num_prompt,
            score_from=seq.next_score,
            next_token=seq.tokens[end] if end < len(seq.tokens) else -1,
        )

    # ---- run and commit ---------------------------------------------------------------------------------------------

    def _run(self, rows: Seq[Sequence], batch: ScheduledBatch) -> Mapping[int, RowResult]:
        """Let the runner compute; when it is interrupted, its rows are computed again from the cache."""
        if not batch.rows:
            return {}
        try:
            return self.parts.runner.run(batch)
        except BaseException as error:
            if not isinstance(error, Exception):
                for seq in sorted(rows, key=lambda seq: -seq.id):
                    self._preempt(seq)
            raise

    def _commit(
        self, plan: SchedulerOutput, rows: Seq[Sequence], batch: ScheduledBatch, results: Mapping[int, RowResult]
    ) -> StepResult:
        """Append what was drawn, publish what was computed, release what ended, tell the callers."""
        deltas: list[Delta] = []
        num_sampled = 0
        for seq, row in zip(rows, batch.rows, strict=True):
            result = results[seq.id]
            seq.scores += result.scores
            seq.score_tops += result.score_tops
            num_added = self._take_tokens(seq, row, result)
            num_sampled += sum(seq.mask[len(seq.mask) - num_added :])
            self._publish(seq, is_chunk=len(row.tokens) > 1)
            if num_added or seq.finish_reason:
                deltas.append(to_delta(seq, num_added, self._version))
            if seq.finish_reason:
                self._leave(seq)
        self._deliver(deltas)
        return StepResult(
            deltas=tuple(deltas),
            samples=tuple(delta.sample for delta in deltas if delta.sample is not None),
            stats=StepStats(
                num_rows=len(rows),
                num_computed=sum(len(row.tokens) for row in batch.rows),
                num_sampled=num_sampled,
                num_preempted=len(plan.preempted_seqs),
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_free_blocks=self._kv.num_free_blocks(),
            ),
        )

    def _take_tokens(self, seq: Sequence, row: Row, result: RowResult) -> int:
        """Append a row's drawn tokens until one ends the sample or forces others; return how many were added.

        K/V exists for the row's own tokens and for every drawn token that another was drawn after.
        """
        num_added = num_drawn = 0
        seq.num_computed = row.start + len(row.tokens)
        tops = result.top_logprobs or ((),) * len(result.tokens)
        for token, logprob, top in zip(result.tokens, result.logprobs, tops, strict=True):
            if not math.isfinite(logprob):
                finish(seq, "abort", "no token can be drawn: the logits are not finite or all tokens are forbidden")
                break
            added = advance(seq, token, logprob, top, self._version)
            num_drawn += 1
            num_added += added
            if seq.finish_reason or added > 1:
                break
        seq.num_computed += max(0, min(num_drawn, len(result.tokens) - 1))
        if seq.max_new <= 0 and seq.finish_reason is None and seq.num_computed == len(seq.tokens):
            finish(seq, "length", None)
        return num_added

    def _publish(self, seq: Sequence, *, is_chunk: bool) -> None:
        """Make new K/V findable: whole blocks as they fill, the rest of one after a chunk and at the end."""
        num_whole = seq.num_computed // self._kv.block_size
        if seq.version != self._version or seq.finish_reason == "abort":
            return
        if num_whole > seq.num_published or is_chunk or seq.finish_reason:
            salt = (self._version, seq.request.salt)
            self._kv.publish(seq.tokens, salt, seq.blocks, seq.num_published, seq.num_computed)
            seq.num_published = num_whole

    def _leave(self, seq: Sequence) -> None:
        """Take an ended sequence out of the queues and free its blocks."""
        if seq.id in self._waiting:
            del self._waiting[seq.id]
        else:
            self._running.remove(seq)
            self._release(seq)
        siblings = self._live.get(seq.request.id)
        if siblings is not None:
            siblings.remove(seq)
            if not siblings:
                del self._live[seq.request.id]

    def _deliver(self, deltas: Seq[Delta]) -> None:
        """Put deltas into the mailboxes that wait for them, and other requests' samples aside for `step`."""
        for delta in deltas:
            if delta.request_id in self._mailboxes:
                self._mailboxes[delta.request_id].append(delta)
            elif delta.sample is not None:
                self._finished.append(delta.sample)


def _copy_of(seq: Sequence, hit: Hit) -> BlockCopy:
    """The copy that gives a sequence the part of a block which its hit ends in."""
    return BlockCopy(hit.partial_block, seq.blocks[len(hit.blocks)], hit.partial_tokens)


def _one_for_each(
    prompts: Seq[Seq[int]], sampling_params: SamplingParams | Seq[SamplingParams] | None
) -> Seq[SamplingParams]:
    """Return one `SamplingParams` for each prompt."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, list | tuple):
        raise BadRequest(f"prompts must be a list of lists of token ids, got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], int):
        raise BadRequest("prompts must be a list of lists of token ids, got one list of ids; put it into a list")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise BadRequest(f"sampling_params: {len(sampling_params)} given for {len(prompts)} prompts")
    return sampling_params
