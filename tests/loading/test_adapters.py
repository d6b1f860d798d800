"""PEFT's files and tensors: what is read, and what is refused by name before values are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference.loading import adapters
from nano_inference.loading.adapters import Adapter, adapter_from, read_adapter
from nano_inference.loading.checkpoint import open_checkpoint
from nano_inference.models.families import program_of
from nano_inference.models.names import TEXT_NAMES, NameRules, TiledHeads
from nano_inference.models.program import Program
from nano_inference.types import BadRequest, WeightError
from nano_inference.weights.staging import plain_pairs
from tests.models.adapted import adapted, save
from tests.models.families import make_model

Tensors = dict[str, Tensor]


class Saved:
    """A tiny Llama's program, and an adapter of it in files."""

    def __init__(self, directory: Path) -> None:
        self.model = adapted(make_model("llama-ratio1-untied", directory), r=3, target_modules=["q_proj", "down_proj"])
        self.program: Program = program_of(open_checkpoint(directory).config)
        self.path = save(self.model, directory / "adapter")
        self.config: dict[str, Any] = json.loads((self.path / adapters.CONFIG_NAME).read_text())
        self.tensors: Tensors = load_file(self.path / adapters.TENSORS_NAME)

    def read(self, path: Path | None = None, names: NameRules = TEXT_NAMES, max_rank: int = 256) -> Adapter:
        return read_adapter(path or self.path, self.program, names, max_rank=max_rank)

    def from_memory(self, config: dict[str, Any] | None = None, tensors: Any = None) -> Adapter:
        named = list(self.tensors.items()) if tensors is None else tensors
        return adapter_from(config or self.config, plain_pairs(named), self.program, TEXT_NAMES, max_rank=256)

    def written(self, directory: Path, tensors: Tensors) -> Path:
        directory.mkdir(exist_ok=True)
        save_file(tensors, directory / adapters.TENSORS_NAME)
        (directory / adapters.CONFIG_NAME).write_text(json.dumps(self.config))
        return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("adapted"))


def equal(one: Adapter, other: Adapter) -> bool:
    pairs = [(one.pairs[name], other.pairs[name]) for name in one.pairs]
    same = all(torch.equal(a, b) for x, y in pairs for a, b in zip(x[:2], y[:2], strict=True))
    return one.pairs.keys() == other.pairs.keys() and same and all(x.scale == y.scale for x, y in pairs)


def test_files_and_tensors_are_the_same_adapter(saved: Saved) -> None:
    read = saved.read()
    assert len(read.pairs) == 8 and read.rank == 3 and read.num_bytes == 4 * 3 * 4 * (48 + 48 + 80 + 48)
    first = read.pairs["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(first.b_NR, saved.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"])
    assert first.scale == pytest.approx(8 / 3)
    named = {name: value for name, value in saved.model.named_parameters() if "lora_" in name}
    assert all(".default." in name for name in named)
    for tensors in (saved.tensors.items(), get_peft_model_state_dict(saved.model).items(), named.items()):
        assert equal(saved.from_memory(tensors=iter(tensors)), read)
    wrapped = {name.replace("model.model.layers", "model.model.language_model.layers"): t for name, t in named.items()}
    wrapped["base_model.model.model.visual.merger.lora_A.weight"] = torch.ones(3, 5)
    assert equal(saved.from_memory(tensors=wrapped.items()), read)


def test_tensors_of_other_parts_of_the_model_are_skipped(saved: Saved, tmp_path: Path) -> None:
    """Here between others in the file, which has wide values first."""
    dtypes = {"A": torch.float64, "B": torch.bfloat16}
    tensors = {name: tensor.to(dtypes[name.split(".lora_")[1][0]]) for name, tensor in saved.tensors.items()}
    more = {"base_model.model.model.visual.merger.lora_A.weight": torch.ones(3, 5)}
    apart, alone = saved.written(tmp_path / "a", tensors | more), saved.written(tmp_path / "b", tensors)
    assert equal(saved.read(apart), saved.read(alone))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_exact(dtype: torch.dtype, saved: Saved, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in saved.tensors.items()}
    read = saved.read(saved.written(tmp_path / "a", tensors))
    own = read.pairs["model.layers.3.mlp.down_proj.weight"].a_RK
    assert own.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert torch.equal(own.float(), tensors["base_model.model.model.layers.3.mlp.down_proj.lora_A.weight"].float())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("peft_type", "LOHA"), ("peft_type", None), ("use_dora", True), ("modules_to_save", ["lm_head"])),
        *(("bias", "all"), ("lora_bias", True), ("fan_in_fan_out", True), ("target_parameters", ["experts.down"])),
        *(("trainable_token_indices", [1]), ("layer_replication", [[0, 2]]), ("alora_invocation_tokens", [1])),
        *(("use_qalora", True), ("use_bdlora", {"nblocks": 2}), ("of_the_future", 1), ("init_lora_weights", "pissa")),
        *(("r", 0), ("r", 257), ("r", 4), ("r", "3"), ("lora_alpha", float("nan")), ("lora_alpha", "x")),
        *(("rank_pattern", [1]), ("rank_pattern", {"q_proj": 300}), ("rank_pattern", {"(": 3})),
        *(("rank_pattern", {key: 3}) for key in ("(?:abc){1000000000}", "(?R)", "(a(?1))", "x" * 201)),
        ("alpha_pattern", {f"x{n}": 3 for n in range(2001)}),
        ("alpha_pattern", {"q_proj": None}),
    ],
)
def test_settings_are_refused_by_name(field: str, value: Any, saved: Saved) -> None:
    def tensors() -> Any:
        assert field in ("r", "rank_pattern"), "tensors were read before the configuration was refused"
        yield from saved.tensors.items()

    with pytest.raises(BadRequest) as found:
        saved.from_memory(saved.config | {field: value}, tensors())
    assert found.value.field == field and len(str(found.value)) < 300


def test_a_pattern_that_takes_long_is_refused(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_SECONDS", 0.0)
    with pytest.raises(BadRequest, match="seconds to match") as found:
        saved.from_memory(saved.config | {"rank_pattern": {"(?:.|..)+[!?]": 3}})
    assert found.value.field == "rank_pattern"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {own: tensor for own, tensor in tensors.items() if not own.endswith(name)}


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {}, "no tensors of the model"),
        (without("layers.0.self_attn.q_proj.lora_A.weight"), "lora_A or lora_B is missing"),
        (lambda t: t | {f"{Q0}.lora_magnitude_vector": torch.ones(3)}, "lora_magnitude_vector"),
        (
            lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 160)},
            "lora_embedding_A",
        ),
        (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(160, 48)}, "lm_head.weight' is no lora_A"),
        (lambda t: t | {f"{Q0}x.lora_A.weight": torch.ones(3, 48)}, "no such matrix"),
        (lambda t: t | {"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(3, 48)}, "no such matrix"),
        (lambda t: t | {f"{Q0[17:]}.lora_A.weight": torch.ones(3, 48)}, "two of them"),
        (lambda t: t | {f"{Q0}.lora_A.weight": torch.ones(3, 47)}, "do not fit"),
        (lambda t: t | {f"{Q0}.lora_B.weight": torch.ones(48, 2)}, "do not fit"),
        (lambda t: t | {f"{Q0}.lora_B.weight": torch.tensor(1.0)}, "do not fit"),
        (lambda t: t | {f"{Q0}.lora_A.weight": torch.full((3, 48), float("nan"))}, "NaN or infinity"),
        (lambda t: t | {f"{Q0}.lora_B.weight": torch.full((48, 3), float("-inf"))}, "NaN or infinity"),
    ],
)
def test_tensors_are_refused_by_name(change: Any, message: str, saved: Saved, tmp_path: Path) -> None:
    tensors = change(saved.tensors)
    for read in (
        lambda: saved.read(saved.written(tmp_path / "a", tensors)),
        lambda: saved.from_memory(tensors=tensors.items()),
    ):
        with pytest.raises(BadRequest, match=message) as found:
            read()
        assert found.value.field == adapters.FIELD


def test_damaged_and_foreign_files_are_refused(saved: Saved, tmp_path: Path) -> None:
    directory = saved.written(tmp_path / "a", saved.tensors)
    file = directory / adapters.TENSORS_NAME
    whole = file.read_bytes()
    for data in (b"", whole[:5], whole[:400], whole[:-1], b"PK\x03\x04" + whole, b"\xff" * 64):
        file.write_bytes(data)
        with pytest.raises(BadRequest) as found:
            saved.read(directory)
        assert found.value.field == adapters.FIELD
    file.unlink()
    (directory / "adapter_model.bin").write_bytes(b"a pickle")
    for missing in (directory, tmp_path):
        with pytest.raises(BadRequest, match=r"No such file"):
            saved.read(missing)
    (directory / adapters.CONFIG_NAME).write_text("[1]")
    with pytest.raises(BadRequest):
        saved.read(directory)
    for item in (
        ("x", 3),
        (3, torch.ones(2)),
        ("x", torch.ones(2, dtype=torch.int8)),
        ("x", torch.ones(2, device="meta")),
    ):
        with pytest.raises(WeightError, match=r"must be|has the dtype"):
            saved.from_memory(tensors=[item])


def test_heads_follow_the_order_of_the_program(saved: Saved) -> None:
    """As in GGUF files of Qwen3.5: rows of B, or columns of A, move with the heads of the matrix."""
    places = (("q_proj.weight", 0, 16), ("down_proj.weight", 1, 0))
    names = NameRules(tiled=TiledHeads(num_k_heads=2, num_v_heads=4, places=places))
    read, moved = saved.read(), saved.read(names=names)
    rows = [*range(16), *(16 + 8 * head + i for head in (0, 2, 1, 3) for i in range(8))]
    columns = [20 * head + i for head in (0, 2, 1, 3) for i in range(20)]
    for name, (a_RK, b_NR, _) in read.pairs.items():
        is_q = name.endswith("q_proj.weight")
        assert torch.equal(moved.pairs[name].a_RK, a_RK if is_q else a_RK[:, columns])
        assert torch.equal(moved.pairs[name].b_NR, b_NR[rows] if is_q else b_NR)
