"""Names of the library's first description, in the forms that it gave them.

Nothing here computes: records are those of the core, functions convert their arguments and call the core's. Functions
with tensors import torch when they are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from nano_inference import types
from nano_inference.config import SchedulerConfig
from nano_inference.core import cache as kv
from nano_inference.core.cache import KVManager, Salt
from nano_inference.core.scheduler import SeqView, Work, plan_step
from nano_inference.core.sequence import Sequence as CoreSequence
from nano_inference.core.sequence import start_sequences
from nano_inference.core.step import Row, RowState
from nano_inference.support.checks import check_int
from nano_inference.types import CacheFull, EngineRequest, SamplingParams, TrainingSample, WeightLabel
from nano_inference.weights.updates import NamedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from nano_inference.executors.cpu.store import KernelStore
    from nano_inference.executors.protocol import Executor
    from nano_inference.executors.step_input import ForwardInput
    from nano_inference.executors.torch.store import KVStore

_LARGEST_HASH = (1 << 128) - 1
_NO_LIMIT = 1 << 30
_NO_SALT: Salt = (0, "", 0)
_Prompts = Seq[Seq[int]]
_Params = SamplingParams | Seq[SamplingParams] | None
_Weights = NamedWeights | str | Path
_BLOCK_SIZE = 16  # of a cache that `model_forward` makes


class SequenceStatus(Enum):
    """What a sequence does, see `status_of`."""

    WAITING = "waiting"  # it holds no blocks: it is new, or was preempted
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

    prefill_seqs: tuple[int, ...]  # ids that compute more than one token, or sample none
    decode_seqs: tuple[int, ...]  # ids that compute their last token and sample the next
    preempted_seqs: tuple[int, ...]  # ids whose blocks are taken away, youngest first
    work: tuple[Work, ...]  # every scheduled sequence, oldest first


@runtime_checkable
class RolloutEngine(Protocol):
    """What rollout code needs: `InferenceEngine` and `RolloutPool` satisfy it."""

    def generate(
        self, prompts: _Prompts, sampling_params: _Params = None, num_samples_per_prompt: int = 1
    ) -> list[TrainingSample]: ...
    def score(
        self, token_ids: Seq[int] | Seq[Seq[int]], start: int | Seq[int] = 0, *, temperature: float = 1.0
    ) -> list[float] | list[list[float]]: ...
    def update_weights(
        self, weights: _Weights, *, blocking: bool = False, version: WeightLabel | None = None, partial: bool = False
    ) -> int: ...
    def finish_update(self, timeout: float | None = None) -> int: ...
    def flush_cache(self) -> int: ...
    def get_weight_version(self) -> int: ...
    def shutdown(self) -> None: ...


@runtime_checkable
class AsyncRolloutEngine(Protocol):
    """The same for asyncio: `AsyncEngine` satisfies it."""

    async def generate(
        self, prompts: _Prompts, sampling_params: _Params = None, num_samples_per_prompt: int = 1
    ) -> list[TrainingSample]: ...
    async def score(self, token_ids: Seq[int], start: int = 0, *, temperature: float = 1.0) -> list[float]: ...
    async def update_weights(
        self, weights: _Weights, *, version: WeightLabel | None = None, partial: bool = False
    ) -> int: ...


class Block(NamedTuple):
    """A KV block of a sequence, or of a cache."""

    block_id: int
    ref_count: int  # number of holders; a block of a sequence counts that sequence alone
    hash: int | None  # of the tokens, after that of the block before; None unless the block is full
    token_ids: tuple[int, ...] = ()  # of a sequence: the tokens whose K/V it has room for; fewer in its last block


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
    """Return the plan of `core.scheduler.plan_step`, for counts or for sequences; finished sequences are left out.

    `num_computed` and `blocks` of a waiting sequence are its cache hit, as `KVCacheManager.allocate` returns it.
    """
    queue = tuple(waiting)
    holders = Counter(block for one in (*queue, *running) if isinstance(one, CoreSequence) for block in one.blocks)
    fresh, old = ([view for one in each if (view := _view(one, holders)) is not None] for each in (queue, running))
    plan = plan_step(tuple(fresh), old, num_free_blocks, config)
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


def _view(one: SeqView | CoreSequence, holders: Counter[int]) -> SeqView | None:
    """Return the counts of a sequence, None if it has ended; `holders`: how many sequences hold each block."""
    if isinstance(one, SeqView):
        return one
    if one.finish_reason is not None:
        return None
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


class CacheAllocation(NamedTuple):
    """A prompt's blocks; the K/V of its first `cached_length` tokens exists."""

    block_ids: tuple[int, ...]
    cached_length: int


@runtime_checkable
class KVCacheManager(Protocol):
    """The minimal interface of a cache, also for `isinstance`: an object with the four methods, whatever its class."""

    def allocate(self, token_ids: Seq[int]) -> CacheAllocation: ...
    def deallocate(self, block_ids: Seq[int], num_computed: int | None = None) -> None: ...
    def num_free_blocks(self) -> int: ...
    def flush(self) -> int: ...


class PromptCache(KVManager):
    """Adds whole prompts to a cache: owns which blocks belong to which prompt until they are released."""

    def reset(self) -> None:
        super().reset()
        # The last block of each `allocate`, which is private -> its blocks and the prompt's tokens.
        self._allocated: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def allocate(self, token_ids: Seq[int]) -> CacheAllocation:
        """Return a prompt's blocks, whole cached ones first. Raises `CacheFull` and then changes nothing."""
        hit = self.peek(token_ids, _NO_SALT)
        if not token_ids:
            raise ValueError("token_ids must hold at least one token")
        num_fresh = -(-len(token_ids) // self.block_size) - len(hit.blocks)
        if num_fresh + hit.num_idle > self.num_free_blocks():
            raise CacheFull(f"{num_fresh + hit.num_idle} KV blocks requested, {self.num_free_blocks()} are free")
        blocks = self.hold(hit) + self.take(num_fresh)
        self._allocated[blocks[-1]] = tuple(blocks), tuple(token_ids)
        return CacheAllocation(tuple(blocks), len(hit.blocks) * self.block_size)

    def share(self, block_ids: Seq[int], num_computed: int | None = None) -> tuple[int, ...]:
        """Publish a prompt's first `num_computed` tokens (default: all), while its owner holds it.

        Returns the owner's blocks from now on: some may be replaced by equal ones. Raises as `deallocate` does.
        """
        tokens = self._taken(block_ids, num_computed)
        computed = tokens[:num_computed]
        blocks = tuple(self.publish(computed, _NO_SALT, list(block_ids), 0, len(computed)))
        self._allocated[blocks[-1]] = blocks, tokens
        return blocks

    def deallocate(self, block_ids: Seq[int], num_computed: int | None = None) -> None:
        """Release a prompt's blocks and publish its first `num_computed` tokens (default: all). Raises `ValueError`."""
        computed = self._taken(block_ids, num_computed)[:num_computed]
        self.release(self.publish(computed, _NO_SALT, list(block_ids), 0, len(computed)))

    def _taken(self, block_ids: Seq[int], num_computed: int | None) -> tuple[int, ...]:
        """Forget that the blocks are allocated; return their tokens."""
        blocks, tokens = self._allocated.get(block_ids[-1], ((), ())) if block_ids else ((), ())
        if not blocks or tuple(block_ids) != blocks:
            raise ValueError("block_ids were not allocated, or were deallocated already")
        if num_computed is not None:
            check_int("num_computed", num_computed, 0, len(tokens))
        del self._allocated[blocks[-1]]
        return tokens


class PagedKVCache(PromptCache, kv.PagedKVCache):
    """Owns `num_blocks` blocks of `block_size` tokens. Its properties are snapshots."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in order of their ids."""
        return tuple(Block(one, count, self._hash_of.get(one)) for one, count in enumerate(self._pool.refs))

    @property
    def hash_to_block(self) -> Mapping[int, int]:
        """Maps the hash of each block that can be found to its id; the first block's prefix is a hash of its salt."""
        return dict(self._block_of)

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        """Blocks without a holder, cached ones included."""
        return tuple(one.block_id for one in self.blocks if not one.ref_count)


class RadixKVCache(PromptCache, kv.RadixKVCache):
    """The tree of published blocks; see `KVManager`."""


RadixAttention = RadixKVCache
"""SGLang's name for prefix reuse by a tree of tokens."""


def model_forward(
    model: Executor,
    inputs: ForwardInput | Seq[int] | Seq[Seq[int]],
    cache: KVStore | KernelStore | None = None,
) -> Tensor:
    """Return float32 logits [T, V] of every token; the rows of several lists follow each other in the order given.

    `inputs` is a list of ids, several such lists, or a `ForwardInput`, which needs the `cache` whose slots it names.
    Lists are computed from position 0 into the first blocks of `cache`, or else by `model.copy()` with a cache of its
    own. Raises `ValueError` naming the argument.
    """
    from nano_inference.executors.batch import build, in_step_order, offsets
    from nano_inference.executors.protocol import CacheSize
    from nano_inference.executors.step_input import ForwardInput

    if isinstance(inputs, ForwardInput):
        if cache is None:
            raise ValueError("cache: a ForwardInput needs the cache whose slots it names")
        return model.forward(inputs, cache)
    texts = _texts_of(inputs, model)
    block_size = _BLOCK_SIZE if cache is None else cache.block_size
    counts = [-(-len(text) // block_size) for text in texts]
    if cache is None:
        owner: Any = model.copy()
        owner.cache.allocate(CacheSize(num_blocks=sum(counts), block_size=block_size, num_states=len(texts)))
        model, cache = owner, owner.store
    elif sum(counts) > cache.num_blocks:
        raise ValueError(f"cache: has {cache.num_blocks} blocks of {block_size} tokens, {sum(counts)} are needed")
    tables = [tuple(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]
    whole = {"prev_token": -1, "start": 0, "num_sampled": 0, "params": SamplingParams()}  # samples nothing
    rest: dict[str, Any] = whole | {"logprobs_mode": "raw", "seed": 0, "sample_index": 0}
    pairs = enumerate(zip(texts, tables, strict=True))
    rows = tuple(Row(id=i, tokens=text, blocks=table, state=RowState(i, i), **rest) for i, (text, table) in pairs)
    ordered = in_step_order(rows)
    logits_TV = model.forward(build(ordered, block_size, model.device), cache)
    start_of = {row.id: start for row, start in zip(ordered, offsets(ordered), strict=True)}
    return logits_TV[[start_of[row.id] + place for row in rows for place in range(len(row.tokens))]]


def _texts_of(inputs: Seq[int] | Seq[Seq[int]], model: Executor) -> list[tuple[int, ...]]:
    """Return the lists of ids. Raises `ValueError` for an empty or too long one, or an id that the model lacks."""
    given: list[Any] = list(inputs)
    if given and not isinstance(given[0], Seq):
        given = [given]
    if not given or not all(isinstance(one, Seq) and len(one) for one in given):
        raise ValueError("inputs must be a list of token ids, or lists of them, none of them empty")
    size, longest = model.config.vocab_size, model.config.max_positions
    for text in given:
        if len(text) > longest:
            raise ValueError(f"inputs must have at most {longest} tokens, the model's positions, got {len(text)}")
        for token in text:
            if type(token) is not int or not 0 <= token < size:
                raise ValueError(f"inputs must be integers in [0, {size - 1}], got {token!r}")
    return [tuple(text) for text in given]


def sample_with_logprobs(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    *,
    top_ks: Seq[int] | None = None,
    top_ps: Seq[float] | None = None,
    min_ps: Seq[float] | None = None,
    uniforms_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token a row; return tokens [B] int64 and their log-probabilities [B] float32 after truncation.

    Temperature 0 is argmax, with the log-probability of temperature 1; so is one below float32's smallest normal
    number. Without `uniforms_B` ([B] in [0, 1)), uses torch's default generator. Raises `ValueError` naming the
    argument if shapes disagree, a value is outside its range, or a row's largest logit is not finite.
    """
    import torch

    from nano_inference.executors.logprobs import at, normalise
    from nano_inference.executors.sampling import invert_cdf, scaled
    from nano_inference.executors.truncation import NO_TRUNCATION, Truncation, truncate

    if logits_BV.dim() != 2 or temperatures_B.shape != (logits_BV.size(0),):
        shapes = f"{tuple(logits_BV.shape)} and {tuple(temperatures_B.shape)}"
        raise ValueError(f"logits must be [B, V] and temperatures [B], got {shapes}")
    num_rows = logits_BV.size(0)
    for name, values in {"top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps, "uniforms_B": uniforms_B}.items():
        if values is not None and len(values) != num_rows:
            raise ValueError(f"{name} must hold one value for each of {num_rows} rows, got {len(values)}")
    temperatures_B = temperatures_B.masked_fill(
        (temperatures_B >= 0) & (temperatures_B < types.SMALLEST_TEMPERATURE), 0
    )
    temperatures = temperatures_B.tolist()
    _check("temperatures", temperatures, lambda t: 0 <= t < float("inf"), "finite and >= 0")
    _check("top_ks", top_ks, lambda k: int(k) == k, "integers")
    _check("top_ps", top_ps, lambda p: 0 < p <= 1, "in (0, 1]")
    _check("min_ps", min_ps, lambda p: 0 <= p <= 1, "in [0, 1]")
    _check("uniforms_B", uniforms_B, lambda u: 0 <= u < 1, "in [0, 1)")
    logits_BV = logits_BV.to(torch.float32, copy=True)
    _check("the largest logit of each row", logits_BV.amax(-1), isfinite, "finite")
    argmax_B = logits_BV.argmax(dim=-1)
    scaled_BV = scaled(logits_BV, temperatures)
    cuts = [NO_TRUNCATION] * num_rows
    for index in range(num_rows):
        if temperatures[index]:
            top_k = 0 if top_ks is None else max(0, int(top_ks[index]))
            top_p = 1.0 if top_ps is None else float(top_ps[index])
            cuts[index] = Truncation(top_k, top_p, 0.0 if min_ps is None else float(min_ps[index]))
    truncate(logits_BV, scaled_BV, cuts)
    if uniforms_B is None:
        uniforms_B = torch.rand(num_rows, dtype=torch.float64, device=logits_BV.device)
    token_B = torch.where(temperatures_B == 0, argmax_B, invert_cdf(scaled_BV, uniforms_B.double()))
    return token_B, normalise(logits_BV, temperatures).logprobs(at(logits_BV, token_B)).squeeze(-1)


def _check(name: str, values: Iterable[float] | None, is_valid: Callable[[float], bool], rule: str) -> None:
    """Raise `ValueError` for the first value that is not valid."""
    for index, value in enumerate(map(float, () if values is None else values)):
        if not is_valid(value):
            raise ValueError(f"{name} must be {rule}, got {value} for row {index}")
