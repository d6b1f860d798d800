"""Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM2/3: one pre-norm decoder, told apart by its configuration alone.

Shapes: T tokens of the step, S rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from nano_inference.attention import StepContext
from nano_inference.models.config import ModelConfig
from nano_inference.models.layers import Attention, GatedMLP, RMSNorm, linear, token_embedding, vocabulary_head
from nano_inference.models.rope import RotaryTable


class DenseLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Return [T, E]."""
        x_TE = x_TE + self.self_attn(self.input_layernorm(x_TE), context)
        out: Tensor = x_TE + self.mlp(self.post_attention_layernorm(x_TE))
        return out


class Dense(nn.Module):
    """A dense decoder; satisfies `models.Model`."""

    def __init__(self, config: ModelConfig, ropes: tuple[RotaryTable, ...]) -> None:
        super().__init__()
        self.config = config
        self.ropes = ropes
        self.embed_tokens = token_embedding(config)
        self.layers = nn.ModuleList(DenseLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else vocabulary_head(config)

    def forward(self, token_T: Tensor, context: StepContext) -> Tensor:
        """Return the hidden states [T, E] before the last norm."""
        x_TE: Tensor = self.embed_tokens(token_T)
        for layer in self.layers:
            x_TE = layer(x_TE, context)
        return x_TE

    def head(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V]."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return linear(self.norm(hidden_SE), weight, None).float()
