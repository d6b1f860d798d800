"""The configurations of engine and scheduler: frozen and flat; each field has its command-line help text.

Derived values (number of blocks, clamped lengths) are never written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nano_inference.checks import check_bool, check_int, check_number, from_known
from nano_inference.types import LOGPROBS_MODES, LogprobsMode

CacheType = Literal["paged", "radix"]
Device = str
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KvDtype = Literal["auto", "bfloat16"]
KernelsName = Literal["auto", "avx512", "avx2", "generic", "off"]
AttentionName = Literal["auto", "sdpa", "flex"]
Speculation = Literal["off", "ngram"]

CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")
DTYPES: tuple[Dtype, ...] = ("auto", "float32", "bfloat16", "float16", "int8")
KV_DTYPES: tuple[KvDtype, ...] = ("auto", "bfloat16")
KERNELS: tuple[KernelsName, ...] = ("auto", "avx512", "avx2", "generic", "off")
ATTENTIONS: tuple[AttentionName, ...] = ("auto", "sdpa", "flex")
SPECULATIONS: tuple[Speculation, ...] = ("off", "ngram")
MAX_THREADS = 256
"""Most threads of the CPU kernels (MAX_THREADS of kernels/c/pool.h)."""


def helped(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and the help text that the command line shows."""
    return field(default=default, metadata={"help": text})


MAX_LINEAGE = 128
"""Most characters of a lineage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine. Raises `ValueError` naming an invalid field."""

    model_path: str = field(metadata={"help": "model: a directory, a .gguf file, a hub id or a known name"})
    cache_type: CacheType = helped("radix", "prefix cache: radix (matches tokens) or paged (matches whole blocks)")
    block_size: int = helped(16, "tokens in a KV block")
    max_batch_size: int = helped(256, "most sequences that run at the same time")
    max_model_len: int = helped(8192, "longest sequence; clamped to the model's maximum")
    max_tokens_per_batch: int = helped(2048, "most tokens computed in one step; longer prompts are cut into chunks")
    gpu_memory_utilization: float = helped(0.9, "share of a GPU's memory that weights and KV cache may take")
    kv_cache_bytes: int | None = helped(
        None,
        "size of the KV cache in bytes, or as 2GiB on the command line; allocated at the start (CPU default: "
        "allocated when used, up to a quarter of free memory and 4 GiB)",
    )
    device: Device = helped("auto", "cpu, cuda, cuda:1, …, mps (untested); auto uses CUDA if available")
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
        "auto", "CPU code: auto uses the fastest that this machine supports and can compile; off uses torch"
    )
    attention: AttentionName = helped("auto", "attention: sdpa or flex (torch); auto uses the kernels, else sdpa")
    speculation: Speculation = helped(
        "off",
        "ngram: speculative decoding with draft tokens from earlier text of the request, where it is expected to "
        "be faster; it changes no token",
    )
    max_draft_tokens: int = helped(5, "most draft tokens of a sequence in one step, with speculation")
    seed: int | None = helped(None, "seed of requests without one; the default is fresh entropy for each")
    logprobs_mode: LogprobsMode = helped("processed", "distribution of reported log-probabilities")
    deterministic: bool = helped(
        False, "require results that are bit-identical in any batch, which needs the CPU kernels"
    )
    num_threads: int | None = helped(None, "CPU threads; the default is torch's")
    lineage: str | None = helped(
        None,
        "name shared by engines that install the same weights in the same order, so that they may resume each "
        "other's samples; the default is random for each engine",
    )
    overrides: tuple[str, ...] = helped(
        (), "name=value: set a property that the checkpoint's format does not store (models info)"
    )

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
        check_int("max_draft_tokens", self.max_draft_tokens, 1, 64)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        if self.kv_cache_bytes is not None:
            check_int("kv_cache_bytes", self.kv_cache_bytes, 1)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.num_threads is not None:
            check_int("num_threads", self.num_threads, 1, MAX_THREADS)
        if self.lineage is not None and not (isinstance(self.lineage, str) and 0 < len(self.lineage) <= MAX_LINEAGE):
            raise ValueError(f"lineage must be a string of 1 to {MAX_LINEAGE} characters, got {self.lineage!r}")
        if isinstance(self.overrides, str) or not all(isinstance(text, str) for text in self.overrides):
            raise ValueError(f"overrides must be a list of name=value texts, got {self.overrides!r}")
        object.__setattr__(self, "overrides", tuple(self.overrides))

    def _check_choices(self) -> None:
        for name, choices in (
            ("cache_type", CACHE_TYPES),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_DTYPES),
            ("kernels", KERNELS),
            ("attention", ATTENTIONS),
            ("speculation", SPECULATIONS),
            ("logprobs_mode", LOGPROBS_MODES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.attention != "auto" and self.kernels not in ("auto", "off"):
            raise ValueError(
                f"attention: {self.attention} uses torch and cannot be combined with kernels={self.kernels}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "overrides": list(self.overrides)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        """Build from the form of `to_dict`. Raises `ValueError` naming an unknown field."""
        config: EngineConfig = from_known(cls, data)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_batch_size: int = 256
    max_tokens_per_batch: int = 2048
    block_size: int = 16
    lookahead: int = 1
    """Most tokens that a row samples in one step (multi-step decoding)."""
    max_draft_tokens: int = 0
    """Most draft tokens of a row; 0 turns speculation off. Cannot be combined with `lookahead`."""
    weight_tokens: int = 6
    """Tokens whose arithmetic takes as long as reading the weights once; see `choose_drafts`."""

    def __post_init__(self) -> None:
        check_int("max_batch_size", self.max_batch_size, 1)
        check_int("max_tokens_per_batch", self.max_tokens_per_batch, 1)
        check_int("block_size", self.block_size, 1)
        check_int("lookahead", self.lookahead, 1)
        check_int("max_draft_tokens", self.max_draft_tokens, 0)
        check_int("weight_tokens", self.weight_tokens, 1)
        if self.lookahead > 1 and self.max_draft_tokens:
            raise ValueError("max_draft_tokens: speculation cannot be combined with a lookahead above 1")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SchedulerConfig:
        """Build from the form of `to_dict`. Raises `ValueError` naming an unknown field."""
        config: SchedulerConfig = from_known(cls, data)
        return config
