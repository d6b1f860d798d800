"""Gemma 2 and Gemma 3 (text): norms before and after each block, (1 + weight) norms, scaled embeddings, soft caps.

Source: arXiv 2408.00118 and 2503.19786, and Transformers' modeling_gemma2.py and modeling_gemma3.py for the details.
"""

from __future__ import annotations

from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Add, Op
from nano_inference.models.parts import attention, decoder, gated_mlp, norm
from nano_inference.models.program import Program

_OFFSET = 1.0


def program(config: ModelConfig) -> Program:
    """Return layers of x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""
    layers: list[Op] = []
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        layers += [
            norm(config, f"{at}.input_layernorm", "x", "n", _OFFSET),
            *attention(config, index, "n", "n", _OFFSET),
            norm(config, f"{at}.post_attention_layernorm", "n", "n", _OFFSET),
            Add(x="x", y="n", out="x"),
            norm(config, f"{at}.pre_feedforward_layernorm", "x", "n", _OFFSET),
            *gated_mlp(config, at, "n", "n"),
            norm(config, f"{at}.post_feedforward_layernorm", "n", "n", _OFFSET),
            Add(x="x", y="n", out="x"),
        ]
    return decoder(config, layers, norm(config, "model.norm", "x", "h", _OFFSET))
