"""`ModelConfig`: a model's hyperparameters, independent of the checkpoint's format. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from nano_inference.models.names import PLAIN_NAMES, NameRules
from nano_inference.support.checks import check_int, check_number

Activation = Literal["silu", "gelu_tanh"]
RopeDtype = Literal["float32", "bfloat16"]
ROPE_DTYPES: tuple[RopeDtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding; `kind` names the scaling of its frequencies.

    linear: position interpolation (arXiv 2306.15595); llama3: Llama 3.1's frequency bands; yarn: arXiv 2309.00071;
    dynamic: NTK-aware base, computed once from `max_positions`, so that cached keys stay valid; factors: one divisor
    per frequency (GGUF files of Llama 3).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "factors"] = "default"
    rotary_dim: int  # number of a head's dimensions that are rotated
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    attention_factor: float | None = None  # yarn: scale of cos and sin; None computes it from the factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    mscale: float | None = None
    mscale_all_dim: float | None = None
    max_positions: int = 8192
    factors: tuple[float, ...] = ()
    reverse: bool = False  # rotate by minus the angle (nanochat)
    table_dtype: RopeDtype = "float32"
    """Precision to which cos and sin are rounded after float32 computation (bfloat16: nanochat G0 to G2e)."""

    def __post_init__(self) -> None:
        check_number("rope theta", self.theta, 0, 1e12, open_low=True)
        check_number("rope factor", self.factor, 0, 1e6, open_low=True)
        check_int("rope rotary_dim", self.rotary_dim, 2)
        if self.rotary_dim % 2:
            raise ValueError(f"rope rotary_dim must be even, got {self.rotary_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer's settings."""

    window: int | None = None  # number of latest keys that a query attends to, its own included; None: all
    rope: int | None = 0  # index into `ModelConfig.ropes`; None: no rotary embedding (SmolLM3)
    attends: bool = True  # False: another kind of layer, without keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Raises `ValueError` if sizes are invalid or inconsistent."""

    architecture: str  # the checkpoint's name for it, for messages
    family: str  # key in the table of families (`models.families`)
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_positions: int
    norm_eps: float = 1e-6
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each head's query and key before the rotation (Qwen3, Gemma 3)
    attention_scale: float | None = None  # factor of q·k; None: 1/sqrt(head_dim)
    attention_softcap: float | None = None  # cap·tanh(score/cap) (Gemma 2)
    logits_softcap: float | None = None
    embedding_scale: float | None = None  # factor of the token embeddings (Gemma: sqrt(hidden_size))
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    names: NameRules = PLAIN_NAMES  # of weights in files and updates
    media_token_ids: tuple[tuple[str, int], ...] = ()  # (field of config.json, token that stands for an image or video)
    terms: object = None
    """Further constants of the family: a frozen record whose type its program checks; None for most families."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            check_int(name, getattr(self, name), 1, 2**31 - 1)
        check_int("max_positions", self.max_positions, 1)
        check_int("number of layers", len(self.layers), 1, 100_000)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        for layer in self.layers:
            if layer.window is not None:
                check_int("window", layer.window, 1)
            if layer.rope is not None:
                check_int("rope", layer.rope, 0, len(self.ropes) - 1)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that have keys and values."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.attends)

    @property
    def scale(self) -> float:
        """Return the factor of q·k."""
        return 1 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of one token's K and V, over all layers."""
        return 2 * len(self.kv_layers) * self.num_kv_heads * self.head_dim * bytes_per_value


def with_length(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """Set the maximum length of every rope: a dynamic rope's base depends on it."""
    return replace(config, ropes=tuple(replace(rope, max_positions=max_model_len) for rope in config.ropes))
