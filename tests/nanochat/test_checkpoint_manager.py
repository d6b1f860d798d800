"""`checkpoint_manager`: selection of checkpoints, printed lines, errors, saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ModelError
from nano_inference.nanochat import GPT, load_model
from nano_inference.nanochat.checkpoint_manager import (
    build_model,
    find_largest_model,
    find_last_step,
    load_checkpoint,
    load_model_from_dir,
    load_optimizer_state,
    save_checkpoint,
)
from nano_inference.nanochat.files import SOURCES
from tests.nanochat.tiny import (
    SPECIAL_IDS,
    base_meta,
    model_config,
    state_dict,
    write_checkpoint,
    write_tokenizer,
)

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
DIRECTORIES = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}


def put(base: Path, source: str, tag: str, step: int, generation: str = "G4", **meta: Any) -> Path:
    """Write a checkpoint that says in its meta file where it lies."""
    directory = base / f"{DIRECTORIES[source]}_checkpoints" / tag
    return write_checkpoint(directory, generation, step=step, meta={"lies": f"{source} {tag} {step}", **meta})


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base directory with every source; NANOCHAT_BASE_DIR names it."""
    write_tokenizer(tmp_path / "tokenizer")
    for source in SOURCES:
        put(tmp_path, source, "d4", 7)
    put(tmp_path, "sft", "d4", 12)
    put(tmp_path, "sft", "d12_wide", 3)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def where(*args: Any, **kwargs: Any) -> str:
    """Load and return what the meta file says."""
    return str(load_model(*args, "cpu", "eval", **kwargs)[2]["lies"])


def test_load_model_selects_source_tag_and_step(base: Path) -> None:
    assert [where(source) for source in ("base", "mid", "rl")] == ["base d4 7", "mid d4 7", "rl d4 7"]
    assert where("sft") == "sft d12_wide 3", "the largest number, whatever comes behind it"
    assert where("sft", model_tag="d4") == "sft d4 12", "the last step"
    assert where("sft", model_tag="d4", step=7) == "sft d4 7"
    assert load_model("sft", "cpu", "eval", "d4", 7)[2]["step"] == 7, "both by their place, as upstream"
    assert where("sft", base_dir=base / "chatsft_checkpoints", model_tag="d4") == "sft d4 12"
    assert where("sft", base_dir=str(base / "chatsft_checkpoints" / "d4"), step=7) == "sft d4 7"


def test_load_model_returns_checkpoint(base: Path, capsys: Capture) -> None:
    model, tokenizer, meta = load_model("sft", torch.device("cpu"), "eval", model_tag="d4")
    assert meta == json.loads((base / "chatsft_checkpoints/d4/meta_000012.json").read_text())
    assert tokenizer.get_vocab_size() == meta["model_config"]["vocab_size"] == model.config.vocab_size
    assert tokenizer.encode_special("<|output_end|>") == SPECIAL_IDS["output_end"]
    weights = torch.load(base / "chatsft_checkpoints/d4/model_000012.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name][: len(tensor)]), name
    assert model.eval() is model and model.get_device() == torch.device("cpu")
    out, err = capsys.readouterr()
    assert out == "" and err == f"nanochat G4 (smear_gate): {base}/chatsft_checkpoints/d4/model_000012.pt\n"


def test_load_model_prints_warnings_and_commit(tmp_path: Path, capsys: Capture) -> None:
    experiment = tmp_path / "experiments" / "first"
    write_tokenizer(experiment / "tokenizer")
    (experiment / "meta.json").write_text(json.dumps({"name": "first", "git_commit": "0aaca56"}))
    write_checkpoint(experiment / "d2" / "base", "G2", meta=base_meta("G2"))
    load_model("base", "cpu", "eval", base_dir=tmp_path)
    first, tables, windows, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("nanochat G2 (value gates of 32 columns): ")
    assert tables == "rope_dtype=bfloat16 (G2's, rounded by upstream until 2026-03-04)"
    assert "2026-01-16 to 30" in windows and windows.endswith("(override decode_window=full)")
    assert second == "trained with nanochat's commit 0aaca56"
    assert third.startswith("warning: soft cap 15 is assumed")


def test_load_model_applies_overrides_and_dtype(base: Path) -> None:
    ids = torch.tensor([[256, 104, 105]])
    plain = load_model("sft", "cpu", "eval")[0](ids)
    capped, _, _ = load_model("sft", "cpu", "eval", overrides=["softcap=2"])
    assert capped(ids).abs().max() < 2 < plain.abs().max()
    assert torch.allclose(capped(ids), 2 * torch.tanh(torch.atanh(plain / 15) * 15 / 2), atol=1e-4)
    short, _, _ = load_model("sft", "cpu", "eval", dtype="bfloat16")
    assert short.weights["lm_head.weight"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^overrides: 'speed=3' must be name=value, with a name of generation, "):
        load_model("sft", "cpu", "eval", overrides=["speed=3"])


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("generation", ["G0", "G4"])
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


def test_interrupted_save_leaves_the_old_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"a": torch.ones(1)}, None, {"step": 1})
    before = (tmp_path / "model_000001.pt").read_bytes()
    with pytest.raises(AttributeError):
        save_checkpoint(tmp_path, 1, {"a": None}, None, {})  # type: ignore[dict-item]
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, 2, {"a": torch.ones(1)}, lambda: None, {})
    assert (tmp_path / "model_000001.pt").read_bytes() == before
    assert {"optim_000002_rank0.pt", "optim_000002_rank0.pt.partial"}.isdisjoint(names_in(tmp_path))


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


@pytest.mark.parametrize(
    ("source", "options", "error", "said"),
    [
        ("chat", {}, KeyError, "the source must be one of sft, rl, mid, base, got 'chat'"),
        ("sft", {"model_tag": "d5"}, FileNotFoundError, r"has no model tag 'd5'; there is d12_wide, d4"),
        ("sft", {"model_tag": "../tokenizer"}, ModelError, "the model tag must be a plain directory name"),
        ("rl", {"step": 8}, FileNotFoundError, "has no step 8; there is 7"),
        ("base", {"base_dir": "/missing"}, FileNotFoundError, "contains no nanochat checkpoints"),
        ("sft", {"phase": "train"}, ValueError, r'^phase must be "eval", got \'train\''),
    ],
)
def test_errors_have_upstreams_classes(
    base: Path, source: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as refused:
        load_model(**{"source": source, "device": "cpu", "phase": "eval", **options})
    assert isinstance(refused.value, ValueError) and "\n" not in str(refused.value)


def test_checkpoint_without_its_tokenizer_or_with_another_size_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "base", "d4", 1)
    with pytest.raises(ModelError, match="has no checkpoint of the source sft; there is base"):
        load_model("sft", "cpu", "eval", base_dir=tmp_path)
    with pytest.raises(ModelError, match="tokenizer"):
        load_model("base", "cpu", "eval", base_dir=tmp_path)
    config = model_config("G4", vocab_size=300)
    write_checkpoint(tmp_path / "base_checkpoints" / "d4", "G4", config=config, step=1)
    write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ModelError, match=r"vocab_size is 300, but .*tokenizer.* has 265"):
        load_model("base", "cpu", "eval", base_dir=tmp_path)
