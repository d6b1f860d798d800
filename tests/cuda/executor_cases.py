"""The executor with the kernels under test against the executor with plain kernels: engines on tiny models.

Larger than the cases of single kernels: they show that the executor gives each kernel what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, SamplingParams, TrainingSample
from nano_inference.executors.cuda.launchers import Kernels
from tests.cuda.case import Case
from tests.cuda.engines import open_cuda
from tests.cuda.plain import plain_kernels

_SMALL: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
_MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {**_SMALL, "sliding_window": 10, "num_hidden_layers": 2},
    "G4": {"n_layer": 2, "window_pattern": "SL"},
    "two-taps": {"linear_num_value_heads": 2},
}


def write_models(home: Path) -> None:
    """Write each model into a directory of its name."""
    from tests.models.families import FAMILIES, make_model  # imports Transformers
    from tests.models.hybrids import HYBRIDS, make_hybrid
    from tests.nanochat.tiny import base_meta, model_config, write_checkpoint

    for name, more in _MODELS.items():
        (home / name).mkdir()
        if name in FAMILIES:
            make_model(name, home / name, more)
        elif name in HYBRIDS:
            make_hybrid(name, home / name, more)
        else:
            write_checkpoint(home / name, name, config=model_config(name, **more), meta=base_meta(name))


def cases(home: Path) -> Iterator[Case]:
    """Yield a case for each model of `write_models`."""
    for name in _MODELS:
        yield Case(f"executor {name}", partial(_difference, home / name), 2e-5)


def _difference(path: Path, kernels: Kernels, device: torch.device) -> float:
    """Return the largest difference of log-probabilities; infinity if tokens differ."""
    mine, right = (_samples(path, one, where) for one, where in ((kernels, device), (plain_kernels(), _CPU)))
    if [sample.completion_tokens for sample in mine] != [sample.completion_tokens for sample in right]:
        return float("inf")
    pairs = [zip(_numbers(a), _numbers(b), strict=True) for a, b in zip(mine, right, strict=True)]
    return max(abs(a - b) for pair in pairs for a, b in pair)


_CPU = torch.device("cpu")


def _samples(path: Path, kernels: Kernels, device: torch.device) -> list[TrainingSample]:
    config = EngineConfig(
        model_path=str(path), device="cpu", kv_cache_bytes=1 << 20, max_batch_size=2, max_tokens_per_batch=40, seed=5,
        max_model_len=300, lookahead=3,
    )  # fmt: skip
    params = [
        SamplingParams(max_tokens=4, seed=1, top_p=0.8, logprobs=2),
        SamplingParams(max_tokens=2, temperature=0, presence_penalty=0.5, raw_logprobs=True, prompt_logprobs=0),
    ]
    prompts = [[*range(12)], [5, 6, 7]]
    with open_cuda(path, config, kernels=kernels, device=device) as engine:
        return engine.generate(prompts, params)


def _numbers(sample: TrainingSample) -> list[float]:
    tops = [one.logprob for top in sample.top_logprobs or () for one in top]
    return [*sample.logprobs, *tops, *(sample.raw_logprobs or ()), *(sample.prompt_logprobs or ())]
