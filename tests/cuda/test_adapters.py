"""Adapters on the CUDA executor with plain kernels: the C path's tokens, and bits that the batch does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference import BadRequest, EngineConfig, InferenceEngine
from nano_inference.types import EngineRequest, SamplingParams, TrainingSample
from tests.cuda.engines import open_cuda
from tests.engine.test_lookahead import run_all
from tests.models.adapted import adapted, save, text
from tests.models.families import make_model
from tests.models.hybrids import make_hybrid

pytestmark = pytest.mark.slow

TARGETS: Any = ["q_proj", "o_proj", "gate_proj", "down_proj"]
NAMES = ("few", "more", None)


@pytest.fixture(scope="module", params=["qwen3-ratio3-tied", "plain"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two adapters: one of few matrices, one of all with more ranks than there is room for at first."""
    path = tmp_path_factory.mktemp("model")
    base: Any = (make_hybrid if request.param == "plain" else make_model)(request.param, path)
    for seed, (name, options) in enumerate((("few", {"target_modules": TARGETS}), ("more", {"r": 33})), 1):
        model = adapted(base, seed, **options)
        save(model, path / name)
        base = model.unload()
    return path


def opened(path: Path, *, on_cuda: bool, **options: Any) -> InferenceEngine:
    config = EngineConfig(str(path), device="cpu", kv_cache_bytes=8 << 20, max_batch_size=8, **options)
    engine = open_cuda(path, config) if on_cuda else InferenceEngine(config)
    for name in ("few", "more"):
        engine.load_adapter(name, path / name)
    return engine


def asked(names: tuple[str | None, ...]) -> list[EngineRequest]:
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    prompts = [text(1, 40), text(2, 9)]
    return [EngineRequest(prompt=ids, params=params, num_samples=2, adapter=name) for name in names for ids in prompts]


def sampled(engine: InferenceEngine, names: tuple[str | None, ...]) -> list[TrainingSample]:
    return list(run_all(engine, asked(names))[0])


def facts(samples: list[TrainingSample]) -> list[Any]:
    return [(one.completion_tokens, one.logprobs) for one in samples]


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_batch": 16, "lookahead": 1}])
def test_samples_are_those_of_the_c_path(options: dict[str, Any], checkpoint: Path) -> None:
    with opened(checkpoint, on_cuda=False) as engine:
        expected = sampled(engine, NAMES)
    with opened(checkpoint, on_cuda=True, **options) as engine:
        found = sampled(engine, NAMES)
        scores = [engine.score([*one.prompt_tokens, *one.completion_tokens], 40, adapter="more") for one in found[4:6]]
    assert [one.completion_tokens for one in found] == [one.completion_tokens for one in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for one, values in zip(found[4:6], scores, strict=True):
        assert values == pytest.approx(one.logprobs, abs=1e-4)
    assert len({one.completion_tokens for one in found[0::4]}) == 3, "an adapter had no effect"


def test_bits_do_not_depend_on_other_adapters(checkpoint: Path) -> None:
    with opened(checkpoint, on_cuda=True, deterministic=True) as engine:
        together = facts(sampled(engine, NAMES))
    for index, name in enumerate(NAMES):
        with opened(checkpoint, on_cuda=True, deterministic=True, max_tokens_per_batch=24, lookahead=3) as engine:
            engine.unload_adapter("few" if name == "more" else "more")
            assert facts(sampled(engine, (name,))) == together[4 * index : 4 * index + 4], name


def test_more_adapters_than_there_was_room_for_leave_the_others(checkpoint: Path) -> None:
    """Memory grows while rows run, and places are used again."""
    with opened(checkpoint, on_cuda=True, deterministic=True) as engine:
        expected = facts(sampled(engine, ("few",)))
        for request in asked(("few",)):
            engine.add(request, claim=True)
        engine.step()
        for index in range(9):
            engine.load_adapter(f"another {index}", checkpoint / "more")
            engine.unload_adapter(f"another {index - 4}")
        assert facts(sampled(engine, ("few",))) == expected
        assert facts(sampled(engine, ("another 8",))) == facts(sampled(engine, ("more",)))


def test_an_adapter_of_the_head_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    if (checkpoint / "config.json").read_text().count("qwen3_5"):
        pytest.skip("one model is enough")
    model = adapted(make_model("qwen3-ratio3-tied", tmp_path), target_modules=["lm_head"])
    with opened(checkpoint, on_cuda=True) as engine, pytest.raises(BadRequest, match="of layers only; use kernels=off"):
        engine.load_adapter("head", save(model, tmp_path / "head"))
