"""`Engine`: tokens and masks on the core engine equal those of nanochat's loop."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.nanochat import (
    GPT,
    Engine,
    GPTConfig,
    KVCache,
    RowState,
    eval_with_timeout,
    sample_next_token,
    timeout,
    use_calculator,
)
from nano_inference.nanochat.columns import Columns
from tests.nanochat.talkative import CHARACTERS, CharacterTokenizer, Foreign, Uniform, talkative
from tests.nanochat.tiny import GENERATIONS, model_config, state_dict

TOKENIZER = CharacterTokenizer()
BOS, END = TOKENIZER.get_bos_token_id(), TOKENIZER.encode_special("<|assistant_end|>")
PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END = (
    TOKENIZER.encode_special(f"<|{name}|>") for name in ("python_start", "python_end", "output_start", "output_end")
)
GENERATOR_STATE = tuple(torch.Generator().get_state().shape)
Columns_ = list[tuple[list[int], list[int]]]
Row = list[tuple[int, int]]


def rows_of(columns: Columns_, num_rows: int) -> list[Row]:
    """Each row's (token, mask) pairs up to its first terminal, which is all that anybody looks at."""
    rows: list[Row] = []
    for index in range(num_rows):
        row: Row = []
        for tokens, masks in columns:
            row.append((tokens[index], masks[index]))
            if tokens[index] in (BOS, END):
                break
        rows.append(row)
    return rows


def num_tool_results(rows: list[Row]) -> int:
    return sum(token == OUTPUT_START and not mask for row in rows for token, mask in row)


def num_tensors(shape: tuple[int, ...]) -> int:
    """Return how many tensors of a shape are in memory."""
    return sum(isinstance(one, Tensor) and tuple(one.shape) == shape for one in gc.get_objects())


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("num_samples", [1, 12])
def test_stream_equals_nanochat_loop(generation: str, num_samples: int) -> None:
    model = talkative(generation)
    ours, plain = Engine(model, TOKENIZER), Engine(Foreign(model), TOKENIZER)
    results = ends = 0
    wishes = [(0.0, None, 70), (1.0, None, 90), (1.0, 12, 23), (0.8, 0, 14), (1.1, 200, 31), (1.0, 9, 11)]
    for number, (temperature, top_k, max_tokens) in enumerate(wishes):
        prompt = [BOS, *TOKENIZER.encode("12+3"[: 1 + number % 4])]
        wish: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "max_tokens": max_tokens, "seed": number}
        columns = list(ours.generate(prompt, num_samples, **wish))
        expected = list(plain.generate(prompt, num_samples, **wish))
        assert len(columns) == len(expected)
        rows = rows_of(columns, num_samples)
        assert rows == rows_of(expected, num_samples)
        results += num_tool_results(rows)
        ends += sum(row[-1][0] == END for row in rows)
    if num_samples == 12:
        assert results > 0 and ends >= 5, (results, ends)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_max_tokens_can_truncate_tool_result(generation: str) -> None:
    model = talkative(generation)
    ours, plain = Engine(model, TOKENIZER), Engine(Foreign(model), TOKENIZER)
    seed, long, place = next(
        (seed, rows, row.index((OUTPUT_START, 0)))
        for seed in range(4)
        for rows in [rows_of(list(ours.generate([BOS, 1], 8, max_tokens=80, seed=seed)), 8)]
        for row in rows
        if (OUTPUT_START, 0) in row
    )
    for max_tokens in range(place, place + 5):
        rows, expected = (
            rows_of(list(engine.generate([BOS, 1], 8, max_tokens=max_tokens, seed=seed)), 8) for engine in (ours, plain)
        )
        assert rows == expected == [row[:max_tokens] for row in long]


def test_batches_equal_nanochat_loop() -> None:
    model = talkative("G3")
    ours, plain = Engine(model, TOKENIZER), Engine(Foreign(model), TOKENIZER)
    for seed in range(5):
        wish: dict[str, Any] = {"max_tokens": 40, "seed": seed, "top_k": 20}
        assert ours.generate_batch([BOS, 1], 6, **wish) == plain.generate_batch([BOS, 1], 6, **wish)


def test_prompts_together_equal_prompts_in_turn() -> None:
    model = talkative("G4")
    prompts = [[BOS, *[3, 1, 4][: n % 4]] + [7] * n for n in range(6)]
    wish: dict[str, Any] = {"max_tokens": 40, "top_k": 15}
    for engine in (Engine(model, TOKENIZER), Engine(Foreign(model), TOKENIZER)):
        alone = [engine.generate_batch(prompt, 4, seed=i, **wish) for i, prompt in enumerate(prompts)]
        assert engine.generate_batches(prompts, 4, seeds=range(6), **wish) == alone
        assert engine.generate_batches(prompts[:2], 4, seeds=1, **wish)[1] == alone[1]
    with pytest.raises(ValueError, match="seeds must be one for each of 6 prompts, got 1"):
        engine.generate_batches(prompts, 4, seeds=[1])
    assert engine.generate_batches([]) == []


def test_top_p_equals_nanochat_loop() -> None:
    model = talkative("G4")
    wish: dict[str, Any] = {"top_p": 0.7, "max_tokens": 40, "seed": 5}
    columns = list(Engine(model, TOKENIZER).generate([BOS], 8, **wish))
    assert rows_of(columns, 8) == rows_of(list(Engine(Foreign(model), TOKENIZER).generate([BOS], 8, **wish)), 8)
    open_columns = list(Engine(model, TOKENIZER).generate([BOS], 8, max_tokens=40, seed=5))
    assert rows_of(columns, 8) != rows_of(open_columns, 8)


def test_concurrent_generators_are_independent() -> None:
    engine = Engine(talkative("G4"), TOKENIZER)
    wishes: list[dict[str, Any]] = [{"num_samples": n, "max_tokens": 30, "seed": n} for n in (1, 3, 5)]
    alone = [list(engine.generate([BOS, 1], **wish)) for wish in wishes]
    generators: list[Iterator[Any]] = [engine.generate([BOS, 1], **wish) for wish in wishes]
    together: list[list[Any]] = [[] for _ in wishes]
    for _ in range(30):
        for columns, generator in zip(together, generators, strict=True):
            columns += islice(generator, 1)
    assert together == alone


def test_a_seed_decides_and_temperature_0_ignores_it() -> None:
    engine = Engine(talkative("G2"), TOKENIZER)

    def run(seed: int, temperature: float = 1.0) -> Columns_:
        return list(engine.generate([BOS, 3], 4, max_tokens=20, seed=seed, temperature=temperature))

    assert run(1) == run(1) != run(2)
    assert run(1, 0.0) == run(2, 0.0)


def test_without_exact_a_row_does_not_depend_on_the_others() -> None:
    engine = Engine(talkative("G4"), TOKENIZER, exact=False)
    four = rows_of(list(engine.generate([BOS, 3], 4, max_tokens=30, seed=9)), 4)
    assert rows_of(list(engine.generate([BOS, 3], 9, max_tokens=30, seed=9)), 9)[:4] == four
    exact = rows_of(list(Engine(talkative("G4"), TOKENIZER).generate([BOS, 3], 4, max_tokens=30, seed=9)), 4)
    assert exact != four


@pytest.mark.parametrize("is_ours", [True, False])
class TestTheContract:
    """What holds for our own model and for any other."""

    @pytest.fixture
    def engine(self, is_ours: bool) -> Engine:
        model = talkative("G4")
        return Engine(model if is_ours else Foreign(model), TOKENIZER)

    def test_nothing_is_checked_before_the_first_next(self, engine: Engine) -> None:
        for wrong, error in (
            (torch.tensor([1]), AssertionError),
            ([], IndexError),
            ([1.5], AssertionError),
            ("1", AssertionError),
        ):
            generator = engine.generate(wrong)  # type: ignore[arg-type]
            with pytest.raises(error):
                next(generator)
        with pytest.raises(AssertionError, match="non-negative"):
            next(engine.generate([BOS], temperature=-1.0))
        with pytest.raises(AssertionError, match="longer"):
            next(engine.generate([BOS] * 257))

    def test_max_tokens_0_yields_nothing(self, engine: Engine) -> None:
        assert list(engine.generate([BOS, 1], 3, max_tokens=0)) == []
        assert engine.generate_batch([BOS, 1], 3, max_tokens=0) == ([[BOS, 1]] * 3, [[0, 0]] * 3)

    def test_without_max_tokens_a_row_ends_where_the_trained_length_is_full(self, engine: Engine) -> None:
        tokens = [BOS, *[1] * 240]
        (row,) = rows_of(list(engine.generate(tokens, temperature=0.0)), 1)
        assert len(row) == 256 - 241 + 1 or row[-1][0] in (BOS, END)
        (full,), _ = engine.generate_batch([BOS, *[1] * 255], seed=1)
        assert len(full) <= 257

    def test_a_prompt_of_one_token_works(self, engine: Engine) -> None:
        results, masks = engine.generate_batch([BOS], 8, max_tokens=12, temperature=1.0)
        assert len({tuple(result) for result in results}) > 1
        assert all(len(result) == len(mask) for result, mask in zip(results, masks, strict=True))

    def test_terminals_are_yielded_with_mask_1_and_left_out_of_the_batch(self, engine: Engine) -> None:
        columns = list(engine.generate([BOS, 2], 16, max_tokens=80, seed=3))
        rows = rows_of(columns, 16)
        ended = [row for row in rows if row[-1][0] in (BOS, END)]
        assert ended and all(row[-1][1] == 1 for row in ended)
        results, masks = engine.generate_batch([BOS, 2], 16, max_tokens=80, seed=3)
        for row, result, mask in zip(rows, results, masks, strict=True):
            kept = row[:-1] if row[-1][0] in (BOS, END) else row
            assert list(zip(result[2:], mask[2:], strict=True)) == kept and mask[:2] == [0, 0]

    def test_forced_tokens_are_the_result_between_its_marks(self, engine: Engine) -> None:
        rows = rows_of(list(engine.generate([BOS, 2], 16, max_tokens=120, seed=1)), 16)
        forced = [[token for token, mask in row if not mask] for row in rows]
        with_results = [tokens for tokens in forced if tokens]
        assert with_results
        for tokens in with_results:
            assert tokens[0] == OUTPUT_START
            assert set(tokens) <= {OUTPUT_START, OUTPUT_END, *range(len(CHARACTERS))}

    def test_a_generator_that_is_closed_early_leaves_nothing_behind(self, engine: Engine) -> None:
        generator = engine.generate([BOS, 2], 4, max_tokens=50)
        next(generator)
        generator.close()  # type: ignore[attr-defined]
        if isinstance(engine.model, GPT):
            assert not engine.core.has_pending()
            parts = engine.core.parts
            assert parts.kv.num_free_blocks() == parts.kv.num_blocks


def test_the_first_tokens_of_the_samples_differ() -> None:
    engine = Engine(Uniform(), TOKENIZER)
    (first, masks) = next(engine.generate([BOS, 1], 16, max_tokens=1))
    assert len(set(first)) > 4 and masks == [1] * 16


def test_foreign_model_is_not_computed_after_last_column() -> None:
    model = Uniform()
    num_columns = len(list(Engine(model, TOKENIZER).generate([BOS, 1], 1, max_tokens=5, seed=2)))
    assert model.num_calls == num_columns <= 5


def test_cache_grows_for_foreign_model() -> None:
    model = Uniform(vocab_size=len(CHARACTERS), sequence_len=8)  # knows no terminal
    columns = list(Engine(model, TOKENIZER).generate([1, 2], 2, max_tokens=40))
    assert len(columns) == 40


def test_rows_that_end_free_their_blocks_in_the_same_step() -> None:
    engine = Engine(talkative("G1"), TOKENIZER)
    core = engine.core
    generator = engine.generate([BOS, 2], 16, max_tokens=200, seed=3)
    seen: list[tuple[int, int]] = []
    run = core.parts.runner.run

    def watched(rows: Any, *others: Any) -> Any:
        seen.append((len(rows), core.parts.kv.num_free_blocks()))
        return run(rows, *others)

    core.parts.runner.run = watched  # type: ignore[method-assign]
    list(generator)
    gained = [after[1] - before[1] for before, after in pairwise(seen) if after[0] < before[0]]
    assert len(gained) >= 4 and any(one > 0 for one in gained[1:])
    assert core.parts.kv.num_free_blocks() == core.parts.kv.num_blocks


def test_ended_row_repeats_terminal_with_mask_0() -> None:
    engine = Engine(talkative("G1"), TOKENIZER)
    columns = []
    for column in engine.generate([BOS, 2], 16, max_tokens=200, seed=3):
        columns.append(column)
        assert 0 < num_tensors(GENERATOR_STATE) < 30
    num_repeats = 0
    for index, row in enumerate(rows_of(columns, 16)):
        after = [(tokens[index], masks[index]) for tokens, masks in columns[len(row) :]]
        assert set(after) <= {(row[-1][0], 0)}
        num_repeats += len(after)
    assert num_repeats > 100 and not num_tensors(GENERATOR_STATE)


def test_new_weights_clear_cached_prefixes() -> None:
    model, other = talkative("G4"), talkative("G4", seed=1)
    engine, expected = Engine(model, TOKENIZER), Engine(other, TOKENIZER)
    prompt = [BOS, *[1, 2, 3] * 20]
    before = list(engine.generate(prompt, max_tokens=20, temperature=0.0))
    model.load_state_dict({f"_orig_mod.{name}": tensor for name, tensor in other.state_dict().items()})
    after = list(engine.generate(prompt, max_tokens=20, temperature=0.0))
    assert after == list(expected.generate(prompt, max_tokens=20, temperature=0.0)) != before
    text = [*prompt, 5]
    found, fresh = (one.core.score(text, start=len(text) - 1) for one in (engine, Engine(other, TOKENIZER)))
    assert found == pytest.approx(fresh, abs=1e-5)


@pytest.mark.parametrize("generation", ["G0", "G2e", "G4"])
def test_the_kernels_and_torch_give_the_same_columns(generation: str) -> None:
    """Also after new weights, which the kernels have packed again."""
    model, other = talkative(generation), talkative(generation, seed=1)
    engines = {
        kernels: Engine(model, TOKENIZER, config=EngineConfig(model_path="x", max_model_len=4096, kernels=kernels))
        for kernels in ("auto", "off")
    }
    found = []
    for _ in range(2):
        columns = [list(e.generate([BOS, *[1, 2, 3] * 20], 3, max_tokens=30, seed=5)) for e in engines.values()]
        assert columns[0] == columns[1]
        found.append(columns[0])
        model.load_state_dict(other.state_dict())
    assert found[0] != found[1]
    assert engines["off"].core.parts.code == "torch" != engines["auto"].core.parts.code
    assert Engine(model, TOKENIZER).core.parts.code == engines["auto"].core.parts.code


def scored(engine: Engine) -> list[float]:
    return [float(one) for one in engine.core.score([BOS, 1, 2, 3, 4, 5, 1, 2])]


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_load_state_dict_updates_every_weight(kernels: Any) -> None:
    """Learnt numbers, too: they are single values, which a program could have copied."""
    model = talkative("G4")
    engine = Engine(model, TOKENIZER, config=EngineConfig(model_path="x", max_model_len=4096, kernels=kernels))
    before = scored(engine)
    for name in model.state_dict():
        state = {other: value.clone() for other, value in model.state_dict().items()}
        state[name] = state[name] * 1.5 if "lambda" in name else state[name] + 0.3 * torch.randn_like(state[name])
        model.load_state_dict(state)
    engine.core  # noqa: B018  (packs the weights again)
    fresh = Engine(GPT.from_state_dict(model.state_dict(), model.config, device="cpu", dtype="float32"), TOKENIZER)
    assert engine.generate_batch([BOS, 1], max_tokens=1)
    assert scored(engine) == pytest.approx(scored(fresh), abs=1e-4) != before


def test_engine_refuses_lookahead() -> None:
    with pytest.raises(ValueError, match="lookahead must be 1 here, got 4"):
        Engine(object(), TOKENIZER, config=EngineConfig(model_path="x", lookahead=4))


def test_core_update_does_not_change_model_weights() -> None:
    model = talkative("G2e")
    engine = Engine(model, TOKENIZER, config=EngineConfig(model_path="x", max_model_len=4096, kernels="off"))
    before, own = scored(engine), {name: value.clone() for name, value in model.state_dict().items()}
    for seed in (1, 2, 3):
        engine.core.update_weights(talkative("G2e", seed=seed).state_dict(), blocking=True)
        assert scored(engine) != before
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    model.load_state_dict(own)
    assert scored(engine) == before


def test_failed_step_ends_only_its_call() -> None:
    engine = Engine(talkative("G4"), TOKENIZER)
    expected = list(engine.generate([BOS, 1], 2, max_tokens=10))
    runner = engine.core.parts.runner
    run = runner.run

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    runner.run = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.generate([BOS, 1], 2, max_tokens=10))
    runner.run = run  # type: ignore[method-assign]
    assert list(engine.generate([BOS, 1], 2, max_tokens=10)) == expected


def test_interrupted_step_reuses_random_numbers() -> None:
    engine = Engine(talkative("G4"), TOKENIZER)
    wishes: list[dict[str, Any]] = [{"max_tokens": 20, "seed": seed} for seed in (1, 2)]
    alone = [list(engine.generate([BOS, 1], 3, **wish)) for wish in wishes]
    first, second = (engine.generate([BOS, 1], 3, **wish) for wish in wishes)
    found = [next(first)], [next(second)]
    runner = engine.core.parts.runner
    run = runner.run

    def interrupted(*step: Any) -> Any:
        run(*step)
        raise KeyboardInterrupt

    runner.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(first)
    runner.run = run  # type: ignore[method-assign]
    assert [*found[1], *second] == alone[1]


def test_engine_is_thread_safe() -> None:
    engine = Engine(talkative("G4"), TOKENIZER)
    wish: dict[str, Any] = {"max_tokens": 15, "seed": 5}
    expected = engine.generate_batch([BOS, 1], 2, **wish), list(engine.generate([BOS, 1], 2, **wish))

    def run(index: int) -> Any:
        found = [
            (engine.generate_batch([BOS, 1], 2, **wish), list(engine.generate([BOS, 1], 2, **wish))) for _ in range(3)
        ]
        return [one == expected for one in found]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(same) for same in pool.map(run, range(4)))


def test_engine_uses_config_and_call_of_model() -> None:
    model = talkative("G4")
    again = GPT.from_state_dict(model.state_dict(), model.config, overrides={"softcap": 20})
    assert again.config == model.config and again.model.config.logits_softcap == 20
    ids = torch.tensor([[BOS, 1, 2]])
    assert torch.equal(model(ids), model.forward(idx=ids))


def test_loss_is_the_cross_entropy_of_the_targets() -> None:
    """The call of upstream's `evaluate_bpb`, and of its validation loss; targets of -1 do not count."""
    model = talkative("G4")
    x, y = torch.tensor([[BOS, 1, 2], [3, 4, 5]]), torch.tensor([[1, -1, 3], [4, 5, -1]])
    logprobs = model(x).log_softmax(-1)
    each = [
        0.0 if token < 0 else -float(logprobs[b, t, token]) for b, row in enumerate(y) for t, token in enumerate(row)
    ]
    assert model(x, y, loss_reduction="none").tolist() == pytest.approx(each, abs=1e-5)
    assert float(model(x, y, loss_reduction="sum")) == pytest.approx(sum(each), abs=1e-5)
    assert float(model(x, y)) == float(model.forward(x, targets=y)) == pytest.approx(sum(each) / 4, abs=1e-5)


def test_numpy_integers_are_accepted() -> None:
    model = talkative("G4")
    wish: dict[str, Any] = {"max_tokens": np.int64(9), "top_k": np.int32(5), "seed": np.int64(3)}
    wish |= {"temperature": np.float32(0.7), "top_p": np.float64(0.9), "num_samples": np.int64(2)}
    prompt: Any = [BOS, np.int64(3)]
    expected = Engine(model, TOKENIZER).generate_batch(
        [BOS, 3], 2, max_tokens=9, top_k=5, seed=3, temperature=0.7, top_p=0.9
    )
    for one in (model, Foreign(model)):
        results, masks = Engine(one, TOKENIZER).generate_batch(prompt, **wish)
        assert (results, masks) == (expected[0], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foreign_model_cache_has_precision_of_weights(dtype: torch.dtype) -> None:
    kinds = []

    class Typed(Uniform):
        def parameters(self) -> Iterator[Tensor]:
            return iter([torch.zeros(1, dtype=dtype)])

        def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
            assert kv_cache is not None
            kinds.append(kv_cache.k_cache.dtype)
            return super().forward(ids, kv_cache=kv_cache)

    list(Engine(Typed(), TOKENIZER).generate([BOS], 2, max_tokens=3))
    assert set(kinds) == {dtype}
    kinds.clear()
    list(Engine(Typed(), TOKENIZER, cache_dtype=torch.float16).generate([BOS], 2, max_tokens=3))
    assert set(kinds) == {torch.float16}


def test_collected_generator_leaves_no_samples() -> None:
    engine = Engine(talkative("G1"), TOKENIZER)
    core = engine.core
    lost = engine.generate([BOS, 1], 3, max_tokens=8)
    next(lost)
    run = core.parts.runner.run

    def collecting(*step: Any) -> Any:
        lost.close()  # type: ignore[attr-defined]
        return run(*step)

    core.parts.runner.run = collecting  # type: ignore[method-assign]
    list(engine.generate([BOS, 2], 2, max_tokens=20))
    core.parts.runner.run = run  # type: ignore[method-assign]
    list(engine.generate([BOS, 3], 2, max_tokens=20))
    assert not core.has_pending() and core.step() == []


def test_invalid_weights_change_nothing() -> None:
    model = talkative("G4")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    del wrong["smear_lambda"]
    with pytest.raises(ValueError, match="smear_lambda"):
        model.load_state_dict(wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_naive_generate_equals_the_engine_at_temperature_0() -> None:
    model = talkative("G4")
    prompt = [BOS, *TOKENIZER.encode("1+2")]
    naive = list(model.generate(prompt, 30, temperature=0.0))
    taken = [tokens[0] for tokens, masks in Engine(model, TOKENIZER).generate(prompt, max_tokens=30, temperature=0.0)]
    until = next((i for i, token in enumerate(naive) if token in (END, BOS, PYTHON_END)), len(naive))
    assert until > 0 and naive[:until] == taken[:until]
    assert list(model.generate(prompt, 30, temperature=0.0, stop_token=naive[2])) == naive[: naive.index(naive[2]) + 1]
    assert len(list(model.generate([BOS], 5, top_k=3, top_p=0.9, seed=1))) == 5


# ---- sampling -------------------------------------------------------------------------------------------------------


def reference(logits: Tensor, rng: torch.Generator, temperature: float, top_k: int | None) -> Tensor:
    """nanochat's draw in torch's own words (its engine.py)."""
    if top_k:
        values, ids = logits.topk(min(top_k, logits.size(-1)), dim=-1)
        return ids.gather(1, torch.multinomial((values / temperature).softmax(-1), 1, generator=rng))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)


@pytest.mark.parametrize("top_k", [None, 0, 7, 1000])
def test_columns_are_multinomials_bit_for_bit_in_any_order_of_rows(top_k: int | None) -> None:
    logits = torch.randn(6, 5, 70, generator=torch.Generator().manual_seed(0))
    rng, same = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
    expected = [reference(column, rng, 0.7, top_k)[:, 0].tolist() for column in logits]
    direct = [sample_next_token(column, same, 0.7, top_k)[:, 0].tolist() for column in logits]
    assert direct == expected
    columns = Columns(5, 11, 0.7, top_k, None, torch.device("cpu"))
    found = [[-1] * 5 for _ in range(6)]
    turns = [(0, range(3)), (1, range(2)), (3, range(5)), (0, range(3, 6)), (2, range(4)), (1, range(3, 6)), (2, [5])]
    for row, places in turns:
        for place in places:
            found[place][row] = int(columns.choose(logits[place, row : row + 1], [row], [place])[0])
    columns.end(4)
    for place, row in [(place, row) for place in range(6) for row in range(4)]:
        if found[place][row] >= 0:
            assert found[place][row] == expected[place][row]
    assert sum(token >= 0 for row in found for token in row) == 21


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (50, None), (None, 0.5), (50, 0.5)])
def test_columns_of_a_large_vocabulary_are_multinomials_with_their_logprobs(
    top_k: int | None, top_p: float | None
) -> None:
    columns, rng = Columns(16, 3, 0.8, top_k, top_p, torch.device("cpu")), torch.Generator().manual_seed(3)
    for place in range(4):
        logits = 3 * torch.randn(16, 32768, generator=torch.Generator().manual_seed(place))
        tokens, logprobs = columns.choose(logits, range(16), [place] * 16)
        assert tokens.tolist() == sample_next_token(logits, rng, 0.8, top_k, top_p)[:, 0].tolist()
        chances = (logits.double() / 0.8).softmax(-1)
        ordered = chances.sort(descending=True).values
        kept = torch.arange(32768) < (top_k or 32768)
        mass = (ordered * kept).sum(-1, keepdim=True)
        kept = kept & (ordered.cumsum(-1) - ordered < (top_p or 2.0) * mass)
        own = chances.gather(1, tokens[:, None])[:, 0] / (ordered * kept).sum(-1)
        assert (logprobs - own.log()).abs().max() < 1e-5


def test_columns_keep_only_needed_numbers() -> None:
    columns = Columns(3, 0, 1.0, None, None, torch.device("cpu"))
    logits = torch.zeros(1, 9)
    for place in range(10):
        columns.choose(logits, [0], [place])
    assert num_tensors(GENERATOR_STATE) == num_tensors((3, 9)) == 10
    columns.end(1)
    columns.choose(logits, [2], [7])
    columns.choose(logits, [0], [10])
    assert num_tensors(GENERATOR_STATE) == num_tensors((3, 9)) == 4, "columns 7 to 10"
    before = columns.choose(torch.zeros(1, 9), [0], [10])[0]
    assert torch.equal(before, columns.choose(torch.zeros(1, 9), [0], [10])[0]), "a step that is run again"


def test_row_far_ahead_keeps_only_generator_states() -> None:
    logits = torch.randn(40, 2, 50, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(4)
    expected = [reference(column, rng, 1.0, None)[:, 0].tolist() for column in logits]
    columns = Columns(2, 4, 1.0, None, None, torch.device("cpu"), kept_bytes=3 * 2 * 50 * 4)
    found: list[list[int]] = [[], []]
    for row, places in ((1, range(20)), (0, range(5)), (1, range(20, 40)), (0, range(5, 40))):
        for place in places:
            found[row].append(int(columns.choose(logits[place, row : row + 1], [row], [place])[0]))
            assert num_tensors((2, 50)) <= 3
    assert found == [[column[row] for column in expected] for row in range(2)]
    assert num_tensors(GENERATOR_STATE) == num_tensors((2, 50)) == 1


def test_sample_next_token_refuses_and_breaks_ties_as_upstream() -> None:
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(AssertionError, match="non-negative"):
        sample_next_token(torch.zeros(1, 4), rng, -0.1)
    assert sample_next_token(torch.tensor([[1.0, 3.0, 3.0]]), rng, 0.0).tolist() == [[1]]
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for top_p, wanted in ((0.45, {1}), (0.55, {1, 2}), (0.75, {1, 2}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2})):
        assert {int(sample_next_token(logits, rng, 1.0, None, top_p)) for _ in range(80)} == wanted, top_p


# ---- the dense cache ------------------------------------------------------------------------------------------------


def test_kv_cache_writes_through_its_views_and_counts() -> None:
    cache = KVCache(2, 3, 8, 4, 2, "cpu", torch.float32)
    assert cache.k_cache.shape == (2, 2, 8, 3, 4) and cache.cache_seqlens.dtype == torch.int32
    k, v = cache.get_layer_cache(1)
    k[:, 0:2], v[:, 0:2] = 1.0, 2.0
    cache.advance(2)
    assert cache.get_pos() == 2 and float(cache.k_cache[1, :, :2].min()) == 1.0
    cache.prev_embedding = torch.ones(2, 1, 5)
    cache.reset()
    assert cache.get_pos() == 0 and cache.prev_embedding is None and float(cache.k_cache.max()) == 1.0


def test_kv_cache_prefill_copies_one_row_and_checks_shapes() -> None:
    prompt = KVCache(1, 2, 4, 3, 2, "cpu", torch.float32)
    prompt.k_cache.normal_()
    prompt.advance(3)
    prompt.prev_embedding = torch.randn(1, 1, 6)
    cache = KVCache(5, 2, 9, 3, 2, "cpu", torch.float32)
    cache.prefill(prompt)
    assert torch.equal(cache.k_cache[:, :, :3], prompt.k_cache[:, :, :3].expand(2, 5, 3, 2, 3))
    assert cache.cache_seqlens.tolist() == [3] * 5
    assert cache.prev_embedding is not None and cache.prev_embedding.shape == (5, 1, 6)
    with pytest.raises(AssertionError, match="Cannot prefill a non-empty KV cache"):
        cache.prefill(prompt)
    for wrong in ((5, 2, 3, 3, 2), (5, 1, 9, 3, 2), (5, 2, 9, 4, 2), (5, 2, 9, 3, 1)):
        with pytest.raises(AssertionError, match="KV cache"):
            KVCache(*wrong).prefill(prompt)
    with pytest.raises(AssertionError, match="KV cache"):
        KVCache(3, 2, 9, 3, 2).prefill(KVCache(2, 2, 9, 3, 2))
    with pytest.raises(AssertionError, match="is None"):
        KVCache(3, 2, 9, 3, 2).prefill(None)


def test_kv_cache_grows_when_full() -> None:
    cache = KVCache(1, 1, 2, 1, 2, "cpu", torch.float32)
    for position in range(5):
        for layer in range(2):
            k, v = cache.get_layer_cache(layer)
            k[:, position], v[:, position] = position, -position
        cache.advance(1)
    assert cache.max_seq_len == 2048
    assert cache.k_cache[:, 0, :5, 0, 0].tolist() == [[0, 1, 2, 3, 4]] * 2
    cache.advance(2048)  # upstream's only counts
    assert cache.get_pos() == 2053 and cache.max_seq_len == 4096


def test_kv_cache_takes_assigned_keys_and_values() -> None:
    cache = KVCache(1, 2, 3, 4, 5, "cpu", torch.float32)
    keys = torch.randn(5, 1, 3, 2, 4)
    cache.k_cache, cache.v_cache = keys, -keys
    assert torch.equal(cache.get_layer_cache(1)[0], keys[1]) and torch.equal(cache.v_cache, -keys)
    for other in (keys[:, :, :2], keys.bfloat16()):
        with pytest.raises(ValueError, match="k_cache: must be"):
            cache.k_cache = other


def test_names_are_upstreams() -> None:
    """Keywords, default values and mutability of what upstream's users call and change."""
    assert GPTConfig().__dict__ == {
        **{"sequence_len": 2048, "vocab_size": 32768, "n_layer": 12, "n_head": 6, "n_kv_head": 6, "n_embd": 768},
        "window_pattern": "SSSL",
    }
    config = GPTConfig(256)
    config.n_layer = 4
    assert (config.sequence_len, config.n_layer) == (256, 4)
    assert GPT.from_state_dict(state_dict("G0", model_config("G0")), model_config("G0")).config.window_pattern == "L"
    row = RowState([1])
    row.score = 2.0  # type: ignore[attr-defined]
    logits = torch.tensor([[0.0, 3.0]])
    assert sample_next_token(logits=logits, rng=None, temperature=0.0).tolist() == [[1]]
    with pytest.raises(NotImplementedError, match="setup_optimizer: this GPT has no gradients"):
        talkative("G4").setup_optimizer(matrix_lr=0.02)


def test_timeout_interrupts() -> None:
    before = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'sleep': timed out after 0\.05 seconds"), timeout(0.05, "sleep"):
        time.sleep(30)
    assert time.monotonic() - started < 20 and signal.getsignal(signal.SIGALRM) is before
    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError):  # no signals there: checked at the end
        pool.submit(_sleep_for, 0.05, 0.001).result()


def _sleep_for(seconds: float, limit: float) -> None:
    with timeout(limit, "sleep"):
        time.sleep(seconds)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        *(("7%3", 1), ("-7%3", 2), ("2**10", 1024), ("2**-1", 0.5), ("7&3|8^1", 11), ("~5", -6), ("1<<4", 16)),
        *(("3>2", True), ("1<2<2", False), ("2==2.0", True), ("'a'!='b'", True), ("'ab'*2+'c'", "ababc")),
        *(("2**5000", None), ("1<<5000", None), ("'a'*9000", None), ("'%9999d'%1", None), ("(-8)**.5", None)),
    ],
)
def test_eval_with_timeout_evaluates_operators(formula: str, expected: object) -> None:
    """Upstream's results of its `eval`, within bounds; the calculator itself refuses these characters."""
    assert eval_with_timeout(formula) == expected
    assert use_calculator(formula) is None


def test_kv_cache_supports_insert_kv() -> None:
    cache = KVCache(batch_size=2, num_heads=3, seq_len=4, head_dim=5, num_layers=2)
    keys = torch.randn(7, 2, 2, 3, 1, 5, dtype=torch.bfloat16)
    for position in range(7):
        for layer in range(2):
            k, v = cache.insert_kv(layer, keys[position, layer], -keys[position, layer])
            expected = torch.cat([keys[p, layer] for p in range(position + 1)], dim=2)
            assert torch.equal(k, expected) and torch.equal(v, -expected)
        assert cache.get_pos() == position + 1
    assert cache.max_seq_len == 2048
    k, _ = cache.insert_kv(0, torch.zeros(2, 3, 2050, 5, dtype=torch.bfloat16), torch.zeros(2, 3, 2050, 5))
    assert k.shape == (2, 3, 2057, 5) and cache.max_seq_len == 4096
