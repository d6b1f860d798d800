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
from typing import NamedTuple

from nano_inference import kv
from nano_inference.checks import check_int
from nano_inference.config import SchedulerConfig
from nano_inference.scheduling import SeqView, Work, plan_step
from nano_inference.sequence import Sequence as Sequence
from nano_inference.sequence import start_sequences
from nano_inference.types import EngineRequest, SamplingParams

_LARGEST_HASH = (1 << 128) - 1
_NO_LIMIT = 1 << 30


class SequenceStatus(Enum):
    """What a sequence does, see `status_of`."""

    WAITING = "waiting"
    """It holds no blocks: it is new, or was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


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


class Block(NamedTuple):
    """A KV block of a sequence."""

    id: int
    token_ids: tuple[int, ...]
    """The tokens whose K/V it has room for; fewer than a block's size in the last one."""
    hash: int | None
    """`compute_block_hash` of the tokens, after the hash of the block before; None unless the block is full."""


def new_sequence(prompt: Seq[int], params: SamplingParams | None = None, *, id: int = 0, seed: int = 0) -> Sequence:
    """Return a sequence that waits. Its prompt is not checked against a model."""
    request = EngineRequest(prompt=prompt, params=params or SamplingParams())
    limit = request.params.max_tokens
    most = _NO_LIMIT if limit is None else limit
    (sequence,) = start_sequences(request, request_id=id, first_id=id, seed=seed, max_new_tokens=most)
    return sequence


def status_of(sequence: Sequence) -> SequenceStatus:
    """Return the status, which follows from the reason of its end and the blocks that it holds."""
    if sequence.finish_reason is not None:
        return SequenceStatus.FINISHED
    return SequenceStatus.RUNNING if sequence.blocks else SequenceStatus.WAITING


def blocks_of(sequence: Sequence, block_size: int) -> tuple[Block, ...]:
    """Return the blocks that a sequence holds, with their tokens and hashes."""
    check_int("block_size", block_size, 1)
    found: list[Block] = []
    parent: int | None = None
    for index, block in enumerate(sequence.blocks):
        tokens = tuple(sequence.tokens[index * block_size : (index + 1) * block_size])
        parent = kv.compute_block_hash(tokens, parent) if len(tokens) == block_size else None
        found.append(Block(block, tokens, parent))
    return tuple(found)


def schedule(
    waiting: Iterable[SeqView | Sequence],
    running: Seq[SeqView | Sequence],
    num_free_blocks: int,
    config: SchedulerConfig,
) -> SchedulerOutput:
    """Return the plan of `scheduling.plan_step`, for counts or for sequences; finished sequences are left out.

    `num_computed` and `blocks` of a waiting sequence are its cache hit, as `KVCacheManager.allocate` returns it.
    """
    queue = tuple(waiting)
    holders = Counter(block for one in (*queue, *running) if isinstance(one, Sequence) for block in one.blocks)
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


def _is_finished(one: SeqView | Sequence) -> bool:
    return isinstance(one, Sequence) and one.finish_reason is not None


def _view(one: SeqView | Sequence, holders: Counter[int]) -> SeqView:
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
