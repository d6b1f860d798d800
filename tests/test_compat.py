"""Names of the library's first description: they import, and give what the core gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_inference import (
    AsyncEngine,
    Block,
    CacheFull,
    EngineConfig,
    ForwardInput,
    InferenceEngine,
    KVCacheManager,
    KVStore,
    PagedKVCache,
    RadixAttention,
    RadixKVCache,
    RolloutPool,
    SamplingParams,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
    SeqView,
    Span,
    WeightSyncManager,
    compute_block_hash,
    model_forward,
    sample_with_logprobs,
    schedule,
)
from nano_inference.compat import AsyncRolloutEngine, RolloutEngine, blocks_of, new_sequence, status_of
from nano_inference.core.cache import compute_block_hash as core_hash
from nano_inference.core.scheduler import plan_step
from tests.models.families import VOCAB_SIZE
from tests.weights.pairs import OpenEngine, Pair

LIMITS = SchedulerConfig(max_batch_size=4, max_tokens_per_batch=32, block_size=4)
CACHES = [PagedKVCache, RadixKVCache]
TEXTS = [[5, 9, 30, 2, 44, 7, 7, 1, 3], [8], [4, 5, 6], [1]]


def tiny_engine(directory: Path, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 1 << 20, "device": "cpu", "block_size": 4} | options
    return InferenceEngine(EngineConfig(str(directory), **options))


# ---- sequences and blocks -------------------------------------------------------------------------------------------


def running_sequence(id: int, num_tokens: int, blocks: list[int]) -> Sequence:
    """Return a sequence of which only the last token is not computed."""
    sequence = new_sequence(range(num_tokens), SamplingParams(max_tokens=8), id=id)
    sequence.num_computed, sequence.blocks = num_tokens - 1, blocks
    return sequence


def test_status_follows_the_life_of_a_sequence() -> None:
    sequence = new_sequence([1, 2, 3], SamplingParams(max_tokens=None))
    assert sequence.max_new > 1 << 20
    assert isinstance(sequence, Sequence) and status_of(sequence) is SequenceStatus.WAITING
    sequence.blocks = [0]
    assert status_of(sequence) is SequenceStatus.RUNNING
    sequence.finish_reason = "stop"
    assert status_of(sequence) is SequenceStatus.FINISHED


@pytest.mark.parametrize("num_free", [0, 1, 9])
def test_schedule_plans_sequences_as_their_counts(num_free: int) -> None:
    fresh, old, young = new_sequence(range(9), id=7), running_sequence(1, 9, [0, 1]), running_sequence(2, 5, [0])
    views = [
        SeqView(7, 9, 0, 0, max_new=256),
        SeqView(1, 9, 8, 2, num_private=1, max_new=8),
        SeqView(2, 5, 4, 1, num_private=0, max_new=8),
    ]
    plan = schedule([fresh], [old, young], num_free, LIMITS)
    assert (plan.work, plan.preempted_seqs) == plan_step(views[:1], views[1:], num_free, LIMITS)
    assert sorted((*plan.prefill_seqs, *plan.decode_seqs)) == sorted(work.id for work in plan.work)
    assert plan == schedule([fresh], [old, views[2]], num_free, LIMITS) or num_free < 9
    young.finish_reason = "length"
    assert 2 not in {work.id for work in schedule([fresh], [old, young], num_free, LIMITS).work}
    if num_free == 0:
        assert plan.preempted_seqs, "no block is free, so the youngest is preempted"
    if num_free == 9:
        assert (plan.prefill_seqs, plan.decode_seqs) == ((7,), (1, 2))


def test_blocks_of_a_sequence_have_the_chain_of_hashes() -> None:
    sequence = running_sequence(0, 10, [6, 2, 9])
    first = compute_block_hash([0, 1, 2, 3])
    assert blocks_of(sequence, 4) == (
        Block(6, 1, first, (0, 1, 2, 3)),
        Block(2, 1, compute_block_hash([4, 5, 6, 7], first), (4, 5, 6, 7)),
        Block(9, 1, None, (8, 9)),
    )
    with pytest.raises(ValueError, match="block_size"):
        blocks_of(sequence, 0)


def test_sequence_has_the_names_of_the_first_description() -> None:
    sequence = new_sequence([1, 2, 3], SamplingParams(temperature=0.5, max_tokens=2, stop_token_ids=[9]), id=7)
    sequence.append_token(4, -0.5)
    assert (sequence.seq_id, sequence.token_ids, sequence.block_ids) == (7, (1, 2, 3, 4), ())
    assert (sequence.num_prompt_tokens, sequence.status, sequence.temperature) == (3, SequenceStatus.WAITING, 0.5)
    assert (sequence.max_tokens, sequence.stop_token_ids, sequence.output_logprobs) == (2, {9}, (-0.5,))
    with pytest.raises(AttributeError):
        sequence.seq_id = 3  # type: ignore[misc]
    sequence.append_token(9, -0.1)
    assert (sequence.status, sequence.finish_reason) == (SequenceStatus.FINISHED, "stop")
    with pytest.raises(ValueError, match="has ended"):
        sequence.append_token(1, -0.1)
    short = new_sequence([1], SamplingParams(max_tokens=1))
    short.append_token(5, -1.0)
    assert short.finish_reason == "length"


def test_paged_cache_shows_blocks_hashes_and_free_blocks() -> None:
    cache = PagedKVCache(4, 2)
    owner = cache.allocate([1, 2, 3]).block_ids
    assert [block.ref_count for block in cache.blocks] == [int(one in owner) for one in range(4)]
    assert set(cache.free_block_ids) == set(range(4)) - set(owner) and not cache.hash_to_block
    cache.share(owner)
    ((chain, block),) = cache.hash_to_block.items()
    assert (block, cache.blocks[block].hash, cache.blocks[block].block_id) == (owner[0], chain, owner[0])
    cache.allocate([1, 2, 9])
    assert cache.blocks[block].ref_count == 2


@pytest.mark.parametrize("kind", [PagedKVCache, RadixKVCache])
def test_cache_shares_a_prompt_while_its_owner_runs(kind: Any) -> None:
    cache = kind(8, 4)
    owner = cache.allocate(range(10)).block_ids
    assert cache.allocate(range(10)).cached_length == 0
    owner = cache.share(owner, 9)
    other = cache.allocate(range(10))
    assert (other.cached_length, other.block_ids[:2]) == (8, owner[:2])
    for one in (owner, other.block_ids):
        cache.deallocate(one)
    cache.check()
    with pytest.raises(ValueError, match="deallocated already"):
        cache.share(owner)


def test_engine_has_its_owners_and_satisfies_the_protocols(tiny_llama: Path) -> None:
    with tiny_engine(tiny_llama) as engine:
        rollouts: RolloutEngine = engine
        assert isinstance(rollouts, RolloutEngine)
        assert (engine.model, engine.cache) == (engine.parts.executor, engine.parts.kv)
        assert engine.weight_sync is not None and not engine.weight_sync.pending_sync
        asynchronous: AsyncRolloutEngine = AsyncEngine(lambda: engine)
        assert isinstance(asynchronous, AsyncRolloutEngine) and issubclass(RolloutPool, RolloutEngine)
        engine.add_request([1, 2], SamplingParams(max_tokens=4))
        assert ([one.token_ids for one in engine.waiting], engine.running) == ([(1, 2)], ())
        engine.step()
        assert (engine.waiting, [one.token_ids[:2] for one in engine.running]) == ((), [(1, 2)])


def test_weight_sync_takes_a_process_group(untied: Pair, open_engine: OpenEngine) -> None:
    class Group:
        def receive(self) -> Any:
            return iter(untied.named().items())

    engine = open_engine(untied)
    sync: Any = WeightSyncManager(engine.model, process_group=Group())  # type: ignore[arg-type]
    sync.start_sync()
    assert sync.pending_sync and sync.wait() == "staged"
    assert sync.maybe_finish_sync() and sync.version == 1 and not sync.pending_sync
    with pytest.raises(ValueError, match="no process group"):
        WeightSyncManager(engine.model).start_sync()  # type: ignore[arg-type]


# ---- caches ---------------------------------------------------------------------------------------------------------


def test_hash_without_a_prefix_is_minus_one() -> None:
    ids = [7, 300, 2**70]
    assert compute_block_hash(ids) == compute_block_hash(ids, -1) == compute_block_hash(ids, prefix_hash=None)
    assert compute_block_hash(ids) == core_hash(ids)
    assert compute_block_hash(ids, prefix_hash=0) == core_hash(ids, 0) != core_hash(ids)
    for wrong in (-2, 1 << 128, 1.5):
        with pytest.raises(ValueError, match="prefix_hash"):
            compute_block_hash(ids, wrong)  # type: ignore[arg-type]


def test_caches_are_instances_of_the_protocol() -> None:
    class Own:
        def allocate(self, token_ids: object) -> None: ...
        def deallocate(self, block_ids: object, num_computed: object = None) -> None: ...
        def num_free_blocks(self) -> int:
            return 0

        def flush(self) -> int:
            return 0

    assert RadixAttention is RadixKVCache
    assert all(isinstance(one, KVCacheManager) for one in (PagedKVCache(2, 2), RadixAttention(2, 2), Own()))
    assert not isinstance({}, KVCacheManager) and not isinstance(KVStore, KVCacheManager)


@pytest.mark.parametrize("kind", CACHES)
def test_allocate_and_deallocate_reuse_cached_prefixes(kind: Any) -> None:
    kv = kind(8, 4)
    first = kv.allocate(range(10))
    assert (len(first.block_ids), first.cached_length, kv.num_free_blocks()) == (3, 0, 5)
    assert kv.allocate(range(10)).cached_length == 0, "nothing is found before its K/V exists"
    kv.deallocate(first.block_ids)
    again = kv.allocate(range(10))
    assert (again.block_ids[:2], again.cached_length) == (first.block_ids[:2], 8)
    kv.deallocate(again.block_ids)
    with pytest.raises(ValueError, match="deallocated already"):
        kv.deallocate(again.block_ids)
    with pytest.raises(ValueError, match="token_ids"):
        kv.allocate([])
    for num_computed, expected in ((0, 0), (7, 4)):
        blocks = kv.allocate(range(50, 60)).block_ids
        kv.deallocate(blocks, num_computed)
        kv.check()
        allocation = kv.allocate(range(50, 60))
        assert allocation.cached_length == expected
        kv.deallocate(allocation.block_ids, 0)


@pytest.mark.parametrize("kind", CACHES)
def test_prompt_without_room_changes_nothing(kind: Any) -> None:
    kv = kind(4, 2)
    kv.deallocate(kv.allocate([1, 2, 3, 4]).block_ids)
    kv.allocate([8])
    for prompt in ([1, 2, 3, 4, 5, 6, 7], [9] * 7):
        with pytest.raises(CacheFull, match="4 KV blocks requested, 3 "):
            kv.allocate(prompt)
        kv.check()
        assert kv.num_free_blocks() == 3
    assert kv.allocate([1, 2, 3, 4, 5, 6]).cached_length == 4


# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_forward_of_lists_equals_transformers(tiny_llama: Path, kernels: Any) -> None:
    with tiny_engine(tiny_llama, kernels=kernels, dtype="float32") as engine:
        model = engine.parts.executor
        assert model is not None
        logits = model_forward(model, TEXTS)
        one = model_forward(model, TEXTS[0])
        (sample,) = engine.generate([TEXTS[0]], SamplingParams(temperature=0, max_tokens=1))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        wanted = torch.cat([theirs(torch.tensor([text])).logits[0] for text in TEXTS])
    assert logits.shape == wanted.shape and torch.allclose(logits, wanted, atol=1e-4)
    assert torch.allclose(one, wanted[: len(TEXTS[0])], atol=1e-4)
    assert sample.completion_tokens[0] == int(one[-1].argmax())


def test_forward_of_lists_can_use_a_cache_of_the_caller(tiny_llama: Path) -> None:
    with tiny_engine(tiny_llama, kernels="off") as engine:
        model = engine.parts.executor
        assert model is not None
        config = model.config
        size = (config.num_layers, 4, 4, config.num_kv_heads, config.head_dim)
        cache = KVStore(*size, torch.float32, torch.device("cpu"))
        first = model_forward(model, TEXTS[2], cache)
        assert cache.k_LSKD[:, :3].abs().sum() > 0
        step = ForwardInput(
            token_T=torch.tensor([9]),
            prev_T=torch.tensor([6]),
            position_T=torch.tensor([3]),
            slot_T=torch.tensor([3]),
            spans=(Span(0, 1, 3, (0,)),),
        )
        last = model_forward(model, step, cache)
        assert torch.allclose(torch.cat([first, last]), model_forward(model, [*TEXTS[2], 9]), atol=1e-5)
        with pytest.raises(ValueError, match="cache: has 4 blocks of 4 tokens, 6 are needed"):
            model_forward(model, TEXTS, cache)
        with pytest.raises(ValueError, match="cache"):
            model_forward(model, step)


@pytest.mark.parametrize("wrong", [[], [[1], []], [[1], 2], [VOCAB_SIZE], [True], "ab"])
def test_forward_refuses_what_are_no_ids(tiny_llama: Path, wrong: Any) -> None:
    with tiny_engine(tiny_llama) as engine:
        assert engine.parts.executor is not None
        with pytest.raises(ValueError, match="inputs must"):
            model_forward(engine.parts.executor, wrong)
        with pytest.raises(ValueError, match="inputs must have at most"):
            model_forward(engine.parts.executor, [1] * (engine.parts.executor.config.max_positions + 1))


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_the_public_function_draws_with_logprobs() -> None:
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 2
    before = logits_BV.clone()
    temperatures_B, uniforms_B = torch.tensor([[0.0, 0.5, 1.0, 2.0], [0.1, 0.9, 0.5, 0.3]])
    token_B, logprob_B = sample_with_logprobs(logits_BV, temperatures_B, top_ks=[0, 2, 0, 5], uniforms_B=uniforms_B)
    assert torch.equal(logits_BV, before)
    assert (token_B.dtype, logprob_B.dtype) == (torch.int64, torch.float32)
    assert int(token_B[0]) == int(logits_BV[0].argmax())
    assert float(logprob_B[0]) == float(torch.log_softmax(logits_BV[0].double(), -1).max().float())
    assert float(logprob_B[2]) == float(torch.log_softmax(logits_BV[2].double(), -1)[token_B[2]].float())
    assert int(token_B[1]) in logits_BV[1].topk(2).indices
    token_B, _ = sample_with_logprobs(logits_BV.bfloat16(), temperatures_B, top_ps=[1e-6] * 4, min_ps=[0.0] * 4)
    assert torch.equal(token_B, logits_BV.bfloat16().float().argmax(-1))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({"min_ps": [1, wrong]}, "min_ps.*for row 1") for wrong in (1.5, -0.1, NAN)],
        *[({"top_ps": [1, wrong]}, "top_ps.*for row 1") for wrong in (0.0, 1.5, NAN)],
        *[({"uniforms_B": torch.tensor([0.5, wrong])}, "uniforms_B.*for row 1") for wrong in (1.0, -0.1, NAN)],
        *[({"temperatures": [1, wrong]}, "temperatures.*for row 1") for wrong in (-1.0, -1e-40, INF, NAN)],
        *[({"logits": [[0, 0], [0, wrong]]}, "logit.*for row 1") for wrong in (NAN, INF)],
        ({"logits": [[0, 0], [-INF, -INF]]}, "largest logit of each row must be finite, got -inf for row 1"),
        ({"top_ks": [1]}, "top_ks must hold one value for each of 2 rows"),
        ({"logits": [0, 0]}, r"logits must be \[B, V\]"),
    ],
)
def test_sample_with_logprobs_rejects_values_outside_their_range(changes: dict[str, Any], message: str) -> None:
    logits = torch.tensor(changes.pop("logits", [[0, 0], [0, 0]]), dtype=torch.float32)
    temperatures = torch.tensor(changes.pop("temperatures", [1, 1]), dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        sample_with_logprobs(logits, temperatures, **changes)


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-300])
def test_temperature_below_the_smallest_normal_number_is_greedy(temperature: float) -> None:
    logits_BV = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    uniforms_B = torch.tensor([0.99])
    found = sample_with_logprobs(logits_BV, torch.tensor([temperature], dtype=torch.float64), uniforms_B=uniforms_B)
    assert found == sample_with_logprobs(logits_BV, torch.zeros(1), uniforms_B=uniforms_B)
    assert found[0].tolist() == [0]
    assert SamplingParams(temperature=temperature) == SamplingParams(temperature=0)
