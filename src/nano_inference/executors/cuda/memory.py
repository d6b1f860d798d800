"""`StepMemory`: everything that a `CudaExecutor` allocates beside weights and cache, once and before the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.core.step import DrawExtras, Row, RowResult
from nano_inference.executors.cuda.adapters import AdapterStacks
from nano_inference.executors.cuda.checks import check_heads
from nano_inference.executors.cuda.decode import DecodeStep, StepTensors, step_tensors
from nano_inference.executors.cuda.launchers import Kernels, SamplingKernels
from nano_inference.executors.cuda.lower import gather_logits, lower, part_size
from nano_inference.executors.cuda.passes import PartialMemory
from nano_inference.executors.cuda.ranks import Ranks, rank_memory, sum_width
from nano_inference.executors.cuda.records import group_rows, num_splits, range_memory
from nano_inference.executors.cuda.registers import Columns, Lowered, Machine, Registers, Ropes
from nano_inference.executors.cuda.sample_records import MOST_TOKENS, RUNNING, Scratch, new_scratch
from nano_inference.executors.cuda.slots import (
    MOST_TOPS,
    SlotMemory,
    excluded_by_bias,
    needs_reference,
    tops_of,
    write_params,
    write_stops,
)
from nano_inference.executors.cuda.vocabulary import VocabularyTables
from nano_inference.executors.sampling import draw as reference_draw
from nano_inference.executors.sampling import results
from nano_inference.executors.torch.store import KVStore
from nano_inference.executors.torch.weights import TorchWeights, layout_of
from nano_inference.executors.truncation import truncation_of
from nano_inference.models.ops import Attend
from nano_inference.models.program import Program
from nano_inference.models.rope import RotaryTable
from nano_inference.types import TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest steps."""

    max_len: int  # positions of a sequence
    max_rows: int = 256  # rows of a window, and draws at a time
    max_tokens: int = 2048  # tokens of a pass
    lookahead: int = 16  # tokens of a window
    is_deterministic: bool = False
    reads_prefixes_once: bool = True  # read the keys that decode rows share once


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a program as launches on one set of registers."""

    body: Lowered
    head: Lowered  # final norm and head, of the result of the body
    final: Lowered  # the final norm of `given`
    logits: Lowered  # final norm and head of `given`
    given: Columns


def head_sizes(program: Program, kernels: Kernels) -> tuple[int, int, int]:
    """Return (query heads, kv heads, head size). Raises `ValueError` if layers differ, or no kernel has these sizes."""
    sizes = {(op.num_heads, op.num_kv_heads, op.head_dim) for op in program.body if isinstance(op, Attend)}
    if len(sizes) != 1:
        raise ValueError(f"Attend: the CUDA kernels need layers with the same heads, not {sorted(sizes)}")
    num_heads, num_kv_heads, head_dim = sizes.pop()
    if kernels.has_fixed_heads:
        check_heads(num_heads // num_kv_heads, head_dim)
    if program.vocab_size > MOST_TOKENS:
        raise ValueError(f"the CUDA kernels support vocabularies of {MOST_TOKENS} tokens, not {program.vocab_size}")
    return num_heads, num_kv_heads, head_dim


def rope_tables(program: Program, max_len: int, dtype: torch.dtype, device: torch.device) -> Ropes:
    """Return cosines and sines of every position, rounded to the model's precision."""
    position_L = torch.arange(max_len, device=device)
    tables = []
    for rope in program.ropes:
        cos_L1R, signed_sin_L1R = RotaryTable(rope, device).at(position_L, dtype)
        half = cos_L1R.size(-1) // 2
        tables.append((cos_L1R[:, 0, :half].contiguous(), signed_sin_L1R[:, 0, half:].contiguous()))
    return tuple(tables)


def lowered_parts(program: Program, machine: Machine, limits: Limits) -> Parts:
    """Lower all parts of a program. Raises `ValueError` naming what the kernels do not support."""
    registers = machine.registers
    body = lower(machine, program.body, limits.max_tokens, {}, "x")
    tail = (*program.final, *program.head)
    head = lower(machine, tail, limits.max_rows, {"x": body.result}, "logits")
    given = Columns(registers.new(limits.max_rows, program.hidden_size), 0, program.hidden_size)
    reusable = head.registers
    final = lower(machine, program.final, limits.max_rows, {"x": given}, "h", reusable)
    logits = lower(machine, tail, limits.max_rows, {"x": given}, "logits", reusable)
    if machine.ranks is not None:
        whole = registers.new(limits.max_rows, machine.ranks.num_logits)
        head, logits = (gather_logits(machine, part, whole, program.vocab_size) for part in (head, logits))
    return Parts(body, head, final, logits, given)


def check_program(program: Program, kernels: Kernels, limits: Limits, ranks: Ranks | None = None) -> None:
    """Raise `ValueError` naming what the kernels do not support, without allocating memory."""
    meta = torch.device("meta")
    stacks = {
        name: torch.empty((sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]), device=meta)
        for name, specs in layout_of(program).items()
    }
    try:
        head_sizes(program, kernels)
        machine = Machine(
            kernels=kernels,
            registers=Registers(torch.float32, meta),
            weights=TorchWeights(layout_of(program), stacks),
            ropes=tuple((torch.empty(0, device=meta), torch.empty(0, device=meta)) for _ in program.ropes),
            one_1=torch.empty(1, device=meta),
            ranges=range_memory(0, meta),
            adapters=AdapterStacks(program, meta, torch.float32, 0, lambda: None),
            ranks=None if ranks is None else rank_memory(ranks, 0, 0, torch.float32, meta),
        )
        lowered_parts(program, machine, limits)
    except ValueError as error:
        raise ValueError(f"{error}; kernels=off computes this model with torch") from None


class StepMemory:
    """Owns registers, slots, tables and scratch memory of all steps, and the launches that use them."""

    def __init__(
        self,
        program: Program,
        weights: TorchWeights,
        kernels: Kernels,
        limits: Limits,
        dtype: torch.dtype,
        adapters: AdapterStacks,
        ranks: Ranks | None = None,
    ) -> None:
        device = next(iter(weights.stacks.values())).device
        num_heads, num_kv_heads, head_dim = head_sizes(program, kernels)
        self.limits = limits
        num_reduced = limits.max_tokens * sum_width(program.ops) if limits.is_deterministic else 0
        self.registers = Registers(dtype, device)
        self.machine = Machine(
            kernels=kernels,
            registers=self.registers,
            weights=weights,
            ropes=rope_tables(program, limits.max_len, dtype, device),
            one_1=torch.ones(1, device=device),
            ranges=range_memory(part_size(program.ops, is_deterministic=limits.is_deterministic), device),
            adapters=adapters,
            ranks=None if ranks is None else rank_memory(ranks, num_reduced, limits.max_rows, dtype, device),
            is_deterministic=limits.is_deterministic,
        )
        self.parts = lowered_parts(program, self.machine, limits)
        self.partials = PartialMemory(limits.max_rows, num_splits(limits.max_len), num_heads, head_dim, device)
        self._scratch = new_scratch(limits.max_rows, program.vocab_size, MOST_TOPS, device)
        self.draws = DrawMemory(kernels.sample, self._scratch, program.vocab_size)
        self._vocabulary = VocabularyTables(program.vocab_size, device, limits.max_rows)
        num_grouped = group_rows(num_heads // num_kv_heads, dtype, head_dim)
        self._tensors: StepTensors = step_tensors(limits.max_rows, num_grouped, device)
        self._has_full_decode = program.has_full_decode
        self._device = device

    def decode_step(self, store: KVStore) -> DecodeStep:
        """Return the step of windows on a cache, with slots for its blocks."""
        num_blocks = -(-self.limits.max_len // store.block_size)
        return DecodeStep(
            machine=self.machine,
            body=self.parts.body,
            head=self.parts.head,
            slots=SlotMemory(self.limits.max_rows, num_blocks, self.limits.lookahead, self._device),
            vocabulary=self._vocabulary,
            scratch=self._scratch,
            partials=self.partials,
            tensors=self._tensors,
            store=store,
            has_full_decode=self._has_full_decode,
            reads_prefixes_once=self.limits.reads_prefixes_once,
        )


class DrawMemory:
    """Owns slots for draws of as many rows at a time as `scratch` has."""

    def __init__(self, kernels: SamplingKernels, scratch: Scratch, vocab_size: int) -> None:
        self._kernels, self._scratch = kernels, scratch
        num_rows, device = scratch.token.size(0), scratch.token.device
        self._slots = SlotMemory(num_rows, 0, 1, device)
        self._vocabulary = VocabularyTables(vocab_size, device, num_rows)

    def draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        """Sample one token a row from float32 logits, as `sampling.draw` does."""
        special = [index for index, row in enumerate(rows) if needs_reference(row)]
        found: dict[int, RowResult] = {}
        if special:
            some = reference_draw(logits_BV[special], [rows[index] for index in special])
            found = dict(zip(special, some, strict=True))
        plain = [index for index in range(len(rows)) if index not in found]
        for start in range(0, len(plain), self._slots.num_slots):
            piece = plain[start : start + self._slots.num_slots]
            logits_PV = logits_BV if len(piece) == len(rows) else logits_BV[piece]
            found |= zip(piece, self._draw(logits_PV, [rows[index] for index in piece]), strict=True)
        return [found[index] for index in range(len(rows))]

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> list[RowResult]:
        scratch, slots, size = self._scratch, self._slots.slots, len(rows)
        fields, vocabulary = self._slots.fields, self._vocabulary
        for slot, row in enumerate(rows):
            write_params(fields, slot, row)
            write_stops(fields, slot, row.banned)
            fields["min_tokens"][slot] = 1 if row.banned else 0
            fields["num_new"][slot] = 0
            fields["state"][slot] = RUNNING
            fields["position"][slot] = row.start + len(row.tokens) - 1
            fields["bias_row"][slot] = vocabulary.write_bias(slot, row.params, excluded_by_bias(row))
            fields["mask_row"][slot] = vocabulary.write_mask(slot, row.mask)
            fields["count_row"][slot] = vocabulary.write_counts(slot, row)
        self._slots.push()
        # launch
        slot_B, tables = self._slots.slot_S.narrow(0, 0, size), vocabulary.tables
        has_cut, has_tops = any(truncation_of(row).is_active for row in rows), any(row.params.logprobs for row in rows)
        self._kernels.adjust(scratch, logits_BV, slot_B, slots, tables)
        if has_cut:
            self._kernels.cut(scratch, slot_B, slots)
        self._kernels.draw(scratch, logits_BV, slot_B, slots, has_cut=has_cut)
        if has_tops:
            self._kernels.tops(scratch, logits_BV, slot_B, slots, has_cut=has_cut)
        # read
        floats = (scratch.logprob[:size].view(torch.int32), scratch.raw_logprob[:size].view(torch.int32))
        words_3B = torch.stack((scratch.token[:size], *floats)).cpu()
        tokens = words_3B[0].tolist()
        logprobs, raw_logprobs = (words_3B[index].view(torch.float32).tolist() for index in (1, 2))
        tops: list[TopLogprobs] = []
        if has_tops:
            tops += map(tops_of, scratch.top_id[:size].tolist(), scratch.top_logprob[:size].tolist())
        extras: list[DrawExtras] = []
        if any(row.params.raw_logprobs for row in rows):
            extras = [
                DrawExtras(value if row.params.raw_logprobs else None)
                for row, value in zip(rows, raw_logprobs, strict=True)
            ]
        return results(rows, tokens, logprobs, tops, extras)
