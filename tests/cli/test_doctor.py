"""`doctor`: its estimates from file headers, compared with loaded models, and its output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.build import kernels_here
from nano_inference.cli import doctor, main
from nano_inference.config import Dtype
from nano_inference.loading.catalog import ModelEntry, default_cache
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.nanochat.builtin import CALCULATOR

Capture = pytest.CaptureFixture[str]
MACHINE = doctor.Machine(available=8_000_000_000, kv_budget=1_000_000_000, has_kernels=True)


@pytest.fixture(autouse=True)
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty hub cache."""
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def weight_bytes(path: Path, dtype: Dtype, kernels: str = "auto") -> int:
    """Return the bytes of the engine's weights."""
    config = EngineConfig(model_path=str(path), dtype=dtype, kernels=kernels, device="cpu", num_threads=1)  # type: ignore[arg-type]
    with InferenceEngine(config) as engine:
        assert engine.parts.executor is not None
        return engine.parts.executor.weights.num_bytes


@pytest.fixture(scope="module")
def bfloat16_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in bfloat16, with a separate head."""
    directory = tmp_path_factory.mktemp("half")
    for file in tiny.iterdir():
        if file.suffix == ".json":
            (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    save_file({name: value.to(torch.bfloat16) for name, value in weights.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.skipif(kernels_here()["code"] == "torch", reason="no CPU kernels on this machine")
@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_weight_estimate_matches_engine(precision: Dtype) -> None:
    path = CALCULATOR.directory
    row = doctor.of_model("calculator", open_checkpoint(path), precision, MACHINE)
    assert row["weight_bytes"] == pytest.approx(weight_bytes(path, precision), rel=0.03)


def test_weight_estimate_matches_torch_executor(bfloat16_model: Path) -> None:
    row = doctor.of_model("half", open_checkpoint(bfloat16_model), "float32", MACHINE)
    assert row["weight_bytes"] == weight_bytes(bfloat16_model, "float32", "off")


def test_estimate_derived_from_bytes(bfloat16_model: Path) -> None:
    checkpoint = open_checkpoint(bfloat16_model)
    config = checkpoint.config
    row = doctor.of_model("half", checkpoint, "auto", MACHINE)
    assert row["precision"] == "auto (bfloat16)" and row["context"] == 8192
    assert row["kv_bytes_per_token"] == 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert row["context_kv_bytes"] == 8192 * row["kv_bytes_per_token"]
    assert row["kv_budget_tokens"] == min(1_000_000_000 // row["kv_bytes_per_token"], 256 * 8192)
    need = row["weight_bytes"] + row["context_kv_bytes"]
    for available, fits in ((need, True), (need - 1, False)):
        now = MACHINE._replace(available=available)
        assert doctor.of_model("half", checkpoint, "auto", now)["fits"] is fits


def test_unreadable_model_has_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mystery", "architectures": ["Mystery"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    (row,) = doctor.of_models([ModelEntry("org/mystery", tmp_path, 0, "hub")], MACHINE)
    assert row["model"] == "org/mystery" and row["problem"]


def test_doctor_page_and_json(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text("quiet = true\n")
    place = ("doctor", "--cache", str(tmp_path), "--config", str(config))
    monkeypatch.setenv("NANO_INFERENCE_API_KEY", "never-shown")
    script = tmp_path / ".config/fish/completions/nano-inference.fish"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(default_cache(os.environ).parent))  # the kernels are not compiled anew
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([*place, "--json"]) == 0
    out = capsys.readouterr().out
    facts = json.loads(out)
    assert {row["model"] for row in facts["models here"]} == {"calculator"}
    assert facts["settings"]["config_files"] == [str(config)] and facts["settings"]["completion"] == ["fish"]
    assert "NANO_INFERENCE_API_KEY" in facts["settings"]["environment"] and "never-shown" not in out
    assert facts["models"]["cache_free_bytes"] > 0 and facts["models"]["hub_offline"] in (True, False)
    assert main([*place]) == 0
    page = capsys.readouterr().out
    assert "8B (Qwen3)" in page and "calculator" in page and "KV budget:" in page
    assert max(map(len, page.splitlines())) < 140


def test_version_of_a_library_is_that_of_the_imported_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.1", "0.2"):  # the second comes first in the path
        about = tmp_path / version / f"jinja2-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: Jinja2\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / version))
    assert doctor.examine(tmp_path)["libraries"]["jinja2"] == "0.2"


def test_cgroup_limits(tmp_path: Path) -> None:
    assert doctor.limits(tmp_path) == {"cgroup_processors": None, "cgroup_memory_bytes": None}
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    assert doctor.limits(tmp_path) == {"cgroup_processors": 1.5, "cgroup_memory_bytes": 4 << 30}
    for name in ("cpu.max", "memory.max"):
        (tmp_path / name).write_text("max 100000\n" if name == "cpu.max" else "max\n")
    assert doctor.limits(tmp_path) == {"cgroup_processors": None, "cgroup_memory_bytes": None}
    old = tmp_path / "old"
    (old / "cpu").mkdir(parents=True)
    (old / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert doctor.limits(old)["cgroup_processors"] is None
    (old / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert doctor.limits(old)["cgroup_processors"] == 0.5
