"""Tiny random models with layers of the gated delta rule, created with Transformers, the reference for results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.models.families import MAX_POSITIONS, VOCAB_SIZE

MODULES: tuple[ModuleType, ...] = (modeling_qwen3_5, modeling_qwen3_next)
for _module in MODULES:
    for _name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        setattr(_module, _name, getattr(_module, _name).__wrapped__)  # never kernels of installed packages

L, F = "linear_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.5,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Qwen3_5", {"layer_types": [L, L, L, F]}),
    "wide-values": (  # the last layer is linear; sizes that no vector width divides
        "Qwen3_5",
        {"layer_types": [L, F, L], "linear_value_head_dim": 44, "linear_num_value_heads": 6, "linear_key_head_dim": 20},
    ),
    "equal-heads-tied": ("Qwen3_5", {"layer_types": [F, L], "linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "two-taps": ("Qwen3_5", {"layer_types": [L, F], "linear_conv_kernel_dim": 2, "attention_bias": True}),
    "wide-keys-yarn": ("Qwen3_5", {"layer_types": [L, F, F], "linear_key_head_dim": 40, "rope_parameters": _YARN}),
    "grouped": (
        "Qwen3Next",
        {"layer_types": [L, L, F], "num_experts": 0, "linear_value_head_dim": 24, "linear_num_value_heads": 6},
    ),
}


def make_hybrid(name: str, directory: Path, more: Mapping[str, Any] | None = None) -> transformers.PreTrainedModel:
    """Write a tiny random model to `directory`; return Transformers' model in float32.

    `more` overrides fields of its configuration.
    """
    kind, options = HYBRIDS[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Qwen3_5" else f"{kind}Config")
    config = config_class(**(_COMMON | {"num_hidden_layers": len(options["layer_types"])} | options | dict(more or {})))
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "A_log" in parameter_name:
                parameter.uniform_(-4, 1)
            elif "dt_bias" in parameter_name:
                parameter.normal_(-1, 1)
            else:
                spread = 0.3 if "norm" in parameter_name or "conv1d" in parameter_name else 0.1
                parameter.normal_(float(parameter_name.endswith("linear_attn.norm.weight")), spread)
    model.save_pretrained(directory)
    return model
