"""Builds the parts of an engine from its configuration: finds and loads the model, chooses kernels, sizes the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

import torch

from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.core.admission import Limits, StopMatcherFactory
from nano_inference.core.cache import KVManager, make_kv
from nano_inference.core.drafting import CPU_WEIGHT_TOKENS, CUDA_WEIGHT_TOKENS, MakeDrafter
from nano_inference.core.ngram_drafter import NgramDrafter
from nano_inference.core.recurrent import SLOTS_PER_SEQUENCE
from nano_inference.core.step import BlockCopy, Launch, Row, RowResult, Runner
from nano_inference.executors.cpu.compile import (
    CannotCompile,
    Isa,
    best_isa,
    compiled_library,
    cpu_flags,
    cpu_has,
    find_compiler,
)
from nano_inference.executors.cpu.library import Library
from nano_inference.executors.devices import available_memory, pick_device, pick_dtype, set_threads
from nano_inference.executors.loading import LoadProgress
from nano_inference.executors.opening import (
    ROUNDINGS,
    load_cuda_model,
    load_kernel_model,
    load_model,
    pick_cuda_kernels,
)
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.loading.catalog import catalog_sampling, default_cache, resolve
from nano_inference.loading.checkpoint import Checkpoint
from nano_inference.loading.formats import generation_fields, sampling_defaults
from nano_inference.loading.kinds import ModelKinds, installed_kinds, opened
from nano_inference.models.config import ModelConfig
from nano_inference.parallel.opening import start_ranks
from nano_inference.text.dialogue import Dialogue, load_dialogue
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.kinds import Tokenizer
from nano_inference.text.stops import stop_matcher
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import BadRequest, EngineDead, ModelError, SamplingParams
from nano_inference.weights.sync import WeightSyncManager

_COPY_SHARE = 8  # the default cache of a copied engine has one block and one state for 8 of the original
_FEWEST_STATES = 64  # slots for states if they fit: snapshots of some conversations, however few run at a time

_log = logging.getLogger("nano_inference")


class ClosedRunner:
    """The runner of an engine that was shut down."""

    failure = None

    def run(
        self, rows: tuple[Row, ...], copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]
    ) -> Mapping[int, RowResult]:
        """Raise `EngineDead`."""
        raise EngineDead("the engine was shut down")

    def commit_adapter(self, number: int, staged: object) -> None: ...

    def drop_adapter(self, number: int) -> None: ...

    def free_cache(self) -> None: ...

    def restore_cache(self) -> None: ...

    def recover(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The components of an engine."""

    runner: Runner
    kv: KVManager
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    lookahead: int = 1
    """Most tokens that the runner samples for a row in one step."""
    stop_matcher: StopMatcherFactory | None = None
    """None without a tokenizer."""
    checkpoint: Checkpoint | None = None
    load_tokenizer: Callable[[], Tokenizer] | None = None
    """Returns the model's tokenizer, loaded once; None for parts without a model's files."""
    load_dialogue: Callable[[], Dialogue | None] = lambda: None
    """Returns what converts messages, loaded once; None for a model without a chat template."""
    weights: WeightSyncManager | None = None
    """None if the weights cannot be replaced."""
    is_on_cuda: bool = False
    caches_by_prompt: bool = False
    """See `Limits`."""
    make_drafter: MakeDrafter = NgramDrafter
    """Used with `speculation="ngram"`."""
    executor: Executor | None = None
    """The runner if it is an executor; None for a test's runner."""
    launch: Launch | None = None
    """Starts windows that run while the host commits the one before; None if the runner cannot."""

    @property
    def code(self) -> str:
        """'torch', or the instruction set of the CPU kernels."""
        return "torch" if self.executor is None else self.executor.code

    def scheduler_config(self, config: EngineConfig) -> SchedulerConfig:
        """Return the limits of a step of these parts."""
        num_states, max_batch_size = self.kv.num_states, config.max_batch_size
        return SchedulerConfig(
            max_batch_size=min(max_batch_size, num_states // SLOTS_PER_SEQUENCE) if num_states else max_batch_size,
            max_tokens_per_batch=config.max_tokens_per_batch,
            block_size=self.kv.block_size,
            lookahead=self.lookahead,
            max_draft_tokens=config.max_draft_tokens if config.speculation == "ngram" else 0,
            weight_tokens=CUDA_WEIGHT_TOKENS if self.is_on_cuda else CPU_WEIGHT_TOKENS,
        )

    def limits(self, lineage: str) -> Limits:
        """Return the limits that a request to these parts must respect."""
        return Limits(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_blocks=self.kv.num_blocks,
            block_size=self.kv.block_size,
            hidden_size=self.checkpoint.config.hidden_size if self.checkpoint else 0,
            eos_token_ids=self.eos_token_ids,
            media_token_ids={token: name for name, token in self.checkpoint.config.media_token_ids}
            if self.checkpoint
            else {},
            caches_by_prompt=self.caches_by_prompt,
            lineage=lineage,
        )

    def closed(self) -> EngineParts:
        """Return the parts of the engine after its shutdown: no model, and a runner that raises `EngineDead`."""
        return replace(self, runner=ClosedRunner(), executor=None, weights=None, launch=None)


def assemble(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    on_open: Callable[[Checkpoint, Callable[[], Tokenizer]], None] = lambda checkpoint, load: None,
    kinds: ModelKinds | None = None,
) -> EngineParts:
    """Build the parts of an engine.

    `on_open` is called with the checkpoint and its tokenizer's loader before the weights are loaded; its exceptions
    propagate. `kinds` are the known formats, families and tokenizers, by default the installed ones. Raises
    `ModelError` for unusable model files, and `ValueError` for an unusable device or a cache smaller than one block.
    """
    set_threads(config)
    device = pick_device(config.device)
    library = pick_kernels(config, device)
    kernels = None if library is not None else pick_cuda_kernels(config, device)
    if config.deterministic and library is None and kernels is None:
        raise ValueError("deterministic: requires the CPU or the CUDA kernels (docs/performance.md)")
    check_cache_fits(config.kv_cache_bytes, device)
    kinds = installed_kinds() if kinds is None else kinds
    checkpoint = opened(config, kinds, default_cache(os.environ))
    load = cache(partial(load_tokenizer, checkpoint.tokenizer, kinds.tokenizers))
    on_open(checkpoint, load)
    max_model_len = min(config.max_model_len, checkpoint.config.max_positions)
    executor: Executor
    if config.tensor_parallel > 1:
        executor = start_ranks(checkpoint, config, kinds, progress)
    elif library is not None:
        rounding = ROUNDINGS[config.dtype]
        executor = load_kernel_model(checkpoint, library, rounding, max_model_len, progress, families=kinds.families)
    elif kernels is not None:
        executor = load_cuda_model(checkpoint, device, kernels, config, progress, families=kinds.families)
    else:
        dtype = pick_dtype(config.dtype, device)
        executor = load_model(
            checkpoint, device, dtype, max_model_len, progress, attention=config.attention, families=kinds.families
        )
    return parts_with(executor, config, checkpoint, kinds, load)


def parts_with(
    executor: Executor,
    config: EngineConfig,
    checkpoint: Checkpoint,
    kinds: ModelKinds,
    load: Callable[[], Tokenizer] | None = None,
) -> EngineParts:
    """Return the parts for an executor that was loaded from a checkpoint; close it if its cache cannot be allocated.

    `load` returns the checkpoint's tokenizer, loaded once.
    """
    try:
        parts = parts_of(executor, config)
    except BaseException:
        executor.close()
        raise
    load = load or cache(partial(load_tokenizer, checkpoint.tokenizer, kinds.tokenizers))
    try:
        ends = end_token_ids(checkpoint.config, load())
    except ModelError as error:
        ends = parts.eos_token_ids
        _log.info("only the configuration's end tokens end an answer: %s", error)
    return replace(
        parts,
        eos_token_ids=ends,
        stop_matcher=lambda stops: stop_matcher(load(), stops),
        checkpoint=checkpoint,
        load_tokenizer=load,
        load_dialogue=cache(lambda: load_dialogue(checkpoint.tokenizer, load(), kinds.tokenizers)),
    )


def chat_params(parts: EngineParts, config: EngineConfig) -> SamplingParams:
    """Return the sampling of a chat whose caller gave none: the model's own or measured defaults, as on the page.

    Raises `ModelError` for invalid values in the model's files.
    """
    if parts.checkpoint is None:
        return SamplingParams()
    sampling_defaults(parts.checkpoint)  # refuses invalid values
    found = chat_defaults(generation_fields(parts.checkpoint), catalog_sampling(str(config.model_path)))
    return SamplingParams(**found.sampling)


def end_token_ids(config: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer, of chats, completions and rollouts alike.

    They are `eos_token_id` of config.json and generation_config.json, and the tokenizer's `eos_token` or, of a GGUF
    file, all that llama.cpp stops at. vLLM's are the same, without config.json's if generation_config.json exists.
    """
    return frozenset(token for token in (*config.eos_token_ids, *tokenizer.eos_ids) if token < config.vocab_size)


def parts_of(executor: Executor, config: EngineConfig) -> EngineParts:
    """Return the parts for an executor with loaded weights, without tokenizer and checkpoint."""
    max_model_len = min(config.max_model_len, executor.config.max_positions)
    parts = _with_cache(executor, config, size_cache(config, executor, max_model_len))
    return replace(
        parts,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(executor.config.eos_token_ids),
        is_on_cuda=executor.device.type == "cuda",
        caches_by_prompt=executor.program.has_full_decode,
    )


def _with_cache(executor: Executor, config: EngineConfig, size: CacheSize) -> EngineParts:
    """Allocate an executor's cache; return the parts that depend only on both."""
    kv = make_kv(config.cache_type, size.num_blocks, size.block_size, size.num_states)
    executor.cache.allocate(size)
    return EngineParts(
        runner=executor,
        kv=kv,
        vocab_size=executor.program.vocab_size,
        max_model_len=executor.config.max_positions,
        weights=WeightSyncManager(executor),
        executor=executor,
        lookahead=config.lookahead or executor.lookahead,
        launch=executor.launch,
    )


def copied_parts(parts: EngineParts, config: EngineConfig, kv_cache_bytes: int | None) -> EngineParts:
    """Return the parts of a second engine with a copy of the installed weights; see `InferenceEngine.copy`."""
    if parts.executor is None:
        raise BadRequest("", "this engine has no model that can be copied")
    fewest = -(-parts.max_model_len // config.block_size)
    size = CacheSize(
        num_blocks=max(parts.kv.num_blocks // _COPY_SHARE, min(fewest, parts.kv.num_blocks)),
        block_size=config.block_size,
        dtype=config.kv_cache_dtype,
        num_states=min(parts.kv.num_states, max(SLOTS_PER_SEQUENCE, parts.kv.num_states // _COPY_SHARE)),
    )
    if kv_cache_bytes is not None:
        block_bytes = parts.executor.cache.block_bytes(config.block_size, config.kv_cache_dtype)
        try:
            size = _size_within(kv_cache_bytes, config, block_bytes, parts.executor.program.state_bytes)
        except ValueError as error:
            raise BadRequest("kv_cache_bytes", str(error)) from error
    copy = _with_cache(parts.executor.copy(), config, size)
    parts = replace(parts, runner=copy.runner, launch=copy.launch, kv=copy.kv)
    return replace(parts, executor=copy.executor, weights=copy.weights)


def locate(name: str) -> Path:
    """Return a model's path. A known name or hub id is looked up in the user's cache, and downloaded if absent."""
    return resolve(name, default_cache(os.environ))


def environment() -> Mapping[str, str]:
    """Return this process's environment, for packages that read their own variables."""
    return os.environ


def pick_kernels(config: EngineConfig, device: torch.device) -> Library | None:
    """Return the CPU kernels, compiled for this machine; None to use torch.

    Torch is used on CUDA, in float16, with a torch attention backend, with kernels=off, and, after a warning, if
    compilation fails. Raises `ValueError` if the configuration requires kernels that are unavailable.
    """
    is_named = config.kernels not in ("auto", "off")
    if config.tensor_parallel > 1:
        return None
    reason = _why_no_kernels(config, device)
    if reason is None:
        isa = best_isa(cpu_flags()) if config.kernels == "auto" else cast(Isa, config.kernels)
        try:
            return _library(isa, config.num_threads or torch.get_num_threads())
        except CannotCompile as error:
            reason = str(error)
            if not is_named and config.dtype != "int8":
                _log.warning("using torch, which is slower and whose results depend on the batch: %s", reason)
    if is_named or config.dtype == "int8":
        name = f"kernels={config.kernels}" if is_named else "dtype=int8"
        raise ValueError(f"{name}: {reason}")
    return None


def kernels_here() -> dict[str, str | bool]:
    """Return the CPU code that `pick_kernels` chooses on this machine, or the reason why it is torch."""
    try:
        library = _library(best_isa(cpu_flags()), 1)
    except CannotCompile as error:
        return {"code": "torch", "reason": str(error)}
    return {"code": library.isa, "compiler": find_compiler(os.environ), "eight-bit products": library.has_vnni}


def _library(isa: Isa, num_threads: int) -> Library:
    """Load the kernels; compile them first if needed. Raises `CannotCompile`."""
    with compiled_library(isa, default_cache(os.environ), os.environ) as path:
        try:
            return Library(path, num_threads)
        except OSError as error:
            raise CannotCompile(f"{path} cannot be loaded: {error}") from error


def _why_no_kernels(config: EngineConfig, device: torch.device) -> str | None:
    """Return why the kernels cannot be used; None if they can."""
    if device.type != "cpu":
        return f"the kernels need a CPU, the device is {device.type}"
    if config.dtype == "float16":
        return "the kernels have no float16"
    if config.attention != "auto":
        return f"the kernels cannot use attention={config.attention}, a torch backend"
    if config.kernels == "off":
        return "the kernels are off"
    if config.kernels != "auto" and not cpu_has(config.kernels, cpu_flags()):
        return f"this machine's CPU has no {config.kernels}"
    return None


def size_cache(config: EngineConfig, executor: Executor, max_model_len: int) -> CacheSize:
    """Return the size of the cache: what fits into memory, at most what a full batch could use.

    Raises `ValueError` if `kv_cache_bytes` exceeds the memory that is free after loading the weights, or if the memory
    does not hold one sequence.
    """
    check_cache_fits(config.kv_cache_bytes, executor.device)
    num_bytes = config.kv_cache_bytes
    if num_bytes is None:
        step_bytes = executor.step_bytes(config.block_size)
        num_bytes = max(0, executor.cache.free_bytes(config.gpu_memory_utilization) - step_bytes)
    block_bytes = executor.cache.block_bytes(config.block_size, config.kv_cache_dtype)
    try:
        size = _size_within(num_bytes, config, block_bytes, executor.program.state_bytes)
    except ValueError as error:
        raise ValueError(f"kv_cache_bytes: {error}") from error
    num_rows, most = size.num_states // SLOTS_PER_SEQUENCE, config.max_batch_size
    if size.num_states and num_rows < most:
        _log.info("%d of max_batch_size=%d sequences run at a time: no more recurrent states fit", num_rows, most)
    num_blocks = min(size.num_blocks, most * -(-max_model_len // config.block_size))
    return replace(size, num_blocks=num_blocks, eager=config.kv_cache_bytes is not None)


def _size_within(num_bytes: int, config: EngineConfig, block_bytes: int, state_bytes: int) -> CacheSize:
    """Return the size of a cache of so many bytes. Raises `ValueError` if it does not hold one sequence."""
    num_states = count_states(num_bytes, state_bytes, config.max_batch_size)
    num_blocks = (num_bytes - num_states * state_bytes) // block_bytes
    if num_blocks < 1:
        raise ValueError(f"{num_bytes} bytes do not hold one block of {block_bytes} bytes")
    return CacheSize(
        num_blocks=num_blocks, block_size=config.block_size, dtype=config.kv_cache_dtype, num_states=num_states
    )


def count_states(num_bytes: int, state_bytes: int, max_batch_size: int) -> int:
    """Return the number of slots for recurrent states in a cache of so many bytes, of which they use at most half.

    Raises `ValueError` if those of one sequence do not fit.
    """
    if not state_bytes:
        return 0
    wanted = max(SLOTS_PER_SEQUENCE * max_batch_size, _FEWEST_STATES)
    count = min(wanted, num_bytes // 2 // state_bytes)
    if count < SLOTS_PER_SEQUENCE:
        raise ValueError(
            f"half of {num_bytes} bytes does not hold the recurrent states of one sequence, {SLOTS_PER_SEQUENCE} slots "
            f"of {state_bytes} bytes; at least {2 * SLOTS_PER_SEQUENCE * state_bytes} bytes are needed"
        )
    return count


def check_cache_fits(num_bytes: int | None, device: torch.device) -> None:
    """Raise `ValueError` if the KV cache is larger than the device's available memory."""
    if num_bytes is None:
        return
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if num_bytes > available:
        raise ValueError(
            f"kv_cache_bytes: {num_bytes} bytes ({num_bytes / 2**30:.1f} GiB) are more than the available memory, "
            f"{available} bytes ({available / 2**30:.1f} GiB); give a smaller size"
        )
