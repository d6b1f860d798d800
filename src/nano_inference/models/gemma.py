"""Gemma 2 and Gemma 3 (text): norms on both sides of each part, (1 + weight) norms, scaled embeddings, soft caps.

Shapes: T tokens of the step, S rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from nano_inference.attention import StepContext
from nano_inference.models.config import ModelConfig
from nano_inference.models.layers import Attention, GatedMLP, RMSNorm, linear, softcap, token_embedding, vocabulary_head
from nano_inference.models.rope import RotaryTable

_NORM_OFFSET = 1.0


class GemmaLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps, offset=_NORM_OFFSET)
        self.self_attn = Attention(config, layer_index, norm_offset=_NORM_OFFSET)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=_NORM_OFFSET)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, offset=_NORM_OFFSET)
        self.mlp = GatedMLP(config)
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=_NORM_OFFSET)

    def forward(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Return [T, E]."""
        x_TE = x_TE + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_TE), context))
        out: Tensor = x_TE + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TE)))
        return out


class Gemma(nn.Module):
    """A Gemma decoder; satisfies `models.Model`."""

    def __init__(self, config: ModelConfig, ropes: tuple[RotaryTable, ...]) -> None:
        super().__init__()
        self.config = config
        self.ropes = ropes
        self.embed_tokens = token_embedding(config)
        self.layers = nn.ModuleList(GemmaLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, offset=_NORM_OFFSET)
        self.lm_head = None if config.tie_embeddings else vocabulary_head(config)

    def forward(self, token_T: Tensor, context: StepContext) -> Tensor:
        """Return the hidden states [T, E] before the last norm."""
        x_TE: Tensor = self.embed_tokens(token_T)
        for layer in self.layers:
            x_TE = layer(x_TE, context)
        return x_TE

    def head(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V], soft-capped where the family does so."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return softcap(linear(self.norm(hidden_SE), weight, None).float(), self.config.logits_softcap)
