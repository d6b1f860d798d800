"""Random numbers of requests: functions of integers, without state and without torch."""

from __future__ import annotations

_MASK64 = 2**64 - 1


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments.

    Three rounds of splitmix64's finaliser (Steele, Lea & Flood 2014), one for each argument, 53 bits kept.
    """
    state = _mix(seed & _MASK64)
    state = _mix(state ^ (sample_index & _MASK64))
    state = _mix(state ^ (position & _MASK64))
    return (state >> 11) / 2**53


def derive_seed(seed: int, request_id: int) -> int:
    """Return the seed of a request without one, from the engine's: different for each request, equal in each run."""
    return _mix(_mix(seed & _MASK64) ^ request_id)


def _mix(state: int) -> int:
    """Return one step of splitmix64: add the golden gamma, then mix the bits."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
