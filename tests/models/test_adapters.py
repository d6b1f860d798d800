"""Rows with LoRA adapters: compared with PEFT's unmerged ones, and bit for bit with themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.build import pick_kernels
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.opening import load_kernel_model, load_model
from nano_inference.executors.protocol import CacheSize
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.adapters import read_adapter
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.types import EngineRequest, SamplingParams, TrainingSample
from tests.engine.test_lookahead import run_all
from tests.models.adapted import BLOCK_SIZE, MAX_LEN, adapted, add, logits_of, rows_of, save, text
from tests.models.families import make_model
from tests.models.hybrids import HYBRIDS, make_hybrid

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOLERANCE = 1e-4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-all-linear": ("llama-linear-rope-biases", {}),
    "llama-head": ("llama-ratio1-untied", {"target_modules": ["lm_head", "gate_proj"]}),
    "qwen3-regex-rank-patterns": (
        "qwen3-ratio3-tied",
        {
            "target_modules": r".*\.(q_proj|v_proj|o_proj|up_proj)",
            "rank_pattern": {"q_proj": 17, r"layers\.[12]\.mlp\.up_proj": 40},
            "alpha_pattern": {r"layers\.1\..*": 30, "o_proj": 1},
        },
    ),
    "qwen3-tied-head": ("qwen3-ratio3-tied", {"target_modules": ["lm_head"]}),
    "gemma3-rslora": ("gemma3", {"use_rslora": True, "r": 9, "exclude_modules": ["k_proj"], "bias": "none"}),
    "gemma3-layers": ("gemma3", {"target_modules": ["q_proj", "k_proj", "down_proj"], "layers_to_transform": [1, 6]}),
    "qwen3.5-all-linear": ("plain", {}),
    "qwen3-next": ("grouped", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]}),
}
Kind = type[CpuExecutor] | type[TorchExecutor]


def kernels(num_threads: int) -> Library:
    found = pick_kernels(EngineConfig(model_path="x", device="cpu", num_threads=num_threads), CPU)
    assert found is not None, "these tests need a C compiler"
    return found


@pytest.fixture(scope="module")
def library() -> Library:
    return kernels(num_threads=2)


def tiny(name: str, directory: Path) -> Any:
    return (make_hybrid if name in HYBRIDS else make_model)(name, directory)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_logits_match_peft(case: str, is_compiled: bool, library: Library, tmp_path: Path) -> None:
    """A row with an adapter, and a row of the model beside it; also while the next token is known, as in a score."""
    family, config = CASES[case]
    model = adapted(tiny(family, tmp_path), **config)
    checkpoint = open_checkpoint(tmp_path)
    executor = (
        load_kernel_model(checkpoint, library, "own", MAX_LEN)
        if is_compiled
        else load_model(checkpoint, CPU, torch.float32, MAX_LEN)
    )
    add(executor, 5, save(model, tmp_path / "adapter"))
    texts = {0: text(1, 100), 1: text(2, 100)}
    with torch.inference_mode():
        own_TV = model(torch.tensor([texts[0]])).logits[0]
        with model.disable_adapter():
            plain_TV, other_TV = (model(torch.tensor([texts[index]])).logits[0] for index in (0, 1))
    assert float((own_TV - plain_TV).abs().max()) > 0.1, "an adapter without effect shows nothing"
    for lengths in ((), (37, 1, 30)):
        found = logits_of(executor, texts, {0: 5}, lengths)
        assert float((found[0] - own_TV).abs().max()) <= TOLERANCE, lengths
        assert float((found[1] - other_TV).abs().max()) <= TOLERANCE, lengths
    executor.cache.allocate(CacheSize(num_blocks=32, block_size=BLOCK_SIZE, num_states=2))
    rows = rows_of({index: ids[:99] for index, ids in texts.items()}, (), {0: 5})
    scored = [row._replace(score_from=60, score_end=100, next_token=texts[row.id][99], num_sampled=1) for row in rows]
    scored = [row if executor.program.states else row._replace(state=None) for row in scored]
    results = executor.run(tuple(scored), (), ())
    for index, logits_TV in ((0, own_TV), (1, other_TV)):
        expected_TV = torch.log_softmax(logits_TV.double(), -1)[59:99]
        expected = [float(expected_TV[i, token]) for i, token in enumerate(texts[index][60:100])]
        assert results[index].scores == pytest.approx(expected, abs=TOLERANCE)


BATCH = {index: text(index, 23 + index) for index in range(34)}
NUMBERS = {index: index for index in range(1, 33)}  # rows 0 and 33 have none


@pytest.mark.parametrize("family", ["llama-linear-rope-biases", "plain"])
@pytest.mark.parametrize("rounding", ["own", "int8"])
def test_bits_of_a_row_do_not_depend_on_its_batch(family: str, rounding: Any, library: Library, tmp_path: Path) -> None:
    """32 adapters of several ranks and precisions; chunks, single tokens and threads."""
    base = tiny(family, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    executor = load_kernel_model(checkpoint, library, rounding, MAX_LEN)
    plain = logits_of(executor, BATCH, {})
    for number in NUMBERS.values():
        model = adapted(
            base, number, r=(1, 4, 16, 17)[number % 4], target_modules=(["q_proj"], "all-linear")[number % 3 > 0]
        )
        if number % 2:
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.bfloat16()
        add(executor, number, save(model, tmp_path / str(number)))
        base = model.unload()
    together = logits_of(executor, BATCH, NUMBERS)
    assert torch.equal(together[0], plain[0]) and torch.equal(together[33], plain[33])
    assert not any(torch.equal(together[index], plain[index]) for index in NUMBERS)
    for lengths in ((8, 1, 1, 20), (1,) * 9):
        again = logits_of(executor, BATCH, NUMBERS, lengths)
        assert all(torch.equal(again[index], together[index]) for index in BATCH), lengths
    alone = load_kernel_model(checkpoint, kernels(num_threads=1), rounding, MAX_LEN)
    for index in (1, 2, 3, 4, 18):
        add(alone, index, tmp_path / str(index))
        found = logits_of(alone, {index: BATCH[index]}, NUMBERS, (5, 1))
        assert torch.equal(found[index], together[index]), index
    same = logits_of(executor, BATCH, dict.fromkeys(BATCH, 4))
    assert torch.equal(same[4], together[4])


def facts(samples: Iterable[TrainingSample]) -> list[tuple[Any, ...]]:
    return [(one.completion_tokens, one.logprobs) for one in samples]


def test_samples_of_many_adapters_equal_each_alone(tmp_path: Path) -> None:
    """In chunks, with drafts, several tokens a step, after hits of the cache and preemption."""
    base = make_model("qwen3-ratio3-tied", tmp_path)
    names = [None, *(f"a{number}" for number in range(1, 5))]
    targets = ["lm_head", "q_proj", "v_proj", "up_proj"]
    for name in names[1:]:
        model = adapted(base, int(name[1:]), r=3 * int(name[1:]), target_modules=targets)
        save(model, tmp_path / name)
        base = model.unload()
    prompts = [text(7, 40) * 2, text(8, 21)]
    params = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)

    def opened(**options: Any) -> InferenceEngine:
        engine = InferenceEngine(EngineConfig(str(tmp_path), device="cpu", max_batch_size=16, **options))
        for name in names[1:]:
            engine.load_adapter(name, tmp_path / name)
        return engine

    expected = {}
    for name in names:
        with opened(kv_cache_bytes=4 << 20, num_threads=1) as engine:
            expected[name] = facts(engine.generate(prompts, params, adapter=name))
    assert len({samples[0][0] for samples in expected.values()}) == len(names)
    pairs = [(name, prompt) for name in names for prompt in prompts]
    requests = [EngineRequest(prompt=prompt, params=params, adapter=name) for name, prompt in pairs]
    block = 2 * 4 * 16 * 4 * 2 * 16
    for options in (
        {"num_threads": 2, "max_tokens_per_batch": 16},
        {"speculation": "ngram", "max_tokens_per_batch": 33},
        {"lookahead": 4, "kv_cache_bytes": 20 * block},
    ):
        with opened(**{"kv_cache_bytes": 4 << 20, "num_threads": 2} | options) as engine:
            for _ in range(2):
                requests = [
                    EngineRequest(prompt=prompt, params=params, adapter=name) for name in names for prompt in prompts
                ]
                samples = iter(run_all(engine, requests)[0])
                found = {name: facts(islice(samples, 2)) for name in names}
                assert found == expected, options


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the system does not list memory")
def test_loading_and_unloading_adapters_takes_no_memory(library: Library, tmp_path: Path) -> None:
    model = adapted(make_model("llama-ratio1-untied", tmp_path), r=64)
    executor = load_kernel_model(open_checkpoint(tmp_path), library, "own", MAX_LEN)
    directory = save(model, tmp_path / "adapter")
    sizes = []
    for number in range(1, 401):
        adapter = read_adapter(directory, executor.program, executor.config.names, max_rank=64)
        executor.commit_adapter(number, executor.stage_adapter(adapter))
        executor.drop_adapter(number)
        if number % 100 == 0:
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert adapter.num_bytes > 500_000 and sizes[-1] - sizes[0] < 20 * adapter.num_bytes
