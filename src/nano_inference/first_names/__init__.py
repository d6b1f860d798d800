"""Names of the library's first description, in the forms that it gave them.

Nothing here computes: records are those of the core, functions convert their arguments and call the core's.
`model_forward` and `sample_with_logprobs` are in `first_names/forward.py` and `first_names/sampling.py`, because they
need torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from nano_inference import kv
from nano_inference.checks import check_int
from nano_inference.config import SchedulerConfig
from nano_inference.scheduling import SeqView, Work, plan_step
from nano_inference.sequence import Sequence as CoreSequence
from nano_inference.sequence import start_sequences
from nano_inference.types import EngineRequest, SamplingParams, TrainingSample, WeightLabel
from nano_inference.weights.updates import NamedWeights

_LARGEST_HASH = (1 << 128) - 1
_NO_LIMIT = 1 << 30


class SequenceStatus(Enum):
    """What a sequence does, see `status_of`."""

    WAITING = "waiting"
    """It holds no blocks: it is new, or was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


class Sequence(CoreSequence):
    """A sequence without an engine, with the first description's names: read-only but for `append_token`."""

    __slots__ = ()

    @property
    def seq_id(self) -> int:
        return self.id

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens)

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(self.blocks)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prompt

    @property
    def status(self) -> SequenceStatus:
        return status_of(self)

    @property
    def temperature(self) -> float:
        return self.request.params.temperature

    @property
    def max_tokens(self) -> int | None:
        return self.request.params.max_tokens

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset(self.request.params.stop_token_ids)

    @property
    def output_logprobs(self) -> tuple[float, ...]:
        return tuple(self.logprobs)

    def append_token(self, token_id: int, logprob: float) -> None:
        """Append a sampled token; the limit and stop tokens end the sequence. Raises `ValueError` after its end."""
        if self.finish_reason is not None:
            raise ValueError(f"the sequence has ended: {self.finish_reason}")
        check_int("token_id", token_id, 0)
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.mask.append(1)
        self.versions.append(self.version)
        if token_id in self.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.max_new <= 0:
            self.finish_reason = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """A plan for one step."""

    prefill_seqs: tuple[int, ...]
    """Ids that compute more than one token, or sample none."""
    decode_seqs: tuple[int, ...]
    """Ids that compute their last token and sample the next."""
    preempted_seqs: tuple[int, ...]
    """Ids whose blocks are taken away, youngest first."""
    work: tuple[Work, ...]
    """Every scheduled sequence, oldest first."""


@runtime_checkable
class RolloutEngine(Protocol):
    """What rollout code needs: `InferenceEngine` and `RolloutPool` satisfy it."""

    def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
    ) -> list[TrainingSample]: ...

    def score(
        self, token_ids: Seq[int] | Seq[Seq[int]], start: int | Seq[int] = 0, *, temperature: float = 1.0
    ) -> list[float] | list[list[float]]: ...

    def update_weights(
        self,
        weights: NamedWeights | str | Path,
        *,
        blocking: bool = False,
        version: WeightLabel | None = None,
        partial: bool = False,
    ) -> int: ...

    def finish_update(self, timeout: float | None = None) -> int: ...

    def flush_cache(self) -> int: ...

    def get_weight_version(self) -> int: ...

    def shutdown(self) -> None: ...


@runtime_checkable
class AsyncRolloutEngine(Protocol):
    """The same for asyncio: `AsyncEngine` satisfies it."""

    async def generate(
        self,
        prompts: Seq[Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
    ) -> list[TrainingSample]: ...

    async def score(self, token_ids: Seq[int], start: int = 0, *, temperature: float = 1.0) -> list[float]: ...

    async def update_weights(
        self, weights: NamedWeights | str | Path, *, version: WeightLabel | None = None, partial: bool = False
    ) -> int: ...


class Block(NamedTuple):
    """A KV block of a sequence, or of a cache."""

    block_id: int
    ref_count: int
    """Number of holders; a block of a sequence counts that sequence alone."""
    hash: int | None
    """`compute_block_hash` of the tokens, after the hash of the block before; None unless the block is full."""
    token_ids: tuple[int, ...] = ()
    """For a sequence: the tokens whose K/V it has room for; fewer than a block's size in the last one."""


def new_sequence(prompt: Seq[int], params: SamplingParams | None = None, *, id: int = 0, seed: int = 0) -> Sequence:
    """Return a sequence that waits. Its prompt is not checked against a model."""
    request = EngineRequest(prompt=prompt, params=params or SamplingParams())
    limit = request.params.max_tokens
    most = _NO_LIMIT if limit is None else limit
    (sequence,) = start_sequences(request, request_id=id, first_id=id, seed=seed, max_new_tokens=most)
    sequence.__class__ = Sequence
    assert isinstance(sequence, Sequence)
    return sequence


def status_of(sequence: CoreSequence) -> SequenceStatus:
    """Return the status, which follows from the reason of its end and the blocks that it holds."""
    if sequence.finish_reason is not None:
        return SequenceStatus.FINISHED
    return SequenceStatus.RUNNING if sequence.blocks else SequenceStatus.WAITING


def blocks_of(sequence: CoreSequence, block_size: int) -> tuple[Block, ...]:
    """Return the blocks that a sequence holds, with their tokens and hashes."""
    check_int("block_size", block_size, 1)
    found: list[Block] = []
    parent: int | None = None
    for index, block in enumerate(sequence.blocks):
        tokens = tuple(sequence.tokens[index * block_size : (index + 1) * block_size])
        parent = kv.compute_block_hash(tokens, parent) if len(tokens) == block_size else None
        found.append(Block(block, 1, parent, tokens))
    return tuple(found)


def schedule(
    waiting: Iterable[SeqView | CoreSequence],
    running: Seq[SeqView | CoreSequence],
    num_free_blocks: int,
    config: SchedulerConfig,
) -> SchedulerOutput:
    """Return the plan of `scheduling.plan_step`, for counts or for sequences; finished sequences are left out.

    `num_computed` and `blocks` of a waiting sequence are its cache hit, as `KVCacheManager.allocate` returns it.
    """
    queue = tuple(waiting)
    holders = Counter(block for one in (*queue, *running) if isinstance(one, CoreSequence) for block in one.blocks)
    views = [[_view(one, holders) for one in each if not _is_finished(one)] for each in (queue, running)]
    plan = plan_step(tuple(views[0]), views[1], num_free_blocks, config)
    decode = dict.fromkeys(work.id for work in plan.work if work.num_tokens == 1 and work.num_sampled)
    return SchedulerOutput(
        prefill_seqs=tuple(work.id for work in plan.work if work.id not in decode),
        decode_seqs=tuple(decode),
        preempted_seqs=plan.preempted,
        work=plan.work,
    )


def compute_block_hash(token_ids: Seq[int], prefix_hash: int | None = -1) -> int:
    """Return `kv.compute_block_hash`, where -1 is no prefix, as None is. Raises `ValueError` for another negative."""
    if prefix_hash is None or prefix_hash == -1:
        return kv.compute_block_hash(token_ids)
    check_int("prefix_hash", prefix_hash, 0, _LARGEST_HASH)
    return kv.compute_block_hash(token_ids, prefix_hash)


def _is_finished(one: SeqView | CoreSequence) -> bool:
    return isinstance(one, CoreSequence) and one.finish_reason is not None


def _view(one: SeqView | CoreSequence, holders: Counter[int]) -> SeqView:
    """Return the counts of a sequence; `holders` has the number of sequences that hold each block."""
    if isinstance(one, SeqView):
        return one
    return SeqView(
        id=one.id,
        num_tokens=len(one.tokens),
        num_computed=one.num_computed,
        num_blocks=len(one.blocks),
        num_private=sum(holders[block] == 1 for block in one.blocks),
        max_new=one.max_new,
        max_ahead=one.max_ahead,
        is_streamed=one.request.is_streamed,
    )
