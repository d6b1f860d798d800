"""`common` and `checkpoint_manager`: what upstream's scripts use in addition to `load_model`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from nano_inference import ModelError
from nano_inference.nanochat import GPT
from nano_inference.nanochat.checkpoint_manager import (
    build_model,
    find_largest_model,
    find_last_step,
    load_checkpoint,
    load_model,
    load_model_from_dir,
    load_optimizer_state,
    save_checkpoint,
)
from nano_inference.nanochat.common import (
    COMPUTE_DTYPE,
    COMPUTE_DTYPE_REASON,
    DummyWandb,
    compute_cleanup,
    compute_init,
    download_file_with_lock,
    get_base_dir,
    get_dist_info,
    get_peak_bandwidth,
    get_peak_flops,
    is_ddp_initialized,
    is_ddp_requested,
    print0,
    print_banner,
)
from tests.nanochat.tiny import GENERATIONS, model_config, state_dict, write_checkpoint, write_tokenizer

Patch = pytest.MonkeyPatch


def torchrun(monkeypatch: Patch, rank: int, local_rank: int, world_size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_saved_checkpoint_loads_with_equal_weights(tmp_path: Path, generation: str) -> None:
    config = model_config(generation)
    model = GPT.from_state_dict(state_dict(generation, config), config)
    directory = tmp_path / "chatrl_checkpoints" / "d4"
    write_tokenizer(tmp_path / "tokenizer")
    save_checkpoint(directory, 12, model.state_dict(), None, {"model_config": model.config.__dict__})
    loaded, tokenizer, meta = load_model("rl", "cpu", "eval", base_dir=tmp_path)
    assert meta["model_config"]["n_embd"] == 64 and tokenizer.get_vocab_size() == config["vocab_size"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.weights[name], tensor), name
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert (directory / "model_000012.pt").stat().st_size < num_bytes + 40_000, "no weight is stored twice"


def test_part_of_a_tensor_is_saved_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"a": torch.arange(100_000.0)[7:9]}, None, {})
    assert (tmp_path / "model_000001.pt").stat().st_size < 10_000
    assert load_checkpoint(tmp_path, 1, "cpu")[0]["a"].tolist() == [7.0, 8.0]


def test_each_rank_saves_its_optimizer_and_rank_0_the_rest(tmp_path: Path) -> None:
    weights, state = {"lm_head.weight": torch.ones(2, 3)}, {"step": torch.tensor(4)}
    save_checkpoint(tmp_path / "new" / "d2", 7, weights, state, {"step": 7}, rank=1)
    assert names_in(tmp_path / "new" / "d2") == {"optim_000007_rank1.pt"}
    save_checkpoint(tmp_path / "new" / "d2", 7, weights, state, {"step": 7})
    names = {"model_000007.pt", "meta_000007.json", "optim_000007_rank0.pt", "optim_000007_rank1.pt"}
    assert names_in(tmp_path / "new" / "d2") == names
    found, optimizer, meta = load_checkpoint(tmp_path / "new" / "d2", 7, "cpu", load_optimizer=True, rank=1)
    assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"]) and int(optimizer["step"]) == 4
    assert meta == {"step": 7} and load_checkpoint(tmp_path / "new" / "d2", 7, "cpu")[1] is None
    with pytest.raises(OSError, match="rank3"):
        load_checkpoint(tmp_path / "new" / "d2", 7, "cpu", load_optimizer=True, rank=3)


def test_optimizer_state_is_found_as_the_model_is(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for tag, step in (("d2", 7), ("d10", 3), ("d10", 5)):
        save_checkpoint(tmp_path / "base_checkpoints" / tag, step, {"a": torch.ones(1)}, {"step": step}, {}, rank=1)
        save_checkpoint(tmp_path / "base_checkpoints" / tag, step, {"a": torch.ones(1)}, None, {})
    assert load_optimizer_state("base", torch.device("cpu"), rank=1) == {"step": 5}
    assert load_optimizer_state("base", "cpu", rank=1, model_tag="d2", step=7) == {"step": 7}
    assert load_optimizer_state("base", "cpu", rank=0) is None
    with pytest.raises(FileNotFoundError):
        load_optimizer_state("sft", "cpu", rank=0)


def test_errors_have_upstreams_classes(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(KeyError) as unknown:
        load_model("pretrained", "cpu", "eval")
    assert isinstance(unknown.value, ModelError) and str(unknown.value).startswith(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="contains no nanochat checkpoints") as missing:
        load_model("sft", "cpu", "eval")
    assert isinstance(missing.value, ModelError)
    write_checkpoint(tmp_path / "base_checkpoints" / "d4", "G4")
    for wish in ({"source": "sft"}, {"source": "base", "model_tag": "d5"}, {"source": "base", "step": 9}):
        with pytest.raises(FileNotFoundError):
            load_model(device="cpu", phase="eval", **wish)  # type: ignore[arg-type]
    for call in (load_checkpoint, build_model):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "base_checkpoints" / "d4", 9, "cpu", "eval")  # type: ignore[operator]


def test_file_is_downloaded_once(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "new"))
    (tmp_path / "bundle").write_bytes(b"data")
    seen: list[str] = []
    for _ in range(2):
        path = download_file_with_lock((tmp_path / "bundle").as_uri(), "bundle.zip", postprocess_fn=seen.append)
        assert path == f"{get_base_dir()}/bundle.zip" and Path(path).read_bytes() == b"data"
    assert seen == [path] and capsys.readouterr().out.count("Downloading") == 1
    with pytest.raises(OSError):
        download_file_with_lock((tmp_path / "absent").as_uri(), "other")
    assert names_in(tmp_path / "new").isdisjoint({"other", "other.partial"})


def test_common_has_upstreams_precision_and_printing(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMPUTE_DTYPE in (torch.float32, torch.bfloat16) and COMPUTE_DTYPE_REASON
    print_banner()
    print0("to stderr", file=sys.stderr, sep="-")
    out, err = capsys.readouterr()
    assert out.startswith("nanochat") and err == "to stderr\n"


def test_interrupted_save_leaves_the_old_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"a": torch.ones(1)}, None, {"step": 1})
    before = (tmp_path / "model_000001.pt").read_bytes()
    with pytest.raises(AttributeError):
        save_checkpoint(tmp_path, 1, {"a": None}, None, {})  # type: ignore[dict-item]
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, 2, {"a": torch.ones(1)}, lambda: None, {})
    assert (tmp_path / "model_000001.pt").read_bytes() == before
    assert {"optim_000002_rank0.pt", "optim_000002_rank0.pt.partial"}.isdisjoint(names_in(tmp_path)) and find_last_step(
        tmp_path
    ) == 2


def test_models_are_found_by_directory(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    tags = tmp_path / "base_checkpoints"
    for tag, step in (("d4", 3), ("d4", 12), ("d12_wide", 5)):
        write_checkpoint(tags / tag, "G4", step=step, meta={"lies": f"{tag} {step}"})
    (tags / "d99").mkdir()
    assert find_largest_model(str(tags)) == "d12_wide" and find_last_step(str(tags / "d4")) == 12
    for call in (find_largest_model, find_last_step):
        with pytest.raises(FileNotFoundError, match="d99: contains no"):
            call(tags / "d99")
    assert load_model_from_dir(tags, "cpu", "eval")[2]["lies"] == "d12_wide 5"
    assert load_model_from_dir(str(tags), torch.device("cpu"), "eval", model_tag="d4", step=3)[2]["lies"] == "d4 3"
    assert build_model(tags / "d4", 12, "cpu", "eval")[2]["lies"] == "d4 12"
    with pytest.raises(ValueError, match='phase must be "eval"'):
        build_model(tags / "d4", 12, "cpu", "train")
    with pytest.raises(ModelError, match="has no step 4"):
        build_model(tags / "d4", 4, "cpu", "eval")


def test_tokenizer_of_the_base_directory_is_used_elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    write_tokenizer(tmp_path / "base" / "tokenizer")
    write_checkpoint(tmp_path / "elsewhere" / "base_checkpoints" / "d4", "G4")
    assert load_model_from_dir(tmp_path / "elsewhere" / "base_checkpoints", "cpu", "eval")[1].get_vocab_size() == 265


def test_ranks_are_those_of_torchrun(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert get_dist_info() == (False, 0, 0, 1) and not is_ddp_requested()
    torchrun(monkeypatch, 5, 1, 8)
    assert get_dist_info() == (True, 5, 1, 8) and is_ddp_requested()
    with torch.random.fork_rng(devices=[]):
        assert compute_init("cpu") == (True, 5, 1, 8, torch.device("cpu"))
    assert not is_ddp_initialized(), "on a CPU no process group is created, as upstream"
    print0("not rank 0")
    monkeypatch.setenv("RANK", "0")
    print0("rank 0", flush=True)
    assert capsys.readouterr().out == "rank 0\n"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number from 0, got 'two'"):
        get_dist_info()


def test_process_group_is_destroyed_at_the_end(tmp_path: Path) -> None:
    compute_cleanup()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    assert is_ddp_initialized()
    compute_cleanup()
    assert not is_ddp_initialized()


def test_dummy_run_records_nothing() -> None:
    run = DummyWandb()
    run.log({"loss": 1.0}, step=3)
    run.finish()


def test_peaks_of_gpus(caplog: pytest.LogCaptureFixture) -> None:
    assert get_peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and get_peak_bandwidth("NVIDIA H100 PCIe") == 2e12
    assert get_peak_flops("NVIDIA H200 NVL") == 836e12 and get_peak_bandwidth("NVIDIA L40S") == 864e9
    assert not caplog.records
    assert get_peak_flops("Voodoo 2") == math.inf == get_peak_bandwidth("Voodoo 2")
    assert "'Voodoo 2' is not known" in caplog.text


def test_meta_file_is_written_as_upstreams(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, {}, None, {"step": 3, "model_config": {"n_layer": 4}})
    text = (tmp_path / "meta_000003.json").read_text(encoding="utf-8")
    assert text == json.dumps({"step": 3, "model_config": {"n_layer": 4}}, indent=2)
