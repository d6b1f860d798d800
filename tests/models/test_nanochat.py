"""Every nanochat generation: G0 compared with Transformers, others with formulas (`tests.nanochat.plain`).

`tests/nanochat/test_parity.py` compares the engine with upstream's recorded logits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nano_inference.build import assemble
from nano_inference.config import EngineConfig
from nano_inference.core.step import Row, Runner
from nano_inference.engine import InferenceEngine
from nano_inference.executors.batch import build
from nano_inference.executors.torch.store import KVStore
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.gpt import GPT
from nano_inference.nanochat.program import hf_name
from nano_inference.types import SamplingParams
from tests.nanochat.plain import plain_logits
from tests.nanochat.tiny import GENERATIONS, VOCAB, base_meta, model_config, state_dict, write_checkpoint
from tests.rows import make_row

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
CPU = torch.device("cpu")
EPS = 1.1920929e-07
AWKWARD = (1, 16, 17, 50, 129, 130, 199)
"""Chunk boundaries: after the first token, at and after a block's end, around the short windows of 129 keys."""
ONE_BY_ONE = (*range(1, 36), *range(120, 150), *range(240, 250))
"""Chunks of one token: in the first blocks, around the short windows, and at the end."""


def text(seed: int, length: int, vocab_size: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def pieces(num_tokens: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    borders = [0, *(cut for cut in cuts if cut < num_tokens), num_tokens]
    return list(pairwise(borders))


def plain(gpt: GPT, ids: Sequence[int], cuts: Sequence[int] | None = None) -> Tensor:
    """The logits [T, V] by the formulas, or those of `GPT.forward` with a cache and cut there."""
    if cuts is None:
        return plain_logits(gpt, torch.tensor([ids]))[0]
    return plain_cached(gpt, ids, cuts)[0]


def plain_cached(gpt: GPT, ids: Sequence[int], cuts: Sequence[int]) -> tuple[Tensor, KVCache]:
    config = gpt.config
    cache = KVCache(1, config.n_kv_head, len(ids), config.n_embd // config.n_head, config.n_layer)
    parts = [gpt.forward(torch.tensor([ids[a:b]]), kv_cache=cache) for a, b in pieces(len(ids), cuts)]
    return torch.cat(parts, dim=1)[0], cache


def core(gpt: GPT, ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
    """Return the logits [T, V] of the paged model with the same weights."""
    return core_cached(gpt, ids, cuts)[0]


def core_cached(gpt: GPT, ids: Sequence[int], cuts: Sequence[int], block_size: int = 16) -> tuple[Tensor, KVStore]:
    config = gpt.model.config
    num_blocks = -(-len(ids) // block_size)
    dtype = gpt.weights["transformer.wte.weight"].dtype
    size = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    store = KVStore(*size, dtype, CPU)
    parts = []
    for a, b in pieces(len(ids), cuts):
        previous, blocks = ids[a - 1] if a else -1, tuple(range(num_blocks))
        row = make_row(0, tuple(ids[a:b]), prev_token=previous, start=a, blocks=blocks)
        parts.append(gpt.model.forward(build((row,), block_size, CPU), store))
    return torch.cat(parts), store


def config_of(directory: Path, **options: Any) -> EngineConfig:
    options = {"kv_cache_bytes": 64 << 20, "device": "cpu"} | options
    return EngineConfig(model_path=str(directory), **options)


def engine(directory: Path, **options: Any) -> InferenceEngine:
    return InferenceEngine(config_of(directory, **options))


def hints_of(generation: str) -> tuple[str, ...]:
    """Return the overrides for a model in memory: only a base run's meta file distinguishes G2s from G2."""
    return ("generation=G2s",) if generation == "G2s" else ()


def load(state: dict[str, Tensor], config: dict[str, Any], *overrides: str) -> GPT:
    return GPT.from_state_dict(state, config, device="cpu", dtype="float32", overrides=overrides)


# ---- compared with a reference --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model's files, the model in memory, and the reference for its logits."""

    directory: Path
    gpt: GPT
    witness: Callable[[Sequence[int]], Tensor]

    def gap(self, ids: Sequence[int], logprobs: Sequence[float]) -> float:
        """Return the largest difference between `logprobs` (of the last tokens) and the reference."""
        assert len(logprobs) > 0
        table = torch.log_softmax(self.witness(ids)[:-1], dim=-1)[-len(logprobs) :]
        targets = torch.tensor(ids[-len(logprobs) :]).unsqueeze(-1)
        return float((table.gather(-1, targets).squeeze(-1) - torch.tensor(logprobs)).abs().max())


def transformers_g0() -> transformers.PreTrainedModel:
    """Return Transformers' nanochat with the fixture's weights of G0."""
    config = transformers.NanoChatConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=EPS,
        attn_implementation="eager",
    )
    model = transformers.NanoChatForCausalLM(config).eval().float()
    weights = state_dict("G0", model_config("G0"), pad=1)
    model.load_state_dict({hf_name(name): weight for name, weight in weights.items()})
    return model


def rounded_to_bfloat16(_module: object, _inputs: object, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Round cos and sin as nanochat did until 2026-03-04; those of Transformers are float32."""
    return tuple(table.bfloat16().float() for table in tables)


def logits_function(model: transformers.PreTrainedModel) -> Callable[[Sequence[int]], Tensor]:
    def logits(ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float()

    return logits


@pytest.fixture(scope="module", params=["G0", "G0 of Transformers", *GENERATIONS[1:]])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    directory = tmp_path_factory.mktemp("nanochat")
    generation = request.param[:2] if "Transformers" in request.param else request.param
    model = transformers_g0() if generation == "G0" else None
    if model is not None and request.param == "G0":
        model.model.rotary_emb.register_forward_hook(rounded_to_bfloat16)
    if model is not None and request.param != "G0":
        model.save_pretrained(directory)
    else:
        config = model_config(generation)
        state = state_dict(generation, config, pad=1 if generation == "G0" else 64)
        write_checkpoint(directory, generation, config=config, state=state, meta=base_meta(generation))
    gpt = GPT.from_checkpoint(directory, device="cpu", dtype="float32")
    assert gpt.terms.generation == generation
    yield Case(directory, gpt, logits_function(model) if model is not None else lambda ids: plain(gpt, ids))


def test_gpt_matches_with_and_without_cache(case: Case) -> None:
    ids = text(1, 250)
    wanted = case.witness(ids)
    assert wanted.shape == (250, VOCAB)
    assert 0.7 < wanted.std() < 2
    assert (case.gpt.forward(torch.tensor([ids]))[0] - wanted).abs().max() <= TOLERANCE
    for cuts in (None, (), AWKWARD, ONE_BY_ONE):
        assert (plain(case.gpt, ids, cuts) - wanted).abs().max() <= TOLERANCE, cuts


def test_core_matches_for_any_chunking(case: Case) -> None:
    ids = text(2, 250)
    wanted = case.witness(ids)
    for cuts in ((), AWKWARD, (7, 100), ONE_BY_ONE):
        assert (core(case.gpt, ids, cuts) - wanted).abs().max() <= TOLERANCE, cuts


class Counting:
    """A runner that counts the tokens it computes."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.num_computed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, rows: tuple[Row, ...], *more: Any) -> Any:
        self.num_computed += sum(len(row.tokens) for row in rows)
        return self._inner.run(rows, *more)


@pytest.mark.parametrize("cache_type", ["radix", "paged"])
def test_engine_matches_on_a_prefix_hit(case: Case, cache_type: str) -> None:
    config = config_of(case.directory, cache_type=cache_type)
    parts = assemble(config)
    runner = Counting(parts.runner)
    with InferenceEngine(config, parts=replace(parts, runner=runner)) as ours:
        ids = text(6, 250)
        ours.generate([ids[:205]], SamplingParams(max_tokens=1, seed=1))
        num_before = runner.num_computed
        scores = ours.score(ids, start=196)
        assert len(scores) == 54
        assert num_before >= 205 and runner.num_computed - num_before < 80
        assert case.gap(ids, scores) <= TOLERANCE
        sample = ours.generate([ids[:210]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))[0]
        assert sample.num_cached_tokens >= 192
        assert case.gap([*ids[:210], *sample.completion_tokens], sample.logprobs) <= TOLERANCE


def test_engine_matches_on_a_partial_block_hit(case: Case) -> None:
    """With 21 reused tokens and blocks of 16, the next token has another predecessor than the cached one."""
    first, second = text(7, 60), text(8, 60)
    second[:21] = first[:21]
    with engine(case.directory, cache_type="radix") as ours:
        ours.score(first)
        sample = ours.generate([second], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))[0]
        assert sample.num_cached_tokens == 21
        assert case.gap([*second, *sample.completion_tokens], sample.logprobs) <= TOLERANCE


def test_preempted_requests_match(case: Case) -> None:
    prompts = [text(20 + seed, 90 + 17 * seed) for seed in range(5)]
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    block_bytes = case.gpt.model.config.kv_bytes_per_token(4) * 16
    samples = engine(case.directory, kv_cache_bytes=block_bytes * 24, max_tokens_per_batch=64).generate(prompts, params)
    assert sum(sample.num_preemptions for sample in samples) > 0
    roomy = engine(case.directory).generate(prompts, params)
    for sample, unpressed in zip(samples, roomy, strict=True):
        ids = [*sample.prompt_tokens, *sample.completion_tokens]
        assert len(sample.logprobs) == 60
        assert sample.completion_tokens == unpressed.completion_tokens
        assert case.gap(ids, sample.logprobs) <= TOLERANCE


def test_scores_match_beyond_the_trained_length(case: Case) -> None:
    """The plain model has positions up to ten times the length; from G1 on, long layers have windows there, too."""
    ids = text(9, 300)
    wanted = plain(case.gpt, ids)
    for cuts in ((), (255, 256, 257, 258, 290), range(250, 300)):
        assert (core(case.gpt, ids, cuts) - wanted).abs().max() <= TOLERANCE, cuts
        assert (plain(case.gpt, ids, cuts) - wanted).abs().max() <= TOLERANCE, cuts
    if case.gpt.terms.generation == "G0":
        assert (case.witness(ids) - wanted).abs().max() <= TOLERANCE


def test_odd_windows_match_for_every_pattern() -> None:
    for generation, pattern, short in (("G1", "SL", 1), ("G2", "SSSL", 23), ("G4", "LS", 37), ("G2e", "S", 5)):
        config = model_config(generation, window_pattern=pattern)
        gpt = load(state_dict(generation, config), config, f"short_window={short}")
        ids = text(50, 120)
        wanted = plain(gpt, ids)
        for cuts in ((), (1, 6, 24, 25, 38, 39, 77), range(1, 120)):
            assert (core(gpt, ids, cuts) - wanted).abs().max() <= TOLERANCE, (generation, cuts)


# ---- windows --------------------------------------------------------------------------------------------------------


def exact(state: dict[str, Tensor], config: dict[str, Any], *overrides: str) -> GPT:
    """Return a model with float32 rotary tables by default, because expected values here are not rounded."""
    return load(state, config, "rope_dtype=float32", *overrides)


def changes_logits(gpt: GPT, ids: list[int], place: int) -> tuple[bool, bool]:
    """Return whether another token at `place` changes the last token's logits, in the plain and in the paged model."""
    other = [*ids]
    other[place] = (ids[place] + 1) % gpt.config.vocab_size
    cuts = (len(ids) // 2, len(ids) - 1)
    changes = {
        (
            not torch.equal(one(gpt, ids)[-1], one(gpt, other)[-1]),
            not torch.equal(two(gpt, ids, cuts)[-1], two(gpt, other, cuts)[-1]),
        )
        for one, two in ((plain, plain), (core, core))
    }
    assert len(changes) == 1, changes
    return changes.pop()


def attention_case(num_layers: int, pattern: str, **sizes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a random G1 in which only the first layer attends, so that tokens outside its window have no effect."""
    config = model_config("G1", n_layer=num_layers, window_pattern=pattern, vocab_size=50, **sizes)
    state = state_dict("G1", config, pad=1)
    for i in range(1, num_layers):
        state[f"transformer.h.{i}.attn.c_proj.weight"].zero_()
    return state, config


@pytest.mark.parametrize("window", [1, 8, 15, 16, 17])
def test_window_counts_keys_before_the_query(window: int) -> None:
    state, config = attention_case(2, "SL")
    gpt = exact(state, config, f"short_window={window}")
    ids = text(70, 60, 50)
    last = len(ids) - 1
    assert changes_logits(gpt, ids, last - window) == (True, True)
    assert changes_logits(gpt, ids, last - window - 1) == (False, False)
    assert changes_logits(gpt, ids, 0) == (False, False)


def test_long_layer_window_is_the_trained_length() -> None:
    state, config = attention_case(1, "L", sequence_len=20)
    gpt = exact(state, config)
    ids = text(72, 50, 50)
    assert changes_logits(gpt, ids, 49 - 20) == (True, True)
    assert changes_logits(gpt, ids, 49 - 21) == (False, False)


def test_g0_has_no_window() -> None:
    config = model_config("G0", n_layer=1, vocab_size=50, sequence_len=20)
    gpt = exact(state_dict("G0", config, pad=1), config)
    assert changes_logits(gpt, text(73, 60, 50), 0) == (True, True)


def test_last_layer_is_always_long() -> None:
    state, config = attention_case(1, "S", sequence_len=200)
    gpt = exact(state, config, "short_window=3")
    assert changes_logits(gpt, text(74, 60, 50), 0) == (True, True)
    config = model_config("G1", window_pattern="S")
    windows = [layer.window for layer in exact(state_dict("G1", config), config, "short_window=3").model.config.layers]
    assert windows == [4, 4, 4, 257]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_logits_exclude_vocabulary_padding(generation: str) -> None:
    config = model_config(generation)
    state = state_dict(generation, config)
    assert state["lm_head.weight"].size(0) == 320
    ids = text(80, 40)
    gpt = exact(state, config)
    wanted = plain(gpt, ids)
    assert wanted.shape == (40, VOCAB)
    for name in ("transformer.wte.weight", "lm_head.weight", *(n for n in state if n.startswith("value_embeds."))):
        state[name][VOCAB:] = math.nan
    spoiled = exact(state, config)
    assert torch.equal(plain(spoiled, ids), wanted)
    assert torch.equal(core(spoiled, ids), core(gpt, ids))
    assert core(spoiled, ids).shape == (40, VOCAB)


# ---- bfloat16 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", GENERATIONS)
def test_bfloat16_keeps_learned_numbers_and_stays_close(generation: str) -> None:
    """bfloat16 has eight bits: a step of 0.4 %. After four layers with logits of about 1 the mean error stays
    below 2 % of that, and no logit is off by more than a twentieth of the largest (seen: 1 %, and a fiftieth)."""
    config = model_config(generation)
    state = state_dict(generation, config)
    exact = load(state, config)
    gpt = GPT.from_state_dict(state, config, device="cpu", dtype="bfloat16")
    for name, weight in gpt.weights.items():
        is_scalar = "lambda" in name
        assert weight.dtype == (torch.float32 if is_scalar else torch.bfloat16), name
        assert not is_scalar or torch.equal(weight, state[name])
    ids = text(90, 200)
    wanted = plain(exact, ids)
    for logits in (plain(gpt, ids), core(gpt, ids), core(gpt, ids, AWKWARD)):
        assert logits.dtype == torch.float32
        error = (logits - wanted).abs()
        assert 0 < error.mean() < 0.02 * wanted.std()
        assert error.max() < 0.05 * wanted.abs().max()


# ---- tables ---------------------------------------------------------------------------------------------------------

KERNELS = ("auto", "off")
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
ROUNDED = ("G0", "G1", "G2", "G2e")
"""Until its commit 1076f97 (2026-03-04) upstream rounded cos and sin to bfloat16."""


def opened(directory: Path, *overrides: str, **options: Any) -> InferenceEngine:
    return engine(directory, overrides=overrides, **options)


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
            with opened(tmp_path, *overrides, kernels=kernels) as ours:
                gaps = (torch.tensor(ours.score(ids)) - wanted).abs()
            assert gaps.max() < 1e-5, (kernels, overrides)
    by_default, by_hand = (
        load(state, config, *hints_of(generation), *overrides).forward(torch.tensor([ids]))
        for overrides in ((), (f"rope_dtype={other}",))
    )
    assert (by_default - by_hand).abs().max() > 1e-3


# ---- windows during decode: upstream ignored them in steps with a cache from 2026-01-16 to 30 ------------------------


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
        cache = KVCache(1, 2, 90, 16, 4)
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
    with opened(full.directory, *FULL, kernels=kernels, **options) as ours:
        for _ in range(2):  # the second time on cached prefixes
            found = [list(sample.completion_tokens) for sample in ours.generate(PROMPTS, GREEDY)]
            assert found == full.answers


@pytest.mark.parametrize("kernels", KERNELS)
def test_preempted_answer_is_recomputed_without_windows(full: FullCase, kernels: str) -> None:
    block_bytes = full.gpt.model.config.kv_bytes_per_token(4) * 16
    with opened(full.directory, *FULL, kernels=kernels, kv_cache_bytes=block_bytes * 14) as ours:
        samples = ours.generate(PROMPTS, GREEDY)
    assert sum(sample.num_preemptions for sample in samples) > 0
    assert [list(sample.completion_tokens) for sample in samples] == full.answers


@pytest.mark.parametrize("kernels", KERNELS)
def test_next_prompt_does_not_reuse_keys_of_generated_tokens(full: FullCase, kernels: str) -> None:
    """In the next prompt, the answer's tokens are prompt tokens, which windows restrict: their keys differ."""
    with opened(full.directory, *FULL, kernels=kernels) as ours:
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
    with opened(full.directory, *FULL, kernels=kernels, max_tokens_per_batch=37) as ours:
        samples = ours.generate(PROMPTS, params)
        texts = [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
        starts = [len(one.prompt_tokens) for one in samples]
        for _ in range(2):  # the second time without cached prefixes
            found = ours.score(texts, starts, params=params)
            for score, sample in zip(found, samples, strict=True):
                exact = list(sample.logprobs)
                assert score == (exact if kernels == "auto" else pytest.approx(exact, abs=TOLERANCE))
            ours.flush_cache()
