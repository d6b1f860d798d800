"""`checkpoint_manager.load_model` and `common`: selection of checkpoints, printed lines, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ModelError
from nano_inference.nanochat import load_model
from nano_inference.nanochat.common import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_base_dir,
    print0,
)
from nano_inference.nanochat.files import SOURCES
from tests.nanochat.tiny import (
    GENERATIONS,
    SPECIAL_IDS,
    base_meta,
    model_config,
    state_dict,
    write_checkpoint,
    write_tokenizer,
)

Capture = pytest.CaptureFixture[str]
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


def test_load_says_which_windows_weights_do_not_show(tmp_path: Path, capsys: Capture) -> None:
    """From 2026-01-16 to 30 upstream without FlashAttention 3 ignored windows in answers (G1, G2, G2e)."""
    write_tokenizer(tmp_path / "tokenizer")
    for generation in set(GENERATIONS) - {"G2s"}:  # which is taken for a G2 after fine-tuning
        write_checkpoint(tmp_path / "chatsft_checkpoints" / "d4", generation)
        load_model("sft", "cpu", "eval", base_dir=tmp_path)
        assert ("override decode_window=full" in capsys.readouterr().err) == (generation in ("G1", "G2", "G2e"))
    write_checkpoint(tmp_path / "chatsft_checkpoints" / "d4", "G1")
    load_model("sft", "cpu", "eval", base_dir=tmp_path, overrides=["decode_window=full"])
    assert "is assumed" not in capsys.readouterr().err


def test_load_model_applies_overrides_and_dtype(base: Path, capsys: Capture) -> None:
    ids = torch.tensor([[256, 104, 105]])
    plain = load_model("sft", "cpu", "eval")[0](ids)
    capped, _, _ = load_model("sft", "cpu", "eval", overrides=["softcap=2"])
    assert capped(ids).abs().max() < 2 < plain.abs().max()
    assert torch.allclose(capped(ids), 2 * torch.tanh(torch.atanh(plain / 15) * 15 / 2), atol=1e-4)
    short, _, _ = load_model("sft", "cpu", "eval", dtype="bfloat16")
    assert short.weights["lm_head.weight"].dtype == torch.bfloat16
    capsys.readouterr()
    load_model("sft", "cpu", "eval", overrides=["generation=G4"])
    assert "nanochat G4 (set by hand)" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"^overrides: 'speed=3' must be name=value, with a name of generation, "):
        load_model("sft", "cpu", "eval", overrides=["speed=3"])


@pytest.mark.parametrize("phase", ["train", "", "Eval"])
def test_other_phases_are_refused(base: Path, phase: str, capsys: Capture) -> None:
    with pytest.raises(ValueError, match=rf'^phase must be "eval", got {phase!r}'):
        load_model("sft", "cpu", phase)
    assert capsys.readouterr().err == "", "before anything is read"


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("chat", {}, "the source must be one of sft, rl, mid, base, got 'chat'"),
        ("sft", {"model_tag": "d5"}, r"has no model tag 'd5'; there is d12_wide, d4"),
        ("sft", {"model_tag": "../tokenizer"}, "the model tag must be a plain directory name"),
        ("rl", {"step": 8}, "has no step 8; there is 7"),
    ],
)
def test_error_names_missing_checkpoint(base: Path, source: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as refused:
        load_model(source, "cpu", "eval", **options)
    assert str(base) in str(refused.value) and "\n" not in str(refused.value)


def test_load_model_rejects_directory_without_checkpoints(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ModelError, match="contains no nanochat checkpoints"):
            load_model("sft", "cpu", "eval", base_dir=place)
    put(tmp_path, "base", "d4", 1)
    with pytest.raises(ModelError, match="has no checkpoint of the source sft; there is base"):
        load_model("sft", "cpu", "eval", base_dir=tmp_path)
    with pytest.raises(ModelError, match="tokenizer"):
        load_model("base", "cpu", "eval", base_dir=tmp_path)


def test_load_model_rejects_tokenizer_of_other_size(tmp_path: Path) -> None:
    config = model_config("G4", vocab_size=300)
    directory = tmp_path / "chatsft_checkpoints" / "d4"
    write_checkpoint(directory, "G4", config=config, state=state_dict("G4", config))
    write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ModelError, match=r"vocab_size is 300, but .*tokenizer.* has 265"):
        load_model("sft", "cpu", "eval", base_dir=tmp_path)


def test_meta_of_reinforcement_learning_has_no_step(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    path = put(tmp_path, "rl", "d4", 466)
    config = model_config("G4")
    (path.parent / "meta_000466.json").write_text(json.dumps({"model_config": config}))
    assert load_model("rl", "cpu", "eval", base_dir=tmp_path)[2] == {"model_config": config}


# ---- common


def test_base_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "~/runs")
    assert get_base_dir() == str(tmp_path / "runs")
    for unset in (True, False):
        monkeypatch.delenv("NANOCHAT_BASE_DIR") if unset else monkeypatch.setenv("NANOCHAT_BASE_DIR", "")
        assert get_base_dir() == str(tmp_path / ".cache" / "nanochat")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", ".cache"}, "created, as upstream's"


def test_compute_init_returns_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, name in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert autodetect_device_type() == name


def test_compute_init_describes_one_process(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with torch.random.fork_rng(devices=[]):
        assert compute_init("cpu") == (False, 0, 0, 1, torch.device("cpu"))
        drawn = torch.rand(3)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(42)))
    compute_cleanup()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device 'cuda': torch sees 0 CUDA devices"):
        compute_init()
    with pytest.raises(ValueError, match="device 'mps': torch sees no Apple GPU"):
        compute_init("mps")
    print0("said", end="!")
    assert capsys.readouterr().out == "said!"
