"""How a checkpoint comes to the CUDA executor, and what is said when it cannot."""

from __future__ import annotations

import importlib.machinery
import logging
import random
import sys
from pathlib import Path

import gguf
import pytest
import torch

from nano_inference import EngineConfig
from nano_inference.executors.cuda.executor import CudaExecutor, largest_steps
from nano_inference.executors.cuda.memory import Limits
from nano_inference.executors.opening import load_cuda_model, pick_cuda_kernels
from nano_inference.executors.protocol import CacheSize
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.loading.sources import measured_sources
from tests.cuda.engines import CPU, executor_of
from tests.cuda.models import config_of, write_model
from tests.cuda.plain import plain_kernels
from tests.executors.random_programs import Writer
from tests.loading import tiny_models
from tests.models.hybrids import make_hybrid

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.make_model("llama", intermediate_size=64, num_hidden_layers=2, max_position_embeddings=256)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return tiny_models.write_gguf(path, "llama", model, kind=gguf.GGMLQuantizationType.Q4_0)


def test_a_quantised_file_is_rounded_to_bfloat16_and_the_error_is_printed(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(packed, dtype="bfloat16")
    checkpoint = open_checkpoint(packed)
    executor = load_cuda_model(checkpoint, CPU, plain_kernels(), config)
    exact = load_cuda_model(checkpoint, CPU, plain_kernels(), config_of(packed, dtype="float32"))
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.startswith("dequantised weights are rounded to bfloat16: relative error 0.00")
    assert line.endswith("(root mean square); dtype=float32 keeps them")
    rounded = dict(executor.weights.values())
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.weights.values())


def test_the_printed_error_is_that_of_the_weights(packed: Path) -> None:
    plain = open_checkpoint(packed).sources
    sources, error = measured_sources(plain, torch.bfloat16)
    squares = errors = 0.0
    for name, source in sources.items():
        rounded, exact = (torch.empty(source.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        source.read_into(rounded)
        if source.dtype.startswith("Q"):
            plain[name].read_into(exact)
            squares += float(exact.double().square().sum())
            errors += float((exact.bfloat16().float() - exact).double().square().sum())
    assert error.relative == pytest.approx((errors / squares) ** 0.5, rel=1e-3) and 1e-4 < error.relative < 4e-3


@pytest.mark.parametrize(
    ("options", "is_torch"), [({}, False), ({"kernels": "off"}, True), ({"attention": "sdpa"}, True)]
)
def test_cuda_uses_its_kernels_unless_torch_is_asked_for(
    options: dict[str, str], is_torch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    config = EngineConfig(model_path="x", **options)  # type: ignore[arg-type]
    assert (pick_cuda_kernels(config, CUDA) is None) == is_torch
    assert pick_cuda_kernels(config, CPU) is None and not caplog.records


def test_without_triton_torch_is_used_after_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finders = [one for one in sys.meta_path if one is not importlib.machinery.PathFinder]
    monkeypatch.setattr(sys, "meta_path", finders)  # the process has no packages beside those already imported
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert pick_cuda_kernels(EngineConfig(model_path="x"), CUDA) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "using torch, which is slower and whose results depend on the batch: CUDA kernels need Triton: "
        "pip install 'nano-inference[cuda]'"
    )


def test_a_program_that_no_kernel_computes_is_refused_by_name() -> None:
    writers = (Writer(random.Random(seed)) for seed in range(20))
    refused = []
    for writer in writers:
        try:
            CudaExecutor(
                writer.config(), writer.program(), CPU, torch.float32, plain_kernels(), Limits(max_len=8, max_tokens=8)
            )
        except ValueError as error:
            refused.append(str(error))
    suffix = "; kernels=off computes this model with torch"
    assert set(refused) == {f"HeadNorm: the CUDA kernels support one before each Store{suffix}"}


@pytest.mark.parametrize("name", ["llama-ratio1-untied", "plain"])
def test_the_largest_steps_fit_the_memory_that_is_reserved_for_them(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    executor = executor_of(tmp_path, config_of(tmp_path, max_tokens_per_batch=64))
    limits = executor.memory.limits
    executor.cache.allocate(CacheSize(num_blocks=2 * limits.max_tokens, block_size=4, num_states=1))
    for rows in largest_steps(limits, 4):
        results = executor.run(rows, (), ())
        assert set(results) == set(range(limits.max_rows)) and all(len(one.tokens) == 1 for one in results.values())


def test_sizes_of_states_that_the_kernels_lack_are_refused(tmp_path: Path) -> None:
    for name, fields, message in (
        ("taps", {"linear_conv_kernel_dim": 17}, "Convolve: the CUDA kernels have at most 16 taps, not 17"),
        ("keys", {"linear_key_head_dim": 257}, "GatedDelta: the CUDA kernels have keys of at most 256 values, not 257"),
    ):
        make_hybrid("equal-heads-tied", tmp_path / name, fields)
        checkpoint = open_checkpoint(tmp_path / name)
        with pytest.raises(ValueError, match=f"^{message}; kernels=off computes this model with torch$"):
            load_cuda_model(checkpoint, CPU, plain_kernels(), config_of(tmp_path))
