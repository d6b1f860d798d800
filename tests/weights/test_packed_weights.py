"""Weight updates of the CPU kernels' packed weights, in every precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from nano_inference import InferenceEngine, SamplingParams, WeightError, weights_checksum
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.matrix import GGML
from tests.loading import tiny_models
from tests.nanochat.tiny import base_meta, model_config, state_dict, write_checkpoint
from tests.weights.pairs import OpenEngine, Pair

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 30, 2, 44, 17, 80, 3, 61, 7]
DTYPES = ("auto", "bfloat16", "int8")
Q = "model.layers.0.self_attn.q_proj.weight"
Named = dict[str, torch.Tensor]


@pytest.fixture(params=["tied", "untied"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def renewed(tied: Pair, untied: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Pair]:
    """Return, by the directory of each pair, a directory with its new weights."""
    found = {}
    for pair in (tied, untied):
        directory = tmp_path_factory.mktemp("renewed")
        pair.new.save_pretrained(directory)
        found[pair.directory] = Pair(directory, pair.new, pair.old)
    return found


def model_of(engine: InferenceEngine) -> CpuExecutor:
    model = engine.parts.executor
    assert isinstance(model, CpuExecutor), "these tests need a C compiler"
    return model


def values(engine: InferenceEngine) -> Named:
    return {name: tensor.clone() for name, tensor in engine.parts.executor.weights.values()}


def scores(engine: InferenceEngine) -> list[float]:
    """Return exact scores, tokens and log-probabilities of the engine."""
    engine.flush_cache()
    found = engine.score(PROMPT)
    sample = engine.generate([PROMPT], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))[0]
    return [*found, *sample.completion_tokens, *sample.logprobs]  # type: ignore[list-item]


def same(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def named(model: transformers.PreTrainedModel, dtype: torch.dtype = torch.float32) -> Named:
    return {name: weight.detach().to(dtype) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocking", [True, False])
def test_updated_engine_equals_engine_opened_with_new_weights(
    pair: Pair, renewed: dict[Path, Pair], open_engine: OpenEngine, dtype: str, blocking: bool
) -> None:
    engine, fresh = open_engine(pair, dtype=dtype), open_engine(renewed[pair.directory], dtype=dtype)
    before = scores(engine)
    for _ in range(2):  # the second time in reused memory
        engine.update_weights(pair.named(), blocking=blocking)
        assert engine.finish_update() in (1, 3)
        assert scores(engine) == scores(fresh) != before
        same(values(engine), values(fresh))
        assert engine.weights_checksum() == fresh.weights_checksum()
        assert model_of(engine).weights.num_bytes == model_of(fresh).weights.num_bytes
        engine.update_weights(named(pair.old), blocking=blocking)
        engine.finish_update()
        assert scores(engine) == before


@pytest.mark.parametrize("is_short", [False, True])
def test_bfloat16_source_is_stored_exactly(pair: Pair, open_engine: OpenEngine, is_short: bool) -> None:
    """An engine with dtype "auto" then stores them in half the bytes."""
    engine = open_engine(pair, dtype="bfloat16" if is_short else "auto")
    before = model_of(engine).weights.num_bytes
    sent = named(pair.new, torch.bfloat16)
    engine.update_weights(sent, blocking=True)
    wide = {name: weight.float() for name, weight in sent.items()}
    same(values(engine), sent if is_short else wide)
    assert engine.weights_checksum() == weights_checksum(sent.items() if is_short else wide.items())
    after = model_of(engine).weights.num_bytes
    assert after == before if is_short else after < 0.55 * before
    engine.update_weights(wide, blocking=True)  # over spare float32 memory
    assert model_of(engine).weights.num_bytes == after


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("blocking", [True, False])
def test_partial_update_keeps_quantised_blocks_of_other_weights(
    dtype: str, blocking: bool, tmp_path: Path, open_engine: OpenEngine
) -> None:
    """The updated weight is stored as plain values."""
    source = tiny_models.make_model("llama", intermediate_size=64)
    path = tiny_models.write_gguf(tmp_path / "m.gguf", "llama", source, kind=gguf.GGMLQuantizationType.Q4_0)
    engine = open_engine(Pair(path, source, source), dtype=dtype)
    before, packed = values(engine), model_of(engine).model.weights.matrices
    for _ in range(2):
        engine.update_weights({Q: 2 * before[Q]}, blocking=blocking, partial=True)
        engine.finish_update()
        after, now = values(engine), model_of(engine).model.weights.matrices
        assert not torch.equal(after.pop(Q), before[Q])
        same(after, {name: tensor for name, tensor in before.items() if name != Q})
        assert {now[name].format for name in now if name != Q} == {GGML["Q4_0"]}
        assert all(now[name].rounds == packed[name].rounds for name in now)
        assert now[Q].format != GGML["Q4_0"]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("generation", ["G2e", "G4"])
def test_nanochat_learnt_numbers_stay_float32(
    generation: str, dtype: str, tmp_path: Path, open_engine: OpenEngine
) -> None:
    """In every precision, after loading, after an update, and after an update of other weights."""
    config = model_config(generation)
    old, new = state_dict(generation, config), state_dict(generation, config, seed=5)
    write_checkpoint(tmp_path, generation, state=old, meta=base_meta(generation))
    engine = open_engine(Pair(tmp_path, None, None), dtype=dtype)  # type: ignore[arg-type]
    vectors = model_of(engine).model.weights.vectors
    learned = [name for name in old if "lambda" in name]
    assert learned and all(torch.equal(vectors[name], old[name]) for name in learned)
    before = scores(engine)
    part = {"lm_head.weight": old["lm_head.weight"]}
    engine.update_weights(part, blocking=True, partial=True)
    assert all(torch.equal(model_of(engine).model.weights.vectors[name], old[name]) for name in learned)
    assert scores(engine) == before
    engine.update_weights(new, blocking=True)
    assert all(torch.equal(model_of(engine).model.weights.vectors[name], new[name]) for name in learned)
    plain = open_engine(Pair(tmp_path, None, None), dtype=dtype, kernels="off")  # type: ignore[arg-type]
    plain.update_weights(new, blocking=True)
    same(values(engine), values(plain))
    assert engine.weights_checksum() == plain.weights_checksum()


def broken_sources(sent: Named) -> dict[str, Any]:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(sent.items()):
            if number == 9:
                raise OSError("the line is dead")
            yield item

    return {
        "raises": failing(),
        "shape": {**sent, "model.layers.3.mlp.up_proj.weight": torch.zeros(3, 3)},
        "nan": {**sent, "model.layers.3.mlp.up_proj.weight": sent["model.layers.3.mlp.up_proj.weight"] * torch.nan},
        "missing": {name: weight for name, weight in sent.items() if name != "model.layers.3.mlp.up_proj.weight"},
    }


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("how", ["raises", "shape", "nan", "missing"])
def test_failed_update_leaves_the_weights_unchanged(
    untied: Pair, renewed: dict[Path, Pair], open_engine: OpenEngine, how: str, dtype: str
) -> None:
    engine = open_engine(untied, dtype=dtype)
    before, held = scores(engine), values(engine)
    for blocking in (True, False):
        with pytest.raises(WeightError):
            engine.update_weights(broken_sources(untied.named())[how], blocking=blocking)
            engine.finish_update()
        assert scores(engine) == before and engine.get_weight_version() == 0
        same(values(engine), held)
    engine.update_weights(untied.named(), blocking=True)
    with pytest.raises(WeightError):  # in reused memory
        engine.update_weights(broken_sources(named(untied.old))[how], blocking=True)
    assert scores(engine) == scores(open_engine(renewed[untied.directory], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_after_discard_restores_the_engine(
    pair: Pair, renewed: dict[Path, Pair], open_engine: OpenEngine, dtype: str
) -> None:
    engine = open_engine(pair, dtype=dtype)
    right = scores(open_engine(renewed[pair.directory], dtype=dtype))
    engine.sleep(discard_weights=True)
    assert model_of(engine).weights.num_bytes == 0 and not engine.has_weights
    for ask in (engine.weights_checksum, lambda: engine.update_weights({Q: pair.named()[Q]}, partial=True)):
        with pytest.raises(WeightError, match="discarded"):
            ask()
    engine.update_weights(pair.named(), blocking=True)
    engine.wake()
    assert scores(engine) == right


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_head_may_have_other_dtype_but_not_other_values(tied: Pair, open_engine: OpenEngine, dtype: str) -> None:
    engine, table = open_engine(tied, dtype=dtype), "model.embed_tokens.weight"
    sent = tied.named() | {table: tied.named()[table].half().float()}
    engine.update_weights([*sent.items(), ("lm_head.weight", sent[table].half())], blocking=True)
    after = scores(engine)
    for other in (sent[table] * 1.5, sent[table] * float("nan")):
        with pytest.raises(WeightError, match=r"^lm_head\.weight: differs from model\.embed_tokens\.weight"):
            engine.update_weights([*sent.items(), ("lm_head.weight", other)], blocking=True)
        assert scores(engine) == after


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_shares_weights_and_is_unaffected_by_updates(pair: Pair, open_engine: OpenEngine, dtype: str) -> None:
    engine = open_engine(pair, dtype=dtype)
    before = scores(engine)
    with engine.copy() as copy:
        mine, its = model_of(engine).model.weights, model_of(copy).model.weights
        assert all(its.matrices[name].packed.data_ptr() == m.packed.data_ptr() for name, m in mine.matrices.items())
        assert scores(copy) == before
        engine.update_weights(pair.named(), blocking=True)
        engine.update_weights({Q: pair.named()[Q] * 2}, blocking=True, partial=True)
        after = scores(engine)
        assert scores(copy) == before != after and copy.get_weight_version() == 0
        copy.update_weights(pair.named(), blocking=True)
        assert scores(copy) != before and scores(engine) == after
        engine.sleep(discard_weights=True)
        assert scores(copy)
