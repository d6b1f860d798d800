"""Every nanochat generation: G0 compared with Transformers, others with the plain `GPT`, and each term by itself."""

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
from nano_inference.models.ops import Attend
from nano_inference.nanochat.cache import KVCache
from nano_inference.nanochat.gpt import GPT
from nano_inference.nanochat.program import hf_name
from nano_inference.types import SamplingParams
from tests.nanochat.plain import plain_logits
from tests.nanochat.tiny import GENERATIONS, VOCAB, base_meta, model_config, state_dict, write_checkpoint

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
        row = Row(id=0, tokens=tuple(ids[a:b]), prev_token=ids[a - 1] if a else -1, start=a,
                  blocks=tuple(range(num_blocks)), num_sampled=0, params=SamplingParams(), logprobs_mode="raw", seed=0,
                  sample_index=0)  # fmt: skip
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


# ---- every generation without its terms is G0 -----------------------------------------------------------------------

NEUTRAL = ("rope_base=10000", "qk_scale=1", "softcap=15", "window_pattern=L", "rope_dtype=bfloat16")


def neutral_weights(generation: str, config: dict[str, Any], pad: int = 64) -> dict[str, Tensor]:
    """Return the generation's weights with a neutral value for every term; the other weights are those of G0."""
    state = state_dict(generation, config, pad=pad)
    for name, weight in state.items():
        if name == "resid_lambdas":
            weight.fill_(1)
        elif "lambda" in name or name.startswith("value_embeds."):
            weight.zero_()
    return state


@pytest.mark.parametrize("generation", GENERATIONS[1:])
def test_generation_without_its_terms_equals_g0_bitwise(generation: str) -> None:
    base = load(state_dict("G0", model_config("G0")), model_config("G0"))
    config = model_config(generation)
    gpt = load(neutral_weights(generation, config), config, *hints_of(generation), *NEUTRAL)
    ids = text(60, 250)
    assert torch.equal(plain(gpt, ids), plain(base, ids))
    assert torch.equal(core(gpt, ids), core(base, ids))
    assert torch.equal(core(gpt, ids, AWKWARD), core(base, ids, AWKWARD))


# ---- each term by itself, with values computed here -----------------------------------------------------------------


def exact(state: dict[str, Tensor], config: dict[str, Any], *overrides: str) -> GPT:
    """Return a model with float32 rotary tables by default, because expected values here are not rounded."""
    return load(state, config, "rope_dtype=float32", *overrides)


def unit(v: Tensor) -> Tensor:
    """Return v / rms(v) in float64."""
    v = v.double()
    return v / (v.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def rotate_pair(v: Tensor, angle: float) -> Tensor:
    """Rotate two numbers by minus the angle."""
    (x, y), c, s = v.double(), math.cos(angle), math.sin(angle)
    return torch.stack((x * c + y * s, -x * s + y * c))


def sigmoid(x: Tensor) -> float:
    return 1 / (1 + math.exp(-float(x)))


def head_of(state: dict[str, Tensor], x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(state["lm_head.weight"].double() @ unit(x) / cap)


def blank(generation: str, **sizes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model whose attention and MLP return zeros and whose terms are neutral; tables and head are random."""
    config = model_config(generation, **sizes)
    state = neutral_weights(generation, config, pad=1)
    for name, weight in state.items():
        if name.startswith("transformer.h.") or "gate" in name:
            weight.zero_()
    return state, config


def small(generation: str, num_layers: int = 1, **sizes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a blank model with one head of two dimensions."""
    sizes = {"n_layer": num_layers, "n_head": 1, "n_kv_head": 1, "n_embd": 2, "vocab_size": 5} | sizes
    return blank(generation, **sizes)


def assert_logits(gpt: GPT, ids: Sequence[int], wanted_TV: Tensor, tolerance: float = TOLERANCE) -> None:
    """Compare with both models, in one chunk, in two chunks, and token by token."""
    middle = (len(ids) // 2,) if len(ids) > 1 else ()
    for cuts in ((), middle, range(1, len(ids))):
        for logits in (plain(gpt, ids, cuts), core(gpt, ids, cuts)):
            assert (logits.double() - wanted_TV).abs().max() <= tolerance, cuts
    assert (plain(gpt, ids).double() - wanted_TV).abs().max() <= tolerance


def keys_and_values(gpt: GPT, ids: Sequence[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the keys and values [L, T, K, D] in the caches of `GPT.forward` and of the paged model."""
    cache, store = plain_cached(gpt, ids, (1,))[1], core_cached(gpt, ids, (1,))[1]
    num = len(ids)
    return (cache.k_cache[:, 0], cache.v_cache[:, 0]), (store.k_LSKD[:, :num], store.v_LSKD[:, :num])


@pytest.mark.parametrize("base", [10000, 100000])
def test_keys_are_rotated_by_minus_the_angle(base: int) -> None:
    state, config = small("G0", n_embd=4)
    state["transformer.wte.weight"][1] = torch.tensor([1.0, 1, 1, 1])
    weight = state["transformer.h.0.attn.c_k.weight"]
    weight[0, 0] = weight[1, 0] = 1.0  # k = (1, 1, 0, 0): the pairs are (0, 2) and (1, 3)
    gpt = exact(state, config, f"rope_base={base}")
    slow = base**-0.5
    for keys, _ in keys_and_values(gpt, [1] * 6):
        for p in range(6):
            wanted = [math.cos(p), math.cos(p * slow), -math.sin(p), -math.sin(p * slow)]
            wanted = [x * math.sqrt(2) for x in wanted]  # rms 1 of four numbers with two pairs of length 1
            assert keys[0, p, 0].tolist() == pytest.approx(wanted, abs=1e-6)


SCALES = {"G0": 1.0, "G1": 1.0, "G2": 1.0, "G2e": 1.0, "G2s": 1.0, "G3": 1.15, "G4": 1.2}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_attention_scale_of_each_generation(generation: str) -> None:
    """1.44 / sqrt(d) in G4: q and k are not scaled, but their product is."""
    config = model_config(generation)
    gpt = exact(state_dict(generation, config), config, *hints_of(generation))
    assert gpt.terms.generation == generation
    scale = SCALES[generation]
    for op in gpt.model.program.body:
        assert not isinstance(op, Attend) or op.scale == pytest.approx(scale * scale / math.sqrt(16), rel=1e-12)
    for keys, _ in keys_and_values(gpt, text(1, 5)):
        assert keys.square().mean(-1).sqrt().flatten().tolist() == pytest.approx([1.0] * 40, rel=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1.15, 1.2])
def test_attention_of_two_tokens(scale: float) -> None:
    state, config = small("G0")
    e = [torch.tensor([1.0, -0.4]), torch.tensor([0.3, 2.0])]
    state["transformer.wte.weight"][1], state["transformer.wte.weight"][2] = e
    q = torch.tensor([[0.5, 1.0], [-1.0, 0.2]])
    k = torch.tensor([[1.0, 0.3], [0.1, -0.7]])
    v = torch.tensor([[0.9, -0.2], [0.4, 1.1]])
    block = "transformer.h.0.attn."
    for part, weight in {"c_q": q, "c_k": k, "c_v": v, "c_proj": torch.eye(2)}.items():
        state[f"{block}{part}.weight"] = weight
    x = [unit(row) for row in e]
    a = [unit(row) for row in x]
    query = scale * unit(rotate_pair(q.double() @ a[1], 1.0))
    keys = [scale * unit(rotate_pair(k.double() @ a[t], float(t))) for t in (0, 1)]
    scores = [math.exp(float(query @ key) / math.sqrt(2)) for key in keys]
    values = [v.double() @ row for row in a]
    mixed = (scores[0] * values[0] + scores[1] * values[1]) / sum(scores)
    wanted = torch.stack((head_of(state, x[0] + values[0], 15.0), head_of(state, x[1] + mixed, 15.0)))
    assert_logits(exact(state, config, f"qk_scale={scale}"), [1, 2], wanted)


def test_softcap_of_15_and_20() -> None:
    state, config = small("G0")
    state["transformer.wte.weight"][1] = torch.tensor([0.7, 0.7])
    state["lm_head.weight"][:] = torch.tensor([[15.0, 15.0], [3.0, 0.0], [0.0, 0.0], [-15.0, -15.0], [1.0, 1.0]])
    raw = [30.0, 3.0, 0.0, -30.0, 2.0]
    for overrides, cap in (((), 15.0), (("softcap=20",), 20.0)):
        wanted = torch.tensor([[cap * math.tanh(z / cap) for z in raw]]).double()
        assert_logits(exact(state, config, *overrides), [1], wanted)
    assert 15 * math.tanh(2) == pytest.approx(14.4604, abs=1e-4)
    assert 20 * math.tanh(1.5) == pytest.approx(18.1030, abs=1e-4)


def test_mlp_uses_relu_squared() -> None:
    state, config = small("G0")
    state["transformer.wte.weight"][1] = torch.tensor([2.0, 2.0])  # normed: (1, 1)
    inner, out = state["transformer.h.0.mlp.c_fc.weight"], state["transformer.h.0.mlp.c_proj.weight"]
    inner[0], inner[1] = torch.tensor([1.0, 0.5]), torch.tensor([-1.0, -0.5])
    out[0, 0], out[1, 1] = 1.0, 1.0  # adds 1.5² to the first; relu(-1.5) is 0
    assert_logits(exact(state, config), [1], head_of(state, torch.tensor([1.0 + 2.25, 1.0]), 15.0)[None])


def test_norm_epsilon_is_float32_epsilon() -> None:
    """With embeddings of 3e-4 a norm's epsilon exceeds the mean square; it is not Transformers' 1e-6."""
    state, config = small("G0")
    state["transformer.wte.weight"][1] = torch.tensor([3e-4, 1e-4])
    inner, out = state["transformer.h.0.mlp.c_fc.weight"], state["transformer.h.0.mlp.c_proj.weight"]
    inner[0], out[1, 0] = torch.tensor([1.0, 0.0]), 1.0
    root = math.sqrt((9e-8 + 1e-8) / 2 + 1.1920929e-07)
    x = torch.tensor([3e-4 / root, 1e-4 / root]).double()
    x = x + torch.tensor([0.0, float(unit(x)[0]) ** 2])
    wanted = head_of(state, x, 15.0)[None]
    assert_logits(exact(state, config), [1], wanted)
    assert (plain(exact(state, config, "norm_eps=1e-6"), [1]) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize(("generation", "columns", "factor"), [("G2", 32, 2.0), ("G3", 12, 3.0), ("G4", 12, 3.0)])
def test_value_embeddings_and_their_gates(generation: str, columns: int, factor: float) -> None:
    """v + c·sigmoid(w·a[:n])·table[id], one gate per kv head; the last of the n columns counts, too."""
    state, config = blank(generation, n_layer=1, n_head=4, n_kv_head=2, n_embd=64, vocab_size=5)
    random = torch.Generator().manual_seed(3)
    table = torch.randn(5, 32, generator=random)
    gate = torch.zeros(2, columns)
    gate[0, columns - 1], gate[1, 0] = 0.8, -0.6
    value = torch.randn(32, 64, generator=random) / 8
    state["value_embeds.0.weight"] = table
    state["transformer.h.0.attn.ve_gate.weight"] = gate
    state["transformer.h.0.attn.c_v.weight"] = value
    if generation == "G4":
        state["backout_lambda"] = torch.tensor([0.5])
    gpt = exact(state, config)
    ids = [3, 1, 1, 4]
    for _, values in keys_and_values(gpt, ids):
        for t, token in enumerate(ids):
            a = unit(unit(state["transformer.wte.weight"][token]))
            gates = (factor * sigmoid(0.8 * a[columns - 1]), factor * sigmoid(-0.6 * a[0]))
            for head, g in enumerate(gates):
                part = slice(16 * head, 16 * head + 16)
                wanted = value[part].double() @ a + g * table[token, part].double()
                assert (values[0, t, head].double() - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("num_layers", "having"), [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3]), (5, [0, 2, 4])])
@pytest.mark.parametrize("generation", ["G2", "G3"])
def test_alternate_layers_have_value_embeddings(generation: str, num_layers: int, having: list[int]) -> None:
    config = model_config(generation, n_layer=num_layers)
    state = state_dict(generation, config)
    gpt = exact(state, config)
    tables = [name for name in gpt.weights if name.startswith("value_embeds.")]
    assert sorted(tables) == [f"value_embeds.{i}.weight" for i in having]
    assert sorted(name for name in gpt.weights if "ve_gate" in name) == [
        f"transformer.h.{i}.attn.ve_gate.weight" for i in having
    ]
    doubled = state | {name: state[name] * 2 for name in tables}
    for (_, before), (_, after) in zip(
        keys_and_values(gpt, [7]), keys_and_values(exact(doubled, config), [7]), strict=True
    ):
        first = next(i for i in range(num_layers) if not torch.equal(before[i], after[i]))
        assert first == having[0]


def test_residual_and_embedding_lambdas() -> None:
    state, config = small("G1", num_layers=2)
    state["transformer.wte.weight"][1] = torch.tensor([3.0, 3.0])  # normed: (1, 1)
    state["resid_lambdas"] = torch.tensor([0.9, 1.3])
    state["x0_lambdas"] = torch.tensor([0.2, -0.4])
    state["transformer.h.0.mlp.c_fc.weight"][0] = torch.tensor([2.0, 0.0])
    state["transformer.h.0.mlp.c_proj.weight"][0, 0] = 1.0  # the first MLP adds (4, 0)
    x = torch.tensor([0.9 + 0.2 + 4.0, 0.9 + 0.2])
    x = 1.3 * x - 0.4 * torch.tensor([1.0, 1.0])
    assert x.tolist() == pytest.approx([6.23, 1.03])
    assert_logits(exact(state, config), [1, 1], head_of(state, x, 15.0).expand(2, -1))


def smear_case() -> tuple[dict[str, Tensor], dict[str, Any], list[int], list[Tensor]]:
    """Return a blank G4 with smear, its configuration, a prompt, and the expected residual after the embedding."""
    state, config = blank("G4", n_layer=1, n_head=1, n_kv_head=1, n_embd=32, vocab_size=5)
    weight = torch.zeros(24)
    weight[0], weight[23] = 0.7, -1.1
    state["smear_gate.weight"] = weight[None]
    state["smear_lambda"] = torch.tensor([0.6])
    ids = [2, 4, 4, 1, 3, 2]
    e = [unit(state["transformer.wte.weight"][token]) for token in ids]
    x = [e[0]]
    for before, now in pairwise(e):
        x.append(now + 0.6 * sigmoid(0.7 * now[0] - 1.1 * now[23]) * before)
    return state, config, ids, x


def test_smear_adds_previous_token_except_for_the_first() -> None:
    state, config, ids, x = smear_case()
    wanted = torch.stack([head_of(state, row, 15.0) for row in x])
    assert (wanted[2] - wanted[1]).abs().max() > 1e-2  # the same token after another one
    assert_logits(exact(state, config), ids, wanted)


def test_chunk_smears_with_its_given_previous_token() -> None:
    """The first token of the second chunk smears with `prev_token` of its row."""
    state, config, ids, _ = smear_case()
    gpt = exact(state, config)
    store = core_cached(gpt, ids, ())[1]
    e = [unit(row) for row in state["transformer.wte.weight"]]
    for prev in (0, 3, -1):
        row = Row(id=0, tokens=(ids[3],), prev_token=prev, start=3, blocks=(0,), num_sampled=0, params=SamplingParams(),
                  logprobs_mode="raw", seed=0, sample_index=0)  # fmt: skip
        now = e[ids[3]]
        before = e[prev] if prev >= 0 else 0 * now
        wanted = head_of(state, now + 0.6 * sigmoid(0.7 * now[0] - 1.1 * now[23]) * before, 15.0)
        logits = gpt.model.forward(build((row,), 16, CPU), store)
        assert (logits[0].double() - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_backout_subtracts_the_middle_layers_output(num_layers: int) -> None:
    """Layer i's MLP adds (i + 1) times the square of the first normalised value, along axis i + 1."""
    state, config = blank("G4", n_layer=num_layers, n_head=1, n_kv_head=1, n_embd=32, vocab_size=5)
    for i in range(num_layers):
        state[f"transformer.h.{i}.mlp.c_fc.weight"][0, 0] = 1.5
        state[f"transformer.h.{i}.mlp.c_proj.weight"][i + 1, 0] = i + 1.0
    state["transformer.wte.weight"][1, 0] = 2.5
    state["backout_lambda"] = torch.tensor([0.3])
    x = unit(state["transformer.wte.weight"][1])
    outputs = []
    for i in range(num_layers):
        added = torch.zeros(32).double()
        added[i + 1] = (i + 1) * (1.5 * float(unit(x)[0])) ** 2
        x = x + added
        outputs.append(x)
    taken = outputs[{1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3}[num_layers]]
    assert_logits(exact(state, config), [1, 1, 1], head_of(state, x - 0.3 * taken, 15.0).expand(3, -1))


def test_hashed_pairs() -> None:
    state, config = blank("G2e", n_layer=2, n_head=1, n_kv_head=1, n_embd=32, vocab_size=50)
    table = state["bigram_embed.embed.weight"]
    assert table.shape == (250, 32)
    state["bigram_lambdas"] = torch.tensor([0.5, -0.2])
    state["resid_lambdas"] = torch.tensor([1.0, 0.5])
    ids = [49, 3, 3, 17, 0, 0, 41]
    rows = [249]
    for before, now in pairwise(ids):
        rows.append(((36313 * now) ^ (27191 * before)) % 249)
    assert rows == [249, 73, 107, 195, 103, 0, 62]
    wanted = []
    for token, row in zip(ids, rows, strict=True):
        pair = table[row].double()
        x = 0.5 * (unit(state["transformer.wte.weight"][token]) + 0.5 * pair) - 0.2 * pair
        wanted.append(head_of(state, x, 15.0))
    assert_logits(exact(state, config), ids, torch.stack(wanted))


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
