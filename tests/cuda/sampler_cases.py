"""The sampler against `sampling.draw`, which defines it, and against float64.

Shapes: B rows, S slots, V vocabulary, P rows of a table, X stop tokens of a slot, K entries of a ring.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_inference.core.seeds import uniform
from nano_inference.core.step import Row
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.sample_records import (
    FULL,
    REPORTS,
    RUNNING,
    STOPPED,
    WANTS_RAW,
    Scratch,
    Slots,
    Tables,
    new_scratch,
)
from nano_inference.executors.sampling import draw as reference_draw
from nano_inference.types import LogprobsMode, SamplingParams
from tests.cuda.case import Case, error
from tests.rows import make_row

MODES: tuple[LogprobsMode, ...] = ("raw", "tempered", "processed")
_NUM_TOPS, _NUM_STOPS = 4, 3


def row(number: int, mode: LogprobsMode, more: dict[str, Any] | None = None, **params: Any) -> Row:
    """Return a row that draws the token at position 6 of its sample."""
    drawn = SamplingParams(logprobs=_NUM_TOPS, **params)
    fields = {"start": 5, "num_sampled": 1, "logprobs_mode": mode, "seed": 97 * number - 300, "params": drawn}
    return make_row(number, sample_index=number % 3, **fields | (more or {}))


def as_tensors(rows: Sequence[Row], vocab_size: int) -> tuple[Slots, Tables]:
    """Return the parameters of rows as slots in reverse order, after one slot that no row uses."""
    params = [row.params for row in rows]
    count_PV, bias_PV = torch.zeros(len(rows), vocab_size, dtype=torch.int32), torch.zeros(len(rows), vocab_size)
    mask_PW = torch.zeros(len(rows), -(-vocab_size // 32), dtype=torch.int32)
    has_mask, has_bias = [row.mask is not None for row in rows], [False] * len(rows)
    stop_SX = torch.full((len(rows) + 1, _NUM_STOPS), -1, dtype=torch.int32)
    for index, one in enumerate(rows):
        for token in set(one.history[: one.num_prompt]):
            count_PV[index, token] += 1
        for token in one.history[one.num_prompt :]:
            count_PV[index, token] += 2
        if one.params.allowed_token_ids is not None:
            bias_PV[index] = -torch.inf
            bias_PV[index, list(one.params.allowed_token_ids)] = 0
        for token, value in one.params.logit_bias.items():
            bias_PV[index, token] += value
        has_bias[index] = bool(bias_PV[index].any())
        if one.mask is not None:
            text = one.mask + bytes(4 * mask_PW.size(1) - len(one.mask))
            mask_PW[index] = torch.frombuffer(bytearray(text), dtype=torch.int32)
        stop_SX[index, : len(one.banned)] = torch.tensor(one.banned, dtype=torch.int32)

    def slot(values: Sequence[float], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([*values, 0], dtype=dtype).flip(0)

    def table(is_used: Sequence[bool]) -> Tensor:
        return slot([index if used else -1 for index, used in enumerate(is_used)])

    float32, float64 = torch.float32, torch.float64
    report = [REPORTS[one.logprobs_mode] + one.params.raw_logprobs * WANTS_RAW for one in rows]
    slots = Slots(
        temperature=slot([one.temperature for one in params], float32),
        top_k=slot([one.top_k for one in params]),
        top_p=slot([one.top_p for one in params], float64),
        min_p=slot([one.min_p for one in params], float64),
        report=slot(report),
        repetition=slot([one.repetition_penalty for one in params], float32),
        presence=slot([one.presence_penalty for one in params], float32),
        frequency=slot([one.frequency_penalty for one in params], float32),
        count_row=table([bool(one.history) for one in rows]),
        bias_row=table(has_bias),
        mask_row=table(has_mask),
        seed=slot([one.seed for one in rows], torch.int64),
        sample=slot([one.sample_index for one in rows]),
        num_tops=slot([one.logprobs or 0 for one in params]),
        stop=stop_SX.flip(0),
        min_tokens=slot([3 if one.banned else 0 for one in rows]),
        max_tokens=slot([9] * len(rows)),
        token=slot([7] * len(rows)),
        previous=slot([6] * len(rows)),
        position=slot([one.start for one in rows]),
        num_new=slot([2] * len(rows)),
        state=slot([0] * len(rows)),
    )
    return slots, Tables(count_PV, bias_PV, mask_PW)


def moved(record: Any, device: torch.device) -> Any:
    """Return a record of tensors on a device."""
    fields = {field.name: getattr(record, field.name).to(device) for field in dataclasses.fields(record)}
    return type(record)(**fields)


def sampled(
    kernels: Kernels,
    logits_BV: Tensor,
    rows: Sequence[Row],
    device: torch.device,
    softcap: float | None = None,
    num_tops: int = _NUM_TOPS,
) -> tuple[Scratch, Slots, Tables, Tensor]:
    """Run the sampler."""
    vocab_size = logits_BV.size(1)
    slots, tables = (moved(one, device) for one in as_tensors(rows, vocab_size))
    slot_B = torch.arange(len(rows), 0, -1, dtype=torch.int32, device=device)
    scratch = new_scratch(len(rows), vocab_size, num_tops, device)
    has_cut = any(one.params.top_k or one.params.top_p < 1 or one.params.min_p for one in rows)
    on_device_BV = logits_BV.to(device)
    kernels.sample.adjust(scratch, on_device_BV, slot_B, slots, tables, softcap)
    if has_cut:
        kernels.sample.cut(scratch, slot_B, slots)
    kernels.sample.draw(scratch, on_device_BV, slot_B, slots, has_cut=has_cut, softcap=softcap)
    kernels.sample.tops(scratch, on_device_BV, slot_B, slots, has_cut=has_cut, softcap=softcap)
    return scratch, slots, tables, slot_B


def difference(
    kernels: Kernels,
    logits_BV: Tensor,
    rows: Sequence[Row],
    device: torch.device,
    softcap: float | None = None,
    margin: float = 1e-6,
) -> float:
    """Return 1 for a different token, else by how much log-probabilities differ beyond `margin` and one ulp."""
    scratch, *_ = sampled(kernels, logits_BV, rows, device, softcap)
    model_BV = logits_BV.float()
    if softcap is not None:
        model_BV = torch.tanh(model_BV / softcap) * softcap
    worst = 0.0
    for index, want in enumerate(reference_draw(model_BV.clone(), rows)):
        if want.tokens[0] != int(scratch.token[index]):
            return 1.0
        ids = [one.token for one in want.top_logprobs[0]]
        if scratch.top_id[index].tolist() != ids + [-1] * (_NUM_TOPS - len(ids)):
            return 2.0
        pairs = [(float(scratch.logprob[index]), want.logprobs[0])]
        pairs += [(float(a), b.logprob) for a, b in zip(scratch.top_logprob[index], want.top_logprobs[0], strict=False)]
        if rows[index].params.raw_logprobs:
            pairs.append((float(scratch.raw_logprob[index]), float(want.extras[0].raw_logprob or 0)))
        for found, expected in pairs:
            found_1, expected_1 = torch.tensor([found]), torch.tensor([expected])
            ulp = abs(expected) * 2**-23 if expected_1.isfinite() else 0.0
            worst = max(worst, max(0.0, error(found_1, expected_1) - max(margin, ulp)))
    return worst


def random_rows(count: int, vocab_size: int, seed: int) -> list[Row]:
    """Return rows with random parameters, each kind of adjustment in some of them."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.4, 0.7, 1.0, 1.0, 1.7])}
        more: dict[str, Any] = {}
        params |= rng.choice([{}, {"top_k": rng.choice([1, 5, 60])}, {"top_p": rng.choice([0.3, 0.9, 0.999])}])
        params |= rng.choice([{}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.8}])
        params |= rng.choice([{}, {"raw_logprobs": True}])
        if rng.random() < 0.4:
            more["history"] = tuple(rng.randrange(min(40, vocab_size)) for _ in range(30))
            more["num_prompt"] = 12
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3}
        if rng.random() < 0.3:
            params["logit_bias"] = {rng.randrange(vocab_size): 4.0, 3: -2.5}
        if rng.random() < 0.3:
            params["allowed_token_ids"] = rng.sample(range(vocab_size), vocab_size // 3)
        if rng.random() < 0.3:
            more["mask"] = rng.randbytes(-(-vocab_size // 8))
        if rng.random() < 0.4:
            more["banned"] = (rng.randrange(vocab_size), 5)
        rows.append(row(number, MODES[number % 3], more, **params))
    return rows


def tied_rows() -> tuple[Tensor, list[Row]]:
    """Return logits with many equal values, -0.0 and -inf, and rows that truncate among them."""
    logits_V = torch.arange(1500).remainder(3).float()
    flat_V, sparse_V = torch.zeros(1500), torch.full((1500,), -torch.inf)
    flat_V[::2] = -0.0
    sparse_V[[3, 700, 1499]] = torch.tensor([1.0, 2.0, 1.0])
    kinds: list[dict[str, Any]] = [
        {"top_k": 7}, {"top_k": 501}, {"top_p": 0.5}, {"top_k": 700, "top_p": 0.75}, {"min_p": 0.3}, {"min_p": 1.0},
        {"temperature": 0.0}, {"top_p": 1e-9}, {"top_k": 5, "top_p": 0.5}, {},
    ]  # fmt: skip
    asked = [(logits_V, kind) for kind in kinds]
    asked += [(flat_V, kind) for kind in kinds[::2]] + [(sparse_V, kind) for kind in kinds[1::2]]
    rows = [row(number, MODES[number % 3], **kind) for number, (_, kind) in enumerate(asked)]
    return torch.stack([one for one, _ in asked]), rows


def normaliser_error(kernels: Kernels, vocab_size: int, device: torch.device) -> float:
    """Return the largest difference from float64: of log-sum-exps in units of 1e-10, of the log-probability in ulps."""
    logits_1V = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    scratch, *_ = sampled(kernels, logits_1V, [row(0, "raw", temperature=0.5)], device, num_tops=0)
    exact_2V = torch.stack((logits_1V[0].double(), logits_1V[0].double() / 0.5))
    best_2, sum_2 = exact_2V.amax(-1), exact_2V.logsumexp(-1)
    found_2 = torch.stack((scratch.normaliser[0, 4], scratch.normaliser[0, 1])).cpu() + best_2
    logprob = torch.tensor([float(exact_2V[0, int(scratch.token[0])] - sum_2[0])]).double()
    ulp = abs(float(logprob)) * 2**-23
    return max(error(found_2, sum_2) / 1e-10, error(scratch.logprob, logprob) / ulp)


def uniform_arguments() -> tuple[Tensor, Tensor, Tensor]:
    """Return random seeds, sample indices and positions, int64."""
    generator = torch.Generator().manual_seed(1)
    seed_B = torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator)
    sample_B, position_B = (torch.randint(0, high, (512,), generator=generator) for high in (16, 1 << 20))
    return seed_B, sample_B, position_B


def uniforms_differ(found_B: Tensor) -> float:
    """Return the number of uniforms whose bits differ from `sampling.uniform` of `uniform_arguments`."""
    expected = map(uniform, *(one.tolist() for one in uniform_arguments()))
    return float(sum(a != b for a, b in zip(found_B.tolist(), expected, strict=True)))


def advance_error(kernels: Kernels, device: torch.device) -> float:
    """Return the number of wrong values after two steps: one row stops, one is full, one runs, one ran before."""
    rows = [row(number, "raw", {"history": (1, 2), "num_prompt": 2}, temperature=0.0) for number in range(4)]
    logits_BV = torch.zeros(4, 40)
    logits_BV[range(4), [11, 12, 13, 14]] = 5.0
    scratch, slots, tables, slot_B = sampled(kernels, logits_BV, rows, device)
    slots.stop[slot_B[0].item(), 1] = 11
    slots.max_tokens[slot_B[1].item()] = 3
    slots.state[slot_B[3].item()] = STOPPED
    ring_SK = torch.full((5, 3), -1, dtype=torch.int32, device=device)
    ring_logprob_SK = torch.zeros(5, 3, device=device)
    for _ in range(2):
        kernels.sample.advance(scratch, slot_B, slots, tables, ring_SK, ring_logprob_SK)
    inputs = [torch.full((4,), -7, dtype=torch.int32, device=device) for _ in range(4)]
    kernels.sample.load(slot_B, slots, *inputs)
    found = {
        "inputs": [one.tolist() for one in inputs],
        "ring": ring_SK[slot_B].tolist(),
        "state": slots.state[slot_B].tolist(),
        "num_new": slots.num_new[slot_B].tolist(),
        "position": slots.position[slot_B].tolist(),
        "token": slots.token[slot_B].tolist(),
        "previous": slots.previous[slot_B].tolist(),
        "counts": [int(tables.count[index, token]) for index, token in enumerate((11, 12, 13, 14))],
    }
    expected = {
        "inputs": [[11, 12, 13, 7], [7, 7, 13, 6], [-1, -1, 7, -1], [0, 0, 8, 0]],
        "ring": [[-1, -1, 11], [-1, -1, 12], [13, -1, 13], [-1, -1, -1]],
        "state": [STOPPED, FULL, RUNNING, STOPPED],
        "num_new": [3, 3, 4, 2],
        "position": [6, 6, 7, 5],
        "token": [11, 12, 13, 7],
        "previous": [7, 7, 13, 6],
        "counts": [2, 2, 4, 0],
    }
    logprob_is_kept = torch.equal(ring_logprob_SK[slot_B[2].item(), [0, 2]], scratch.logprob[2].expand(2))
    return float(sum(found[name] != expected[name] for name in expected) + (not logprob_is_kept))


def mixed_error(kernels: Kernels, device: torch.device) -> float:
    """Return the difference for random rows over two chunks and a part, in float32 and, soft-capped, in float16."""
    logits_BV = torch.randn(9, 2500, generator=torch.Generator().manual_seed(2)) * 3
    rows = random_rows(9, 2500, seed=15)  # each kind of adjustment in two rows at least
    worst = difference(kernels, logits_BV, rows, device)
    return max(worst, difference(kernels, logits_BV[:6].half(), rows[:6], device, softcap=4.0, margin=4e-6))


def bfloat16_error(kernels: Kernels, device: torch.device) -> float:
    """Return the difference for random rows of bfloat16 logits, and soft-capped ones; many are equal."""
    logits_BV = (torch.randn(18, 2500, generator=torch.Generator().manual_seed(6)) * 3).bfloat16()
    rows = random_rows(18, 2500, seed=8)
    worst = difference(kernels, logits_BV, rows, device)
    return max(worst, difference(kernels, logits_BV[:6], rows[:6], device, softcap=4.0, margin=4e-6))


def not_finite_error(kernels: Kernels, device: torch.device) -> float:
    """Return 0 if rows of NaN, and rows without any token that can be drawn, report NaN and a valid token."""
    logits_BV = torch.zeros(3, 1100)
    logits_BV[0, 1030], logits_BV[1] = torch.nan, -torch.inf
    scratch, *_ = sampled(kernels, logits_BV, [row(index, "processed") for index in range(3)], device)
    is_valid = bool(((scratch.token >= 0) & (scratch.token < 1100)).all())
    return float(scratch.logprob.isnan().tolist() != [True, True, False] or not is_valid)


def distant_chunks_error(kernels: Kernels, device: torch.device) -> float:
    """Return the difference of rows with a chunk that excludes all, and with chunks far below the best one."""
    logits_BV = torch.randn(3, 3000, generator=torch.Generator().manual_seed(2))
    logits_BV[0, 1024:2048] = -torch.inf
    logits_BV[1, :1024] -= 90.0
    logits_BV[2, 2048:] += 50.0
    rows = [row(0, "processed"), row(1, "tempered", temperature=0.01), row(2, "processed", temperature=3.0)]
    return difference(kernels, logits_BV, rows, device)


def truncating_neighbour_error(kernels: Kernels, device: torch.device) -> float:
    """Return 0 if rows that do not truncate have the same bits beside one that does; else 1."""
    count = 5
    logits_BV = torch.randn(count + 1, 5000, generator=torch.Generator().manual_seed(0)).mul(3)
    found = []
    for top_k in (0, 5):
        rows = [row(number, "processed", temperature=0.7) for number in range(count)]
        scratch, *_ = sampled(kernels, logits_BV, [*rows, row(count, "processed", top_k=top_k)], device)
        found.append((scratch.normaliser[:count].tolist(), scratch.token[:count].tolist()))
    return float(found[0] != found[1])


def cases() -> Iterator[Case]:
    """Yield every case."""
    yield Case("sampler-random-rows", mixed_error, 0.0)
    yield Case("sampler-bfloat16", bfloat16_error, 0.0, needs_gpu=True)
    yield Case("sampler-ties", lambda kernels, device: difference(kernels, *tied_rows(), device), 0.0)
    yield Case("sampler-not-finite", not_finite_error, 0.0)
    yield Case("sampler-distant-chunks", distant_chunks_error, 0.0)
    yield Case("sampler-truncating-neighbour", truncating_neighbour_error, 0.0)
    yield Case("sampler-advance", advance_error, 0.0)
    yield Case("sampler-vocabulary-512k", lambda kernels, device: normaliser_error(kernels, 1 << 19, device), 1.0)
