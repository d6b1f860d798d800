"""Tiny random models created with transformers, and GGUF files of them in the conventions of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from nano_inference.loading.checkpoint import Checkpoint

COMMON: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 5}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {}),
    "smollm3-windows": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 24, "no_rope_layer_interval": 3}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", {**GEMMA, "query_pre_attn_scalar": 20}),
}
GGUF_ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "llama-biased": gguf.MODEL_ARCH.LLAMA,
    "llama-tied": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
HALVES: dict[Kind, tuple[int, ...]] = {
    **{Kind.Q4_0: (0,), Kind.Q4_1: (0, 1), Kind.Q8_0: (0,), Kind.Q4_K: (0, 1), Kind.Q6_K: (104,)},
    **{Kind.Q5_0: (0,), Kind.Q5_1: (0, 1), Kind.Q5_K: (0, 1), Kind.Q3_K: (54,)},
}
"""Offsets of a block's half-precision scales, in halves."""


def make_config(family: str, **changes: Any) -> Any:
    """Return a tiny transformers configuration of a family."""
    name, own = FAMILIES[family]
    kind = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    return kind(**{**COMMON, **own, **changes})


def make_model(family: str, **changes: Any) -> Any:
    """Return a transformers model of a family with random weights, including norms and biases."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")(make_config(family, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def read_all(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, each read into memory filled with NaN."""
    out: dict[str, torch.Tensor] = {}
    for name, source in checkpoint.tensors():
        out[name] = torch.full(source.shape, torch.nan, dtype=dtype)
        source.read_into(out[name])
    return out


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the state dict without tied weights."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute q's or k's rows like the converter: interleave the halves of each head."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def converted(family: str, model: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a GGUF file of the model, named by the gguf package's table."""
    config, out = model.config, {}
    names = gguf.get_tensor_name_map(GGUF_ARCHITECTURES[family], config.num_hidden_layers)
    for name, tensor in weights_of(model).items():
        values = tensor.float().numpy()
        if family.startswith(("llama", "smollm3")) and ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if family.startswith(("llama", "smollm3")) and ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return out


def write_metadata(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    """Write the metadata keys that the converter writes for every architecture."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(
    path: Path,
    family: str,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a GGUF file with matrices of type `kind` and float32 vectors."""
    config = model.config
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[GGUF_ARCHITECTURES[family]])
    write_metadata(writer, config, model.model.layers[0].self_attn.head_dim)
    writer.add_rope_freq_base(theta)
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.to_dict().get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    more(writer)
    for name, values in converted(family, model).items():
        matrix_kind = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, matrix_kind), raw_dtype=matrix_kind)
    finish(writer)
    return path


def random_blocks(rows: int, columns: int, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Return random blocks with scales of both signs, small enough for a finite forward pass."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.F32:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.06)
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = data.view(np.float16)
    for place in HALVES[kind]:
        halves[..., place] = 1.0
    unit = gguf.quants.dequantize(data.reshape(rows, -1), kind).std()
    for place in HALVES[kind]:
        halves[..., place] = rng.choice([-1, 1], data.shape[:2]) * rng.uniform(0.02, 0.1, data.shape[:2]) / unit
    return data.reshape(rows, -1)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Save as transformers does."""
    model.save_pretrained(directory, **options)
    return directory


def gguf_bytes(tmp_path: Path) -> bytes:
    """Return the bytes of a small GGUF file with every type of metadata value."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_array("test.strings", ["a", "", "ü"])
        writer.add_array("test.floats", [1.5, 2.5])
        writer.add_array("test.flags", [True, False])
        writer.add_uint8("test.u8", 7)
        writer.add_int64("test.i64", -7)
        writer.add_float64("test.f64", 0.5)

    model = make_model("llama", num_hidden_layers=1, vocab_size=8)
    return write_gguf(tmp_path / "whole.gguf", "llama", model, more=more).read_bytes()
