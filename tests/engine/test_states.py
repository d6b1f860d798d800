"""Engines of models with recurrent states: the memory of the slots, and engines that share a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.build import count_states
from nano_inference.cli import doctor
from nano_inference.compat import model_forward
from nano_inference.loading.checkpoint import open_checkpoint
from tests.models.families import make_model
from tests.models.hybrids import make_hybrid
from tests.sim.test_states import hit_rate

PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
PROMPTS = [[*range(5, 60), last] for last in range(6)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    make_hybrid("plain", directory)
    return directory


def engine(directory: Path, num_bytes: int = 8 << 20, **options: object) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(directory), device="cpu", kv_cache_bytes=num_bytes, **options)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(("max_batch_size", "num_states"), [(256, None), (40, 80), (2, 64)])
def test_cache_has_the_size_that_is_configured(
    hybrid: Path, kernels: str, max_batch_size: int, num_states: int | None
) -> None:
    with engine(hybrid, kernels=kernels, max_batch_size=max_batch_size) as ours:
        parts = ours.parts
        assert parts.executor is not None
        state_bytes = parts.executor.program.state_bytes
        num_states = num_states or (4 << 20) // state_bytes  # at most half
        assert parts.kv.num_states == num_states
        assert num_states * state_bytes < parts.executor.cache.num_bytes <= 8 << 20
        assert parts.scheduler_config(ours.config).max_batch_size == min(max_batch_size, num_states // 2)
        if max_batch_size == 256:
            assert parts.executor.cache.num_bytes > 0.95 * (8 << 20)
        row = doctor.of_model("hybrid", open_checkpoint(hybrid), "float32", doctor.Machine(1 << 40, 8 << 20, True))
        assert row["state_bytes"] == state_bytes
        if max_batch_size == 256:
            assert row["kv_budget_tokens"] == pytest.approx(parts.kv.num_blocks * parts.kv.block_size, rel=0.01)


def test_states_that_do_not_fit_are_refused(hybrid: Path) -> None:
    with pytest.raises(ValueError, match=r"^kv_cache_bytes: half of 20000 bytes .* at least \d+ bytes are needed$"):
        engine(hybrid, 20_000)
    with pytest.raises(ValueError, match=r"^cache_type: the model keeps recurrent states"):
        engine(hybrid, cache_type="paged")
    with engine(hybrid) as ours, pytest.raises(ValueError, match="half of 20000 bytes"):
        ours.copy(kv_cache_bytes=20_000)


@pytest.mark.parametrize(
    ("num_bytes", "state_bytes", "expected"), [(4000, 0, 0), (4000, 1000, 2), (10**9, 1000, 512), (5999, 1000, 2)]
)
def test_count_of_states(num_bytes: int, state_bytes: int, expected: int) -> None:
    assert count_states(num_bytes, state_bytes, 256) == expected


def test_copy_has_slots_of_its_own(hybrid: Path) -> None:
    with engine(hybrid) as ours, ours.copy() as other, ours.copy(kv_cache_bytes=2 << 20) as small:
        assert 2 <= other.parts.kv.num_states <= ours.parts.kv.num_states // 8
        expected = ours.generate(PROMPTS, PARAMS)
        for copy in (other, small):
            assert [one.logprobs for one in copy.generate(PROMPTS, PARAMS)] == [one.logprobs for one in expected]
            assert copy.parts.kv.states.num_snapshots == ours.parts.kv.states.num_snapshots > 0
        other.flush_cache()
        assert ours.generate(PROMPTS[:1], PARAMS)[0].num_cached_tokens == 55


def test_conversations_of_a_real_model_hit_nearly_as_often_as_those_of_a_dense_one(
    hybrid: Path, tmp_path: Path
) -> None:
    make_model("qwen3-ratio3-tied", tmp_path)
    rates = []
    for directory in (hybrid, tmp_path):
        with engine(directory) as ours:
            rates.append(hit_rate(ours, drops_thoughts=False))
    assert 0.98 * rates[1] < rates[0] <= rates[1] and rates[1] > 0.85, rates


@pytest.mark.parametrize("on_running", ["keep", "recompute", "wait", "abort"])
def test_snapshots_of_replaced_weights_are_not_found(hybrid: Path, on_running: str) -> None:
    with engine(hybrid) as ours:
        weights = {name: value.clone() for name, value in ours.parts.executor.weights.values()}  # type: ignore[union-attr]
        ours.generate(PROMPTS[:1], PARAMS)
        assert ours.generate(PROMPTS[:1], PARAMS)[0].num_cached_tokens == 55
        request = ours.add_request(PROMPTS[1], PARAMS)
        ours.step()
        ours.update_weights(weights, blocking=True, on_running=on_running)  # type: ignore[arg-type]
        ours.abort(request)
        assert ours.generate(PROMPTS[:1], PARAMS)[0].num_cached_tokens == 0
        assert ours.generate(PROMPTS[:1], PARAMS)[0].num_cached_tokens == 55


def test_resumed_sample_continues_as_if_it_had_not_been_aborted(hybrid: Path) -> None:
    with engine(hybrid) as ours:
        whole = ours.generate(PROMPTS[:1], PARAMS)[0]
    with engine(hybrid) as ours:
        request = ours.add_request(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True, seed=3))
        for _ in range(4):
            ours.step()
        (partial,) = ours.abort(request)
        assert 0 < len(partial.completion_tokens) < 8
        again = ours.add_request(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True), partial=partial)
        samples = []
        while not samples:
            samples = ours.step()
        assert samples[0].request_id == again
        assert (samples[0].completion_tokens, samples[0].logprobs) == (whole.completion_tokens, whole.logprobs)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_model_forward_computes_every_text_from_an_empty_state(hybrid: Path, kernels: str) -> None:
    with engine(hybrid, kernels=kernels) as ours:
        assert ours.parts.executor is not None
        texts = [PROMPTS[0], PROMPTS[1][3:40]]
        logits_TV = model_forward(ours.parts.executor, texts)
        alone_TV = torch.cat([model_forward(ours.parts.executor, text) for text in texts])
        assert torch.allclose(logits_TV, alone_TV, atol=1e-4)
        scores = torch.log_softmax(logits_TV.double(), -1)[range(len(texts[0]) - 1), texts[0][1:]]
        assert torch.allclose(scores.float(), torch.tensor(ours.score(texts[0])), atol=1e-4)
