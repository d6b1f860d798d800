"""`Windows`: decode rows in slots, and the tokens that the device samples for them without returning to the host.

Shapes: S slots, K tokens of a window, N top tokens or entries of all rings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nano_inference.core.step import DrawExtras, Row, RowResult
from nano_inference.executors.cuda.decode import DecodeStep, StepKey, Stepper
from nano_inference.executors.cuda.records import SPLIT, num_splits
from nano_inference.executors.cuda.sample_records import RUNNING, STOPPED
from nano_inference.executors.cuda.slots import (
    MOST_TOPS,
    Window,
    copied,
    excluded_by_bias,
    needs_reference,
    send,
    tops_of,
    write_params,
    write_stops,
)
from nano_inference.executors.truncation import truncation_of
from nano_inference.types import TopLogprobs

_FINE, _MEDIUM = 16, 128
_NOT_COUNTED = (0, -1)  # `_Held.counted` of a row without history
_WARM_LENGTHS = (256, 512, 1024, 2048)


def bucket_of(num_rows: int, most: int) -> int:
    """Return the size of the step that computes so many rows: a power of two, or a multiple of 16 or 32."""
    if num_rows <= _FINE:
        size = 1 << (num_rows - 1).bit_length()
    else:
        unit = _FINE if num_rows <= _MEDIUM else 2 * _FINE
        size = -(-num_rows // unit) * unit
    return min(size, most)


def splits_of(length: int, most: int) -> int:
    """Return the splits of a step whose longest row reaches `length` keys: a power of two."""
    return min(1 << (num_splits(length) - 1).bit_length(), most)


def fits_window(row: Row, *, has_full_decode: bool) -> bool:
    """Return whether a window can compute a row: one generated token, with results that the rings can hold."""
    is_decode = len(row.tokens) == 1 and row.num_sampled > 0 and not row.num_drafts
    is_plain = row.score_from is None and row.pool_from is None and not (row.state and row.state.saves)
    is_generated = not has_full_decode or row.start >= row.num_prompt
    return is_decode and is_plain and is_generated and not needs_reference(row)


@dataclass(slots=True)
class _Held:
    """The row that a slot holds, as the device knows it."""

    row: Row
    counted: tuple[int, int]  # length of the history that is counted on the device, and its last token


class Windows:
    """Owns the assignment of rows to slots, and the rings of results that not every window needs."""

    def __init__(self, step: DecodeStep, stepper: Stepper) -> None:
        self._step, self._stepper = step, stepper
        slots = step.slots
        device = slots.slot_S.device
        self._slot_of: dict[int, int] = {}
        self._held: list[_Held | None] = [None] * slots.num_slots
        self._groups: object = None  # the shared prefixes that the device knows
        self._tops_K2SN = torch.zeros(
            (slots.ring_size, 2, slots.num_slots, MOST_TOPS), dtype=torch.int32, device=device
        )
        self._raw_KS = torch.zeros((slots.ring_size, slots.num_slots), dtype=torch.float32, device=device)

    def run(self, rows: Sequence[Row]) -> dict[int, RowResult]:
        """Sample up to `num_sampled` tokens for each row; return results by row id."""
        return self.launch(rows)()

    def launch(self, rows: Sequence[Row], *, is_next: bool = False) -> Callable[[], dict[int, RowResult]]:
        """Start a window; return what waits for its results. With `is_next`, its rows continue the last one's.

        The last window must have been read unless this is the next one.
        """
        step = self._step
        bucket = bucket_of(len(rows), step.slots.num_slots)
        former = self._slot_of.copy()
        placed = self._place(rows, bucket)
        self._write(placed, bucket, is_next=is_next)
        count = min(max(row.num_sampled for row in rows), step.slots.ring_size)
        key = StepKey(
            num_rows=bucket,
            num_splits=splits_of(max(row.start for row in rows) + count, step.partials.num_splits),
            has_cut=any(truncation_of(row).is_active for row in rows),
            has_tops=any(row.params.logprobs for row in rows),
            has_groups=self._group(placed),
            has_adapters=any(row.adapter for row in rows),
        )
        step.slots.push(with_state=not is_next)
        if is_next:
            step.slots.resume(bucket, {slot: former[row.id] for slot, row in placed if former[row.id] != slot})
        wants_raw = any(row.params.raw_logprobs for row in rows)
        self._replay(key, count, wants_raw=wants_raw)
        device = step.slots.slot_S.device
        tops = copied(self._tops_K2SN[:count]) if key.has_tops else None
        raw = copied(self._raw_KS[:count]) if wants_raw else None
        pull = step.slots.pull()
        done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def collect() -> dict[int, RowResult]:
            if done is not None:
                done.synchronize()
            return self._read(placed, pull(), tops, raw)

        return collect

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Prepare the stepper for windows of any number of rows, without truncation; compile the kernels of others.

        Groups' steps are captured when they are needed. Their kernels are compiled here, and those of truncation and
        top tokens, in both forms that `Variant.launch` has for few and for many programs.
        """
        step = self._step
        most, splits = step.slots.num_slots, step.partials.num_splits
        buckets = sorted({bucket_of(size, most) for size in range(1, most + 1)}, reverse=True)
        lengths = sorted({splits_of(length, splits) for length in _WARM_LENGTHS})
        step.slots.push()
        keys = [StepKey(bucket, length, False, False, False) for bucket in buckets for length in lengths]
        self._stepper.warm_up(keys, progress)
        for bucket, length in product((buckets[-1], buckets[0]), (1, splits)):
            step.run(StepKey(bucket, length, True, True, step.reads_prefixes_once))
            step.run(StepKey(bucket, length, False, True, False))

    def _replay(self, key: StepKey, count: int, *, wants_raw: bool) -> None:
        scratch = self._step.scratch
        for index in range(count):
            self._stepper.replay(key)
            if key.has_tops:
                self._tops_K2SN[index, 0].copy_(scratch.top_id)
                self._tops_K2SN[index, 1].copy_(scratch.top_logprob.view(torch.int32))
            if wants_raw:
                self._raw_KS[index].copy_(scratch.raw_logprob)

    # ---- slots ----

    def _place(self, rows: Sequence[Row], bucket: int) -> list[tuple[int, Row]]:
        """Assign each row to one of the first `bucket` slots, its former one if possible."""
        homes = {row.id: slot for row in rows if (slot := self._slot_of.get(row.id, bucket)) < bucket}
        if len(homes) < len(rows):
            free = iter(sorted(set(range(bucket)).difference(homes.values())))
            for row in rows:
                if row.id not in homes:
                    slot = homes[row.id] = next(free)
                    if (former := self._slot_of.get(row.id)) is not None:
                        self._clear(former)
                    self._clear(slot)
                    self._slot_of[row.id] = slot
        return [(homes[row.id], row) for row in rows]

    def _clear(self, slot: int) -> None:
        held, self._held[slot] = self._held[slot], None
        if held is not None:
            self._slot_of.pop(held.row.id, None)

    def _write(self, placed: Placed, bucket: int, *, is_next: bool) -> None:
        """Write what the slots of a window need; the others among the first `bucket` stop.

        In a next window the device has the tokens and places.
        """
        fields = self._step.slots.fields
        self._write_tables(placed)
        for slot, row in placed:
            self._write_row(slot, row)
        slots = [slot for slot, _ in placed]
        fields["max_tokens"][:bucket] = 0
        fields["max_tokens"][slots] = [row.num_sampled for _, row in placed]
        fields["min_tokens"][slots] = [row.num_sampled if row.banned else 0 for _, row in placed]
        fields["recurrent"][slots] = [row.state.slot if row.state else 0 for _, row in placed]
        fields["adapter"][:bucket] = -1
        fields["adapter"][slots] = self._step.machine.adapters.places([row.adapter for _, row in placed])
        if is_next:
            return
        fields["state"][:bucket] = STOPPED
        fields["state"][slots] = RUNNING
        fields["token"][slots] = [row.tokens[0] for _, row in placed]
        fields["previous"][slots] = [row.prev_token for _, row in placed]
        fields["position"][slots] = [row.start for _, row in placed]
        fields["num_new"][slots] = 0

    def _write_row(self, slot: int, row: Row) -> None:
        """Write the parameters and vocabulary tables of one row, as far as they changed."""
        fields, vocabulary, held = self._step.slots.fields, self._step.vocabulary, self._held[slot]
        former = None if held is None else held.row
        is_new = former is None or former.params is not row.params or former.id != row.id
        if is_new or former is None:
            write_params(fields, slot, row)
        if is_new or former is None or former.banned != row.banned or former.stop_ids != row.stop_ids:
            write_stops(fields, slot, row.banned or row.stop_ids)
            fields["bias_row"][slot] = vocabulary.write_bias(slot, row.params, excluded_by_bias(row))
        if is_new or former is None or former.mask != row.mask:
            fields["mask_row"][slot] = vocabulary.write_mask(slot, row.mask)
        counted = (len(row.history), row.history[-1]) if row.history else _NOT_COUNTED
        if is_new or held is None or held.counted != counted:
            fields["count_row"][slot] = vocabulary.write_counts(slot, row)
        self._held[slot] = _Held(row, counted)

    def _write_tables(self, placed: Placed) -> None:
        """Write the blocks that the slots do not have yet: a row's table usually grows by one block."""
        slots: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for slot, row in placed:
            held, end = self._held[slot], len(row.blocks)
            former = () if held is None else held.row.blocks
            start = len(former) if row.blocks[: len(former)] == former else 0  # all former ones if it only grew
            if start < end:
                slots += (slot,) * (end - start)
                columns += range(start, end)
                blocks += row.blocks[start:]
        self._step.slots.fields["table"][slots, columns] = blocks

    def _group(self, placed: Placed) -> bool:
        """Send the groups of rows that share a prefix, if they changed; return whether there are any."""
        step, tensors = self._step, self._step.tensors
        if not step.reads_prefixes_once:
            return False
        prefixes = shared_prefixes(placed, step.store.block_size)
        if prefixes != self._groups:
            found = group_tables(prefixes, step.slots.num_slots, *tensors.row_QX.shape)
            send(found.shared_R, tensors.shared_R)
            send(found.row_QX, tensors.row_QX)
            send(found.shared_Q, tensors.shared_Q)
            self._groups = prefixes
        return bool(prefixes)

    # ---- results ----

    def _read(self, placed: Placed, read: Window, tops: Tensor | None, raw: Tensor | None) -> dict[int, RowResult]:
        """Return the tokens of each row."""
        tokens_N, logprobs_N = read.ring_token.ravel().tolist(), read.ring_logprob.ravel().tolist()
        num_new_S = read.num_new.tolist()
        # Read the tokens that were drawn, up to the first whose log-probability is not finite.
        is_finite_SK = np.isfinite(read.ring_logprob)
        num_finite_S = np.where(is_finite_SK.all(axis=1), is_finite_SK.shape[1], is_finite_SK.argmin(axis=1))
        num_read_S = np.minimum(read.num_new, num_finite_S + 1).tolist()
        tops_K2SN = None if tops is None else tops.numpy()
        raw_KS = [] if raw is None else raw.tolist()
        found = {}
        for slot, row in placed:
            start = slot * self._step.slots.ring_size
            tokens = tuple(tokens_N[start : start + num_read_S[slot]])
            if not row.stop_ids.isdisjoint(tokens[:-1]):
                # Drop tokens behind a stop token, which the device does not know if a row has very many or bans some.
                tokens = tokens[: next(place for place, token in enumerate(tokens) if token in row.stop_ids) + 1]
            size = len(tokens)
            if row.history:
                held = self._held[slot]
                assert held is not None
                num_drawn = num_new_S[slot]
                held.counted = (len(row.history) + num_drawn, tokens_N[start + num_drawn - 1])
            found[row.id] = RowResult(
                row.id,
                tokens,
                tuple(logprobs_N[start : start + size]),
                () if tops_K2SN is None else _tops(tops_K2SN, slot, row, size),
                () if not row.params.raw_logprobs else tuple(DrawExtras(raw_S[slot]) for raw_S in raw_KS[:size]),
            )
        return found


def _tops(tops_K2SN: npt.NDArray[np.int32], slot: int, row: Row, size: int) -> tuple[TopLogprobs, ...]:
    count = row.params.logprobs
    if not count:
        return ()
    ids = tops_K2SN[:size, 0, slot, :count].tolist()
    values = np.ascontiguousarray(tops_K2SN[:size, 1, slot, :count]).view(np.float32).tolist()
    return tuple(map(tops_of, ids, values))


Placed = Sequence[tuple[int, Row]]  # pairs of slot and row


class Prefix(NamedTuple):
    """Slots whose rows have the same first positions."""

    slots: tuple[int, ...]
    num_shared: int  # positions, a multiple of `SPLIT`


def shared_prefixes(placed: Placed, block_size: int) -> list[Prefix]:
    """Return the groups of two rows or more that share at least one split."""
    num_blocks = -(-SPLIT // block_size)
    by_start: defaultdict[tuple[int, ...], list[tuple[int, Row]]] = defaultdict(list)
    long = [(slot, row) for slot, row in placed if row.start >= SPLIT]
    if len({row.blocks[0] for _, row in long}) == len(long):
        return []  # the usual case, found without reading more than a block of each row
    for slot, row in long:
        by_start[row.blocks[:num_blocks]].append((slot, row))
    found = []
    for group in by_start.values():
        if len(group) > 1 and (num_shared := _num_shared([row for _, row in group], block_size)):
            found.append(Prefix(tuple(slot for slot, _ in group), num_shared))
    return found


def _num_shared(rows: Sequence[Row], block_size: int) -> int:
    tables = [row.blocks for row in rows]
    first, last = min(tables), max(tables)  # what these two share, all tables between them share
    num_common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, tables)))
    computed = min(row.start for row in rows)
    return min(num_common * block_size, computed) // SPLIT * SPLIT


class GroupTables(NamedTuple):
    """What `Rows.shared_R` and `Groups` hold; int32."""

    shared_R: npt.NDArray[np.int32]
    row_QX: npt.NDArray[np.int32]
    shared_Q: npt.NDArray[np.int32]


def group_tables(prefixes: Sequence[Prefix], num_rows: int, num_tiles: int, width: int) -> GroupTables:
    """Divide groups into tiles of `width` rows."""
    shared_R = np.zeros(num_rows, np.int32)
    row_QX = np.full((num_tiles, width), -1, np.int32)
    shared_Q = np.zeros(num_tiles, np.int32)
    tiles = ((slots[at : at + width], shared) for slots, shared in prefixes for at in range(0, len(slots), width))
    for index, (slots, num_shared) in enumerate(tiles):
        shared_R[list(slots)] = num_shared
        row_QX[index, : len(slots)] = slots
        shared_Q[index] = num_shared
    return GroupTables(shared_R, row_QX, shared_Q)
