"""A model's program with gradients: the operations of `models.ops` in torch's differentiable functions.

The backward pass of `train_logprobs` runs it on whole sequences, without padding: the tokens of all texts one after the
other, texts of one length side by side. Its values are close to the engine's (1e-6 in float32), not equal: only its
gradient is used.

Shapes: T tokens of all texts, N scored tokens, G texts of one length, L tokens of each, W width of a buffer, E hidden
size, H query heads, J kv heads, D head size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.executors.torch import ops as compute
from nano_inference.executors.torch import states
from nano_inference.executors.torch.attention.masks import create_attention_mask
from nano_inference.models import ops
from nano_inference.models.program import Program, live_after
from nano_inference.models.rope import RotaryTable
from nano_inference.types import SamplingParams

SCORES = 1 << 20
"""Most attention scores of one head in memory at a time, for more than one text."""


@dataclass(frozen=True)
class Texts:
    """Sequences, of which the tokens from `starts` on are scored as sampled with `params`."""

    ids: Sequence[Sequence[int]]
    starts: Sequence[int]
    """At least 1 for each text."""
    params: Sequence[SamplingParams]
    stop_ids: Sequence[frozenset[int]]
    """Ids that `min_tokens` bans."""


@dataclass(frozen=True)
class Group:
    """Texts of one length, whose tokens are adjacent."""

    tokens: slice
    num_texts: int
    masks: Mapping[int | None, Tensor | None]
    """For each window, [L, L] bool; None: causal."""


@dataclass(frozen=True)
class Tokens:
    """What operations read beside buffers and weights. Texts are sorted by length."""

    token_T: Tensor
    prev_T: Tensor
    groups: Sequence[Group]
    ropes: Sequence[tuple[Tensor, Tensor]]
    kept_N: Tensor
    """The token before each scored one, in the order in which texts were given."""


@dataclass(frozen=True)
class Part:
    """Adjacent operations, and the buffers that later ones read."""

    ops: Sequence[ops.Op]
    results: Sequence[str]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(spec.name for op in self.ops for spec in op.weights))


Buffers = dict[str, Tensor]
_Operation = Callable[[Any, Buffers, Mapping[str, Tensor], Tokens], Sequence[Tensor]]
"""Returns the values of `op.writes`."""


def unsupported(program: Program) -> list[str]:
    """Return the names of a program's operations that have no gradient here."""
    return sorted({type(op).__name__ for op in program.ops} - {one.__name__ for one in (*DIFFERENTIABLE, *_OTHERS)})


def parts_of(program: Program, *, by_layer: bool) -> list[Part]:
    """Split a body once between two layers, where the fewest buffers are live; one part without `by_layer`."""
    body, live = program.body, live_after(program.body, "x")
    attends = (
        [index for index, op in enumerate(body) if isinstance(op, ops.Attend | ops.GatedDelta)] if by_layer else []
    )
    cuts = [min(range(one, other), key=lambda i: (len(live[i]), -i)) + 1 for one, other in pairwise(attends)]
    return [Part(body[i:j], sorted(live[j - 1])) for i, j in pairwise([0, *cuts, len(body)])]


def run_part(part: Part, given: Mapping[str, Tensor], weights: Mapping[str, Tensor], tokens: Tokens) -> Buffers:
    """Return the part's results; [N, W] in the order of scored tokens after `Keep`, else [T, W]."""
    buffers = dict(given)
    for op in part.ops:
        if isinstance(op, ops.Keep):
            buffers = {name: value[tokens.kept_N] for name, value in buffers.items()}
        elif not isinstance(op, ops.Store):  # whole sequences need no cache
            values = DIFFERENTIABLE[type(op)](op, buffers, weights, tokens)
            buffers.update(zip(op.writes, values, strict=True))
    return {name: buffers[name] for name in part.results}


def tokens_of(program: Program, texts: Texts, dtype: torch.dtype, device: torch.device) -> Tokens:
    """Return the tokens of texts, sorted by length."""

    def kind(index: int) -> tuple[int, int]:
        return len(texts.ids[index]), texts.starts[index] if program.has_full_decode else 0

    order = sorted(range(len(texts.ids)), key=kind)
    ids = [texts.ids[index] for index in order]
    groups, begins, num_tokens = [], [0] * len(order), 0
    for (length, start), members in groupby(order, kind):
        masks = {window: _mask(length, window, start, program, device) for window in program.windows}
        texts_of_kind, most = list(members), max(1, SCORES // length**2)
        for first in range(0, len(texts_of_kind), most):
            some = texts_of_kind[first : first + most]
            groups.append(Group(slice(num_tokens, num_tokens + len(some) * length), len(some), masks))
            for index in some:
                begins[index] = num_tokens
                num_tokens += length
    scored = zip(begins, texts.ids, texts.starts, strict=True)
    position_T = torch.cat([torch.arange(len(one), device=device) for one in ids])
    return Tokens(
        token_T=torch.tensor([token for one in ids for token in one], device=device),
        prev_T=torch.tensor([token for one in ids for token in (-1, *one[:-1])], device=device),
        groups=groups,
        ropes=[RotaryTable(rope, device).at(position_T, dtype) for rope in program.ropes],
        kept_N=torch.tensor(
            [begin + place - 1 for begin, one, start in scored for place in range(start, len(one))],
            dtype=torch.long,
            device=device,
        ),
    )


def _mask(length: int, window: int | None, start: int, program: Program, device: torch.device) -> Tensor | None:
    if window is None or window >= length:
        return None
    place_L = torch.arange(length, device=device)
    mask_LL = create_attention_mask(place_L, place_L, window)
    if program.has_full_decode:  # windows restrict prompts only
        mask_LL[start:] = create_attention_mask(place_L[start:], place_L)
    return mask_LL


# ---- operations -----------------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * (offset + weight) if offset else x * weight


def _heads(buffer_TW: Tensor, head_dim: int) -> Tensor:
    return buffer_TW.reshape(buffer_TW.size(0), -1, head_dim)


def _embed(op: ops.Embed, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    table = weights[op.table.name]
    scale = None if op.scale == 1.0 else torch.tensor(op.scale, dtype=table.dtype)
    return [compute.embed(table, tokens.token_T, tokens.prev_T, op.rows, scale, op.part, sparse=True)]


def _copy(op: ops.Copy, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [at[op.x]]


def _norm(op: ops.Norm, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [_rms_norm(at[op.x], None if op.weight is None else weights[op.weight.name], op.eps, op.offset)]


def _linear(op: ops.Linear, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    x_TK = at[op.x]
    matrices = [weights[matrix.name] for matrix in op.matrices]
    if op.matrices[0].shape[1] < x_TK.size(1):
        x_TK = x_TK[:, : op.matrices[0].shape[1]]
    if op.num_rows is not None:  # the gradient of a slice is a second matrix
        matrices = [matrix[: op.num_rows] for matrix in matrices]
    biases: list[Tensor | None] = [weights[bias.name] for bias in op.biases]
    pairs = zip(matrices, biases or [None] * len(matrices), strict=True)
    return [functional.linear(x_TK, matrix, bias) for matrix, bias in pairs]


def _head_norm(op: ops.HeadNorm, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    norms: list[Tensor | None] = [weights[norm.name] for norm in op.norms]
    pairs = zip(op.x, norms or [None] * len(op.x), strict=True)
    return [_rms_norm(_heads(at[x], op.head_dim), weight, op.eps, op.offset).flatten(-2) for x, weight in pairs]


def _rotate(op: ops.Rotate, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    cos_T1R, sin_T1R = tokens.ropes[op.rope]
    return [compute.rotate(_heads(at[x], op.head_dim), cos_T1R, sin_T1R).flatten(-2) for x in op.x]


def _by_group(tokens: Tokens, compute_group: Callable[..., Tensor], *values_T: Tensor) -> Tensor:
    """Return the values [G, L, …] of a function of each group and its rows [G, L, …] of `values_T`, as [T, …]."""
    found = []
    for group in tokens.groups:
        rows = (value[group.tokens].view(group.num_texts, -1, *value.shape[1:]) for value in values_T)
        found.append(compute_group(group, *rows).flatten(0, 1))
    return torch.cat(found)


def _attend(op: ops.Attend, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    q_THD, k_TJD, v_TJD = (_heads(at[name], op.head_dim) for name in (op.q, op.k, op.v))

    def attend(group: Group, q_GLHD: Tensor, k_GLJD: Tensor, v_GLJD: Tensor) -> Tensor:
        q_GHLD, k_GJLD, v_GJLD = (x.transpose(1, 2) for x in (q_GLHD, k_GLJD, v_GLJD))
        out_GHLD = _attended(op, q_GHLD, k_GJLD, v_GJLD, group.masks[op.window])
        return out_GHLD.transpose(1, 2).flatten(2)

    return [_by_group(tokens, attend, q_THD, k_TJD, v_TJD)]


def _attended(op: ops.Attend, q_GHLD: Tensor, k_GJLD: Tensor, v_GJLD: Tensor, mask_LL: Tensor | None) -> Tensor:
    if op.softcap is None:
        return functional.scaled_dot_product_attention(
            q_GHLD, k_GJLD, v_GJLD, attn_mask=mask_LL, is_causal=mask_LL is None, scale=op.scale, enable_gqa=True
        )
    k, v = (x.repeat_interleave(op.num_heads // op.num_kv_heads, dim=1) for x in (k_GJLD, v_GJLD))
    score = compute.softcap(q_GHLD @ k.transpose(-1, -2) * op.scale, op.softcap)
    if mask_LL is None:
        place_L = torch.arange(score.size(-1), device=score.device)
        mask_LL = create_attention_mask(place_L, place_L)
    return score.masked_fill(~mask_LL, -torch.inf).softmax(-1) @ v


def _add(op: ops.Add, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [at[op.x] + at[op.y]]


def _mix(op: ops.Mix, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    x_TW = at[op.x] if op.a is None else weights[op.a.weight.name][op.a.index] * at[op.x]
    return [x_TW + op.sign * (weights[op.b.weight.name][op.b.index] * at[op.y])]


def _activate(op: ops.Activate, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [compute.activate(op.kind, at[op.gate], None if op.up is None else at[op.up])]


def _gate_values(op: ops.GateValues, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [compute.gate_values(_heads(at[op.v], op.head_dim), at[op.gate], at[op.more], op.scale).flatten(-2)]


def _smear(op: ops.Smear, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    share = weights[op.share.weight.name][op.share.index]
    return [compute.smear(at[op.x], at[op.gate], at[op.before], share, tokens.prev_T)]


def _softcap(op: ops.Softcap, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [compute.softcap(at[op.x], op.cap)]


def _unzip(op: ops.Unzip, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [part.flatten(1) for part in torch.split(_heads(at[op.x], sum(op.widths)), list(op.widths), dim=2)]


def _convolve(op: ops.Convolve, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    weight_C1K = weights[op.weight.name]

    def convolve(group: Group, x_GLC: Tensor) -> Tensor:
        x_GCS = functional.pad(x_GLC.transpose(1, 2), (weight_C1K.size(2) - 1, 0))
        return functional.conv1d(x_GCS, weight_C1K, groups=weight_C1K.size(0)).transpose(1, 2)

    out_TC = functional.silu(_by_group(tokens, convolve, torch.cat([at[name] for name in op.x], dim=1)))
    return list(torch.split(out_TC, list(op.widths), dim=1))


def _gated_delta(op: ops.GatedDelta, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    numbers = (weights[op.a_log.name], weights[op.dt_bias.name])
    q_THX, k_THX, g_TH, beta_TH = compute.delta_inputs(op, at[op.q], at[op.k], at[op.a], at[op.b], *numbers)

    def rule(group: Group, *inputs_GL: Tensor) -> Tensor:
        q_LYX, k_LYX, v_LYV, g_LY, beta_LY = (x.transpose(0, 1).flatten(1, 2) for x in inputs_GL)
        zero_YXV = v_LYV.new_zeros((v_LYV.size(1), *op.state_shape[1:]))  # Y heads of all texts: none reads another
        out_LYV, _ = states.advanced(q_LYX, k_LYX, v_LYV, g_LY, beta_LY, zero_YXV, 0)
        return out_LYV.view(out_LYV.size(0), group.num_texts, -1, op.v_dim).transpose(0, 1)

    return [_by_group(tokens, rule, q_THX, k_THX, _heads(at[op.v], op.v_dim), g_TH, beta_TH).flatten(1)]


def _gated_norm(op: ops.GatedNorm, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    normed_TYV = _rms_norm(_heads(at[op.x], op.head_dim), weights[op.weight.name], op.eps, 0.0)
    return [normed_TYV.flatten(1) * functional.silu(at[op.gate])]


def _gate(op: ops.Gate, at: Buffers, weights: Mapping[str, Tensor], tokens: Tokens) -> list[Tensor]:
    return [at[op.x] * at[op.gate].sigmoid()]


DIFFERENTIABLE: Mapping[type[Any], _Operation] = {
    ops.Embed: _embed,
    ops.Copy: _copy,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.HeadNorm: _head_norm,
    ops.Rotate: _rotate,
    ops.Attend: _attend,
    ops.Add: _add,
    ops.Mix: _mix,
    ops.Activate: _activate,
    ops.GateValues: _gate_values,
    ops.Smear: _smear,
    ops.Unzip: _unzip,
    ops.Convolve: _convolve,
    ops.GatedDelta: _gated_delta,
    ops.GatedNorm: _gated_norm,
    ops.Gate: _gate,
    ops.Widen: _copy,
    ops.Softcap: _softcap,
}
_OTHERS = (ops.Store, ops.Keep)  # of `run_part`
