"""The parts that decoders are made of. Weights keep Hugging Face's values; projections that read one input are fused.

Shapes: T tokens of the step, E hidden size, F inner size of the MLP, H heads, K kv heads, D head size, R rotary size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_inference.attention import AttentionSpec, StepContext
from nano_inference.models.config import Activation, LayerConfig, ModelConfig

_SWAPPED_ROWS = range(3, 49)


def linear(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return x W^T + b, [T, F]; in column-major order where that is the faster product.

    On a CPU, MKL's float32 product of a few dozen rows is about twice as fast when the weights stand on the left
    (docs/log.md has the measurements); with one or two rows, and with many, the plain order is.
    """
    if x_TE.device.type != "cpu" or x_TE.size(0) not in _SWAPPED_ROWS:
        return functional.linear(x_TE, weight_FE, bias_F)
    out_FT = torch.mm(weight_FE, x_TE.t())
    return out_FT.t() if bias_F is None else out_FT.add_(bias_F.unsqueeze(-1)).t()


class Linear(nn.Module):
    """One or several projections of the same input, their weights stacked."""

    def __init__(self, num_in: int, parts: dict[str, int], *, bias: bool) -> None:
        super().__init__()
        self.parts = parts
        """Name in the checkpoint -> rows, in order."""
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts.values())), requires_grad=False) if bias else None

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return all projections side by side, [T, sum of rows]."""
        return linear(x_TE, self.weight, self.bias)

    def slots(self, path: str) -> dict[str, Tensor]:
        """Return a view of each projection's rows under its name beside the module's path."""
        parent = path.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        slots: dict[str, Tensor] = {}
        start = 0
        for name, rows in self.parts.items():
            slots[f"{prefix}{name}.weight"] = self.weight.data[start : start + rows]
            if self.bias is not None:
                slots[f"{prefix}{name}.bias"] = self.bias.data[start : start + rows]
            start += rows
        return slots


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, in float32 (arXiv 1910.07467)."""
    x32 = x.float()
    mean_square: Tensor = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.size(-1))
    return x32 * mean_square.add_(eps).rsqrt_()


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + weight), computed in float32 (arXiv 1910.07467; Gemma's offset is 1)."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension, in the input's dtype."""
        x32 = rms_norm(x, self.eps)
        if self.offset:
            return (x32 * (self.offset + self.weight.float())).to(x.dtype)
        return x32.to(x.dtype) * self.weight

    def slots(self, path: str) -> dict[str, Tensor]:
        """Return the weight under its name below the module's path."""
        return {f"{path}.weight": self.weight.data}


def rotate(x_THD: Tensor, cos_T1R: Tensor, signed_sin_T1R: Tensor) -> Tensor:
    """Turn the first R of D dimensions by the position, halves paired (GPT-NeoX's layout, Hugging Face's files).

    The sine of the first half comes with its minus sign, so that swapping the halves is all that is left to do.
    """
    rotary_dim = cos_T1R.size(-1)
    x_THR = x_THD[..., :rotary_dim]
    turned_THR = torch.addcmul(x_THR * cos_T1R, x_THR.roll(rotary_dim // 2, dims=-1), signed_sin_T1R)
    if rotary_dim == x_THD.size(-1):
        return turned_THR
    return torch.cat((turned_THR, x_THD[..., rotary_dim:]), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; how K/V is read is the backend's."""

    def __init__(self, config: ModelConfig, layer_index: int, *, norm_offset: float = 0.0) -> None:
        super().__init__()
        layer: LayerConfig = config.layers[layer_index]
        self.layer_index = layer_index
        self.rope = layer.rope
        self.head_dim = config.head_dim
        self.spec = AttentionSpec(config.scale, layer.window, config.attention_softcap)
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        parts = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
        self.qkv_proj = Linear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(num_q, {"o_proj": config.hidden_size}, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, offset=norm_offset) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, offset=norm_offset) if config.qk_norm else None

    def forward(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Project, turn, attend, project back."""
        qkv_TXD = self.qkv_proj(x_TE).reshape(x_TE.size(0), -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD, v_TKD = qkv_TXD.split(self.heads, dim=1)
            qk_TXD = torch.cat((self.q_norm(q_THD), self.k_norm(k_TKD)), dim=1)
        else:
            qk_TXD, v_TKD = qkv_TXD.tensor_split((-self.heads[2],), dim=1)
        if self.rope is not None:
            qk_TXD = rotate(qk_TXD, *context.ropes[self.rope])
        q_THD, k_TKD = qk_TXD.tensor_split((self.heads[0],), dim=1)
        out_THD = context.attend(q_THD, k_TKD, v_TKD, self.layer_index, self.spec)
        out: Tensor = self.o_proj(out_THD.flatten(1))
        return out


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)) (GLU variants, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = Linear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, {"down_proj": config.hidden_size}, bias=config.mlp_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return [T, E]."""
        gate_TF, up_TF = self.gate_up_proj(x_TE).chunk(2, dim=-1)
        if self.activation == "silu":
            gate_TF = functional.silu(gate_TF)
        else:
            gate_TF = functional.gelu(gate_TF, approximate="tanh")
        out: Tensor = self.down_proj(gate_TF * up_TF)
        return out


class Embedding(nn.Module):
    """A table with a row for each token; a tied model projects back onto the vocabulary with it."""

    def __init__(self, num_rows: int, num_columns: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_rows, num_columns), requires_grad=False)

    def forward(self, token_T: Tensor) -> Tensor:
        """Return [T, E]; Gemma's scale is rounded to the weights' dtype first, as it was in training."""
        x_TE = functional.embedding(token_T, self.weight)
        if self.scale is None:
            return x_TE
        return x_TE * torch.tensor(self.scale, dtype=x_TE.dtype)

    def slots(self, path: str) -> dict[str, Tensor]:
        """Return the table under its name below the module's path."""
        return {f"{path}.weight": self.weight.data}


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap·tanh(x/cap), or x when there is no cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def token_embedding(config: ModelConfig) -> Embedding:
    """Return the table of a model's token embeddings."""
    return Embedding(config.vocab_size, config.hidden_size, scale=config.embedding_scale)


def vocabulary_head(config: ModelConfig) -> Linear:
    """Return the untied projection onto the vocabulary."""
    return Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False)
