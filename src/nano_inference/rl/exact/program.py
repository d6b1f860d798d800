"""A model's program with gradients: the operations of `models.ops` in torch's differentiable functions.

The backward pass of `train_logprobs` runs it on whole sequences, concatenated without padding. Its values are close to
the engine's (1e-6 in float32), not equal: only its gradient is used.

Shapes: T tokens (sequences concatenated), N scored tokens, S tokens of one sequence, Q of its queries, W width of a
buffer, E hidden size, V vocabulary, H query heads, J kv heads, D head size, C scored tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nano_inference.core.step import Row
from nano_inference.executors.sampling import WHOLE, Known, adjust_known, is_adjusted
from nano_inference.executors.torch import ops as compute
from nano_inference.executors.torch.attention.masks import create_attention_mask
from nano_inference.models import ops
from nano_inference.models.program import Program, live_after
from nano_inference.models.rope import RotaryTable
from nano_inference.types import SamplingParams

HEAD_ELEMENTS = 1 << 23
"""Most logits in memory at a time in the backward pass."""


@dataclass(frozen=True)
class Texts:
    """Sequences, of which the tokens from `starts` on are scored as sampled with `params`."""

    ids: Sequence[Sequence[int]]
    starts: Sequence[int]
    """At least 1 for each text."""
    params: Sequence[SamplingParams]
    stop_ids: Sequence[frozenset[int]]
    """Ids that `min_tokens` bans."""

    @property
    def offsets(self) -> list[int]:
        return list(accumulate(map(len, self.ids), initial=0))[:-1]


@dataclass(frozen=True)
class _Tokens:
    """What operations read beside buffers and weights."""

    token_T: Tensor
    prev_T: Tensor
    spans: Sequence[slice]
    ropes: Sequence[tuple[Tensor, Tensor]]
    masks: Mapping[int | None, Sequence[Tensor | None]]
    """For each window and sequence [S, S] bool; None: causal."""


Buffers = dict[str, Tensor]
_Operation = Callable[[Any, Buffers, Mapping[str, Tensor], _Tokens], Sequence[Tensor]]
"""Returns the values of `op.writes`."""


def unsupported(program: Program) -> list[str]:
    """Return the names of a program's operations that have no gradient here."""
    return sorted({type(op).__name__ for op in program.ops} - {one.__name__ for one in (*DIFFERENTIABLE, *_SKIPPED)})


def gradients(
    program: Program,
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    texts: Texts,
    grad_N: Tensor,
    *,
    by_layer: bool,
    exact_logits: Callable[[int], Tensor] | None = None,
) -> list[Tensor | None]:
    """Return the gradients of some weights for those of the scored tokens' log-probabilities; None for one not used.

    `tensors` are the program's weights by name, float32 or float64 leaves, of which `wanted` require a gradient.
    `by_layer` keeps one residual a layer, and computes the rest again (activation checkpointing). `exact_logits`
    returns the logits [C, V] of the next tokens, whose softmax the gradient has instead of that of recomputed ones.
    """
    leaves = [tensors[name] for name in wanted]
    some = next(iter(tensors.values()))
    tokens = _tokens_of(program, texts, some.dtype, some.device)
    x_NE = _residuals(program, tensors, texts, tokens, by_layer=by_layer)
    # The head, a chunk of logits at a time, forward and backward at once.
    found: list[Tensor | None] = [None] * len(leaves)
    grad_NE = torch.empty_like(x_NE)
    known = _known_of(texts)
    targets = [token for ids, start in zip(texts.ids, texts.starts, strict=True) for token in ids[start:]]
    width = head_width(program)
    for start in range(0, len(known), width):
        piece = slice(start, start + width)
        x_CE = x_NE[piece].detach().requires_grad_()
        target_C = torch.tensor(targets[piece], device=x_CE.device)
        exact_CV = None if exact_logits is None else exact_logits(len(target_C))
        out_C = _head(program, tensors, tokens, x_CE, target_C, known[piece], exact_CV)
        grad_CE, *more = torch.autograd.grad(out_C, [x_CE, *leaves], grad_N[piece].to(out_C), allow_unused=True)
        grad_NE[piece] = grad_CE
        found = list(map(_sum, found, more))
    below = torch.autograd.grad(x_NE, leaves, grad_NE, allow_unused=True)
    return list(map(_sum, found, below))


def head_width(program: Program) -> int:
    """Return the most tokens whose logits are in memory at a time."""
    return max(1, HEAD_ELEMENTS // program.vocab_size)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _residuals(
    program: Program, tensors: Mapping[str, Tensor], texts: Texts, tokens: _Tokens, *, by_layer: bool
) -> Tensor:
    """Return the residual after the last layer of the token before each scored one, [N, E]."""
    before_N = [
        offset + position - 1
        for offset, ids, start in zip(texts.offsets, texts.ids, texts.starts, strict=True)
        for position in range(start, len(ids))
    ]
    buffers: Buffers = {}
    for part, names in _segments(program):
        given = tuple(buffers)

        def run(
            *values: Tensor, part: Sequence[ops.Op] = part, given: Sequence[str] = given, names: Sequence[str] = names
        ) -> tuple[Tensor, ...]:
            after = _run(part, dict(zip(given, values, strict=True)), tensors, tokens)
            return tuple(after[name] for name in names)

        values = tuple(buffers.values())
        found = checkpoint(run, *values, use_reentrant=False) if by_layer and values else run(*values)
        buffers = dict(zip(names, found, strict=True))
    return buffers["x"][torch.tensor(before_N, dtype=torch.long, device=buffers["x"].device)]


def _segments(program: Program) -> list[tuple[Sequence[ops.Op], Sequence[str]]]:
    """Split a body once between two attentions, where the fewest buffers are live; return (operations, live names)."""
    body, live = program.body, live_after(program.body, "x")
    attends = [index for index, op in enumerate(body) if isinstance(op, ops.Attend)]
    cuts = [min(range(one, other), key=lambda i: (len(live[i]), -i)) + 1 for one, other in pairwise(attends)]
    return [(body[i:j], sorted(live[j - 1])) for i, j in pairwise([0, *cuts, len(body)])]


def _run(part: Sequence[ops.Op], buffers: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> Buffers:
    for op in part:
        if isinstance(op, _SKIPPED):
            continue
        for name, value in zip(op.writes, DIFFERENTIABLE[type(op)](op, buffers, tensors, tokens), strict=True):
            buffers[name] = value
    return buffers


def _tokens_of(program: Program, texts: Texts, dtype: torch.dtype, device: torch.device) -> _Tokens:
    position_T = torch.cat([torch.arange(len(ids), device=device) for ids in texts.ids])
    masks: dict[int | None, list[Tensor | None]] = {}
    for window in program.windows:
        masks[window] = []
        for ids, start in zip(texts.ids, texts.starts, strict=True):
            mask_SS = None
            if window is not None and window < len(ids):
                place_S = torch.arange(len(ids), device=device)
                mask_SS = create_attention_mask(place_S, place_S, window)
                if program.has_full_decode:  # windows restrict prompts only
                    mask_SS[start:] = create_attention_mask(place_S[start:], place_S)
            masks[window].append(mask_SS)
    return _Tokens(
        token_T=torch.tensor([token for ids in texts.ids for token in ids], device=device),
        prev_T=torch.tensor([token for ids in texts.ids for token in (-1, *ids[:-1])], device=device),
        spans=[slice(i, i + len(ids)) for i, ids in zip(texts.offsets, texts.ids, strict=True)],
        ropes=[RotaryTable(rope, device).at(position_T, dtype) for rope in program.ropes],
        masks=masks,
    )


# ---- the head -------------------------------------------------------------------------------------------------------


def _head(
    program: Program,
    tensors: Mapping[str, Tensor],
    tokens: _Tokens,
    x_CE: Tensor,
    target_C: Tensor,
    known: Sequence[Known],
    exact_CV: Tensor | None,
) -> Tensor:
    """Return the log-probabilities [C] of known tokens, from residuals."""
    logits_CV = _run((*program.final, *program.head), {"x": x_CE}, tensors, tokens)["logits"]
    if exact_CV is not None:  # exact values, and the gradient of the head that was computed again
        logits_CV = exact_CV.to(logits_CV) + (logits_CV - logits_CV.detach())
    logits_CV = _adjusted(logits_CV, known)
    divisors = [(row.params.temperature or 1.0) if row.logprobs_mode != "raw" else 1.0 for row, _ in known]
    if any(divisor != 1 for divisor in divisors):
        logits_CV = logits_CV / logits_CV.new_tensor(divisors).unsqueeze(-1)
    return logits_CV.log_softmax(-1).gather(-1, target_C.unsqueeze(-1)).squeeze(-1)


def _known_of(texts: Texts) -> list[Known]:
    """Return each scored token with the row that sampled it."""
    found: list[Known] = []
    for ids, start, params, stop_ids in zip(texts.ids, texts.starts, texts.params, texts.stop_ids, strict=True):
        is_penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        assert params.logprobs_mode is not None
        row = Row(
            id=0,
            tokens=(),
            prev_token=-1,
            start=0,
            blocks=(),
            num_sampled=0,
            params=params,
            logprobs_mode=params.logprobs_mode,
            seed=0,
            sample_index=0,
            history=tuple(ids) if is_penalised else (),
            num_prompt=start,
            score_params=params,
            stop_ids=stop_ids,
        )
        found += [Known(row, position) for position in range(start, len(ids))]
    return found


def _adjusted(logits_CV: Tensor, known: Sequence[Known]) -> Tensor:
    """Return logits as the sampler adjusts them, differentiable.

    The sampler's functions run on a copy. Each changes a logit to factor * logit + constant, or excludes the token.
    """
    if not any(is_adjusted(one.row) for one in known):
        return logits_CV
    exact_CV = logits_CV.detach()
    adjusted_CV = exact_CV.float().clone()
    adjust_known(adjusted_CV, [one if is_adjusted(one.row) else None for one in known], WHOLE)
    factor_CV = torch.ones_like(logits_CV)
    for factor_V, logits_V, (row, position) in zip(factor_CV, exact_CV, known, strict=True):
        penalty = row.params.repetition_penalty
        if penalty != 1 and row.logprobs_mode != "raw":
            seen = torch.tensor(sorted(set(row.history[:position])), device=logits_V.device)
            factor_V[seen] = torch.where(logits_V[seen] > 0, 1 / penalty, penalty).to(factor_V.dtype)
    is_excluded_CV = adjusted_CV == -torch.inf
    constant_CV = (adjusted_CV - exact_CV * factor_CV).masked_fill(is_excluded_CV, 0.0)
    return (logits_CV * factor_CV + constant_CV).masked_fill(is_excluded_CV, -torch.inf)


# ---- operations -----------------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * (offset + weight) if offset else x * weight


def _heads(buffer_TW: Tensor, head_dim: int) -> Tensor:
    return buffer_TW.reshape(buffer_TW.size(0), -1, head_dim)


def _embed(op: ops.Embed, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    table = tensors[op.table.name]
    scale = None if op.scale == 1.0 else torch.tensor(op.scale, dtype=table.dtype)
    return [compute.embed(table, tokens.token_T, tokens.prev_T, op.rows, scale, op.part)]


def _copy(op: ops.Copy, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    return [at[op.x]]


def _norm(op: ops.Norm, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    return [_rms_norm(at[op.x], None if op.weight is None else tensors[op.weight.name], op.eps, op.offset)]


def _linear(op: ops.Linear, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    x_TK = at[op.x][:, : op.matrices[0].shape[1]]
    weights = [tensors[matrix.name][: op.num_rows] for matrix in op.matrices]
    biases: list[Tensor | None] = [tensors[bias.name] for bias in op.biases]
    biases = biases or [None] * len(weights)
    return [functional.linear(x_TK, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _head_norm(op: ops.HeadNorm, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    weights: list[Tensor | None] = [tensors[norm.name] for norm in op.norms]
    weights = weights or [None] * len(op.x)
    pairs = zip(op.x, weights, strict=True)
    return [_rms_norm(_heads(at[x], op.head_dim), weight, op.eps, op.offset).flatten(-2) for x, weight in pairs]


def _rotate(op: ops.Rotate, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    cos_T1R, sin_T1R = tokens.ropes[op.rope]
    return [compute.rotate(_heads(at[x], op.head_dim), cos_T1R, sin_T1R).flatten(-2) for x in op.x]


def _attend(op: ops.Attend, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    q_THD, k_TJD, v_TJD = (_heads(at[name], op.head_dim) for name in (op.q, op.k, op.v))
    parts = zip(tokens.spans, tokens.masks[op.window], strict=True)
    return [torch.cat([_attend_one(op, q_THD[i], k_TJD[i], v_TJD[i], mask_SS) for i, mask_SS in parts])]


def _attend_one(op: ops.Attend, q_SHD: Tensor, k_SJD: Tensor, v_SJD: Tensor, mask_SS: Tensor | None) -> Tensor:
    """Attend within one sequence, [S, H * D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHD, k_SJD, v_SJD))
    if op.softcap is None:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_SS, is_causal=mask_SS is None, scale=op.scale, enable_gqa=True
        )
    else:
        k, v = (x.repeat_interleave(op.num_heads // op.num_kv_heads, dim=1) for x in (k, v))
        score = compute.softcap(q @ k.transpose(-1, -2) * op.scale, op.softcap)
        if mask_SS is None:
            place_S = torch.arange(q.size(2), device=q.device)
            mask_SS = create_attention_mask(place_S, place_S)
        out = score.masked_fill(~mask_SS, -torch.inf).softmax(-1) @ v
    return out[0].transpose(0, 1).flatten(-2)


def _add(op: ops.Add, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    return [at[op.x] + at[op.y]]


def _mix(op: ops.Mix, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    x_TW = at[op.x] if op.a is None else tensors[op.a.weight.name][op.a.index] * at[op.x]
    return [x_TW + op.sign * (tensors[op.b.weight.name][op.b.index] * at[op.y])]


def _activate(op: ops.Activate, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    return [compute.activate(op.kind, at[op.gate], None if op.up is None else at[op.up])]


def _gate_values(op: ops.GateValues, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    return [compute.gate_values(_heads(at[op.v], op.head_dim), at[op.gate], at[op.more], op.scale).flatten(-2)]


def _smear(op: ops.Smear, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    share = tensors[op.share.weight.name][op.share.index]
    return [compute.smear(at[op.x], at[op.gate], at[op.before], share, tokens.prev_T)]


def _softcap(op: ops.Softcap, at: Buffers, tensors: Mapping[str, Tensor], tokens: _Tokens) -> list[Tensor]:
    return [compute.softcap(at[op.x], op.cap)]


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
    ops.Widen: _copy,
    ops.Softcap: _softcap,
}
_SKIPPED = (ops.Store, ops.Keep)  # whole sequences need no cache, and all residuals are kept
