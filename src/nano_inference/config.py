"""The configurations of engine and scheduler: frozen and flat; each field has its command-line help text.

Derived values (number of blocks, clamped lengths) are never written back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nano_inference.support.checks import (
    SEEDS,
    Check,
    brief_repr,
    check_fields,
    check_text,
    checked,
    from_known,
    integer,
    number,
)
from nano_inference.types import BadRequest, LogprobsMode

CacheType = Literal["paged", "radix"]
Device = str
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvDtype = Literal["auto", "bfloat16"]
KernelsName = Literal["auto", "avx512", "avx2", "generic", "off"]
AttentionName = Literal["auto", "sdpa", "flex"]
Speculation = Literal["off", "ngram"]

MAX_THREADS = 256
"""Most threads of the CPU kernels (MAX_THREADS of executors/cpu/c/pool.h)."""
MAX_RANKS = 64
"""Most ranks of one engine."""
MAX_LINEAGE = 128
"""Most characters of a lineage."""


def helped(default: Any, text: str, check: Check | None = None) -> Any:
    """Return a dataclass field with a default, the command line's help text, and a check for `check_fields`."""
    return field(default=default, metadata={"help": text, "check": check})


def check_overrides(name: str, values: object) -> None:
    """Raise `ValueError` naming `name` unless `values` is a collection of texts."""
    if isinstance(values, str) or not isinstance(values, Iterable) or not all(isinstance(v, str) for v in values):
        raise BadRequest(name, f"must be a list of name=value texts, got {values!r}")


def check_lineage(name: str, value: object) -> None:
    """Raise `ValueError` naming `name` unless `value` is a string of 1 to `MAX_LINEAGE` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_LINEAGE:
        raise BadRequest(name, f"must be a string of 1 to {MAX_LINEAGE} characters, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine. Raises `ValueError` naming an invalid field."""

    model_path: str = field(
        kw_only=False,
        metadata={"help": "model: a directory, a .gguf file, a hub id or a known name", "check": check_text},
    )
    cache_type: CacheType = helped(
        "radix", "prefix cache: radix (matches tokens) or paged (matches whole blocks; without recurrent states)"
    )
    block_size: int = helped(16, "tokens in a KV block", integer(1, 4096))
    max_batch_size: int = helped(256, "most sequences that run at the same time", integer(1, 65536))
    max_model_len: int = helped(8192, "longest sequence; clamped to the model's maximum", integer(1))
    allow_long_context: bool = helped(
        False, "let max_model_len exceed the model's maximum; it was not trained for these positions"
    )
    max_tokens_per_batch: int = helped(
        2048, "most tokens computed in one step; longer prompts are cut into chunks", integer(1)
    )
    gpu_memory_utilization: float = helped(
        0.9, "share of a GPU's memory that weights and KV cache may take", number(0, 1, open_low=True)
    )
    kv_cache_bytes: int | None = helped(
        None,
        "size of the KV cache in bytes, or as 2GiB on the command line; recurrent states take at most half of it; "
        "allocated at the start (CPU default: allocated when used, up to a quarter of free memory and 4 GiB)",
        integer(1),
    )
    device: Device = helped("auto", "cpu, cuda, cuda:1, …, mps (untested); auto uses CUDA if available", check_text)
    dtype: Dtype = helped(
        "auto",
        "precision of the weights; auto keeps the file's on a CPU, with float32 arithmetic, and is bfloat16 on CUDA; "
        "int8 (CPU) rounds activations, and weights that have more bits, to eight bits",
    )
    kv_cache_dtype: KvDtype = helped(
        "auto",
        "precision of the KV cache; auto is that of the arithmetic, float32 on a CPU; bfloat16 halves its bytes and "
        "rounds keys and values (CPU kernels)",
    )
    kernels: KernelsName = helped(
        "auto",
        "CPU code: auto uses the fastest that this machine supports and can compile; off uses torch, on CUDA too",
    )
    attention: AttentionName = helped("auto", "attention: sdpa or flex (torch); auto uses the kernels, else sdpa")
    tensor_parallel: int = helped(
        1,
        "processes (ranks) among which the model is divided: each has a part of every layer and of the KV cache; "
        "on CUDA each uses one device. kv_cache_bytes and num_threads are those of one rank (CUDA kernels or "
        "torch: no CPU kernels)",
        integer(1, MAX_RANKS),
    )
    speculation: Speculation = helped(
        "off",
        "ngram: speculative decoding with draft tokens from earlier text of the request, where it is expected to "
        "be faster; it changes no token",
    )
    max_draft_tokens: int = helped(5, "most draft tokens of a sequence in one step, with speculation", integer(1, 64))
    lookahead: int | None = helped(
        None,
        "most tokens of a sequence sampled in one step, which saves work between them; 1 while a prompt is computed, "
        "or without the CUDA kernels an update is gathered, at most 4 while a client streams; it changes no token; the "
        "default is 16 with the CUDA kernels, else 1",
        integer(1, 64),
    )
    max_adapters: int = helped(
        32,
        "most LoRA adapters in memory; of those that no request uses, the least recently used is unloaded first",
        integer(1, 65536),
    )
    adapter_memory: int = helped(2**30, "most memory of all adapters in bytes, or as 2GiB", integer(0))
    max_adapter_rank: int = helped(256, "highest rank of an adapter that is accepted", integer(1, 65536))
    seed: int | None = helped(
        None, "seed of requests without one; the default is fresh entropy for each", integer(*SEEDS)
    )
    logprobs_mode: LogprobsMode = helped("processed", "distribution of reported log-probabilities")
    deterministic: bool = helped(
        False, "require results that are bit-identical in any batch, which needs the CPU or the CUDA kernels"
    )
    num_threads: int | None = helped(None, "CPU threads; the default is torch's", integer(1, MAX_THREADS))
    lineage: str | None = helped(
        None,
        "name shared by engines that install the same weights in the same order, so that they may resume each "
        "other's samples; the default is random for each engine",
        check_lineage,
    )
    overrides: tuple[str, ...] = helped(
        (), "name=value: set a property that the checkpoint's format does not store (models info)", check_overrides
    )
    __repr__ = brief_repr

    def __post_init__(self) -> None:
        check_fields(self)
        if self.attention != "auto" and self.kernels not in ("auto", "off"):
            raise BadRequest(
                "attention", f"{self.attention} uses torch and cannot be combined with kernels={self.kernels}"
            )
        if self.tensor_parallel > 1:
            self._check_parallel()
        object.__setattr__(self, "overrides", tuple(self.overrides))

    def _check_parallel(self) -> None:
        """Raise `ValueError` naming a field that requires the CPU kernels, which compute undivided models only."""
        if self.kernels not in ("auto", "off"):
            raise BadRequest(
                "tensor_parallel", f"cannot be combined with kernels={self.kernels}: ranks use CUDA kernels or torch"
            )
        if self.dtype == "int8" or self.kv_cache_dtype != "auto":
            name = "dtype=int8" if self.dtype == "int8" else "kv_cache_dtype"
            raise BadRequest("tensor_parallel", f"cannot be combined with {name}, which ranks do not support")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "overrides": list(self.overrides)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        """Build from the form of `to_dict`. Raises `ValueError` naming an unknown field."""
        return from_known(cls, data)


def config_of(config: EngineConfig | str | Path) -> EngineConfig:
    """Return a configuration; a text or path is its `model_path`. Raises `BadRequest`."""
    if not isinstance(config, EngineConfig | str | Path):
        raise BadRequest("config", f"must be an EngineConfig or a model's path, got {type(config).__name__}")
    return config if isinstance(config, EngineConfig) else EngineConfig(str(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_batch_size: int = checked(256, integer(1))
    max_tokens_per_batch: int = checked(2048, integer(1))
    block_size: int = checked(16, integer(1))
    lookahead: int = checked(1, integer(1))
    """Most tokens that a row without draft tokens samples in one step (multi-step decoding)."""
    max_draft_tokens: int = checked(0, integer(0))
    """Most draft tokens of a row; 0 turns speculation off."""
    weight_tokens: int = checked(6, integer(1))
    """Tokens whose arithmetic takes as long as reading the weights once; see `choose_drafts`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SchedulerConfig:
        """Build from the form of `to_dict`. Raises `ValueError` naming an unknown field."""
        return from_known(cls, data)
