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
    RowState,
    eval_with_timeout,
    sample_next_token,
    timeout,
    use_calculator,
)
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


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_stream_equals_nanochat_loop(generation: str) -> None:
    model = talkative(generation)
    ours, plain = Engine(model, TOKENIZER), Engine(Foreign(model), TOKENIZER)
    results = ends = 0
    wishes = [(0.0, None, 70, None), (1.0, None, 90, None), (1.0, 12, 23, 0.7), (0.8, 0, 14, None), (1.1, 200, 31, 0.9)]
    for number, (temperature, top_k, max_tokens, top_p) in enumerate(wishes):
        prompt, num_samples = [BOS, *TOKENIZER.encode("12+3"[: number % 4])], 1 if number % 4 == 0 else 12
        wish: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "max_tokens": max_tokens, "seed": number}
        wish["top_p"] = top_p
        columns = list(ours.generate(prompt, num_samples, **wish))
        expected = list(plain.generate(prompt, num_samples, **wish))
        assert len(columns) == len(expected)
        rows = rows_of(columns, num_samples)
        assert rows == rows_of(expected, num_samples)
        results += num_tool_results(rows)
        ends += sum(row[-1][0] == END for row in rows)
    assert results > 0 and ends >= 5, (results, ends)


@pytest.mark.slow
def test_max_tokens_can_truncate_tool_result() -> None:
    model = talkative("G4")
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


@pytest.mark.slow
def test_prompts_together_equal_prompts_in_turn() -> None:
    model = talkative("G4")
    prompts = [[BOS, *[3, 1, 4][: n % 4]] + [7] * n for n in range(6)]
    wish: dict[str, Any] = {"max_tokens": 40, "top_k": 15}
    expected = None
    for engine in (Engine(model, TOKENIZER), Engine(Foreign(model), TOKENIZER)):
        alone = [engine.generate_batch(prompt, 4, seed=i, **wish) for i, prompt in enumerate(prompts)]
        assert engine.generate_batches(prompts, 4, seeds=range(6), **wish) == alone == (expected or alone)
        assert engine.generate_batches(prompts[:2], 4, seeds=1, **wish)[1] == alone[1]
        expected = alone
    with pytest.raises(ValueError, match="seeds must be one for each of 6 prompts, got 1"):
        engine.generate_batches(prompts, 4, seeds=[1])
    assert engine.generate_batches([]) == []


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

    def test_terminals_are_yielded_with_mask_1_and_left_out_of_the_batch(self, engine: Engine) -> None:
        columns = list(engine.generate([BOS, 2], 16, max_tokens=80, seed=3))
        rows = rows_of(columns, 16)
        ended = [row for row in rows if row[-1][0] in (BOS, END)]
        assert ended and all(row[-1][1] == 1 for row in ended)
        results, masks = engine.generate_batch([BOS, 2], 16, max_tokens=80, seed=3)
        for row, result, mask in zip(rows, results, masks, strict=True):
            kept = row[:-1] if row[-1][0] in (BOS, END) else row
            assert list(zip(result[2:], mask[2:], strict=True)) == kept and mask[:2] == [0, 0]

    def test_a_generator_that_is_closed_early_leaves_nothing_behind(self, engine: Engine) -> None:
        generator = engine.generate([BOS, 2], 4, max_tokens=50)
        next(generator)
        generator.close()  # type: ignore[attr-defined]
        if isinstance(engine.model, GPT):
            assert not engine.core.has_pending()
            parts = engine.core.parts
            assert parts.kv.num_free_blocks() == parts.kv.num_blocks


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


@pytest.mark.slow
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


@pytest.mark.slow
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
