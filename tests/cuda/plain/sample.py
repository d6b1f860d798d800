"""The launchers of `kernels.sample` in plain torch. `sampling.draw` is the reference; masses are float64.

Shapes: B rows, S slots, V vocabulary, N chunks of C = `CHUNK` tokens, P rows of a table, X stop tokens of a slot,
K top tokens or entries of a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.executors.cuda.checks import check_logits
from nano_inference.executors.cuda.sample_records import (
    CHUNK,
    FULL,
    REPORTS,
    RUNNING,
    STOPPED,
    Scratch,
    Slots,
    Tables,
)
from nano_inference.executors.logprobs import floor_logprobs
from tests.cuda.plain.select import cut, divisor_of, is_kept, model_logits, tops
from tests.cuda.plain.uniform import uniform_of

__all__ = ["adjust", "advance", "cut", "draw", "load", "tops"]


def load(
    slot_B: Tensor, slots: Slots, token_B: Tensor, previous_B: Tensor, position_B: Tensor, length_B: Tensor
) -> None:
    """Write the inputs of a decode step; position -1 and length 0 for slots that are not running."""
    num_rows, slot_B = slot_B.size(0), slot_B.long()
    at_B = torch.where(slots.state[slot_B] == RUNNING, slots.position[slot_B], -1)
    token_B[:num_rows].copy_(slots.token[slot_B])
    previous_B[:num_rows].copy_(slots.previous[slot_B])
    position_B[:num_rows].copy_(at_B)
    length_B[:num_rows].copy_(at_B + 1)


def adjust(
    out: Scratch, logits_BV: Tensor, slot_B: Tensor, slots: Slots, tables: Tables, softcap: float | None = None
) -> None:
    """Write the logits after soft cap, penalties, bias, masks and bans, and masses, also of the unmodified ones."""
    check_logits(out, logits_BV)
    num_rows, vocab_size, slot_B = slot_B.size(0), out.work.size(1), slot_B.long()
    x_BV = model_logits(logits_BV[:num_rows, :vocab_size], softcap)
    x_BNC = _chunks(x_BV, -torch.inf)
    raw_best_BN = x_BNC.amax(-1)
    shift_BN1 = raw_best_BN.masked_fill(raw_best_BN == -torch.inf, 0.0).double().unsqueeze(-1)
    out.raw_best[:num_rows].copy_(raw_best_BN)
    out.raw_mass[:num_rows].copy_((x_BNC.double() - shift_BN1).exp().sum(-1))
    x_BV = _penalised(x_BV, slot_B, slots, tables)
    x_BV = _restricted(x_BV, slot_B, slots, tables)
    out.work[:num_rows].copy_(x_BV)
    best_BN = _chunks(x_BV, -torch.inf).amax(-1)
    out.best[:num_rows].copy_(best_BN)
    shift_BN1 = best_BN.masked_fill(best_BN == -torch.inf, 0.0).double().unsqueeze(-1)
    divisor_B11 = divisor_of(slots.temperature[slot_B]).double().view(-1, 1, 1)
    out.mass[:num_rows].copy_(((_chunks(x_BV, -torch.inf).double() - shift_BN1) / divisor_B11).exp().sum(-1))


def draw(
    out: Scratch, logits_BV: Tensor, slot_B: Tensor, slots: Slots, *, has_cut: bool, softcap: float | None = None
) -> None:
    """Draw each row's token at its uniform and compute its log-probabilities; call after `adjust`."""
    num_rows, slot_B = slot_B.size(0), slot_B.long()
    work_BV = out.work[:num_rows]
    temperature_B1 = slots.temperature[slot_B].unsqueeze(-1)
    best_B1 = out.best[:num_rows].amax(-1, keepdim=True).double()
    weight_BV = ((work_BV.double() - best_B1) / divisor_of(temperature_B1).double()).exp()
    if has_cut:
        id_V = torch.arange(work_BV.size(1), device=work_BV.device)
        weight_BV = weight_BV.masked_fill(~is_kept(out, work_BV, id_V, temperature_B1), 0.0)
    weight_BNC = _chunks(weight_BV, 0.0)
    out.kept[:num_rows].copy_(weight_BNC.sum(-1))
    position_B = slots.position[slot_B].long() + 1
    uniform_B = uniform_of(slots.seed[slot_B], slots.sample[slot_B].long(), position_B)
    drawn_B1 = _inverted(weight_BNC, out.kept[:num_rows], uniform_B.unsqueeze(-1))
    greedy_B1 = (work_BV == best_B1.float()).int().argmax(-1, keepdim=True)
    token_B1 = torch.where(temperature_B1 == 0, greedy_B1, drawn_B1).clamp(max=work_BV.size(1) - 1)
    out.token[:num_rows].copy_(token_B1.squeeze(-1))
    _write_logprobs(out, model_logits(logits_BV[:num_rows].gather(-1, token_B1), softcap), token_B1, slot_B, slots)


def advance(
    drawn: Scratch, slot_B: Tensor, slots: Slots, tables: Tables, ring_token_SK: Tensor, ring_logprob_SK: Tensor
) -> None:
    """Append the drawn tokens of running slots to their rings, at entry `num_new` % K, and update the slots."""
    num_rows, slot_B = slot_B.size(0), slot_B.long()
    runs_B = slots.state[slot_B] == RUNNING
    token_B, num_new_B = drawn.token[:num_rows], slots.num_new[slot_B]
    is_stop_B = (slots.stop[slot_B] == token_B.unsqueeze(-1)).any(-1)
    state_B = torch.where(num_new_B + 1 >= slots.max_tokens[slot_B], FULL, RUNNING).masked_fill(is_stop_B, STOPPED)
    count_row_B = slots.count_row[slot_B]
    counts_B = runs_B & (count_row_B >= 0)
    if tables.count.size(0):  # adds 0 where nothing is counted
        at = (count_row_B.long().masked_fill(~counts_B, 0), token_B.long().masked_fill(~counts_B, 0))
        tables.count.index_put_(at, 2 * counts_B.to(tables.count.dtype), accumulate=True)
    entry_B = num_new_B.long() % ring_token_SK.size(1)
    for ring_SK, value_B in ((ring_token_SK, token_B), (ring_logprob_SK, drawn.logprob[:num_rows])):
        ring_SK.index_put_((slot_B, entry_B), torch.where(runs_B, value_B, ring_SK[slot_B, entry_B]))
    updates = (
        (slots.previous, slots.token[slot_B]),
        (slots.token, token_B),
        (slots.position, slots.position[slot_B] + 1),
        (slots.num_new, num_new_B + 1),
        (slots.state, state_B.to(slots.state.dtype)),
    )
    for field_S, value_B in updates:
        field_S.index_copy_(0, slot_B, torch.where(runs_B, value_B, field_S[slot_B]))


def _chunks(x_BV: Tensor, fill: float) -> Tensor:
    """Return rows in chunks [B, N, C], filled up."""
    num_rows, vocab_size = x_BV.shape
    num_chunks = -(-vocab_size // CHUNK)
    padded_BV = functional.pad(x_BV, (0, num_chunks * CHUNK - vocab_size), value=fill)
    return padded_BV.view(num_rows, num_chunks, CHUNK)


def _penalised(x_BV: Tensor, slot_B: Tensor, slots: Slots, tables: Tables) -> Tensor:
    """Return logits after the penalties of the slots that have a row of counts."""
    if not tables.count.size(0):
        return x_BV
    repetition_B1, presence_B1, frequency_B1 = (
        x_S[slot_B].unsqueeze(-1) for x_S in (slots.repetition, slots.presence, slots.frequency)
    )
    row_B = slots.count_row[slot_B].long()
    count_BV = tables.count[row_B.clamp(min=0)].masked_fill((row_B < 0).unsqueeze(-1), 0)
    divided_BV = torch.where(x_BV > 0, x_BV / repetition_B1, x_BV * repetition_B1)
    x_BV = torch.where(count_BV > 0, divided_BV, x_BV)
    output_BV = count_BV >> 1
    return torch.where(output_BV > 0, x_BV - (presence_B1 + frequency_B1 * output_BV.float()), x_BV)


def _restricted(x_BV: Tensor, slot_B: Tensor, slots: Slots, tables: Tables) -> Tensor:
    """Return logits after biases, masks and banned stop tokens."""
    id_V = torch.arange(x_BV.size(1), device=x_BV.device)
    if tables.bias.size(0):
        row_B = slots.bias_row[slot_B].long()
        bias_BV = tables.bias[row_B.clamp(min=0)]
        biased_BV = (x_BV + bias_BV).masked_fill(bias_BV == -torch.inf, -torch.inf)
        x_BV = torch.where((row_B >= 0).unsqueeze(-1), biased_BV, x_BV)
    if tables.mask.size(0):
        row_B = slots.mask_row[slot_B].long()
        word_BV = tables.mask[row_B.clamp(min=0)].index_select(1, id_V // 32)
        is_excluded_BV = ((word_BV >> (id_V % 32)) & 1) == 0
        x_BV = x_BV.masked_fill(is_excluded_BV & (row_B >= 0).unsqueeze(-1), -torch.inf)
    bans_B1 = (slots.num_new[slot_B] < slots.min_tokens[slot_B]).unsqueeze(-1)
    for stop_B1 in torch.split(slots.stop[slot_B], 1, -1):
        x_BV = x_BV.masked_fill(bans_B1 & (id_V == stop_B1), -torch.inf)
    return x_BV


def _inverted(weight_BNC: Tensor, kept_BN: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return the first token, in ascending order of ids, at which the cumulative weight exceeds uniform · total."""
    target_B1 = uniform_B1 * kept_BN.sum(-1, keepdim=True)
    chunk_B1 = _first_above(kept_BN, target_B1)
    index_N = torch.arange(kept_BN.size(1), device=kept_BN.device)
    before_B1 = kept_BN.masked_fill(index_N >= chunk_B1, 0.0).sum(-1, keepdim=True)
    weight_BC = weight_BNC.gather(1, chunk_B1.unsqueeze(-1).expand(-1, -1, CHUNK)).squeeze(1)
    return chunk_B1 * CHUNK + _first_above(weight_BC, target_B1 - before_B1)


def _first_above(mass_BN: Tensor, target_B1: Tensor) -> Tensor:
    """Return the first index whose cumulative mass exceeds the target; if none does, the last one with a mass."""
    above_B1 = (mass_BN.cumsum(-1) <= target_B1).sum(-1, keepdim=True)
    index_N = torch.arange(mass_BN.size(1), device=mass_BN.device)
    return above_B1.minimum(torch.where(mass_BN > 0, index_N, 0).amax(-1, keepdim=True))


def _write_logprobs(out: Scratch, raw_B1: Tensor, token_B1: Tensor, slot_B: Tensor, slots: Slots) -> None:
    """Write the tokens' log-probabilities and the normalisers; `raw_B1` are their unmodified logits."""
    num_rows = slot_B.size(0)
    temperature_B, report_B = slots.temperature[slot_B], slots.report[slot_B] % 4
    best_BN, divisor_B = out.best[:num_rows].double(), divisor_of(temperature_B).double()
    best_B = best_BN.amax(-1)
    scale_BN = ((best_BN - best_B.unsqueeze(-1)) / divisor_B.unsqueeze(-1)).exp()
    log_mass_B, log_kept_B = (out.mass[:num_rows] * scale_BN).sum(-1).log(), out.kept[:num_rows].sum(-1).log()
    y_B = (out.work[:num_rows].gather(-1, token_B1).squeeze(-1).double() - best_B) / divisor_B
    processed_B, tempered_B = (y_B - log_kept_B).float(), (y_B - log_mass_B).float()
    raw_best_BN = out.raw_best[:num_rows]
    raw_best_B1 = raw_best_BN.amax(-1, keepdim=True)
    shift_BN = (raw_best_BN - raw_best_B1).masked_fill(raw_best_BN == -torch.inf, -torch.inf).double()
    log_raw_B = (out.raw_mass[:num_rows] * shift_BN.exp()).sum(-1).log()
    raw_logprob_B = floor_logprobs(((raw_B1.double() - raw_best_B1.double()).squeeze(-1) - log_raw_B).float())
    logprob_B = torch.where(report_B == REPORTS["tempered"], tempered_B, processed_B)
    logprob_B = torch.where(report_B == REPORTS["raw"], raw_logprob_B, logprob_B)
    out.logprob[:num_rows].copy_(torch.where(processed_B.isfinite(), logprob_B, processed_B))
    out.raw_logprob[:num_rows].copy_(raw_logprob_B)
    normalisers = (best_B, log_mass_B, log_kept_B, raw_best_B1.squeeze(-1).double(), log_raw_B)
    out.normaliser[:num_rows].copy_(torch.stack(normalisers, -1))
