"""nanochat (karpathy/nanochat), generations G0 to G4: one decoder whose terms come and go with `NanochatTerms`.

What mixes a token with the one before it (smear, hashed pairs) is a function of the predecessor's id, which every step
brings along: nothing is remembered between steps, so chunks, prefix hits and preemption change nothing.

Shapes: T tokens of the step, S rows whose logits are wanted, E hidden size, F inner size of the MLP, H heads, K kv
heads, D head size, L layers, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano_inference.attention import AttentionSpec, StepContext
from nano_inference.models.config import ModelConfig, NanochatTerms
from nano_inference.models.layers import Embedding, Linear, linear, rms_norm, rotate, softcap
from nano_inference.models.rope import RotaryTable

_BIGRAM_FACTORS = (36313, 27191)
_HF_NAMES = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.h.", "model.layers."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".attn.c_", ".self_attn."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)


def hf_name(name: str) -> str:
    """Return what Transformers' port (models/nanochat, G0 only) calls one of nanochat's weights."""
    for ours, theirs in _HF_NAMES:
        name = name.replace(ours, theirs)
    for part in ("q", "k", "v"):
        name = name.replace(f".self_attn.{part}.", f".self_attn.{part}_proj.")
    return name


def norm(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) in the input's dtype: nanochat's norms have no weights."""
    return rms_norm(x, eps).to(x.dtype)


def bigram_rows_of(token_T: Tensor, prev_T: Tensor, num_rows: int) -> Tensor:
    """Return each token's row in the table of hashed pairs, [T]; the last row stands for a text's first token."""
    ours, theirs = _BIGRAM_FACTORS
    row_T = torch.bitwise_xor(token_T * ours, prev_T * theirs) % (num_rows - 1)
    return torch.where(prev_T < 0, num_rows - 1, row_T)


class Scalars(nn.Module):
    """Learnt numbers, kept in float32 whatever the model's precision: they scale whole layers."""

    keeps_float32 = True

    def __init__(self, terms: NanochatTerms, num_layers: int) -> None:
        super().__init__()
        sizes = {"resid_lambdas": num_layers, "x0_lambdas": num_layers} if terms.has_lambdas else {}
        sizes |= {"bigram_lambdas": num_layers} if terms.bigram_rows else {}
        sizes |= {"smear_lambda": 1} if terms.smear_columns else {}
        sizes |= {"backout_lambda": 1} if terms.has_backout else {}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size), requires_grad=False))

    def slots(self, path: str) -> dict[str, Tensor]:
        """Return the numbers under their names beside the module's path."""
        return {name: weight.data for name, weight in self.named_parameters()}

    def at(self, name: str, index: int = 0) -> Tensor:
        """Return one number as a tensor without dimensions, which does not widen what it is multiplied with."""
        return self.get_parameter(name)[index]


class NanochatAttention(nn.Module):
    """Rotation, then norm of q and k; values mixed with a table's, gated for each kv head."""

    def __init__(self, config: ModelConfig, terms: NanochatTerms, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.eps = config.norm_eps
        # q and k are each scaled by qk_scale; so is their product by its square, without touching either.
        scale = config.scale * terms.qk_scale**2
        self.spec = AttentionSpec(scale, config.layers[layer_index].window, config.attention_softcap)
        self.heads = (config.num_heads + config.num_kv_heads, config.num_kv_heads)
        self.num_heads = config.num_heads
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.c_qkv = Linear(config.hidden_size, {"c_q": num_q, "c_k": num_kv, "c_v": num_kv}, bias=False)
        self.c_proj = Linear(num_q, {"c_proj": config.hidden_size}, bias=False)
        self.gate_columns, self.gate_scale = terms.gate_columns, terms.gate_scale
        self.ve_gate: Linear | None = None
        if terms.has_value_embedding(layer_index, config.num_layers):
            self.ve_gate = Linear(terms.gate_columns, {"ve_gate": config.num_kv_heads}, bias=False)

    def forward(self, a_TE: Tensor, value_TKD: Tensor | None, context: StepContext) -> Tensor:
        """Attend from the normalised input; `value_TKD` are the tokens' value embeddings, where the layer has them."""
        qkv_TXD = self.c_qkv(a_TE).reshape(a_TE.size(0), -1, self.head_dim)
        qk_TXD, v_TKD = qkv_TXD.split(self.heads, dim=1)
        if self.ve_gate is not None and value_TKD is not None:
            gate_TK = self.gate_scale * torch.sigmoid(self.ve_gate(a_TE[:, : self.gate_columns]))
            v_TKD = v_TKD + gate_TK.unsqueeze(-1) * value_TKD
        qk_TXD = norm(rotate(qk_TXD, *context.ropes[0]), self.eps)
        q_THD, k_TKD = qk_TXD.tensor_split((self.num_heads,), dim=1)
        out_THD = context.attend(q_THD, k_TKD, v_TKD, self.layer_index, self.spec)
        out: Tensor = self.c_proj(out_THD.flatten(1))
        return out


class SquaredMLP(nn.Module):
    """down(relu(up(x))²) (Primer, arXiv 2109.08668)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden_size, {"c_fc": config.intermediate_size}, bias=False)
        self.c_proj = Linear(config.intermediate_size, {"c_proj": config.hidden_size}, bias=False)

    def forward(self, a_TE: Tensor) -> Tensor:
        """Return [T, E]."""
        out: Tensor = self.c_proj(functional.relu(self.c_fc(a_TE)).square())
        return out


class NanochatLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, terms: NanochatTerms, layer_index: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attn = NanochatAttention(config, terms, layer_index)
        self.mlp = SquaredMLP(config)

    def forward(self, x_TE: Tensor, value_TKD: Tensor | None, context: StepContext) -> Tensor:
        """Return [T, E]."""
        x_TE = x_TE + self.attn(norm(x_TE, self.eps), value_TKD, context)
        out: Tensor = x_TE + self.mlp(norm(x_TE, self.eps))
        return out


class Nanochat(nn.Module):
    """A nanochat decoder of any generation; satisfies `models.Model`."""

    def __init__(self, config: ModelConfig, ropes: tuple[RotaryTable, ...]) -> None:
        super().__init__()
        assert config.nanochat is not None
        terms, num_layers = config.nanochat, config.num_layers
        self.config, self.terms, self.ropes = config, terms, ropes
        layers = nn.ModuleList(NanochatLayer(config, terms, i) for i in range(num_layers))
        wte = Embedding(terms.padded_vocab_size, config.hidden_size)
        self.transformer = nn.ModuleDict({"wte": wte, "h": layers})
        self.lm_head = Linear(config.hidden_size, {"lm_head": terms.padded_vocab_size}, bias=False)
        num_kv = config.num_kv_heads * config.head_dim
        with_values = [i for i in range(num_layers) if terms.has_value_embedding(i, num_layers)]
        self.value_embeds = nn.ModuleDict({str(i): Embedding(terms.padded_vocab_size, num_kv) for i in with_values})
        self.smear_gate = Linear(terms.smear_columns, {"smear_gate": 1}, bias=False) if terms.smear_columns else None
        bigrams = {"embed": Embedding(terms.bigram_rows, config.hidden_size)} if terms.bigram_rows else {}
        self.bigram_embed = nn.ModuleDict(bigrams)
        self.scalars = Scalars(terms, num_layers)

    def forward(self, token_T: Tensor, context: StepContext) -> Tensor:
        """Return the hidden states [T, E] before the last norm."""
        prev_T = context.step.prev_T
        x_TE = start_TE = self._embed(token_T, prev_T)
        pair_TE = self._pairs(token_T, prev_T)
        middle_TE = x_TE
        for index, layer in enumerate(self._layers()):
            x_TE = self._mix(x_TE, start_TE, pair_TE, index)
            x_TE = layer(x_TE, self._values(token_T, index), context)
            if index == self.config.num_layers // 2:
                middle_TE = x_TE
        if self.terms.has_backout:
            x_TE = x_TE - self.scalars.at("backout_lambda") * middle_TE
        return x_TE

    def head(self, hidden_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V], soft-capped; the padding's logits are left out."""
        weight_VE = self.lm_head.weight[: self.config.vocab_size]
        logits_SV = linear(norm(hidden_SE, self.config.norm_eps), weight_VE, None).float()
        return softcap(logits_SV, self.config.logits_softcap)

    def _layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.transformer["h"])

    def _embed(self, token_T: Tensor, prev_T: Tensor) -> Tensor:
        """Return the tokens' normalised embeddings, each smeared with its predecessor's where the model does so."""
        wte, eps = self.transformer["wte"], self.config.norm_eps
        e_TE: Tensor = norm(wte(token_T), eps)
        if self.smear_gate is None:
            return e_TE
        gate_T1 = self.scalars.at("smear_lambda") * torch.sigmoid(self.smear_gate(e_TE[:, : self.terms.smear_columns]))
        before_TE = norm(wte(prev_T.clamp(min=0)), eps)
        return torch.where((prev_T < 0).unsqueeze(-1), e_TE, e_TE + gate_T1 * before_TE)

    def _pairs(self, token_T: Tensor, prev_T: Tensor) -> Tensor | None:
        """Return the embeddings of the tokens' hashed pairs, None for a model without them."""
        if not self.terms.bigram_rows:
            return None
        pair_TE: Tensor = self.bigram_embed["embed"](bigram_rows_of(token_T, prev_T, self.terms.bigram_rows))
        return pair_TE

    def _mix(self, x_TE: Tensor, start_TE: Tensor, pair_TE: Tensor | None, index: int) -> Tensor:
        """Return a layer's input: the residual, the embedding and the hashed pair, each with the layer's weight."""
        if not self.terms.has_lambdas:
            return x_TE
        scalars = self.scalars
        x_TE = scalars.at("resid_lambdas", index) * x_TE + scalars.at("x0_lambdas", index) * start_TE
        return x_TE if pair_TE is None else x_TE + scalars.at("bigram_lambdas", index) * pair_TE

    def _values(self, token_T: Tensor, index: int) -> Tensor | None:
        """Return a layer's value embeddings [T, K, D] of the tokens, None where it has none."""
        if str(index) not in self.value_embeds:
            return None
        value_TX = self.value_embeds[str(index)](token_T)
        return cast(Tensor, value_TX.view(token_T.size(0), self.config.num_kv_heads, self.config.head_dim))
