"""Operations and bytes of inference, counted as upstream's `GPT` counts them (scripts/infer_bench.py). No torch.

A token with `n` tokens of context, its own included, attends to at most the layer's window of them: upstream counts the
window without the query's own key, one key fewer than attention reads beyond the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_inference.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Sizes that determine the cost of a token."""

    matmul_params: int  # weights in matrix products, the head's padding included; embeddings are look-ups
    attention_width: int  # query heads times their size
    windows: Sequence[int | None]  # tokens before a query to which each layer attends; None is all
    kv_layer_bytes: int  # bytes of one token's keys and values in one layer

    def decode_flops(self, num_context: int) -> int:
        """Return the operations of one token: 2 per weight, 4 per visible key and element of the queries."""
        seen = sum(_visible(num_context, window) for window in self.windows)
        return 2 * self.matmul_params + 4 * self.attention_width * seen

    def prefill_flops(self, num_tokens: int) -> int:
        """Return the operations of a prompt, with logits of every token."""
        seen = 0
        for window in self.windows:
            full = _visible(num_tokens, window)
            seen += full * (full + 1) // 2 + (num_tokens - full) * full
        return 2 * self.matmul_params * num_tokens + 4 * self.attention_width * seen

    def kv_read_bytes(self, num_context: int) -> int:
        """Return the bytes of keys and values that one token reads."""
        return self.kv_layer_bytes * sum(_visible(num_context, window) for window in self.windows)


def costs_of(config: ModelConfig, matmul_params: int, num_bytes: int) -> Costs:
    """Return the costs of a model whose cache has `num_bytes` per value; windows of `config` include the query."""
    return Costs(
        matmul_params=matmul_params,
        attention_width=config.num_heads * config.head_dim,
        windows=tuple(None if layer.window is None else layer.window - 1 for layer in config.layers),
        kv_layer_bytes=2 * config.num_kv_heads * config.head_dim * num_bytes,
    )


def _visible(num_context: int, window: int | None) -> int:
    return num_context if window is None else min(num_context, window)
