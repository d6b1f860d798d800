"""The engine's configuration: frozen, flat, each field with its help text; an option is written once.

What is derived from it (number of blocks, clamped lengths) is a different value made by a function, never written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nano_inference.types import LOGPROBS_MODES, LogprobsMode, check_bool, check_int, check_number, from_known

CacheType = Literal["paged", "radix"]
Device = str
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "sdpa", "flex"]

CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")
DTYPES: tuple[Dtype, ...] = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS: tuple[AttentionName, ...] = ("auto", "sdpa", "flex")


def helped(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and the help text that the command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. Raises `ValueError` naming the field when a value makes no sense."""

    model_path: str = field(metadata={"help": "model: a directory, a .gguf file, a hub id or a known name"})
    cache_type: CacheType = helped("radix", "how prefixes are found again: radix (by token) or paged (by block)")
    block_size: int = helped(16, "tokens a KV block holds")
    max_batch_size: int = helped(256, "most sequences that run at once")
    max_model_len: int = helped(8192, "longest sequence; clamped to what the model was made for")
    max_tokens_per_batch: int = helped(2048, "most tokens computed in one step; longer prompts are cut into chunks")
    gpu_memory_utilization: float = helped(0.9, "share of a GPU's memory that weights and KV cache may take")
    kv_cache_bytes: int | None = helped(
        None, "bytes of KV cache (CPU default: a quarter of free memory, at most 4 GiB)"
    )
    device: Device = helped("auto", "cpu, cuda, cuda:1, …; auto takes CUDA when it is there")
    dtype: Dtype = helped("auto", "arithmetic: auto is float32 on a CPU, bfloat16 on CUDA")
    attention: AttentionName = helped("auto", "how K/V is read: sdpa or flex; auto takes sdpa")
    seed: int | None = helped(None, "seed of requests that name none; the default is fresh entropy for each")
    logprobs_mode: LogprobsMode = helped("processed", "distribution that log-probabilities speak of")
    deterministic: bool = helped(False, "bit-identical rows in any batch; not supported yet, refused")
    num_threads: int | None = helped(None, "CPU threads; the default is torch's")
    overrides: tuple[str, ...] = helped((), "name=value: set what a nanochat checkpoint leaves open (models info)")

    def __post_init__(self) -> None:
        if not isinstance(self.model_path, str) or not self.model_path:
            raise ValueError(f"model_path must be a non-empty string, got {self.model_path!r}")
        if not isinstance(self.device, str) or not self.device:
            raise ValueError(f"device must be a non-empty string, got {self.device!r}")
        self._check_choices()
        check_bool("deterministic", self.deterministic)
        check_int("block_size", self.block_size, 1, 4096)
        check_int("max_batch_size", self.max_batch_size, 1, 65536)
        check_int("max_model_len", self.max_model_len, 1)
        check_int("max_tokens_per_batch", self.max_tokens_per_batch, 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        if self.kv_cache_bytes is not None:
            check_int("kv_cache_bytes", self.kv_cache_bytes, 1)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.num_threads is not None:
            check_int("num_threads", self.num_threads, 1, 4096)
        if isinstance(self.overrides, str) or not all(isinstance(text, str) for text in self.overrides):
            raise ValueError(f"overrides must be a list of name=value texts, got {self.overrides!r}")
        object.__setattr__(self, "overrides", tuple(self.overrides))

    def _check_choices(self) -> None:
        for name, choices in (
            ("cache_type", CACHE_TYPES),
            ("dtype", DTYPES),
            ("attention", ATTENTIONS),
            ("logprobs_mode", LOGPROBS_MODES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "overrides": list(self.overrides)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        """Build from `to_dict`'s form; an unknown field is a `ValueError`."""
        config: EngineConfig = from_known(cls, data)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What bounds one step."""

    max_batch_size: int = 256
    max_tokens_per_batch: int = 2048
    block_size: int = 16
    lookahead: int = 1
    """Tokens a row may draw in one step (multi-step decoding, speculation)."""

    def __post_init__(self) -> None:
        check_int("max_batch_size", self.max_batch_size, 1)
        check_int("max_tokens_per_batch", self.max_tokens_per_batch, 1)
        check_int("block_size", self.block_size, 1)
        check_int("lookahead", self.lookahead, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SchedulerConfig:
        """Build from `to_dict`'s form; an unknown field is a `ValueError`."""
        config: SchedulerConfig = from_known(cls, data)
        return config
