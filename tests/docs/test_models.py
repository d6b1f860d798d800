"""The worked example of docs/models.md: Granite on both executors, compared with Transformers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.build import parts_of, pick_kernels
from nano_inference.executors.loading import load_weights
from nano_inference.loading.sources import TensorSource
from scripts import models
from tests.models.families import gap

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
IDS = [5, 9, 30, 2, 44, 17, 80, 3, 71, 12, *range(20, 60)]
CPU = torch.device("cpu")
CONFIG = EngineConfig(model_path="granite", device="cpu", kv_cache_bytes=8 << 20)


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's code defines."""
    path = tmp_path_factory.mktemp("page") / "granite_page.py"
    path.write_text("from __future__ import annotations\n\n" + "\n".join(blocks()))
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(path.parent)
        return vars(importlib.import_module(path.stem))


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedModel:
    """A tiny random Granite whose multipliers are all unlike 1."""
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, embedding_multiplier=3.0, residual_multiplier=0.4,
        attention_multiplier=0.2, logits_scaling=2.5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.GraniteForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_the_page_s_granite_is_transformers(kind: str, page: dict[str, Any], theirs: Any) -> None:
    config = page["granite_config"](theirs.config.to_dict())
    program = page["granite"](config, theirs.config.residual_multiplier, theirs.config.logits_scaling)
    library = pick_kernels(EngineConfig(model_path="x", device="cpu"), CPU)
    executor = page["on_torch"](config, program) if kind == "torch" else page["on_kernels"](config, program, library)
    named = {name: TensorSource(weight.detach()) for name, weight in theirs.named_parameters()}
    load_weights(executor, named)
    with InferenceEngine(CONFIG, parts=parts_of(executor, CONFIG)) as engine:
        assert gap(theirs, IDS, engine.score(IDS)) <= 1e-4  # type: ignore[arg-type]
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (sample,) = engine.generate([IDS], greedy)
    expected = theirs.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False)
    assert list(sample.completion_tokens) == expected[0, len(IDS) :].tolist()


def test_an_executor_without_the_operation_refuses_the_model_by_its_name(page: dict[str, Any], theirs: Any) -> None:
    config = page["granite_config"](theirs.config.to_dict())
    program = page["granite"](config, 0.5, 2.0)
    library = pick_kernels(EngineConfig(model_path="x", device="cpu"), CPU)
    with pytest.raises(ValueError, match=r"^torch has no operation Scale$"):
        page["TorchExecutor"](config, program, CPU, torch.float32, page["SdpaBackend"]())
    with pytest.raises(ValueError, match=r"^the CPU kernels have no operation Scale; kernels=off computes"):
        page["CpuExecutor"](config, program, library, 64)


def test_the_tables_are_those_of_the_registries() -> None:
    assert PAGE.read_text(encoding="utf-8") == models.page(), "run scripts/models.py"
