"""What truncation keeps of a row, and its best tokens: `cut` and `tops` of `kernels.sample`, by sorting.

Shapes: B rows, S slots, V vocabulary, C tokens of a chunk or all of V, N chunks, K top tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_inference.executors.cuda.sample_records import MOST_TOKENS, REPORTS, Scratch, Slots
from nano_inference.executors.logprobs import COLDEST


def cut(out: Scratch, slot_B: Tensor, slots: Slots) -> None:
    """Find which tokens top-k, top-p and min-p keep in each row: those above `cut_key`, and equal ones to `cut_id`."""
    work_BV, slot_B = out.work[: slot_B.size(0)], slot_B.long()
    vocab_size = work_BV.size(1)
    temperature_B1, top_k_B1, top_p_B1, min_p_B1 = (
        x_S[slot_B].unsqueeze(-1) for x_S in (slots.temperature, slots.top_k, slots.top_p, slots.min_p)
    )
    best_B1 = out.best[: slot_B.size(0)].amax(-1, keepdim=True)
    y_BV, id_BV = scaled(work_BV, best_B1, temperature_B1).sort(stable=True, dim=-1, descending=True)
    weight_BV = (y_BV.double() - y_BV[:, :1].double()).exp()
    has_top_k_B1, has_top_p_B1 = (top_k_B1 > 0) & (top_k_B1 < vocab_size), top_p_B1 < 1
    count_B1 = torch.where(has_top_k_B1, top_k_B1.long(), vocab_size)
    mass_BV = weight_BV.cumsum(-1)
    target_B1 = top_p_B1 * mass_BV.gather(-1, count_B1 - 1)
    nucleus_B1 = (mass_BV < target_B1).sum(-1, keepdim=True) + 1
    count_B1 = torch.where(has_top_p_B1, nucleus_B1.minimum(count_B1), count_B1)
    probable_B1 = (weight_BV >= min_p_B1).sum(-1, keepdim=True)
    count_B1 = torch.where(min_p_B1 > 0, probable_B1.minimum(count_B1), count_B1).clamp(min=1)
    is_active_B1 = (temperature_B1 != 0) & best_B1.isfinite() & (has_top_k_B1 | has_top_p_B1 | (min_p_B1 > 0))
    key_B1, id_B1 = _keys_of(y_BV.gather(-1, count_B1 - 1)), id_BV.gather(-1, count_B1 - 1)
    out.cut_key[: slot_B.size(0)].copy_(torch.where(is_active_B1, key_B1, 0).squeeze(-1))
    out.cut_id[: slot_B.size(0)].copy_(torch.where(is_active_B1, id_B1, vocab_size).squeeze(-1))


def tops(
    out: Scratch, logits_BV: Tensor, slot_B: Tensor, slots: Slots, *, has_cut: bool, softcap: float | None = None
) -> None:
    """Write each row's `Slots.num_tops` most probable tokens in its mode, lowest id first among equals; then ids -1."""
    num_rows, slot_B = slot_B.size(0), slot_B.long()
    work_BV, vocab_size = out.work[:num_rows], out.work.size(1)
    width = min(out.top_id.size(1), vocab_size)
    temperature_B1 = slots.temperature[slot_B].unsqueeze(-1)
    report_B1 = slots.report[slot_B].unsqueeze(-1) % 4
    is_raw_B1 = report_B1 == REPORTS["raw"]
    x_BV = torch.where(is_raw_B1, model_logits(logits_BV[:num_rows, :vocab_size], softcap), work_BV)
    id_V = torch.arange(vocab_size, device=x_BV.device)
    code_BV = _keys_of(x_BV.masked_fill(x_BV == 0, 0.0)) * (2 * MOST_TOKENS) - id_V
    if has_cut:
        is_kept_BV = is_kept(out, work_BV, id_V, temperature_B1)
        code_BV = code_BV.masked_fill(~is_kept_BV & (report_B1 == REPORTS["processed"]), torch.iinfo(torch.int64).min)
    code_BK, id_BK = code_BV.topk(width, -1)
    normaliser_B5 = out.normaliser[:num_rows]
    best_B1, log_all_B1, log_kept_B1, raw_best_B1, log_raw_B1 = torch.split(normaliser_B5, 1, -1)
    log_own_B1 = torch.where(report_B1 == REPORTS["processed"], log_kept_B1, log_all_B1)
    shift_B1, log_mass_B1 = torch.where(is_raw_B1, raw_best_B1, best_B1), torch.where(is_raw_B1, log_raw_B1, log_own_B1)
    divisor_B1 = divisor_of(temperature_B1).double().masked_fill(is_raw_B1, 1.0)
    logprob_BK = ((x_BV.gather(-1, id_BK).double() - shift_B1) / divisor_B1 - log_mass_B1).float()
    is_wanted_BK = torch.arange(width, device=x_BV.device) < slots.num_tops[slot_B].unsqueeze(-1)
    is_found_BK = is_wanted_BK & log_mass_B1.isfinite() & (logprob_BK > -torch.inf)
    is_found_BK = is_found_BK & (code_BK > torch.iinfo(torch.int64).min)
    out.top_id[:num_rows].fill_(-1)
    out.top_id[:num_rows, :width].copy_(torch.where(is_found_BK, id_BK, -1))
    out.top_logprob[:num_rows, :width].copy_(logprob_BK)


def model_logits(logits_BV: Tensor, softcap: float | None) -> Tensor:
    """Return float32 logits after the soft cap."""
    x_BV = logits_BV.float()
    return x_BV if softcap is None else softcap * torch.tanh(x_BV / softcap)


def divisor_of(temperature_B1: Tensor) -> Tensor:
    """Return what logits are divided by; temperature 0 counts as 1."""
    return temperature_B1.clamp(min=COLDEST).masked_fill(temperature_B1 == 0, 1.0)


def scaled(x_BC: Tensor, best_B1: Tensor, temperature_B1: Tensor) -> Tensor:
    """Return logits divided by the temperature, bit-equal to `sampling.scaled`, without negative zeros."""
    is_scaled_B1 = (temperature_B1 != 0) & (temperature_B1 != 1)
    shift_B1 = best_B1.masked_fill(~(is_scaled_B1 & best_B1.isfinite()), 0.0)
    y_BC = (x_BC - shift_B1) / divisor_of(temperature_B1)
    return y_BC.masked_fill(y_BC == 0, 0.0)


def is_kept(out: Scratch, x_BC: Tensor, id_BC: Tensor, temperature_B1: Tensor) -> Tensor:
    """Return True for tokens above their row's cut, with adjusted logits `x_BC` and ids `id_BC`."""
    num_rows = x_BC.size(0)
    key_B1, last_B1 = out.cut_key[:num_rows].unsqueeze(-1), out.cut_id[:num_rows].unsqueeze(-1)
    key_BC = _keys_of(scaled(x_BC, out.best[:num_rows].amax(-1, keepdim=True), temperature_B1))
    return (key_BC > key_B1) | ((key_BC == key_B1) & (id_BC <= last_B1))


def _keys_of(x: Tensor) -> Tensor:
    """Return unsigned 32-bit keys, as int64, in the order of the float32 values."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + (1 << 31))
