"""`SlotMemory`: the sampling parameters, block tables and results of the rows of decode windows, on the device.

All fields are views of one int32 tensor, of which the host keeps a copy: before a window, `push` sends the words that
differ; after it, `pull` reads the words that the device changes (its state and rings) in one copy.

Shapes: S slots, X stop tokens, B blocks per slot, K entries of a ring, N words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nano_inference.core.step import Row
from nano_inference.executors.cuda.sample_records import FULL, REPORTS, RUNNING, STOPPED, WANTS_RAW, Slots
from nano_inference.executors.truncation import is_in_kernels, truncation_of
from nano_inference.types import TokenLogprob, TopLogprobs

Words = npt.NDArray[np.int32]
MOST_STOPS = 16  # stop tokens of a slot; a sample with more ends at the others when its window is read
MOST_TOPS = 32  # most probable tokens that a window can report
_PUSHED = 1 << 16  # most words of one copy to the device
_WIDE = ("top_p", "min_p", "seed")
_FLOATS = ("temperature", "repetition", "presence", "frequency")
_GIVEN = (
    *("temperature", "top_k", "report", "repetition", "presence", "frequency", "count_row", "bias_row", "mask_row"),
    *("sample", "num_tops", "min_tokens", "max_tokens"),
)
_CHANGED = ("token", "previous", "position", "num_new", "state")  # fields that the device changes, too


@dataclass(frozen=True, slots=True)
class Window:
    """What a window returned for every slot."""

    num_new: Words
    ring_token: Words  # [S, K]
    ring_logprob: npt.NDArray[np.float32]


class SlotMemory:
    """Owns the words of `num_slots` slots, on the device and on the host."""

    def __init__(self, num_slots: int, num_blocks: int, ring_size: int, device: torch.device) -> None:
        self.num_slots, self.ring_size = num_slots, ring_size
        # Shapes in words: the fields of 64 bits are first, those that the device changes last.
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(_WIDE, (2 * num_slots,))
        sizes |= dict.fromkeys(_GIVEN, (num_slots,))
        sizes |= {"stop": (num_slots, MOST_STOPS), "table": (num_slots, num_blocks), "recurrent": (num_slots,)}
        sizes |= {"adapter": (num_slots,)}
        sizes |= dict.fromkeys(_CHANGED, (num_slots,))
        sizes |= dict.fromkeys(("ring_token", "ring_logprob"), (num_slots, ring_size))
        self._places = _places(sizes)
        num_words = sum(int(np.prod(shape)) for shape in sizes.values())
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._known: Words = np.zeros(num_words, np.int32)  # the device's words as the host knows them
        self._wanted: Words = np.zeros(num_words, np.int32)
        self._first_changed = self._places["token"].start
        self._first_ring = self._places["ring_token"].start
        self._pushed_on_device = torch.zeros(2 * _PUSHED, dtype=torch.int64, device=device)
        self.fields: Mapping[str, npt.NDArray[Any]] = {name: self._host(name) for name in sizes}
        """The wanted values of all fields."""
        self.fields["state"][:] = STOPPED
        self.slots = Slots(**{name: self._device_view(name) for name in (*_WIDE, *_GIVEN, "stop", *_CHANGED)})
        self.table_SB = self._device_view("table")
        self.recurrent_S = self._device_view("recurrent")  # the slot of each row's recurrent state
        self.adapter_S = self._device_view("adapter")  # the place of each row's adapter, -1 for none
        self.ring_token_SK, self.ring_logprob_SK = self._device_view("ring_token"), self._device_view("ring_logprob")
        self.slot_S = torch.arange(num_slots, dtype=torch.int32, device=device)

    def _host(self, name: str) -> npt.NDArray[Any]:
        place = self._places[name]
        words = self._wanted[place.start : place.stop]
        if name in _WIDE:
            return words.view(np.int64 if name == "seed" else np.float64)
        return words.view(np.float32 if name in _FLOATS else np.int32).reshape(place.shape)

    def _device_view(self, name: str) -> Tensor:
        place = self._places[name]
        words = self._words.narrow(0, place.start, place.stop - place.start)
        if name in _WIDE:
            return words.view(torch.int64 if name == "seed" else torch.float64)
        is_float = name in (*_FLOATS, "ring_logprob")
        return words.view(torch.float32 if is_float else torch.int32).view(place.shape)

    def push(self, *, with_state: bool = True) -> None:
        """Send the wanted words that differ from the device's; without `with_state` none that the device changes."""
        end = self._first_ring if with_state else self._first_changed
        (changed,) = np.nonzero(self._wanted[:end] != self._known[:end])
        for start in range(0, len(changed), _PUSHED):
            index = changed[start : start + _PUSHED]
            on_device = self._pushed_on_device.narrow(0, 0, 2 * len(index)).view(2, -1)
            send(np.stack((index, self._wanted[index])), on_device)
            self._words.index_copy_(0, on_device[0], on_device[1].to(torch.int32))
        self._known[:end] = self._wanted[:end]

    def resume(self, num_slots: int, moved: Mapping[int, int]) -> None:
        """Let the first slots continue that are full and may draw more tokens; the others stop.

        `moved` maps slots to the slots whose state they take over.
        """
        state_5S = self._words.narrow(0, self._first_changed, len(_CHANGED) * self.num_slots).view(len(_CHANGED), -1)
        if moved:
            source = np.arange(num_slots, dtype=np.int64)
            source[list(moved)] = list(moved.values())
            source_S = torch.empty(num_slots, dtype=torch.int64, device=state_5S.device)
            send(source, source_S)
            state_5S.narrow(1, 0, num_slots).copy_(state_5S.index_select(1, source_S))
        state_S, max_tokens_S = (one.narrow(0, 0, num_slots) for one in (self.slots.state, self.slots.max_tokens))
        continues_S = (state_S == FULL) & (max_tokens_S > 0)
        state_S.fill_(STOPPED).masked_fill_(continues_S, RUNNING)
        self.slots.num_new.narrow(0, 0, num_slots).zero_()

    def pull(self) -> Callable[[], Window]:
        """Start to copy the words that the device changed; return what reads the copy when it is complete."""
        pulled = copied(self._words.narrow(0, self._first_changed, len(self._words) - self._first_changed))

        def read() -> Window:
            words: Words = pulled.numpy()
            self._known[self._first_changed :] = words
            self._wanted[self._first_changed :] = words
            shape = self._places["ring_token"].shape
            start, end = self._first_ring, self._places["ring_logprob"].start
            return Window(
                self.fields["num_new"].copy(),
                self._known[start:end].reshape(shape).copy(),
                self._known[end:].view(np.float32).reshape(shape).copy(),
            )

        return read


def copied(values: Tensor) -> Tensor:
    """Return a copy in main memory, which is complete when the device has done what was started before."""
    is_cuda = values.device.type == "cuda"
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=is_cuda).copy_(values, non_blocking=is_cuda)


def send(values: npt.NDArray[Any], target: Tensor) -> None:
    """Copy to a device without waiting for it: pinned memory is reused when the copy is done."""
    is_cuda = target.device.type == "cuda"
    pinned = torch.from_numpy(values)
    target.copy_(pinned.pin_memory() if is_cuda else pinned, non_blocking=is_cuda)


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    stop: int
    shape: tuple[int, ...]


def _places(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    start = 0
    for name, shape in sizes.items():
        found[name] = _Place(start, start + int(np.prod(shape)), shape)
        start = found[name].stop
    return found


def write_params(fields: Mapping[str, npt.NDArray[Any]], slot: int, row: Row) -> None:
    """Write the sampling parameters of a row to its slot; stop tokens and tables are written apart."""
    params, cut = row.params, truncation_of(row)
    low = row.seed & (2**64 - 1)
    values = {
        "temperature": params.temperature,
        "top_k": cut.top_k,
        "top_p": cut.top_p,
        "min_p": cut.min_p,
        "report": REPORTS[row.logprobs_mode] + (WANTS_RAW if params.raw_logprobs else 0),
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "sample": row.sample_index,
        "num_tops": params.logprobs or 0,
        "seed": low - 2**64 if low >= 2**63 else low,
    }
    for name, value in values.items():
        fields[name][slot] = value


def write_stops(fields: Mapping[str, npt.NDArray[Any]], slot: int, tokens: Iterable[int]) -> None:
    """Write the first `MOST_STOPS` tokens that end a sample, or are banned while `num_new` is below `min_tokens`."""
    stops = tuple(tokens)[:MOST_STOPS]
    fields["stop"][slot] = -1
    fields["stop"][slot, : len(stops)] = stops


def excluded_by_bias(row: Row) -> tuple[int, ...]:
    """Return banned tokens that do not fit a slot: they are excluded by the row's bias."""
    return row.banned if len(row.banned) > MOST_STOPS else ()


def needs_reference(row: Row) -> bool:
    """Return whether only `sampling.draw` has a row's results: a mask of ids, the log-probabilities of other tokens
    than a few of the most probable ones, or a truncation that the kernels lack.
    """
    params = row.params
    if not is_in_kernels(truncation_of(row)):
        return True
    return params.sampling_mask or bool(params.logprob_token_ids) or (params.logprobs or 0) > MOST_TOPS


def tops_of(ids: Sequence[int], logprobs: Sequence[float]) -> TopLogprobs:
    """Return the top tokens of one draw; negative ids are no tokens."""
    return tuple(TokenLogprob(token, value) for token, value in zip(ids, logprobs, strict=True) if token >= 0)
