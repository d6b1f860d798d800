"""nanochat's forward pass by its formulas: dense, uncached, on the weights of a `GPT`. The reference for its program.

Shapes: B rows, T tokens, E embedding size, H heads, K kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.nanochat.gpt import GPT


@torch.inference_mode()
def plain_logits(gpt: GPT, ids_BT: Tensor) -> Tensor:
    """Return float32 logits (B, T, V)."""
    return logits_with_graph(gpt, ids_BT)


def logits_with_graph(gpt: GPT, ids_BT: Tensor, num_prompt: int | None = None) -> Tensor:
    """Return float32 or float64 logits (B, T, V), differentiable.

    With `num_prompt`, later tokens attend to all keys (decode_window=full).
    """
    config, terms, weights = gpt.model.config, gpt.terms, gpt.weights
    prev_BT = functional.pad(ids_BT[:, :-1], (1, 0), value=-1)
    x_BTE = start_BTE = middle_BTE = embedded(gpt, ids_BT, prev_BT)
    for index in range(config.num_layers):
        at = f"transformer.h.{index}"
        if terms.has_lambdas:
            x_BTE = weights["resid_lambdas"][index] * x_BTE + weights["x0_lambdas"][index] * start_BTE
        if terms.bigram_rows:
            last = terms.bigram_rows - 1
            row_BT = torch.where(prev_BT < 0, last, ((36313 * ids_BT) ^ (27191 * prev_BT)) % last)
            x_BTE = x_BTE + weights["bigram_lambdas"][index] * weights["bigram_embed.embed.weight"][row_BT]
        x_BTE = x_BTE + attended(gpt, norm(gpt, x_BTE), ids_BT, index, num_prompt)
        inner = functional.relu(norm(gpt, x_BTE) @ weights[f"{at}.mlp.c_fc.weight"].T).square()
        x_BTE = x_BTE + inner @ weights[f"{at}.mlp.c_proj.weight"].T
        if index == config.num_layers // 2:
            middle_BTE = x_BTE
    if terms.has_backout:
        x_BTE = x_BTE - weights["backout_lambda"][0] * middle_BTE
    logits_BTV = norm(gpt, x_BTE) @ weights["lm_head.weight"][: config.vocab_size].T
    logits_BTV = wide(logits_BTV)
    cap = config.logits_softcap
    return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or float64."""
    return x if x.dtype == torch.float64 else x.float()


def norm(gpt: GPT, x: Tensor) -> Tensor:
    """Return x · rsqrt(mean(x²) + ε)."""
    x32 = wide(x)
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + gpt.model.config.norm_eps)).to(x.dtype)


def embedded(gpt: GPT, ids_BT: Tensor, prev_BT: Tensor) -> Tensor:
    """Return norm(wte[id]), plus λ·σ(w·e[:24]) times that of the predecessor from the second token on (G4)."""
    table_VE = gpt.weights["transformer.wte.weight"]
    e_BTE = norm(gpt, table_VE[ids_BT])
    if not gpt.terms.smear_columns:
        return e_BTE
    gate_BT1 = torch.sigmoid(e_BTE[..., : gpt.terms.smear_columns] @ gpt.weights["smear_gate.weight"].T)
    smeared_BTE = e_BTE + gpt.weights["smear_lambda"][0] * gate_BT1 * norm(gpt, table_VE[prev_BT.clamp(min=0)])
    return torch.where(prev_BT[..., None] < 0, e_BTE, smeared_BTE)


def attended(gpt: GPT, a_BTE: Tensor, ids_BT: Tensor, index: int, num_prompt: int | None) -> Tensor:
    """Return one layer's attention: q and k rotated, normed and scaled; v plus gated value embedding (from G2)."""
    at, head_dim, num_tokens = f"transformer.h.{index}.attn", gpt.model.config.head_dim, ids_BT.size(1)
    q_BTHD, k_BTKD, v_BTKD = (
        (a_BTE @ gpt.weights[f"{at}.{part}.weight"].T).unflatten(-1, (-1, head_dim)) for part in ("c_q", "c_k", "c_v")
    )
    gate = gpt.weights.get(f"{at}.ve_gate.weight")
    if gate is not None:
        value_BTKD = gpt.weights[f"value_embeds.{index}.weight"][ids_BT].view_as(v_BTKD)
        gate_BTK = gpt.terms.gate_scale * torch.sigmoid(a_BTE[..., : gpt.terms.gate_columns] @ gate.T)
        v_BTKD = v_BTKD + gate_BTK[..., None] * value_BTKD
    cos, sin = rotation(gpt, num_tokens, a_BTE.dtype)
    q_BTHD, k_BTKD = (gpt.terms.qk_scale * norm(gpt, rotated(x, cos, sin)) for x in (q_BTHD, k_BTKD))
    query_T, key_T = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    window = gpt.model.config.layers[index].window or num_tokens + 1
    mask_TT = (key_T <= query_T) & (key_T > query_T - window)
    if num_prompt is not None:
        mask_TT |= (key_T <= query_T) & (query_T >= num_prompt)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    out_BHTD = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT, enable_gqa=q.size(1) != k.size(1))
    return out_BHTD.transpose(1, 2).flatten(2) @ gpt.weights[f"{at}.c_proj.weight"].T


def rotation(gpt: GPT, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (1, T, 1, D/2) of position · base^(-2j/D), rounded to the table's precision."""
    head_dim, rope = gpt.model.config.head_dim, gpt.model.config.ropes[0]
    theta_D = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_TD = torch.outer(torch.arange(num_tokens, dtype=torch.float32), theta_D)[None, :, None]
    rounded = torch.bfloat16 if rope.table_dtype == "bfloat16" else torch.float32
    return angle_TD.cos().to(rounded).to(dtype), angle_TD.sin().to(rounded).to(dtype)


def rotated(x_BTHD: Tensor, cos_1T1D: Tensor, sin_1T1D: Tensor) -> Tensor:
    """Rotate the pairs (j, j + D/2) by minus the angle."""
    first, second = x_BTHD.chunk(2, dim=-1)
    turned = (first * cos_1T1D + second * sin_1T1D, -first * sin_1T1D + second * cos_1T1D)
    return torch.cat(turned, dim=-1)
