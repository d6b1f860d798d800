"""Rotary tables of each nanochat generation, and windows during decode, compared with a transcription of upstream.

Upstream rounded cos and sin to bfloat16 until its commit 1076f97 (2026-03-04). Its attention for devices without
FlashAttention 3 ignored windows in steps with a cache from b62a5bc (2026-01-16) to 3ba42e8 (2026-01-30).
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.gpt import GPT
from nano_inference.types import SamplingParams
from tests.nanochat.plain import plain_logits
from tests.nanochat.tiny import GENERATIONS, VOCAB, base_meta, model_config, state_dict, write_checkpoint

pytestmark = pytest.mark.slow

ROUNDED = ("G0", "G1", "G2", "G2e")
HEAD_DIM = 16
KERNELS = ("auto", "off")
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def bfloat16(value: float) -> float:
    """Round to eight significant bits, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)


def table(position: int, base: float, *, is_rounded: bool) -> list[tuple[float, float]]:
    """Return (cos, sin) of position · base^(-2j/D), in float64."""
    angles = [position * base ** (-2 * j / HEAD_DIM) for j in range(HEAD_DIM // 2)]
    pairs = [(math.cos(angle), math.sin(angle)) for angle in angles]
    return [(bfloat16(c), bfloat16(s)) for c, s in pairs] if is_rounded else pairs


def rotate_pairs(x: Sequence[float], pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Rotate each pair (j, j + D/2) of a head by minus the angle."""
    half = len(x) // 2
    first = [x[j] * c + x[j + half] * s for j, (c, s) in enumerate(pairs)]
    return first + [-x[j] * s + x[j + half] * c for j, (c, s) in enumerate(pairs)]


def load(state: dict[str, Tensor], config: dict[str, Any], *overrides: str) -> GPT:
    return GPT.from_state_dict(state, config, device="cpu", dtype="float32", overrides=overrides)


def hints_of(generation: str) -> tuple[str, ...]:
    return ("generation=G2s",) if generation == "G2s" else ()


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def core(directory: Path, *overrides: str, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 64 << 20, "device": "cpu"} | options
    return InferenceEngine(EngineConfig(model_path=str(directory), overrides=overrides, **options))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_keys_are_rotated_with_the_generations_tables(generation: str) -> None:
    """The first layer's keys equal a transcription, up to the end of the tables."""
    config = model_config(generation, n_layer=1, n_kv_head=4, sequence_len=300)
    state = state_dict(generation, config)
    if generation == "G4":
        state["smear_lambda"].zero_()
    for name, start in (("resid_lambdas", 1.0), ("x0_lambdas", 0.0), ("bigram_lambdas", 0.0)):
        if name in state:
            state[name].fill_(start)
    gpt = load(state, config, *hints_of(generation))
    base = 100_000 if generation in ("G3", "G4") else 10_000
    ids = [7] * 2900
    cache = KVCache(1, 4, len(ids), HEAD_DIM, 1)
    gpt.forward(torch.tensor([ids]), kv_cache=cache)
    x = state["transformer.wte.weight"][7].double()
    for _ in range(2):
        x = x / (x.pow(2).mean() + 1.1920929e-07).sqrt()
    key = (state["transformer.h.0.attn.c_k.weight"].double() @ x)[:HEAD_DIM].tolist()
    worst = {False: 0.0, True: 0.0}
    for position in (*range(1, 60, 7), 299, 1700, 2899):
        for is_rounded in worst:
            wanted = torch.tensor(rotate_pairs(key, table(position, base, is_rounded=is_rounded)))
            wanted = wanted / (wanted.pow(2).mean() + 1.1920929e-07).sqrt()
            gap = float((cache.k_cache[0, 0, position, 0] - wanted).abs().max())
            worst[is_rounded] = max(worst[is_rounded], gap)
    # An ulp of float32 at an angle of 2899 is 2.4e-4, which may also change the rounding of a table's entry.
    assert worst[generation in ROUNDED] < 1e-3 < 3e-3 < worst[generation not in ROUNDED]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_gpt_torch_and_kernels_use_the_same_tables(tmp_path: Path, generation: str) -> None:
    config = model_config(generation)
    state = state_dict(generation, config)
    write_checkpoint(tmp_path, generation, config=config, state=state, meta=base_meta(generation))
    ids = text(1, 200)
    other = "float32" if generation in ROUNDED else "bfloat16"
    for overrides in ((), (f"rope_dtype={other}",)):
        plain = load(state, config, *hints_of(generation), *overrides)
        wanted = torch.log_softmax(plain_logits(plain, torch.tensor([ids]))[0, :-1], dim=-1)
        wanted = wanted.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        for kernels in KERNELS:
            with core(tmp_path, *overrides, kernels=kernels) as ours:
                gaps = (torch.tensor(ours.score(ids)) - wanted).abs()
            assert gaps.max() < 1e-5, (kernels, overrides)
    by_default, by_hand = (
        load(state, config, *hints_of(generation), *overrides).forward(torch.tensor([ids]))
        for overrides in ((), (f"rope_dtype={other}",))
    )
    assert (by_default - by_hand).abs().max() > 1e-3


# ---- windows during decode ------------------------------------------------------------------------------------------


def greedy(gpt: GPT, prompt: list[int], num_tokens: int) -> list[int]:
    """Generate with the plain model: the prompt in one call, then token by token with the cache."""
    config = gpt.config
    head_dim = config.n_embd // config.n_head
    cache = KVCache(1, config.n_kv_head, len(prompt) + num_tokens, head_dim, config.n_layer)
    logits, found = gpt.forward(torch.tensor([prompt]), kv_cache=cache), []
    for _ in range(num_tokens):
        found.append(int(logits[0, -1].argmax()))
        logits = gpt.forward(torch.tensor([found[-1:]]), kv_cache=cache)
    return found


PROMPTS = [text(40 + seed, 30 + 13 * seed) for seed in range(6)]
FULL = ("short_window=24", "decode_window=full")


@dataclass(frozen=True)
class FullCase:
    """A checkpoint, its model with decode_window=full and with the default, and the plain loop's greedy answers."""

    directory: Path
    gpt: GPT
    windowed: GPT
    answers: list[list[int]]


@pytest.fixture(scope="module", params=["G1", "G2", "G2e"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FullCase:
    config = model_config(request.param)
    state = state_dict(request.param, config)
    directory = tmp_path_factory.mktemp("full")
    write_checkpoint(directory, request.param, config=config, state=state)
    gpt, windowed = load(state, config, *FULL), load(state, config, "short_window=24")
    answers = [greedy(gpt, prompt, 48) for prompt in PROMPTS]
    assert answers != [greedy(windowed, prompt, 48) for prompt in PROMPTS]
    return FullCase(directory, gpt, windowed, answers)


def test_windows_apply_to_prompts_only(full: FullCase) -> None:
    gpt, windowed = full.gpt, full.windowed
    ids = torch.tensor([text(3, 90)])
    assert torch.equal(gpt.forward(ids), windowed.forward(ids))
    everything = load(dict(gpt.weights), model_config(gpt.terms.generation), "window_pattern=L")
    after = []
    for model in (gpt, everything, windowed):
        cache = KVCache(1, 2, 90, HEAD_DIM, 4)
        windowed.forward(ids[:, :89], kv_cache=cache)
        after.append(model.forward(ids[:, 89:], kv_cache=cache))
    assert torch.equal(after[0], after[1])
    assert (after[0] - after[2]).abs().max() > 1e-2


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens_per_batch": 17, "block_size": 5}, {"speculation": "ngram"}, {"cache_type": "paged"}],
    ids=str,
)
def test_core_matches_the_plain_loop(full: FullCase, kernels: str, options: dict[str, Any]) -> None:
    with core(full.directory, *FULL, kernels=kernels, **options) as ours:
        for _ in range(2):  # the second time on cached prefixes
            found = [list(sample.completion_tokens) for sample in ours.generate(PROMPTS, GREEDY)]
            assert found == full.answers


@pytest.mark.parametrize("kernels", KERNELS)
def test_preempted_answer_is_recomputed_without_windows(full: FullCase, kernels: str) -> None:
    block_bytes = full.gpt.model.config.kv_bytes_per_token(4) * 16
    with core(full.directory, *FULL, kernels=kernels, kv_cache_bytes=block_bytes * 14) as ours:
        samples = ours.generate(PROMPTS, GREEDY)
    assert sum(sample.num_preemptions for sample in samples) > 0
    assert [list(sample.completion_tokens) for sample in samples] == full.answers


@pytest.mark.parametrize("kernels", KERNELS)
def test_next_prompt_does_not_reuse_keys_of_generated_tokens(full: FullCase, kernels: str) -> None:
    """In the next prompt, the answer's tokens are prompt tokens, which windows restrict: their keys differ."""
    with core(full.directory, *FULL, kernels=kernels) as ours:
        first = ours.generate(PROMPTS[:1], GREEDY)[0]
        prompt = [*first.prompt_tokens, *first.completion_tokens, *text(5, 9)]
        second = ours.generate([prompt], GREEDY)[0]
        again = ours.generate([prompt], GREEDY)[0]
    assert list(second.completion_tokens) == greedy(full.gpt, prompt, 48)
    assert second.num_cached_tokens == 0
    assert (again.completion_tokens, again.num_cached_tokens > 0) == (second.completion_tokens, True)


@pytest.mark.parametrize("kernels", KERNELS)
def test_answer_is_scored_without_windows(full: FullCase, kernels: str) -> None:
    params = SamplingParams(max_tokens=48, seed=1)
    with core(full.directory, *FULL, kernels=kernels, max_tokens_per_batch=37) as ours:
        samples = ours.generate(PROMPTS, params)
        texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
        starts = [len(one.prompt_tokens) for one in samples]
        for _ in range(2):  # the second time without cached prefixes
            found = ours.score(texts, starts, params=params)
            for score, sample in zip(found, samples, strict=True):
                exact = list(sample.logprobs)
                assert score == (exact if kernels == "auto" else pytest.approx(exact, abs=2e-6))
            ours.flush_cache()
