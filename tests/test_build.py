"""Who computes: the CPU kernels where they can be had, torch where not, and one plain line when that was not wanted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, build
from nano_inference.executors.cpu.compile import best_isa, cpu_flags, cpu_has
from nano_inference.executors.cpu.drawing import KernelSampler
from nano_inference.executors.cpu.executor import CpuExecutor
from nano_inference.executors.sampling import draw
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.executors.torch.store import KVStore
from tests.kernels.steps import have_ended, threads_here
from tests.models.families import gap
from tests.weights.pairs import Pair

IDS = [5, 9, 30, 2, 44, 17, 80, 3, *range(20, 60)]
CPU = torch.device("cpu")
TORCHS = "using torch, which is slower and whose results depend on the batch"


def config(path: Path = Path("somewhere"), **options: Any) -> EngineConfig:
    return EngineConfig(model_path=str(path), **({"device": "cpu", "kv_cache_bytes": 4 << 20} | options))


def executor_of(engine: InferenceEngine) -> CpuExecutor | TorchExecutor:
    assert isinstance(engine.parts.executor, CpuExecutor | TorchExecutor)
    return engine.parts.executor


def has_kernels(engine: InferenceEngine) -> bool:
    """Whether the kernels compute, store and draw; they do all of it or nothing."""
    executor = executor_of(engine)
    found = isinstance(executor, CpuExecutor)
    assert isinstance(executor.sampler, KernelSampler) if found else executor.sampler is draw
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent")


@pytest.fixture(params=["none", "fails", "cannot be run"])
def broken_compiler(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ways not to have a compiler, and what is said of each."""
    monkeypatch.setenv("NANO_INFERENCE_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "cc"
    if request.param == "none":
        monkeypatch.setenv("CC", "/nonexistent")
        yield "no C compiler (/nonexistent) was found"
        return
    text = '[ "$1" = --version ] && echo cc 1.0 && exit 0\necho "1: note: hm" >&2\necho "1: error: boom" >&2\nexit 1\n'
    script.write_text(f"#!/bin/sh\n{text}" if request.param == "fails" else "#!/nonexistent/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    yield f"{script} failed: 1: error: boom" if request.param == "fails" else f"{script} could not be run"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".so"]


def refused(chosen: EngineConfig) -> str:
    with pytest.raises(ValueError) as caught:
        InferenceEngine(chosen)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 300
    return line


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "int8"}]
)
def test_kernels_are_used_where_available(
    tied: Pair, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with InferenceEngine(config(tied.directory, **options)) as engine:
        assert has_kernels(engine)
        assert executor_of(engine).code == best_isa(cpu_flags())
        assert len(engine.score(IDS)) == len(IDS) - 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_kernels_option_selects_an_instruction_set(tied: Pair, isa: Any) -> None:
    if not cpu_has(isa, cpu_flags()):
        assert refused(config(tied.directory, kernels=isa)) == f"kernels={isa}: this machine's CPU has no {isa}"
        return
    with InferenceEngine(config(tied.directory, kernels=isa, deterministic=True)) as engine:
        assert has_kernels(engine)
        assert executor_of(engine).code == isa
        assert gap(tied.old, IDS, engine.score(IDS)) <= 1e-4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "off"},
        {"attention": "sdpa"},
        pytest.param({"attention": "flex"}, marks=pytest.mark.slow),
        {"dtype": "float16"},
        {"kernels": "off", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_requested_torch_is_used_without_warning(
    tied: Pair, options: dict[str, Any], caplog: pytest.LogCaptureFixture, no_compiler: None
) -> None:
    with InferenceEngine(config(tied.directory, **options)) as engine:
        assert not has_kernels(engine)
        limit = 1e-4 if "dtype" not in options else 0.5
        assert gap(tied.old, IDS, engine.score(IDS)) <= limit  # type: ignore[arg-type]
    assert warnings(caplog) == []


def test_torch_is_used_without_a_compiler_with_one_warning(
    tied: Pair, broken_compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    with InferenceEngine(config(tied.directory)) as engine:
        assert not has_kernels(engine)
        assert gap(tied.old, IDS, engine.score(IDS)) <= 1e-4  # type: ignore[arg-type]
        sample = engine.generate([IDS], SamplingParams(temperature=0, max_tokens=3))[0]
        assert gap(tied.old, [*IDS, *sample.completion_tokens], list(sample.logprobs)) <= 1e-4
    (line,) = warnings(caplog)
    assert line.startswith(f"{TORCHS}: {broken_compiler}") and "\n" not in line


@pytest.mark.parametrize(
    ("options", "name"),
    [({"kernels": "generic"}, "kernels=generic"), ({"dtype": "int8"}, "dtype=int8"), ({"deterministic": True}, "")],
)
def test_options_that_need_kernels_are_rejected_without_a_compiler(
    options: dict[str, Any], name: str, broken_compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    if not name:
        assert refused(config(**options)).startswith("deterministic: ")
        return
    assert refused(config(**options)).startswith(f"{name}: {broken_compiler}")
    assert warnings(caplog) == [], "the refusal says it"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dtype": "int8", "kernels": "off"}, "dtype=int8: the kernels are off"),
        ({"dtype": "int8", "attention": "sdpa"}, "dtype=int8: the kernels cannot use attention=sdpa"),
        ({"dtype": "float16", "kernels": "generic"}, "kernels=generic: the kernels have no float16"),
        ({"deterministic": True, "kernels": "off"}, "deterministic: requires the CPU or the CUDA kernels"),
        ({"deterministic": True, "attention": "sdpa"}, "deterministic: requires the CPU or the CUDA kernels"),
        ({"deterministic": True, "dtype": "float16"}, "deterministic: requires the CPU or the CUDA kernels"),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, Any], line: str) -> None:
    """Refused before the model is looked for: there is none at that path."""
    assert refused(config(**options)).startswith(line)


def test_a_gpu_has_no_cpu_kernels() -> None:
    cuda = torch.device("cuda")
    assert build.pick_kernels(config(), cuda) is None
    for options, name in (({"kernels": "generic"}, "kernels=generic"), ({"dtype": "int8"}, "dtype=int8")):
        with pytest.raises(ValueError, match=rf"^{name}: the kernels need a CPU, the device is cuda$"):
            build.pick_kernels(config(**options), cuda)


def test_cpu_without_avx_uses_generic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    for isa in ("avx2", "avx512"):
        assert refused(config(kernels=isa)) == f"kernels={isa}: this machine's CPU has no {isa}"
    library = build.pick_kernels(config(), CPU)
    assert library is not None and library.isa == "generic"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_kernels_have_as_many_threads_as_asked_for(num_threads: int) -> None:
    library = build.pick_kernels(config(num_threads=num_threads), CPU)
    assert library is not None
    before = threads_here()
    assert library.pool
    started = threads_here() - before
    assert len(started) == num_threads - 1  # the caller is one of them
    library.close()
    assert have_ended(started)


def test_a_cache_in_bfloat16_takes_half_the_bytes_and_rounds_little(tied: Pair) -> None:
    with (
        InferenceEngine(config(tied.directory)) as plain,
        InferenceEngine(config(tied.directory, kv_cache_dtype="bfloat16")) as short,
    ):
        exact, rounded = (torch.tensor(engine.score(IDS)) for engine in (plain, short))
        assert 1e-6 < (exact - rounded).abs().max() < 2e-2
        assert short.parts.kv.num_blocks == 2 * plain.parts.kv.num_blocks
        assert executor_of(short).store.num_bytes <= 4 << 20


def test_a_cache_in_bfloat16_needs_the_kernels_or_bfloat16(tied: Pair) -> None:
    with pytest.raises(ValueError, match=r"^kv_cache_dtype=bfloat16 needs the CPU kernels, or weights in bfloat16$"):
        InferenceEngine(config(tied.directory, kv_cache_dtype="bfloat16", kernels="off"))
    with InferenceEngine(config(tied.directory, kv_cache_dtype="bfloat16", kernels="off", dtype="bfloat16")) as engine:
        store = executor_of(engine).store
        assert isinstance(store, KVStore) and store.k_LSKD.dtype == torch.bfloat16
