"""Rotary frequencies and their scalings, in float32 like the reference implementations.

Shapes: T tokens of the step, R rotary size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nano_inference.models.config import RopeConfig


class RotaryTable:
    """Owns the frequencies of one rotary embedding on one device."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        frequency_R, self.scale = frequencies(config)
        self.frequency_R = (-frequency_R if config.reverse else frequency_R).to(device)
        self.table_dtype = torch.bfloat16 if config.table_dtype == "bfloat16" else torch.float32

    def at(self, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, R] of the positions; the first half of sin is negated, as `rotate` expects."""
        angle_TR = torch.outer(position_T.float(), self.frequency_R)
        cos_TR, sin_TR = ((x_TR * self.scale).to(self.table_dtype) for x_TR in (angle_TR.cos(), angle_TR.sin()))
        cos_T1R = torch.cat((cos_TR, cos_TR), dim=-1).to(dtype).unsqueeze(1)
        return cos_T1R, torch.cat((-sin_TR, sin_TR), dim=-1).to(dtype).unsqueeze(1)


def frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Return each pair's angle per position, float32 [R/2], and the factor of cos and sin."""
    plain = _plain(config.theta, config.rotary_dim)
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(plain, config), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config)
    if config.kind == "dynamic":
        return _plain(_dynamic_theta(config), config.rotary_dim), 1.0
    if config.kind == "factors":
        return plain / torch.tensor(config.factors, dtype=torch.float32), 1.0
    return plain, 1.0


def _plain(theta: float, rotary_dim: int) -> Tensor:
    """Return theta^(-2i/R) (RoFormer, arXiv 2104.09864)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return torch.tensor(1.0) / (theta**exponent)


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, interpolate between (Llama 3.1)."""
    length = config.original_max_positions
    wavelength = 2 * math.pi / plain
    blend = (length / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * plain / config.factor + blend * plain
    is_slow = wavelength > length / config.low_freq_factor
    is_fast = wavelength < length / config.high_freq_factor
    return torch.where(is_slow, plain / config.factor, torch.where(is_fast, plain, blended))


def _yarn(plain: Tensor, config: RopeConfig) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, keep high ones, ramp between (arXiv 2309.00071, section 3.2)."""
    low, high = (_yarn_dimension(turns, config) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = (high - low) if high != low else 0.001
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp), _yarn_scale(config)


def _yarn_dimension(turns: float, config: RopeConfig) -> float:
    """Return the dimension whose pair makes `turns` full turns within the original length."""
    positions = config.original_max_positions
    return config.rotary_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _yarn_scale(config: RopeConfig) -> float:
    """Return YaRN's attention temperature as a factor of cos and sin: 0.1 ln(factor) + 1 by default."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _dynamic_theta(config: RopeConfig) -> float:
    """Return the NTK-aware base for the longest length, so that cached keys stay valid."""
    length, original = config.max_positions, config.original_max_positions
    if length <= original:
        return config.theta
    growth = config.factor * length / original - (config.factor - 1)
    return float(config.theta * growth ** (config.rotary_dim / (config.rotary_dim - 2)))
