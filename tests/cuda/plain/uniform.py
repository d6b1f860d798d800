"""`sampling.uniform` on tensors. Shapes: B rows."""

from __future__ import annotations

from torch import Tensor

_GAMMA, _FIRST, _SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform_of(seed_B: Tensor, sample_B: Tensor, position_B: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64, bit-equal to `sampling.uniform`; arguments are int64."""
    state_B = _mix(seed_B)
    state_B = _mix(state_B ^ sample_B)
    state_B = _mix(state_B ^ position_B)
    return _shifted(state_B, 11).double() / 2.0**53


def _mix(state_B: Tensor) -> Tensor:
    """Return one step of splitmix64; int64 sums and products wrap around as those of uint64."""
    state_B = state_B + _GAMMA
    state_B = (state_B ^ _shifted(state_B, 30)) * _FIRST
    state_B = (state_B ^ _shifted(state_B, 27)) * _SECOND
    return state_B ^ _shifted(state_B, 31)


def _shifted(state_B: Tensor, count: int) -> Tensor:
    """Return the bits shifted right, with zeros from the left."""
    return (state_B >> count) & ((1 << (64 - count)) - 1)
