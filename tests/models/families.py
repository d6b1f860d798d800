"""Tiny random models of every family, created with Transformers, the reference for numerical results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

VOCAB_SIZE = 160
MAX_POSITIONS = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",  # with "sdpa", some releases of Transformers leave out Gemma 2's soft cap
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-ratio1-untied": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama3-rope-ratio3-tied": (
        "Llama",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama-linear-rope-biases": (
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama-dynamic-rope": (
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "mistral-window": ("Mistral", {"num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 37}),
    "mistral-no-window": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None}),
    "ministral3": (
        "Ministral3",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": _YARN_ROPE
            | {"original_max_position_embeddings": MAX_POSITIONS, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"llama_4_scaling_beta": 0.1},
        },
    ),
    "qwen2-ratio7": ("Qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56}),
    "qwen2-yarn-window": (
        "Qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 29,
            "max_window_layers": 2,
            "rope_parameters": _YARN_ROPE,
        },
    ),
    "qwen3-ratio3-tied": (
        "Qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "smollm3-layers-without-rope": ("SmolLM3", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 23,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 19,
            "query_pre_attn_scalar": 20,
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
}


KINDS = (
    *("llama-linear-rope-biases", "qwen3-ratio3-tied", "qwen2-yarn-window", "smollm3-layers-without-rope", "gemma2"),
    *("gemma3", "G0", "G2e", "G4"),
)
"""Models, nanochat's too, in which every operation and option occurs; the others have other numbers."""


def others_nightly(names: Iterable[str]) -> list[Any]:
    """Return values of a parameter; those that are not among `KINDS` are nightly."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def make_model(name: str, directory: Path, more: Mapping[str, Any] | None = None) -> transformers.PreTrainedModel:
    """Write a tiny random model of the family to `directory`; return Transformers' model in float32.

    `more` overrides fields of the family's configuration.
    """
    kind, options = FAMILIES[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    config = config_class(**(_COMMON | options | dict(more or {})))
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in parameter_name else 0.12
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if _is_plain_norm(kind, parameter_name) else 0))
    model.save_pretrained(directory)
    return model


def _is_plain_norm(kind: str, name: str) -> bool:
    """Return True for norm weights that are centred at 1; Gemma's are centred at 0."""
    return "norm" in name and not kind.startswith("Gemma")


def reference_logprobs(
    model: transformers.PreTrainedModel, token_ids: list[int], count: int | None = None
) -> torch.Tensor:
    """Return Transformers' teacher-forced log-probabilities [count, V] of the last `count` tokens, or of all.

    float32, normalised in float64.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0].float()
    count = len(token_ids) - 1 if count is None else count
    return torch.log_softmax(logits[-count - 1 : -1].double(), dim=-1).float()


def gap(model: transformers.PreTrainedModel, token_ids: list[int], logprobs: list[float]) -> float:
    """Return the largest difference between `logprobs` (of the last tokens) and those of Transformers."""
    return gap_to(reference_logprobs(model, token_ids, len(logprobs)), token_ids, logprobs)


def gap_to(table: torch.Tensor, token_ids: list[int], logprobs: list[float]) -> float:
    """Return the largest difference between `logprobs` (of the last tokens) and those of a table [tokens, V]."""
    assert len(logprobs) > 0
    targets = torch.tensor(token_ids[-len(logprobs) :]).unsqueeze(-1)
    found = table[-len(logprobs) :].gather(-1, targets).squeeze(-1)
    return float((found - torch.tensor(logprobs)).abs().max())
