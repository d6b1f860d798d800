"""Packed formats of a checkpoint's weights: values, formats and sizes."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.cpu.library import BF16, F16, F32, INT8
from nano_inference.executors.cpu.matrix import GGML
from nano_inference.executors.opening import load_kernel_model
from nano_inference.loading.checkpoint import open_checkpoint
from tests.loading.tiny_models import COMMON, converted, finish, random_blocks, read_all, write_metadata
from tests.models.families import FAMILIES, gap, make_model
from tests.nanochat.tiny import GENERATIONS, base_meta, model_config, state_dict, write_checkpoint

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
IDS = [5, 9, 30, 2, 44, 17, 80, 3, 71, 12, *range(20, 60)]
SOME = ("llama3-rope-ratio3-tied", "llama-linear-rope-biases", "gemma2")

NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16", INT8: "int8"} | {kind: name for name, kind in GGML.items()}


def engine(path: Path, **options: Any) -> InferenceEngine:
    options = {"kv_cache_bytes": 8 << 20, "device": "cpu"} | options
    return InferenceEngine(EngineConfig(model_path=str(path), **options))


def packed_model(ours: InferenceEngine) -> CpuExecutor:
    model = ours.parts.executor
    assert isinstance(model, CpuExecutor), "these tests need a C compiler"
    return model


def formats(ours: InferenceEngine) -> Counter[str]:
    return Counter(NAMES[matrix.format] for matrix in packed_model(ours).model.weights.matrices.values())


def matrix_bytes(ours: InferenceEngine) -> int:
    return sum(matrix.num_bytes for matrix in packed_model(ours).model.weights.matrices.values())


def rounded(model: transformers.PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """Return the model with rounded weights, in float32; its rotary tables are not rounded."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(dtype).float())
    return model


def save_as(dtype: torch.dtype, model: transformers.PreTrainedModel, directory: Path) -> None:
    deepcopy(model).to(dtype).save_pretrained(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_matches_transformers_with_rounded_weights(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    with engine(tmp_path, dtype="bfloat16") as ours:
        scores = ours.score(IDS)
        assert set(formats(ours)) == {"bfloat16"}
    assert gap(model, IDS, scores) > TOLERANCE, "rounding would not be seen"
    assert gap(rounded(model), IDS, scores) <= TOLERANCE


@pytest.mark.parametrize("family", SOME)
def test_bfloat16_checkpoint_is_stored_unchanged(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "wide")
    with engine(tmp_path / "wide") as wide:
        assert set(formats(wide)) == {"float32"}
        wide_bytes, wide_weights = matrix_bytes(wide), packed_model(wide).weights.num_bytes
    save_as(torch.bfloat16, model, tmp_path / "short")
    save_as(torch.float32, rounded(model), tmp_path / "fits")
    found = []
    for name in ("short", "fits"):
        with engine(tmp_path / name) as ours:
            assert set(formats(ours)) == {"bfloat16"}, name
            assert 2 * matrix_bytes(ours) == wide_bytes
            assert packed_model(ours).weights.num_bytes < 0.55 * wide_weights
            found.append(ours.score(IDS))
    assert found[0] == found[1], "what fits is kept as that, wherever it came from"
    assert gap(model, IDS, found[0]) <= TOLERANCE


def test_matrices_that_do_not_fit_bfloat16_stay_float32(tmp_path: Path) -> None:
    model = rounded(make_model("qwen3-ratio3-tied", tmp_path))
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[79, 47] = 1 + 2.0**-20
    model.save_pretrained(tmp_path)
    with engine(tmp_path) as ours:
        assert formats(ours)["float32"] == 1
        assert NAMES[packed_model(ours).model.weights.matrices["model.layers.1.mlp.up_proj.weight"].format] == "float32"
        assert gap(model, IDS, ours.score(IDS)) <= TOLERANCE


def test_float16_checkpoint_is_stored_unchanged(tmp_path: Path) -> None:
    model = rounded(make_model("qwen3-ratio3-tied", tmp_path), torch.float16)
    save_as(torch.float16, model, tmp_path)
    with engine(tmp_path) as ours:
        assert set(formats(ours)) == {"float16"}
        assert gap(model, IDS, ours.score(IDS)) <= TOLERANCE


@pytest.mark.parametrize("family", SOME)
def test_int8_is_close_and_takes_a_quarter_of_the_memory(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    with engine(tmp_path, dtype="int8") as ours, engine(tmp_path) as wide:
        assert set(formats(ours)) == {"int8"}
        assert packed_model(ours).weights.num_bytes < 0.45 * packed_model(wide).weights.num_bytes
        scores = ours.score(IDS)
    assert TOLERANCE < gap(model, IDS, scores) < 0.5


@pytest.mark.parametrize("generation", GENERATIONS)
def test_nanochat_bfloat16_keeps_learned_numbers(generation: str, tmp_path: Path) -> None:
    """Like the torch executor in bfloat16; all other weights are rounded."""
    state = state_dict(generation, model_config(generation))
    write_checkpoint(tmp_path / "wide", generation, state=state, meta=base_meta(generation))
    short = {name: weight if "lambda" in name else weight.bfloat16().float() for name, weight in state.items()}
    write_checkpoint(tmp_path / "short", generation, state=short, meta=base_meta(generation))
    with (
        engine(tmp_path / "wide", dtype="bfloat16") as ours,
        engine(tmp_path / "short") as own,
        engine(tmp_path / "short", kernels="off") as plain,
    ):
        assert set(formats(ours)) == {"bfloat16"} == set(formats(own))
        scores = ours.score(IDS)
        assert scores == own.score(IDS)
        assert max(abs(a - b) for a, b in zip(scores, plain.score(IDS), strict=True)) <= TOLERANCE  # type: ignore[arg-type]


# ---- GGUF -----------------------------------------------------------------------------------------------------------

SIZES = {**COMMON, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
KEPT = {"Q4_0": Kind.Q4_0, "Q4_1": Kind.Q4_1, "Q8_0": Kind.Q8_0, "Q4_K": Kind.Q4_K, "Q6_K": Kind.Q6_K}
WIDENED = {kind.name: kind for kind in (Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q3_K, Kind.F32)}
GGUF_IDS = [one % 64 for one in IDS]


def write_blocks(path: Path, kind: Kind) -> transformers.PreTrainedModel:
    """Write a Llama with matrices of a ggml type; return Transformers' model with the dequantised values."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    rng = np.random.default_rng(int(kind))
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, model.config, 64)
    writer.add_rope_freq_base(10000.0)
    for name, values in converted("llama", model).items():
        if values.ndim > 1:
            writer.add_tensor(name, random_blocks(*values.shape, kind, rng), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    finish(writer)
    model.load_state_dict(read_all(open_checkpoint(path)), strict=True)
    return model


@pytest.mark.parametrize("name", [*KEPT, *WIDENED])
def test_ggml_blocks_are_stored_unchanged(name: str, tmp_path: Path) -> None:
    kind = (KEPT | WIDENED)[name]
    model = write_blocks(tmp_path / "m.gguf", kind)
    with engine(tmp_path / "m.gguf") as ours, engine(tmp_path / "m.gguf", kernels="off") as plain:
        assert set(formats(ours)) == {name if name in KEPT else "float32"}
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind if name in KEPT else Kind.F32]
        num_values = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
        assert matrix_bytes(ours) <= 1.04 * num_values * block_bytes / per_block
        scores = ours.score(GGUF_IDS)
        assert gap(model, GGUF_IDS, scores) <= TOLERANCE
        assert max(abs(a - b) for a, b in zip(scores, plain.score(GGUF_IDS), strict=True)) <= TOLERANCE  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "bfloat16"), ("float32", "Q4_0")])
def test_blocks_are_unpacked_for_another_dtype(dtype: str, expected: str, tmp_path: Path) -> None:
    model = write_blocks(tmp_path / "m.gguf", Kind.Q4_0)
    with engine(tmp_path / "m.gguf", dtype=dtype) as ours:
        assert set(formats(ours)) == {expected}
        assert gap(rounded(model) if dtype == "bfloat16" else model, GGUF_IDS, ours.score(GGUF_IDS)) <= TOLERANCE


@pytest.mark.parametrize("name", [*KEPT, *WIDENED])
def test_int8_keeps_four_bit_weights(name: str, tmp_path: Path) -> None:
    """Only activations are rounded; blocks with more than four bits are converted to eight bits."""
    model = write_blocks(tmp_path / "m.gguf", (KEPT | WIDENED)[name])
    with engine(tmp_path / "m.gguf", dtype="int8") as ours:
        assert set(formats(ours)) == {name if name in ("Q4_0", "Q4_1", "Q4_K") else "int8"}
        assert all(matrix.rounds for matrix in packed_model(ours).model.weights.matrices.values())
        assert TOLERANCE < gap(model, GGUF_IDS, ours.score(GGUF_IDS)) < 0.5


# ---- reading --------------------------------------------------------------------------------------------------------


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    make_model("qwen3-ratio3-tied", tmp_path)
    with engine(tmp_path) as ours:
        library = packed_model(ours).library
    reported: list[tuple[int, int]] = []
    model = load_kernel_model(open_checkpoint(tmp_path), library, "own", 64, lambda *now: reported.append(now))
    assert len(reported) == len(model.program.weights)
    assert [done for done, _ in reported] == sorted({done for done, _ in reported})
    assert {total for _, total in reported} == {reported[-1][0]}
