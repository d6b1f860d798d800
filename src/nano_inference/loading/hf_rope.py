"""One object of rotary parameters of a Hugging Face configuration → `RopeConfig`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from nano_inference.loading.fields import Fields, shown
from nano_inference.models.config import RopeConfig
from nano_inference.types import ModelError


def filled(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `found` with defaults for its missing and null entries."""
    return {**defaults, **{key: value for key, value in found.items() if value is not None}}


def rope_of(rope: Fields, max_positions: int, head_dim: int) -> RopeConfig:
    """Return the rotary embedding described by one object of rotary parameters."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = rope.number("rope_theta")
    config = partial(RopeConfig, theta=theta, rotary_dim=head_dim, max_positions=max_positions)
    if kind == "default":  # none of these families rotates a part of its heads: their own code ignores the field
        return config()
    if int(head_dim * rope.number("partial_rotary_factor", 1.0)) != head_dim:
        raise ModelError(f"{rope.origin}: partial_rotary_factor is not supported with the rope type {shown(kind)}")
    if kind == "linear":
        return config(kind="linear", factor=rope.number("factor", high=1e6))
    if kind == "dynamic":
        if head_dim < 4:
            raise ModelError(f"{rope.origin}: dynamic scaling needs at least 4 rotary dimensions, got {head_dim}")
        return config(kind="dynamic", factor=rope.number("factor", high=1e6), original_max_positions=max_positions)
    original = rope.integer("original_max_position_embeddings", max_positions) if kind in ("llama3", "yarn") else 0
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", high=1e6), rope.number("high_freq_factor", high=1e6)
        if low >= high:
            text = f"high_freq_factor ({high:g}) must be greater than low_freq_factor ({low:g})"
            raise ModelError(f"{rope.origin}: {text}")
        return config(
            kind="llama3",
            factor=rope.number("factor", high=1e6),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original,
        )
    if kind == "yarn":
        factor = rope.number("factor", max_positions / original, high=1e6)
        if theta <= 1:
            raise ModelError(f"{rope.origin}: yarn needs a rope_theta above 1, got {theta:g}")
        return config(
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=rope.optional_number("attention_factor", high=1e6),
            beta_fast=rope.number("beta_fast", 32.0, high=1e6),
            beta_slow=rope.number("beta_slow", 1.0, high=1e6),
            truncate=rope.flag("truncate", True),
            mscale=rope.optional_number("mscale", low=-1e6, high=1e6),
            mscale_all_dim=rope.optional_number("mscale_all_dim", low=-1e6, high=1e6),
        )
    raise ModelError(
        f"{rope.origin}: rope type {shown(kind)} is not supported; known: default, linear, dynamic, llama3, yarn"
    )


def stretched(max_positions: int, ropes: Iterable[RopeConfig]) -> int:
    """Return the longest supported sequence: some YaRN files give, as `max_positions`, the length before extension."""
    lengths = [int(rope.original_max_positions * rope.factor) for rope in ropes if rope.kind == "yarn"]
    return min(max(max_positions, *lengths), 2**31 - 1) if lengths else max_positions
