"""`score` of an answer: the bits of the sample's own log-probabilities, from its ids and parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nano_inference import BadRequest, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from tests.models.families import make_model
from tests.nanochat.tiny import write_checkpoint

NAMES = (
    *("llama-ratio1-untied", "llama3-rope-ratio3-tied", "qwen2-yarn-window", "qwen3-ratio3-tied", "mistral-window"),
    *("gemma2", "gemma3", "smollm3-layers-without-rope"),
)
PROMPTS = [[7, 3, 99, 21, 4, 60], [12], list(range(30, 70))]
PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "greedy": SamplingParams(temperature=0),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k, min-p": SamplingParams(top_k=20, min_p=0.02),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "penalties": SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, top_p=0.8),
    "bias": SamplingParams(logit_bias={5: 3.0, 9: -4.0}),
    "allowed": SamplingParams(allowed_token_ids=range(40, 90), top_k=8),
    "min_tokens": SamplingParams(min_tokens=8, stop_token_ids=range(20)),
    "tempered": SamplingParams(temperature=0.8, top_p=0.9, logprobs_mode="tempered"),
    "raw": SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.3, logprobs_mode="raw"),
}


def scored(
    engine: InferenceEngine, samples: list[TrainingSample], **options: Any
) -> tuple[list[list[float]], list[list[float]]]:
    texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
    starts = [len(one.prompt_tokens) for one in samples]
    return engine.score(texts, starts, **options), [list(one.logprobs) for one in samples]  # type: ignore[return-value]


@pytest.fixture(scope="module", params=[*NAMES, "G4"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("scored")
    if request.param in NAMES:
        make_model(request.param, directory)
    else:
        write_checkpoint(directory, request.param)
    config = EngineConfig(model_path=str(directory), dtype="float32", device="cpu", kv_cache_bytes=8 << 20)
    with InferenceEngine(config) as one:
        yield one


@pytest.mark.parametrize("name", PARAMS)
def test_score_repeats_the_parameters_of_a_sample(engine: InferenceEngine, name: str) -> None:
    params = replace(PARAMS[name], max_tokens=24, seed=3)
    samples = engine.generate(PROMPTS, params, 3)
    assert sum(len(one.completion_tokens) for one in samples) > 20
    found, expected = scored(engine, samples, params=params)
    assert found == expected
    engine.flush_cache()
    assert scored(engine, samples, params=[params] * len(samples))[0] == expected
    if name not in ("greedy", "temperature", "tempered"):
        assert scored(engine, samples, temperature=params.temperature)[0] != expected


@pytest.mark.parametrize("engine", NAMES[:1], indirect=True)
def test_score_with_wrong_parameters_is_refused(engine: InferenceEngine) -> None:
    params = SamplingParams()
    refused: list[tuple[str, Callable[[], object]]] = [
        ("start", lambda: engine.score([[1, 2], [3, 4]], [1, 0], params=params)),
        ("temperature", lambda: engine.score([1, 2], 1, temperature=0.5, params=params)),
        ("params", lambda: engine.score([1, 2], 1, params=[params, params])),
        ("params", lambda: engine.score([1, 2], 1, params=["hot"])),  # type: ignore[list-item]
        ("logit_bias", lambda: engine.score([1, 2], 1, params=SamplingParams(logit_bias={10**6: 1.0}))),
    ]
    for field, call in refused:
        with pytest.raises(BadRequest) as caught:
            call()
        assert caught.value.field == field
