"""`Core`: the queues, the block tables, and a step without its model: plan (counts only), apply (take blocks), commit.

`InferenceEngine` runs the rows of a planned step between `plan_and_apply` and `commit`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from nano_inference.config import SchedulerConfig
from nano_inference.core.adapters import Adapters
from nano_inference.core.appending import append_prompt_results, append_result
from nano_inference.core.cache import Hit, KVManager
from nano_inference.core.drafting import MakeDrafter
from nano_inference.core.identity import next_key, salt_of
from nano_inference.core.overlap import is_current, is_window, must_wait, num_ahead, num_missing, row_after
from nano_inference.core.recurrent import (
    keep_states,
    keeps_snapshots,
    release_state,
    settle_state,
    starts_from_snapshot,
    take_slots,
)
from nano_inference.core.scheduler import SeqView, StepPlan, plan_step, seats
from nano_inference.core.sequence import Sequence, clear_prompt_results, finish, pass_on_scoring, to_delta, to_row
from nano_inference.core.speculation import Speculator
from nano_inference.core.step import BlockCopy, Row, RowResult
from nano_inference.types import AdapterInfo, Delta, OnRunning, SequenceView, StepResult, StepStats, WeightLabel

_NOTHING_COUNTED = StepStats()


class PlannedStep(NamedTuple):
    """A step whose blocks are taken: what the executor runs, and what `Core.commit` needs afterwards."""

    plan: StepPlan
    seqs: list[Sequence]
    rows: tuple[Row, ...]
    """One for each of `seqs`."""
    copies: tuple[BlockCopy, ...]
    fresh: tuple[int, ...]
    started: tuple[tuple[int, int], ...]
    """(request id, sample index) of the sequences that left the queue."""


class Core:
    """Owns the queues and hands out block ids through its KV manager. Its methods alone change a queued `Sequence`."""

    def __init__(
        self, kv: KVManager, limits: SchedulerConfig, make_drafter: MakeDrafter, adapters: Adapters, *, vocab_size: int
    ) -> None:
        self.version = 0
        """Number of weight installations since the start."""
        self.labels: dict[int, WeightLabel] = {}
        """The trainer's names of versions."""
        self.adapters = adapters
        self._vocab_size = vocab_size
        self._kv = kv
        self._config = limits
        self._urgent_config = replace(limits, lookahead=1)
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: list[Sequence] = []  # ascending by id, that is, oldest first
        self._speculator = Speculator(make_drafter, limits.max_draft_tokens)
        self._open: Counter[int] = Counter()  # request id -> number of its sequences that have not ended
        self._started: set[int] = set()  # open requests of which a sequence was ever started

    def has_work(self) -> bool:
        """Return whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    def views(self, *, running: bool) -> tuple[SequenceView, ...]:
        """Return copies of the running sequences, or of the waiting ones in the order of the queue."""
        sequences = self._running if running else self._waiting.values()
        return tuple(
            SequenceView(seq.id, seq.request_id, tuple(seq.tokens), seq.num_prompt, seq.num_computed, tuple(seq.blocks))
            for seq in sequences
        )

    def started_requests(self) -> frozenset[int]:
        """Return the open requests of which a sequence was ever started."""
        return frozenset(self._started)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Append all sequences of a request to the queue."""
        for seq in sequences:
            self._open[seq.request_id] += 1
            self._waiting[seq.id] = seq
            self._speculator.open(seq)
            self.adapters.use(seq.adapter, seq.request_id)

    def abort(self, seq: Sequence, reason: str | None = None) -> Delta:
        """End a waiting or running sequence and release its blocks; return its last delta."""
        finish(seq, "abort", reason)
        self._leave(seq)
        return to_delta(seq, 0, self.version, self.labels)

    def install(self, version: int, label: WeightLabel | None, on_running: OnRunning) -> list[Delta]:
        """Start a new weight version at this step boundary; return the last deltas of aborted requests.

        Cached K/V of older versions is no longer found. A prompt that is being scored or pooled starts again, so that
        its scores or its embedding are computed under one version.
        """
        self.version = version
        if label is not None:
            self.labels[version] = label
        if on_running == "abort":
            started = self.started_requests()
            return [self.abort(seq) for seq in (*self._running, *self._waiting.values()) if seq.request_id in started]
        if on_running == "recompute":
            self.preempt_all()
        for seq in (*reversed(self._running), *self._waiting.values()):
            if seq.must_restart:
                self._restart(seq)
        return []

    def install_adapter(self, number: int, info: AdapterInfo, staying: Collection[int]) -> None:
        """Make an adapter its name's current one at this step boundary, also of requests that are not `staying`.

        K/V of several adapters is not published; a prompt that is being scored or pooled starts again.
        """
        self.adapters.put(number, info)
        for seq in (*reversed(self._running), *self._waiting.values()):
            if seq.request.adapter == info.name and seq.request_id not in staying:
                self.adapters.leave(seq.adapter, seq.request_id)
                self.adapters.use(number, seq.request_id)
                seq.adapter, seq.version = number, -1
                if seq.must_restart:
                    self._restart(seq)

    def _restart(self, seq: Sequence) -> None:
        if seq.id not in self._waiting:
            self._preempt(seq)
        clear_prompt_results(seq)

    def preempt_all(self) -> None:
        """Preempt every running sequence; they resume oldest first and recompute their K/V."""
        for seq in reversed(self._running.copy()):
            self._preempt(seq)

    def forget_kv(self) -> None:
        """Preempt every sequence and forget all cached prefixes."""
        self.preempt_all()
        self._kv.flush()

    # ---- a step -----------------------------------------------------------------------------------------------------

    def plan_and_apply(self, *, admit_new: bool = True, is_urgent: bool = False) -> PlannedStep:
        """Plan the next step, which changes nothing, and take its blocks.

        Without `admit_new`, only requests that have started are computed. With `is_urgent`, a row samples one token,
        because something waits for the end of the step.
        """
        hits: dict[int, Hit] = {}  # filled while `plan_step` reads the queue's views
        admitted = None if admit_new else self.started_requests()
        waiting = self._waiting_views(hits, admitted) if self._waiting else ()
        running = self._speculator.with_drafts(self._running, self._running_views())
        limits = self._urgent_config if is_urgent else self._config
        plan = plan_step(waiting, running, self._kv.num_free_blocks(), limits)
        assert plan.work or plan.preempted or admitted == frozenset() or not self.has_work(), "a step without work"
        seqs, copies, fresh = self._apply(plan, hits)
        rows = tuple(
            to_row(seq, work.num_tokens, work.num_sampled, self._speculator.drafts(seq, work.num_drafts))
            for seq, work in zip(seqs, plan.work, strict=True)
        )
        started = tuple((seq.request_id, seq.sample_index) for seq in seqs if seq.id in hits)
        return PlannedStep(plan, seqs, rows, copies, fresh, started)

    def plan_ahead(self, step: PlannedStep) -> PlannedStep | str:
        """Plan the window after a step that is not committed yet, and take its blocks; or return why it must wait."""
        counts = num_ahead(step.seqs, step.rows, self._config)
        needs = [num_missing(*three, self._kv.block_size) for three in zip(step.seqs, step.rows, counts, strict=True)]
        if not is_window(step.rows, len(self._running)):
            return "budget"
        if any(map(must_wait, step.seqs, step.rows)):
            return "choice"
        if self._waiting and (0 in counts or len(self._running) < seats(self._config)):
            return "arrival"
        if not any(counts):
            return "end"
        if sum(needs) > self._kv.num_free_blocks():
            return "blocks"
        rows, seqs, fresh = [], [], []
        for seq, row, count, need in zip(step.seqs, step.rows, counts, needs, strict=True):
            if count:
                taken = self._kv.take(need)
                seq.blocks += taken
                fresh += taken
                seqs.append(seq)
                rows.append(row_after(seq, row, count))
        return PlannedStep(StepPlan((), ()), seqs, tuple(rows), (), tuple(fresh), ())

    def current(self, step: PlannedStep) -> PlannedStep:
        """Return a step without the rows of sequences that have ended or were preempted since it was planned."""
        pairs = [pair for pair in zip(step.seqs, step.rows, strict=True) if is_current(*pair)]
        return step._replace(seqs=[seq for seq, _ in pairs], rows=tuple(row for _, row in pairs))

    # ---- plan -------------------------------------------------------------------------------------------------------

    def _running_views(self) -> list[SeqView]:
        """Return the counts of running sequences, oldest first; counts private blocks only if blocks are scarce."""
        size = self._kv.block_size
        wanted = self._config.max_tokens_per_batch + len(self._running) * (size + self._config.lookahead)
        is_scarce = self._kv.num_free_blocks() * size < wanted
        looks_ahead = self._config.lookahead > 1
        return [
            SeqView(  # by position, which takes half the time
                seq.id,
                len(seq.tokens),
                seq.num_computed,
                len(seq.blocks),
                self._kv.num_private(seq.blocks) if is_scarce else 0,
                0,
                self._next_key(seq, seq.num_computed, seq.blocks, seq.reach),
                seq.max_new,
                seq.max_ahead if looks_ahead else 1,
                seq.request.is_streamed,
            )
            for seq in self._running
        ]

    def _waiting_views(self, hits: dict[int, Hit], admitted: Collection[int] | None) -> Iterator[SeqView]:
        """Yield the counts of waiting sequences, and store their cache hits in `hits`; lazy.

        `admitted` are the requests that may start; None admits all.
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
            end = seq.first_uncached
            reusable = seq.tokens if end is None else seq.tokens[: end + 1]
            hit = hits[seq.id] = self._kv.peek(reusable, (self.version, seq.request.salt, seq.adapter))
            num_computed = len(hit.blocks) * size + hit.partial_tokens
            yield SeqView(
                id=seq.id,
                num_tokens=len(seq.tokens),
                num_computed=num_computed,
                num_blocks=len(hit.blocks),
                idle_hit=hit.num_idle,
                next_key=self._next_key(seq, num_computed, hit.blocks, hit.reach),
                max_new=seq.max_new,
            )

    def _next_key(self, seq: Sequence, num_computed: int, blocks: Seq[int], reach: int) -> object:
        return next_key(seq, num_computed, blocks, reach, self._kv.block_size, has_states=bool(self._kv.num_states))

    # ---- apply ------------------------------------------------------------------------------------------------------

    def _apply(
        self, plan: StepPlan, hits: dict[int, Hit]
    ) -> tuple[list[Sequence], tuple[BlockCopy, ...], tuple[int, ...]]:
        """Preempt, start and give blocks as planned; return the scheduled sequences, block copies and fresh blocks."""
        by_id = {seq.id: seq for seq in self._running}
        for sequence_id in plan.preempted:
            self._preempt(by_id[sequence_id])
        admitted = [self._waiting[work.id] for work in plan.work if work.id in self._waiting]
        for seq in admitted:  # every hold before any take: a take may evict idle blocks
            self._start(seq, hits[seq.id])
        by_id |= {seq.id: seq for seq in admitted}
        seqs = [by_id[work.id] for work in plan.work]
        if self._kv.num_states:
            take_slots(self._kv.states, seqs, plan.work, hits)
        fresh: list[int] = []
        for work in plan.work:
            taken = self._kv.take(work.num_blocks)
            by_id[work.id].blocks += taken
            fresh += taken
        copies = tuple(
            BlockCopy(hit.partial_block, seq.blocks[len(hit.blocks)], hit.partial_tokens)
            for seq in admitted
            if (hit := hits[seq.id]).partial_tokens
        )
        return seqs, copies, tuple(fresh)

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """Move a waiting sequence to the running ones, with its cached blocks."""
        del self._waiting[seq.id]
        self._started.add(seq.request_id)
        insort(self._running, seq, key=lambda other: other.id)
        seq.blocks = self._kv.hold(hit)
        seq.num_published = len(hit.blocks)
        seq.num_computed = len(hit.blocks) * self._kv.block_size + hit.partial_tokens
        seq.version = self.version
        if seq.num_cached is None:  # the completion of a resumed sample may be cached too, but is not counted
            seq.num_cached = min(seq.num_computed, seq.num_prompt)

    def _preempt(self, seq: Sequence, *, was_run: bool = True) -> None:
        """Release a sequence's blocks and put it at the head of the queue. `was_run`: no step with it is planned."""
        self._running.remove(seq)
        self._release(seq, was_run=was_run)
        seq.num_preemptions += 1
        self._waiting[seq.id] = seq
        self._waiting.move_to_end(seq.id, last=False)

    def _release(self, seq: Sequence, *, was_run: bool = False) -> None:
        if seq.state is not None:
            if was_run:
                self._publish(seq, is_chunk=True)  # so that its state can be found
            release_state(self._kv, seq, salt_of(seq, self.version) if was_run else None)
        self._kv.release(seq.blocks)
        seq.blocks, seq.num_computed, seq.num_published = [], 0, 0

    # ---- commit -----------------------------------------------------------------------------------------------------

    def preempt(self, step: PlannedStep) -> None:
        """Undo a step that was not run to its end: its rows are computed again, the oldest first."""
        for seq in sorted(step.seqs, key=lambda seq: -seq.id):
            self._preempt(seq, was_run=False)

    def free_memory(self, step: PlannedStep, error: MemoryError) -> StepResult:
        """Preempt a step's rows after it ran out of memory, and make the next one smaller.

        Rows with draft tokens get no more of them; if there were none, the youngest sequence is aborted.
        """
        drafting = [seq for seq, row in zip(step.seqs, step.rows, strict=True) if row.num_drafts]
        for seq in drafting:
            self._speculator.disable(seq)
        self.preempt(step)
        deltas = []
        if not drafting:
            youngest = max(step.seqs, key=lambda seq: seq.id)
            deltas.append(self.abort(youngest, f"out of memory: {error}" if str(error) else "out of memory"))
        return self.result(deltas, StepStats(num_preempted=len(step.seqs)), step.started)

    def commit(
        self, step: PlannedStep, results: Mapping[int, RowResult], is_read: Callable[[int], bool] | None = None
    ) -> StepResult:
        """Append sampled tokens, publish computed K/V, release what ended; return the step's deltas and counters.

        With `is_read`, deltas that end no sample are built only for request ids of which it is true.
        """
        deltas: list[Delta] = []
        num_sampled = num_accepted = num_computed = num_drafted = 0
        for seq, row in zip(step.seqs, step.rows, strict=True):
            num_computed += len(row.tokens)
            num_drafted += row.num_drafts
            result = results[seq.id]
            if row.num_drafts and not all(map(math.isfinite, result.logprobs)):
                # Not finite, which a draft token can cause: torch's attention also reads masked K/V. Compute it again.
                self._speculator.disable(seq)
                self._preempt(seq, was_run=False)
                continue
            if result.scores or row.pool_from is not None:
                append_prompt_results(seq, row, result)
            num_added = append_result(seq, row, result, self.version, self._vocab_size)
            if row.adapter:
                seq.adapter_versions += [self.adapters.version_of(row.adapter)] * num_added
            has_forced = seq.matcher is not None or seq.request.program is not None
            num_sampled += sum(seq.mask[len(seq.mask) - num_added :]) if has_forced else num_added
            if row.num_drafts:
                num_accepted += seq.num_computed - row.start - len(row.tokens) + row.num_drafts
            is_chunk = len(row.tokens) - row.num_drafts > 1
            if row.state is None:
                self._publish(seq, is_chunk=is_chunk)
            else:
                position = settle_state(self._kv.states, seq, row, result)
                self._publish(seq, is_chunk=is_chunk or keeps_snapshots(row))
                keep_states(self._kv, seq, row, position, salt_of(seq, self.version))
            if row.num_drafts:
                num_needed = -(-seq.num_computed // self._kv.block_size)  # the others contain rejected drafts only
                self._kv.release(seq.blocks[num_needed:])
                del seq.blocks[num_needed:]
            if seq.finish_reason:
                deltas.append(to_delta(seq, num_added, self.version, self.labels))
                self._leave(seq)
            elif is_read is not None and not is_read(seq.request_id):
                continue
            elif num_added or (seq.request.reports_prefill and not seq.num_new):
                deltas.append(to_delta(seq, num_added, self.version, self.labels))
        counted = StepStats(
            num_rows=len(step.rows),
            num_computed=num_computed,
            num_sampled=num_sampled,
            num_preempted=len(step.plan.preempted),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_state_hits=sum(map(starts_from_snapshot, step.rows)) if self._kv.num_states else 0,
        )
        return self.result(deltas, counted, step.started)

    def result(
        self, deltas: Seq[Delta], counted: StepStats = _NOTHING_COUNTED, started: tuple[tuple[int, int], ...] = ()
    ) -> StepResult:
        """Return deltas and a step's counters, completed by the current state of the queues and the cache."""
        stats = replace(
            counted,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._kv.num_free_blocks(),
            num_state_snapshots=self._kv.states.num_snapshots if self._kv.num_states else 0,
            weight_version=self.version,
        )
        samples = tuple(delta.sample for delta in deltas if delta.sample is not None)
        return StepResult(deltas=tuple(deltas), samples=samples, stats=stats, started=started)

    def _publish(self, seq: Sequence, *, is_chunk: bool) -> None:
        """Publish full blocks; after a prefill chunk and at the end, also a partly filled one."""
        num_whole = seq.num_computed // self._kv.block_size
        salt = salt_of(seq, self.version)
        is_partial = is_chunk or seq.finish_reason is not None
        if salt is not None and (num_whole > seq.num_published or is_partial):
            end = seq.num_computed if is_partial else num_whole * self._kv.block_size
            seq.blocks = self._kv.publish(seq.tokens, salt, seq.blocks, seq.num_published, end)
            seq.num_published = num_whole

    def _leave(self, seq: Sequence) -> None:
        """Remove an ended sequence from the queues and release its blocks."""
        self._speculator.close(seq)
        self._open[seq.request_id] -= 1
        if not self._open[seq.request_id]:
            del self._open[seq.request_id]
            self._started.discard(seq.request_id)
            self.adapters.leave(seq.adapter, seq.request_id)
        if seq.id in self._waiting:
            del self._waiting[seq.id]
        else:
            self._running.remove(seq)
            self._release(seq)
        if seq.next_score is not None:
            pass_on_scoring(seq, (*self._running, *self._waiting.values()))
