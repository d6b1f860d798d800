"""Adapters of a real model: what names, versions, updates and the cache do to samples."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, TrainingSample, WeightError
from tests.weights.pairs import Pair

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
Facts = list[tuple[tuple[int, ...], tuple[float, ...]]]
Named = dict[str, torch.Tensor]


def adapter_of(pair: Pair, seed: int) -> Named:
    """Return PEFT's tensors of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in pair.old.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            num_out, num_in = module.weight.shape
            found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, num_in, generator=generator) * 0.3
            found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_out, 4, generator=generator) * 0.3
    return found


def saved(tensors: Named, directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture
def open_one(untied: Pair) -> Iterator[Callable[[], InferenceEngine]]:
    opened: list[InferenceEngine] = []

    def open_engine() -> InferenceEngine:
        config = EngineConfig(str(untied.directory), device="cpu", num_threads=1, kv_cache_bytes=4 << 20)
        opened.append(InferenceEngine(config))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.shutdown()


def facts(samples: list[TrainingSample]) -> Facts:
    return [(sample.completion_tokens, sample.logprobs) for sample in samples]


def alone(engine: InferenceEngine, tensors: Named) -> Facts:
    """Return a sample of one adapter."""
    engine.load_adapter("only", tensors.items(), config=CONFIG)
    return facts(engine.generate([PROMPT], PARAMS, adapter="only"))


def test_update_in_mid_run_leaves_running_samples_their_version(
    open_one: Callable[[], InferenceEngine], untied: Pair, tmp_path: Path
) -> None:
    first, second = adapter_of(untied, 1), adapter_of(untied, 2)
    old, new, base = alone(open_one(), first), alone(open_one(), second), facts(open_one().generate([PROMPT], PARAMS))
    assert len({old[0][0], new[0][0], base[0][0]}) == 3
    engine = open_one()
    assert engine.load_adapter("policy", saved(first, tmp_path / "first"), version="step 1") == "step 1"
    running = engine.add_request(PROMPT, PARAMS, adapter="policy")
    for _ in range(4):
        engine.step()
    assert engine.load_adapter("policy", saved(second, tmp_path / "second"), version="step 2") == "step 2"
    others = [engine.add_request(PROMPT, PARAMS, adapter=name) for name in ("policy", None)]
    samples = {sample.request_id: sample for _ in range(40) for sample in engine.step()}
    assert facts([samples[running]]) == old and samples[running].adapter_versions == ("step 1",) * 12
    assert facts([samples[others[0]]]) == new and samples[others[0]].adapter_versions == ("step 2",) * 12
    assert facts([samples[others[1]]]) == base and samples[others[1]].adapter is None
    (info,) = engine.adapters()
    assert info[:3] == ("policy", "step 2", 4) and info.source == str(tmp_path / "second") and info.num_bytes > 0


def test_update_in_mid_run_can_continue_running_samples(open_one: Callable[[], InferenceEngine], untied: Pair) -> None:
    first, second = adapter_of(untied, 1), adapter_of(untied, 2)
    old, new = alone(open_one(), first), alone(open_one(), second)
    engine = open_one()
    engine.load_adapter("policy", first, config=CONFIG)
    engine.add_request(PROMPT, PARAMS, adapter="policy")
    for _ in range(4):
        engine.step()
    engine.load_adapter("policy", second, config=CONFIG, on_running="continue")
    (sample,) = [sample for _ in range(40) for sample in engine.step()]
    assert sample.adapter_versions == (1,) * 4 + (2,) * 8
    assert sample.completion_tokens[:4] == old[0][0][:4] and sample.completion_tokens != old[0][0]
    assert facts(engine.generate([PROMPT], PARAMS, adapter="policy")) == new, "K/V of both was not published"


def test_bad_adapter_leaves_the_old_one_serving(
    open_one: Callable[[], InferenceEngine], untied: Pair, tmp_path: Path
) -> None:
    engine, tensors = open_one(), adapter_of(untied, 1)
    engine.load_adapter("policy", tensors, config=CONFIG)
    infos, samples = engine.adapters(), facts(engine.generate([PROMPT], PARAMS, adapter="policy"))
    truncated = saved(tensors, tmp_path / "truncated") / "adapter_model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-40])
    name = next(iter(tensors))
    for source in (truncated.parent, tmp_path / "missing"):
        with pytest.raises(BadRequest):
            engine.load_adapter("policy", source)
    wrong = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    for source, error in ((wrong, BadRequest), ({**tensors, name: tensors[name].T}, BadRequest), ([1], WeightError)):
        with pytest.raises(error):
            engine.load_adapter("policy", source, config=CONFIG)
    with pytest.raises(BadRequest):
        engine.load_adapter("policy", tensors, config={**CONFIG, "use_dora": True})
    assert engine.adapters() == infos and facts(engine.generate([PROMPT], PARAMS, adapter="policy")) == samples


def test_scores_are_those_of_merged_weights_and_of_the_reference_model(
    open_one: Callable[[], InferenceEngine], untied: Pair
) -> None:
    engine, tensors = open_one(), adapter_of(untied, 1)
    engine.load_adapter("policy", tensors, config=CONFIG)
    merged = deepcopy(untied.old)
    for name, module in merged.named_modules():
        if (a := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            module.weight.data += 2 * tensors[f"base_model.model.{name}.lora_B.weight"] @ a
    for model, adapter in ((merged, "policy"), (untied.old, None)):
        with torch.no_grad():
            logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        expected = [logprobs[i, token].item() for i, token in enumerate(PROMPT[1:])]
        assert engine.score(PROMPT, adapter=adapter) == pytest.approx(expected, abs=1e-4)
    assert engine.embed(PROMPT, adapter="policy") != engine.embed(PROMPT)


def test_adapters_outlive_sleep_and_updates_of_the_weights(
    open_one: Callable[[], InferenceEngine], untied: Pair
) -> None:
    tensors = adapter_of(untied, 1)
    engine, other = open_one(), open_one()
    other.update_weights(untied.named(), blocking=True)
    old, new = alone(engine, tensors), alone(other, tensors)
    engine.sleep()
    engine.wake()
    assert facts(engine.generate([PROMPT], PARAMS, adapter="only")) == old
    engine.update_weights(untied.named(), blocking=True)
    (sample,) = engine.generate([PROMPT], PARAMS, adapter="only")
    assert facts([sample]) == new != old and (sample.weight_version, sample.adapter_versions[0]) == (1, 1)
    with engine.copy() as copy:
        assert copy.adapters() == () and facts(copy.generate([PROMPT], PARAMS)) == facts(
            engine.generate([PROMPT], PARAMS)
        )


@pytest.mark.slow
def test_a_thousand_loads_keep_no_tensors(open_one: Callable[[], InferenceEngine], untied: Pair) -> None:
    engine, tensors = open_one(), adapter_of(untied, 1)
    counts = []
    for number in range(1000):
        engine.load_adapter("policy", tensors, config=CONFIG)
        engine.load_adapter(f"step-{number}", tensors, config=CONFIG)
        engine.unload_adapter(f"step-{number}")
        if number in (9, 999):
            engine.generate([PROMPT], PARAMS, adapter="policy")
            gc.collect()
            counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert counts[0] == counts[1]
