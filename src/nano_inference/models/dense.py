"""Llama, Mistral, Qwen 2 and 3, SmolLM3: pre-norm decoders with grouped-query attention and a gated MLP.

Source: arXiv 2302.13971, and Transformers' modeling_llama.py, modeling_qwen3.py, modeling_smollm3.py for the details.
"""

from __future__ import annotations

from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Add, Op
from nano_inference.models.parts import attention, decoder, gated_mlp, norm
from nano_inference.models.program import Program


def program(config: ModelConfig) -> Program:
    """Return layers of x += attention(norm(x)); x += mlp(norm(x))."""
    layers: list[Op] = []
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        layers += [
            norm(config, f"{at}.input_layernorm", "x", "n"),
            *attention(config, index, "n", "n"),
            Add(x="x", y="n", out="x"),
            norm(config, f"{at}.post_attention_layernorm", "x", "n"),
            *gated_mlp(config, at, "n", "n"),
            Add(x="x", y="n", out="x"),
        ]
    return decoder(config, layers, norm(config, "model.norm", "x", "h"))
