"""Names of the library's first description: they import, and give what the core gives."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

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
    schedule,
)
from nano_inference.compat import AsyncRolloutEngine, RolloutEngine, blocks_of, new_sequence, status_of
from nano_inference.core.cache import compute_block_hash as core_hash
from nano_inference.core.scheduler import plan_step
from tests.models.families import VOCAB_SIZE, make_model

LIMITS = SchedulerConfig(max_batch_size=4, max_tokens_per_batch=32, block_size=4)
CACHES = [PagedKVCache, RadixKVCache]
TEXTS = [[5, 9, 30, 2, 44, 7, 7, 1, 3], [8], [4, 5, 6], [1]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("compat")
    return directory, make_model("llama-ratio1-untied", directory)


def open_engine(tiny: tuple[Path, Any], **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 1 << 20, "device": "cpu", "block_size": 4} | options
    return InferenceEngine(EngineConfig(str(tiny[0]), **options))


# ---- sequences and blocks -------------------------------------------------------------------------------------------


def running_sequence(id: int, num_tokens: int, blocks: list[int]) -> Sequence:
    """Return a sequence of which only the last token is not computed."""
    sequence = new_sequence(range(num_tokens), SamplingParams(max_tokens=8), id=id)
    sequence.num_computed, sequence.blocks = num_tokens - 1, blocks
    return sequence


def test_status_follows_the_life_of_a_sequence() -> None:
    sequence = new_sequence([1, 2, 3])
    assert isinstance(sequence, Sequence) and status_of(sequence) is SequenceStatus.WAITING
    sequence.blocks = [0]
    assert status_of(sequence) is SequenceStatus.RUNNING
    sequence.finish_reason = "stop"
    assert status_of(sequence) is SequenceStatus.FINISHED


def test_new_sequence_takes_its_limit_from_the_parameters() -> None:
    assert new_sequence([1], SamplingParams(max_tokens=5)).max_new == 5
    assert new_sequence([1], SamplingParams(max_tokens=None)).max_new > 1 << 20


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
    if num_free == 0:
        assert plan.preempted_seqs, "no block is free, so the youngest is preempted"
    if num_free == 9:
        assert (plan.prefill_seqs, plan.decode_seqs) == ((7,), (1, 2))


def test_schedule_leaves_finished_sequences_out() -> None:
    ended, other = running_sequence(1, 9, [0, 1, 2]), running_sequence(2, 5, [3, 4])
    ended.finish_reason = "length"
    plan = schedule([], [ended, other], 4, LIMITS)
    assert [work.id for work in plan.work] == [2]
    ended_early = new_sequence([1, 2])
    ended_early.finish_reason = "abort"
    assert not schedule([ended_early], [], 4, LIMITS).work


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


def test_engine_has_its_owners_and_satisfies_the_protocols(tiny: tuple[Path, Any]) -> None:
    with open_engine(tiny) as engine:
        rollouts: RolloutEngine = engine
        assert isinstance(rollouts, RolloutEngine)
        assert (engine.model, engine.cache) == (engine.parts.executor, engine.parts.kv)
        assert engine.weight_sync is not None and not engine.weight_sync.pending_sync
        asynchronous: AsyncRolloutEngine = AsyncEngine(lambda: engine)
        assert isinstance(asynchronous, AsyncRolloutEngine) and issubclass(RolloutPool, RolloutEngine)
        engine.update_weights(dict(tiny[1].state_dict()), hold=True)
        assert engine.weight_sync.pending_sync
        engine.cancel_update()


def as_rollouts(pool: RolloutPool) -> RolloutEngine:
    """Checked by mypy: a pool has the protocol's signatures."""
    return pool


@pytest.mark.parametrize("name", ["waiting", "running"])
def test_engine_shows_its_queues(tiny: tuple[Path, Any], name: str) -> None:
    with open_engine(tiny) as engine:
        engine.add_request([1, 2], SamplingParams(max_tokens=4))
        if name == "running":
            engine.step()
        assert [one.token_ids[:2] for one in getattr(engine, name)] == [(1, 2)]


def test_weight_sync_takes_a_process_group(tiny: tuple[Path, Any]) -> None:
    class Group:
        def receive(self) -> Any:
            return iter(tiny[1].state_dict().items())

    with open_engine(tiny) as engine:
        assert engine.model is not None
        sync: Any = WeightSyncManager(engine.model, process_group=Group())  # type: ignore[arg-type]
        sync.start_sync()
        while not sync.maybe_finish_sync():
            time.sleep(0.01)
        assert sync.version == 1
        with pytest.raises(ValueError, match="no process group"):
            WeightSyncManager(engine.model).start_sync()


def test_names_without_tensors_do_not_load_torch() -> None:
    text = "import sys, nano_inference as n; n.schedule, n.Sequence, n.PagedKVCache; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


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


@pytest.mark.parametrize("kind", CACHES)
def test_reset_forgets_allocated_prompts(kind: Any) -> None:
    kv = kind(4, 2)
    blocks = kv.allocate([1, 2, 3]).block_ids
    kv.reset()
    with pytest.raises(ValueError, match="not allocated"):
        kv.deallocate(blocks)
    assert kv.num_free_blocks() == 4


@pytest.mark.parametrize("kind", CACHES)
def test_a_published_prefix_is_found_while_its_owner_holds_it(kind: Any) -> None:
    kv, prompt = kind(8, 4), list(range(9))
    owner = kv.allocate(prompt)
    assert kv.allocate(prompt[:5]).cached_length == 0, "its K/V does not exist yet"
    kv.publish(prompt, (0, ""), owner.block_ids, 0, 8)
    other = kv.allocate([*prompt, 77])
    assert other.cached_length == 8 and other.block_ids[:2] == owner.block_ids[:2]
    with pytest.raises(CacheFull):
        kv.allocate(list(range(100, 120)))
    kv.deallocate(owner.block_ids)
    kv.deallocate(other.block_ids)
    kv.check()


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_a_request_finds_the_prefix_of_a_running_one(tiny: tuple[Path, Any], cache_type: Any) -> None:
    prompt = [3 + index for index in range(9)]
    with open_engine(tiny, cache_type=cache_type) as engine:
        owner = engine.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        engine.step()
        (sample,) = engine.generate([[*prompt[:8], 1]], SamplingParams(max_tokens=1))
        assert engine.has_pending(), "the owner still runs"
        assert sample.num_cached_tokens == 8
        engine.abort(owner)


# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_forward_of_lists_equals_transformers(tiny: tuple[Path, Any], kernels: Any) -> None:
    with open_engine(tiny, kernels=kernels, dtype="float32") as engine:
        model = engine.parts.executor
        assert model is not None
        logits = model_forward(model, TEXTS)
        one = model_forward(model, TEXTS[0])
        (sample,) = engine.generate([TEXTS[0]], SamplingParams(temperature=0, max_tokens=1))
    with torch.no_grad():
        wanted = torch.cat([tiny[1](torch.tensor([text])).logits[0] for text in TEXTS])
    assert logits.shape == wanted.shape and torch.allclose(logits, wanted, atol=1e-4)
    assert torch.allclose(one, wanted[: len(TEXTS[0])], atol=1e-4)
    assert sample.completion_tokens[0] == int(one[-1].argmax())


def test_forward_of_lists_can_use_a_cache_of_the_caller(tiny: tuple[Path, Any]) -> None:
    with open_engine(tiny, kernels="off") as engine:
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


@pytest.mark.parametrize("wrong", [[], [[]], [[1], []], [[1], 2], [VOCAB_SIZE], [[-1]], [True], "ab", [[1.5]]])
def test_forward_refuses_what_are_no_ids(tiny: tuple[Path, Any], wrong: Any) -> None:
    with open_engine(tiny) as engine:
        assert engine.parts.executor is not None
        with pytest.raises(ValueError, match="inputs must"):
            model_forward(engine.parts.executor, wrong)
        with pytest.raises(ValueError, match="inputs must have at most"):
            model_forward(engine.parts.executor, [1] * (engine.parts.executor.config.max_positions + 1))


def test_engine_config_takes_the_path_by_position() -> None:
    assert EngineConfig("path") == EngineConfig(model_path="path")
    assert EngineConfig("path", block_size=8).block_size == 8
    with pytest.raises(TypeError):
        EngineConfig("path", "radix")  # type: ignore[misc]
