"""`Core`: the queues, the blocks and the step. Plan (counts only), apply (the cache gives blocks), run, commit.

It moves sequences from waiting to running to ended and decides nothing: every decision is made by a function it calls.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from nano_inference.config import SchedulerConfig
from nano_inference.kv import Hit, KVManager
from nano_inference.recovery import Checkpoint, checkpoint, restart, roll_back
from nano_inference.runner import BlockCopy, DrawExtras, Row, RowResult, Runner
from nano_inference.scheduling import StepPlan, plan_step
from nano_inference.sequence import (
    NO_EXTRAS,
    Sequence,
    add_pooled,
    advance,
    finish,
    follow_again,
    forget_found,
    to_delta,
)
from nano_inference.speculation import Speculation
from nano_inference.types import (
    Delta,
    OnRunning,
    SeqView,
    StepResult,
    StepStats,
    TopLogprobs,
    WeightLabel,
    Work,
)


class Core:
    """Owns the queues and, through its manager, the KV blocks. The only place where a `Sequence` changes."""

    def __init__(
        self,
        runner: Runner,
        kv: KVManager,
        limits: SchedulerConfig,
        speculation: Speculation,
        *,
        vocab_size: int,
    ) -> None:
        self.version = 0
        """How many times weights were installed since the start."""
        self.labels: dict[int, WeightLabel] = {}
        """What the trainer calls a version, where it said so."""
        self.is_torn = False
        """Whether a change was left half done: then `recover` comes before anything else."""
        self._vocab_size = vocab_size
        self._runner = runner
        self._kv = kv
        self._limits = limits
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: list[Sequence] = []
        self._speculation = speculation
        self._open: Counter[int] = Counter()
        """For each request, its sequences that have not ended."""
        self._begun: set[int] = set()
        """Those of them of which a sequence was ever started."""
        self._undo: tuple[Checkpoint, ...] = ()
        """The sequences that the step under way adds to, as they were before; empty between two steps."""
        self._has_dropped_matchers = False
        """Whether a rollback may have left sequences without their matchers."""

    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    def begun_requests(self) -> frozenset[int]:
        """Open requests of which any sequence was ever started."""
        return frozenset(self._begun)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Put new sequences at the end of the queue; all of a request at once."""
        for seq in sequences:
            self._open[seq.request_id] += 1
            self._waiting[seq.id] = seq
            self._speculation.open(seq)

    def abort(self, seq: Sequence) -> Delta:
        """End a sequence that waits or runs; return its last delta. Its blocks are free at once."""
        finish(seq, "abort", None)
        self._leave(seq)
        return to_delta(seq, 0, self.version, self.labels)

    def install(self, version: int, label: WeightLabel | None, on_running: OnRunning) -> list[Delta]:
        """Let a new version begin at this step boundary; return the last deltas of what it ended.

        K/V of older versions can no longer be found. A prompt that is still being scored or pooled begins again, so
        that its log-probabilities, or its embedding and what that has read, are all of one version.
        """
        self.version = version
        if label is not None:
            self.labels[version] = label
        if on_running == "abort":
            begun = self.begun_requests()
            return [self.abort(seq) for seq in (*self._running, *self._waiting.values()) if seq.request_id in begun]
        if on_running == "recompute":
            self.preempt_all()
        for seq in (*reversed(self._running), *self._waiting.values()):
            if seq.next_score is not None or seq.request.params.pooling is not None:
                self._begin_again(seq)
        return []

    def preempt_all(self) -> None:
        """Take the blocks of everything that runs; it goes on later, oldest first, and computes its K/V again."""
        for seq in reversed(self._running.copy()):
            self._preempt(seq)

    def _begin_again(self, seq: Sequence) -> None:
        """Forget what was found of a prompt that is still being scored or pooled."""
        if seq.id not in self._waiting:
            self._preempt(seq)
        forget_found(seq)

    def recover(self, live: Iterable[Sequence]) -> None:
        """Rebuild queues and block books from the sequences that have not ended, after an interrupted change.

        All K/V is forgotten, cached prefixes included. What the interrupted step added to a sequence is taken back: its
        tokens are drawn again, the same ones, because a draw depends on seed, sample index and position alone. Can be
        interrupted itself, at any point, and called again.
        """
        self._has_dropped_matchers = True
        for mark in self._undo:
            roll_back(mark)
        self._kv.reset()
        sequences = sorted(live, key=lambda seq: seq.id)
        for seq in sequences:
            restart(seq)
        self._running = []
        self._waiting = OrderedDict((seq.id, seq) for seq in sequences)
        self._open = Counter(seq.request_id for seq in sequences)
        self._begun = self._begun & self._open.keys()
        self._speculation.restart(sequences)
        self._undo = ()

    def settle(self) -> None:
        """Forget how to take the last step back: its results have been delivered."""
        self._undo = ()

    def step(self, *, admit_new: bool = True) -> StepResult:
        """Run one step. When the runner is interrupted (Ctrl-C) or fails, its rows are computed again by the next step.

        Any other exception leaves a step half done, to be taken back by `recover`. Without `admit_new`, only requests
        that have begun go on.
        """
        ended = self._restore_matchers() if self._has_dropped_matchers else []
        hits: dict[int, Hit] = {}
        admitted = None if admit_new else self.begun_requests()
        waiting = self._waiting_views(hits, admitted) if self._waiting else ()
        running = self._speculation.offered(self._running, self._running_views())
        plan = plan_step(waiting, running, self._kv.num_free_blocks(), self._limits)
        assert plan.work or plan.preempted or admitted == frozenset() or not self.has_work(), "a step without work"
        seqs, copies, fresh = self._apply(plan, hits)
        rows = tuple(map(self._row, seqs, plan.work))
        started = tuple((seq.request_id, seq.sample_index) for seq in seqs if seq.id in hits)
        try:
            results = self._run(seqs, rows, copies, fresh)
        except MemoryError as error:
            if any(row.num_drafts for row in rows):
                result = self._give_up_guesses(seqs, rows)
            else:
                result = self._give_up_youngest(seqs, error)
        else:
            result = self._commit(plan, seqs, rows, results)
        return (replace(result, started=started) if started else result).after(ended)

    def _restore_matchers(self) -> list[Delta]:
        """Give sequences that were rolled back their matchers again; a matcher that fails ends its own sample."""
        ended: list[Delta] = []
        for seq in (*self._running, *self._waiting.values()):
            try:
                follow_again(seq)
            except Exception as error:
                finish(seq, "abort", f"{type(error).__name__}: {error}")
                self._leave(seq)
                ended.append(to_delta(seq, 0, self.version, self.labels))
        self._has_dropped_matchers = False
        return ended

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

    def _waiting_views(self, hits: dict[int, Hit], admitted: Collection[int] | None) -> Iterator[SeqView]:
        """Counts of the waiting sequences with what the cache would give them, noted in `hits`; lazy.

        `admitted` names the requests that may start; None lets all.
        """
        num_left = len(self._waiting)
        if admitted is not None:
            num_left = sum(self._open[one] for one in admitted) - len(self._running)
        size = self._kv.block_size
        for seq in self._waiting.values():
            if not num_left:
                return
            if admitted is not None and seq.request_id not in admitted:
                continue
            num_left -= 1
            wanted = seq.next_wanted
            known = seq.tokens if wanted is None else seq.tokens[: wanted + 1]
            hit = hits[seq.id] = self._kv.peek(known, (self.version, seq.request.salt))
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

        A prompt that its first sample still scores for others is named by the request: they wait for the scores.
        """
        wanted = (seq.leader or seq).next_wanted
        if wanted is not None and seq.request.num_samples > 1:
            return seq.request_id
        size = self._kv.block_size
        start = num_computed // size * size
        if len(seq.tokens) - num_computed <= 1 or (wanted is not None and start + size > wanted):
            return None
        parent = blocks[start // size - 1] if start else -1
        return (seq.request.salt, parent, *seq.tokens[start : start + size])

    # ---- apply ------------------------------------------------------------------------------------------------------

    def _apply(
        self, plan: StepPlan, hits: dict[int, Hit]
    ) -> tuple[list[Sequence], tuple[BlockCopy, ...], tuple[int, ...]]:
        """Give back the blocks of the preempted, hold and take those of the scheduled.

        Returns the scheduled sequences, what is to be copied between blocks, and the fresh blocks.
        """
        by_id = {seq.id: seq for seq in self._running}
        for sequence_id in plan.preempted:
            self._preempt(by_id[sequence_id])
        admitted = [self._waiting[work.id] for work in plan.work if work.id in self._waiting]
        for seq in admitted:  # every hold before any take: a take may evict what nobody holds
            self._start(seq, hits[seq.id])
        by_id |= {seq.id: seq for seq in admitted}
        fresh: list[int] = []
        for work in plan.work:
            taken = self._kv.take(work.num_blocks)
            by_id[work.id].blocks += taken
            fresh += taken
        copies = tuple(_copy_of(seq, hits[seq.id]) for seq in admitted if hits[seq.id].partial_tokens)
        return [by_id[work.id] for work in plan.work], copies, tuple(fresh)

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """Move a waiting sequence among the running, with what the cache gives it."""
        del self._waiting[seq.id]
        self._begun.add(seq.request_id)
        insort(self._running, seq, key=lambda other: other.id)
        seq.blocks = self._kv.hold(hit)
        seq.num_published = len(hit.blocks)
        seq.num_computed = len(hit.blocks) * self._kv.block_size + hit.partial_tokens
        seq.version = self.version
        if seq.num_cached is None:  # a resumed sample's own tokens may be cached too, and are not the prompt's
            seq.num_cached = min(seq.num_computed, seq.num_prompt)

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
        draws = work.num_sampled > 0
        return Row(
            id=seq.id,
            tokens=(*seq.tokens[start:end], *self._speculation.drafts(seq, work.num_drafts)),
            prev_token=seq.tokens[start - 1] if start else -1,
            start=start,
            blocks=tuple(seq.blocks),
            num_sampled=work.num_sampled,
            params=params,
            logprobs_mode=seq.logprobs_mode,
            seed=seq.seed,
            sample_index=seq.sample_index + seq.request.beginning.sample_index,
            request_id=seq.request_id,
            banned=seq.banned if draws else (),
            mask=seq.token_mask if draws else None,
            history=tuple(seq.tokens) if draws and seq.counts_history else (),
            num_prompt=seq.num_prompt - seq.request.beginning.num_tokens,
            score_from=seq.next_score,
            score_end=seq.num_prompt,
            next_token=seq.tokens[end] if end < len(seq.tokens) else -1,
            pool_from=seq.pool_from(end),
            num_drafts=work.num_drafts,
        )

    # ---- run and commit ---------------------------------------------------------------------------------------------

    def _give_up_youngest(self, seqs: Seq[Sequence], error: MemoryError) -> StepResult:
        """End the youngest of the rows that memory did not suffice for; the others are computed again, one fewer."""
        self._compute_again(seqs)
        victim = max(seqs, key=lambda seq: seq.id)
        finish(victim, "abort", f"out of memory: {error}" if str(error) else "out of memory")
        self._leave(victim)
        return _result([to_delta(victim, 0, self.version, self.labels)], self._stats(num_preempted=len(seqs)))

    def _give_up_guesses(self, seqs: Seq[Sequence], rows: Seq[Row]) -> StepResult:
        """Compute all rows again, and guess nothing more about those of the samples that memory did not suffice for."""
        for seq, row in zip(seqs, rows, strict=True):
            if row.num_drafts:
                self._speculation.bar(seq)
        self._compute_again(seqs)
        return _result((), self._stats(num_preempted=len(seqs)))

    def _compute_again(self, seqs: Seq[Sequence]) -> None:
        """Preempt a step's sequences, the oldest last, so that it is first in the queue."""
        for seq in sorted(seqs, key=lambda seq: -seq.id):
            self._preempt(seq)

    def _run(
        self, seqs: Seq[Sequence], rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        """Let the runner compute; when it fails or is interrupted, its rows are computed again from the cache."""
        if not rows:
            return {}
        try:
            return self._runner.run(rows, copies, fresh)
        except MemoryError:
            raise
        except BaseException:
            self._runner.recover()
            self._compute_again(seqs)
            self.is_torn = False
            raise

    def _commit(
        self, plan: StepPlan, seqs: Seq[Sequence], rows: Seq[Row], results: Mapping[int, RowResult]
    ) -> StepResult:
        """Append what was drawn, publish what was computed, release what ended, tell the callers."""
        self._undo = tuple(map(checkpoint, seqs))
        deltas: list[Delta] = []
        num_sampled = num_accepted = 0
        for seq, row in zip(seqs, rows, strict=True):
            result = results[seq.id]
            if row.num_drafts and not all(map(math.isfinite, result.logprobs)):
                self._compute_alone(seq)
                continue
            seq.scores += result.scores
            seq.score_tops += result.score_tops
            seq.score_ranks += result.score_ranks
            if row.pool_from is not None:
                add_pooled(seq, result.pooled, row.start + len(row.tokens) - row.pool_from)
            num_added = self._take_tokens(seq, row, result)
            num_sampled += sum(seq.mask[len(seq.mask) - num_added :])
            self._publish(seq, is_chunk=len(row.tokens) - row.num_drafts > 1)
            if row.num_drafts:
                num_accepted += seq.num_computed - row.start - len(row.tokens) + row.num_drafts
                self._give_back_unused(seq)
            if num_added or seq.finish_reason:
                deltas.append(to_delta(seq, num_added, self.version, self.labels))
            if seq.finish_reason:
                self._leave(seq)
        stats = self._stats(
            num_rows=len(rows),
            num_computed=sum(len(row.tokens) for row in rows),
            num_sampled=num_sampled,
            num_preempted=len(plan.preempted),
            num_drafted=sum(row.num_drafts for row in rows),
            num_accepted=num_accepted,
        )
        return _result(deltas, stats)

    def idle_result(self, deltas: Seq[Delta]) -> StepResult:
        """Return the result of a step that computes nothing."""
        return _result(deltas, self._stats())

    def _stats(
        self,
        *,
        num_rows: int = 0,
        num_computed: int = 0,
        num_sampled: int = 0,
        num_preempted: int = 0,
        num_drafted: int = 0,
        num_accepted: int = 0,
    ) -> StepStats:
        """Put what a step counted beside how the queues and the cache stand now."""
        return StepStats(
            num_rows=num_rows,
            num_computed=num_computed,
            num_sampled=num_sampled,
            num_preempted=num_preempted,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._kv.num_free_blocks(),
            weight_version=self.version,
        )

    def _take_tokens(self, seq: Sequence, row: Row, result: RowResult) -> int:
        """Append a row's drawn tokens until one ends the sample, forces others or was guessed wrong; return how many.

        K/V exists for the row's own tokens and for every drawn token that another was drawn after.
        """
        num_added = 0
        num_own = len(row.tokens) - row.num_drafts
        drafts = row.tokens[num_own:] if row.num_drafts else result.tokens[:-1]
        seq.num_computed = row.start + num_own
        tops = result.top_logprobs or ((),) * len(result.tokens)
        extras = result.extras or (NO_EXTRAS,) * len(result.tokens)
        drawn = zip(result.tokens, result.logprobs, tops, extras, strict=True)
        for place, (token, logprob, top, extra) in enumerate(drawn):
            if not math.isfinite(logprob):
                finish(seq, "abort", "no token can be drawn: the logits are not finite or all tokens are forbidden")
                break
            added = self._advance(seq, token, logprob, top, extra)
            num_added += added
            has_kv = place < len(drafts) and token == drafts[place]
            seq.num_computed += has_kv
            if seq.finish_reason or added > 1 or not has_kv:
                break
        if seq.max_new <= 0 and seq.finish_reason is None and seq.num_computed == len(seq.tokens):
            finish(seq, "length", None)
        return num_added

    def _advance(self, seq: Sequence, token: int, logprob: float, top: TopLogprobs, extra: DrawExtras) -> int:
        """Append a drawn token and what it forces; a failing matcher or program ends its own sample only."""
        before = seq.num_new
        try:
            advance(seq, token, logprob, top, self.version, extra, vocab_size=self._vocab_size)
        except Exception as error:
            finish(seq, "abort", f"{type(error).__name__}: {error}")
        return seq.num_new - before

    def _publish(self, seq: Sequence, *, is_chunk: bool) -> None:
        """Make new K/V findable: whole blocks as they fill, the rest of one after a chunk and at the end."""
        num_whole = seq.num_computed // self._kv.block_size
        if seq.version != self.version or seq.finish_reason == "abort":
            return
        if num_whole > seq.num_published or is_chunk or seq.finish_reason:
            salt = (self.version, seq.request.salt)
            seq.blocks = self._kv.publish(seq.tokens, salt, seq.blocks, seq.num_published, seq.num_computed)
            seq.num_published = num_whole

    def _give_back_unused(self, seq: Sequence) -> None:
        """Give back the blocks that only wrong guesses stand in: a sequence holds what its K/V needs."""
        num_needed = -(-seq.num_computed // self._kv.block_size)
        self._kv.release(seq.blocks[num_needed:])
        del seq.blocks[num_needed:]

    def _compute_alone(self, seq: Sequence) -> None:
        """Forget what a row with guesses gave, and compute it again without any.

        Not all of its numbers are finite, which a guess may have done, and torch reads the K/V of tokens that it hides.
        """
        self._speculation.bar(seq)
        self._preempt(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take an ended sequence out of the queues and free its blocks."""
        self._speculation.close(seq)
        self._open[seq.request_id] -= 1
        if not self._open[seq.request_id]:
            del self._open[seq.request_id]
            self._begun.discard(seq.request_id)
        if seq.id in self._waiting:
            del self._waiting[seq.id]
        else:
            self._running.remove(seq)
            self._release(seq)


def _copy_of(seq: Sequence, hit: Hit) -> BlockCopy:
    """The copy that gives a sequence the part of a block which its hit ends in."""
    return BlockCopy(hit.partial_block, seq.blocks[len(hit.blocks)], hit.partial_tokens)


def _result(deltas: Seq[Delta], stats: StepStats) -> StepResult:
    """Put together what a step gives back."""
    samples = tuple(delta.sample for delta in deltas if delta.sample is not None)
    return StepResult(deltas=tuple(deltas), samples=samples, stats=stats)
