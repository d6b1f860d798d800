"""nanochat checkpoints in the loader: opening, inferred constants, overrides, rejected files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.nanochat.checkpoint import Inferred
from nano_inference.nanochat.format import open_tensors, own_config
from nano_inference.types import BadRequest, ModelError
from tests.loading.tiny_models import make_model, save
from tests.nanochat.tiny import (
    GENERATIONS,
    SPECIAL_IDS,
    VOCAB,
    base_meta,
    model_config,
    state_dict,
    write_checkpoint,
    write_tokenizer,
)

pytestmark = pytest.mark.slow

IDS = [256, 257, *range(40, 70), 258, 259]


def write(directory: Path, generation: str, **options: Any) -> Path:
    """Write a base run's checkpoint of a generation."""
    return write_checkpoint(directory, generation, **({"meta": base_meta(generation)} | options))


def engine(path: Path, *overrides: str) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(path), device="cpu", kv_cache_bytes=1 << 24, overrides=overrides)
    )


def inferred(checkpoint: Checkpoint) -> Inferred:
    assert checkpoint.inferred is not None
    return checkpoint.inferred


def refusal(path: Path, *overrides: str) -> str:
    """Return the one-line error of opening a checkpoint or reading its weights."""
    with pytest.raises(ModelError) as caught:
        engine(path, *overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 700
    return line


# ---- opening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_opens_with_its_exact_keys(tmp_path: Path, generation: str) -> None:
    write(tmp_path, generation)
    checkpoint = open_checkpoint(tmp_path)
    found = inferred(checkpoint)
    assert found.constants.generation == generation
    assert found.reasons["generation"]
    assert bool(found.warnings) == (found.constants.generation == "G2")
    state = state_dict(generation, model_config(generation))
    assert set(checkpoint.sources) == set(state)
    config = checkpoint.config
    assert config.architecture == f"nanochat {generation}"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 2, 16)
    assert (config.hidden_size, config.intermediate_size, config.max_positions) == (64, 256, 256)
    assert checkpoint.dtype == "float32"


@pytest.mark.parametrize(("pad", "rows"), [(1, 265), (128, 384)])
@pytest.mark.parametrize("generation", ["G0", "G2e", "G4"])
def test_padded_vocabularies(tmp_path: Path, generation: str, pad: int, rows: int) -> None:
    config = model_config(generation)
    write(tmp_path, generation, config=config, state=state_dict(generation, config, pad=pad))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.terms is not None
    assert (checkpoint.config.vocab_size, checkpoint.config.terms.padded_vocab_size) == (VOCAB, rows)
    with engine(tmp_path) as ours:
        assert len(ours.score(IDS)) == len(IDS) - 1


def test_end_tokens_are_read_from_the_tokenizer_or_inferred(tmp_path: Path) -> None:
    wanted = (SPECIAL_IDS["assistant_end"], SPECIAL_IDS["bos"])
    write(tmp_path, "G4")
    for _ in range(2):
        config = open_checkpoint(tmp_path).config
        assert config.eos_token_ids == wanted
        assert config.bos_token_id == SPECIAL_IDS["bos"]
        write_tokenizer(tmp_path)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_model_is_inferred_from_a_state_dict(generation: str) -> None:
    config = model_config(generation)
    state = state_dict(generation, config)
    overrides = ("generation=G2s",) if generation == "G2s" else ()
    for prefix in ("", "_orig_mod.", "module.", "module._orig_mod."):
        weights = {prefix + name: torch.nn.Parameter(weight) for name, weight in state.items()}
        checkpoint = open_tensors(weights, config, overrides)
        assert inferred(checkpoint).constants.generation == generation
        assert set(checkpoint.sources) == set(state)


# ---- hints, gaps and patches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("directory", ["chatsft_checkpoints", "mid_checkpoints", "chatrl_checkpoints"])
def test_settings_of_later_stages_are_ignored(tmp_path: Path, directory: str) -> None:
    write(tmp_path / directory / "d4", "G2s")
    for path in (tmp_path, tmp_path / directory / "d4", tmp_path / directory / "d4" / "model_000650.pt"):
        found = inferred(open_checkpoint(path))
        assert found.constants.softcap == 15
        assert [line for line in found.warnings if "softcap=20" in line]
        by_hand = inferred(open_checkpoint(path, ("softcap=20",)))
        assert (by_hand.constants.softcap, by_hand.reasons["softcap"]) == (20, "set by hand")


@pytest.mark.parametrize("generation", ["G1", "G2", "G3"])
def test_zero_patched_file_computes_the_same(tmp_path: Path, generation: str) -> None:
    state = state_dict(generation, model_config(generation))
    zeros = {"smear_gate.weight": torch.zeros(1, 24), "smear_lambda": torch.zeros(1), "backout_lambda": torch.zeros(1)}
    write(tmp_path / "own", generation, state=state)
    write(tmp_path / "patched", generation, state=state | zeros)
    found = inferred(open_checkpoint(tmp_path / "patched"))
    assert found.constants.generation == generation
    assert [line for line in found.warnings if "all zero" in line]
    with engine(tmp_path / "own") as own, engine(tmp_path / "patched") as patched:
        assert own.score(IDS) == patched.score(IDS)


@pytest.mark.parametrize(("missing", "value"), [("resid_lambdas", 1.0), ("x0_lambdas", 0.0)])
def test_one_missing_lambda_is_filled_in(tmp_path: Path, missing: str, value: float) -> None:
    state = state_dict("G3", model_config("G3"))
    filled = state | {missing: torch.full((4,), value)}
    write(tmp_path / "whole", "G3", state=filled)
    write(tmp_path / "partial", "G3", state={name: w for name, w in state.items() if name != missing})
    warnings = inferred(open_checkpoint(tmp_path / "partial")).warnings
    assert [line for line in warnings if missing in line and f"{value:g}" in line]
    assert inferred(open_checkpoint(tmp_path / "whole")).warnings == ()
    with engine(tmp_path / "whole") as whole, engine(tmp_path / "partial") as partial:
        assert whole.score(IDS) == partial.score(IDS)


# ---- rejected checkpoints -------------------------------------------------------------------------------------------


def edited(directory: Path, generation: str, changes: dict[str, Tensor | None], **config: Any) -> Path:
    """Write a checkpoint with weights replaced, added or removed (None), and changed configuration values."""
    plain = model_config(generation)
    state: dict[str, Any] = state_dict(generation, plain) | changes
    kept = {name: weight for name, weight in state.items() if weight is not None}
    return write(directory, generation, config=plain | config, state=kept)


REFUSED: dict[str, tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = {
    "a fork's weight": ("G4", {"loop_gate": torch.ones(1)}, {}, "no known nanochat generation: 'loop_gate'"),
    "experts": ("G4", {"transformer.h.0.mlp.router.gate.weight": torch.ones(8, 64)}, {}, "mixture-of-experts"),
    "a prototype": ("G1", {"value_embed_A.weight": torch.ones(8, 64)}, {}, "prototype"),
    "tables without gates": ("G1", {"value_embeds.1.weight": torch.ones(320, 32)}, {}, "prototype"),
    "ambiguous": (
        "G2",
        {"smear_gate.weight": torch.ones(1, 24), "smear_lambda": torch.ones(1), "backout_lambda": torch.ones(1)},
        {},
        "ambiguous",
    ),
    "wide gates": (
        "G3",
        {f"transformer.h.{i}.attn.ve_gate.weight": torch.ones(2, 16) for i in (1, 3)},
        {},
        "gates of [16] columns",
    ),
    "a narrow smear gate": ("G4", {"smear_gate.weight": torch.ones(1, 12)}, {}, "smear_gate"),
    "fewer layers": ("G4", {}, {"n_layer": 3}, "n_layer is 3, but there are weights of 4 layers"),
    "a gap": ("G0", {f"transformer.h.2.{part}.weight": None for part in (
        "attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}, {}, "weights of 3 layers"),
    "a larger vocabulary": ("G4", {}, {"vocab_size": 321}, "vocab_size is 321, but the embedding has 320 rows"),
    "more kv heads": ("G4", {}, {"n_kv_head": 4}, "attn.c_k.weight must have 64 rows"),
    "heads that do not share out": ("G0", {}, {"n_head": 7}, "n_embd (64) must be a multiple of n_head (7)"),
    "another width": ("G0", {}, {"n_embd": 128, "n_head": 8}, "n_embd is 128, but the embedding has 64 columns"),
    "no embedding": ("G0", {"transformer.wte.weight": None}, {}, "has no transformer.wte.weight"),
    "no keys": ("G0", {"transformer.h.0.attn.c_k.weight": None}, {}, "has no transformer.h.0.attn.c_k.weight"),
    "a table too many": (
        "G4",
        {"value_embeds.0.weight": torch.ones(320, 32)},
        {},
        "has value_embeds.0.weight, which the model does not have",
    ),
    "no smear_lambda": ("G4", {"smear_lambda": None}, {}, "lacks 1 tensors: smear_lambda"),
    "no backout": ("G4", {"backout_lambda": None}, {}, "backout_lambda"),
    "no lambdas of the pairs": ("G2e", {"bigram_lambdas": None}, {}, "lacks 1 tensors: bigram_lambdas"),
    "pairs of another vocabulary": ("G2e", {"bigram_embed.embed.weight": torch.ones(1000, 64)}, {}, "bigram_embed"),
    "no vocab_size": ("G4", {}, {"vocab_size": None}, "vocab_size is missing"),
    "layers without end": ("G4", {}, {"n_layer": 10**9}, "n_layer must be an integer"),
    "a pattern of other letters": ("G4", {}, {"window_pattern": "SML"}, "window_pattern must be made of S and L"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_checkpoint_is_rejected_with_a_reason(tmp_path: Path, name: str) -> None:
    generation, changes, config, reason = REFUSED[name]
    edited(tmp_path, generation, changes, **config)
    assert reason in refusal(tmp_path)


def test_ambiguous_checkpoint_opens_with_a_generation_override(tmp_path: Path) -> None:
    _, changes, _, _ = REFUSED["ambiguous"]
    edited(tmp_path, "G2", changes)
    for generation in ("G2", "G4"):
        checkpoint = open_checkpoint(tmp_path, (f"generation={generation}",))
        assert inferred(checkpoint).constants.generation == generation
    with engine(tmp_path, "generation=G4") as ours:
        assert len(ours.score(IDS)) == len(IDS) - 1


def test_meta_file_without_configuration_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, "G4")
    meta = path.with_name("meta_000650.json")
    for text in ("{}", '{"model_config": null}', '{"model_config": []}', "[]", "{"):
        meta.write_text(text)
        assert "meta_000650.json" in refusal(tmp_path)


@pytest.mark.parametrize("vocab_size", [264, 266, 300])
def test_tokenizer_of_other_vocabulary_size(tmp_path: Path, vocab_size: int) -> None:
    write_tokenizer(tmp_path)
    write(tmp_path, "G4", config=model_config("G4", vocab_size=vocab_size))
    line = refusal(tmp_path)
    assert f"vocab_size is {vocab_size}" in line
    assert f"the tokenizer in {tmp_path} has 265" in line
    assert line.endswith("has 265")


# ---- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    ["softcap=20", "rope_base=20000", "qk_scale=1.1", "gate_scale=2", "window_pattern=L", "short_window=4",
     "sequence_len=12", "norm_eps=0.01", "generation=G3"],
)  # fmt: skip
def test_override_changes_the_logits(tmp_path: Path, override: str) -> None:
    write(tmp_path, "G4", config=model_config("G4", window_pattern="SL"))
    ids = IDS[:12] if override.startswith("sequence_len") else IDS
    extra = () if "window" not in override else ("short_window=9",) if "pattern" in override else ()
    with engine(tmp_path, *extra) as plain, engine(tmp_path, *extra, override) as ours:
        name, _, value = override.partition("=")
        found = inferred(ours.parts.checkpoint)
        assert found.reasons[name] == "set by hand"
        assert str(getattr(found.constants, name)).removesuffix(".0") == value
        if name == "sequence_len":
            assert ours.parts.max_model_len == 12
        else:
            gaps = [abs(a - b) for a, b in zip(plain.score(ids), ours.score(ids), strict=True)]
            assert max(gaps) > 1e-3


@pytest.mark.parametrize("text", ["qk_scale=100000", "gate_scale=5000"])
def test_huge_override_values_are_rejected(tmp_path: Path, text: str) -> None:
    write(tmp_path, "G4")
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        open_checkpoint(tmp_path, (text,))


def test_overrides_of_other_formats_are_rejected(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    open_checkpoint(tmp_path)
    with pytest.raises(BadRequest, match="not a nanochat checkpoint"):
        open_checkpoint(tmp_path, ("softcap=20",))


def test_overrides_of_the_transformers_port_are_rejected(tmp_path: Path) -> None:
    """Its config.json contains every constant."""
    config = transformers.NanoChatConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.NanoChatForCausalLM(config).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).inferred is None
    with pytest.raises(BadRequest, match="overrides: "):
        open_checkpoint(tmp_path, ("softcap=20",))


# ---- safetensors with nanochat's names ------------------------------------------------------------------------------


def own(directory: Path, generation: str, changes: dict[str, Any], *overrides: str) -> Path:
    """Write a safetensors directory whose config.json has every constant, some of them changed."""
    config = model_config(generation)
    state = state_dict(generation, config)
    directory.mkdir(exist_ok=True)
    save_file(state, directory / "model.safetensors")
    values = own_config(open_tensors(state, config, overrides).config)
    values["constants"] |= changes
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        *({"foo": 1}, {"softcap": "x"}, {"softcap": -1}, {"generation": "G9"}),
        *({"window_pattern": "X"}, {"short_window": True}, {"sequence_len": 2.5}),
    ],
    ids=str,
)
def test_invalid_constants_in_exported_directory_raise_model_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    own(tmp_path, "G4", changes)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path)
    assert next(iter(changes)) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# ---- Transformers' port ---------------------------------------------------------------------------------------------


def ported(directory: Path, **changes: Any) -> Path:
    """Write a directory of the Transformers port with changed values in its config.json (None removes one)."""
    config = transformers.NanoChatConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        final_logit_softcapping=12.0,
        max_position_embeddings=300,
        eos_token_id=SPECIAL_IDS["assistant_end"],
    )
    transformers.NanoChatForCausalLM(config).save_pretrained(directory)
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return directory


def test_transformers_port_is_read(tmp_path: Path) -> None:
    config = open_checkpoint(ported(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})).config
    assert config.terms is not None
    assert (config.terms.generation, config.terms.has_hf_names) == ("G0", True)
    assert (config.intermediate_size, config.num_kv_heads, config.norm_eps) == (192, 2, 1e-5)
    assert (config.logits_softcap, config.max_positions, config.ropes[0].theta) == (12.0, 300, 5000.0)
    assert SPECIAL_IDS["assistant_end"] in config.eos_token_ids


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "silu"}, "relu2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope type"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16}, "num_heads (3)"),
        ({"num_hidden_layers": 3}, "lacks"),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"intermediate_size": None}, "shape"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_inconsistent_transformers_port_is_rejected(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(ported(tmp_path, **changes))
