"""`doctor`: facts for a bug report, and the models that fit in this machine's memory; `models info`: a model's facts.

Memory use is estimated from the headers of a model's files alone.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal

import nano_inference
from nano_inference.build import count_states, end_token_ids, kernels_here
from nano_inference.cli.arguments import ENV_PREFIX, default_file
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of, fetch
from nano_inference.cli.shells import installed
from nano_inference.cli.terminal import print_rows
from nano_inference.config import EngineConfig
from nano_inference.core.recurrent import SLOTS_PER_SEQUENCE
from nano_inference.executors.cpu.matrix import can_keep, can_round
from nano_inference.executors.devices import available_memory, free_bytes
from nano_inference.loading.catalog import WHEELS, ModelEntry, list_models
from nano_inference.loading.checkpoint import Checkpoint, open_checkpoint
from nano_inference.loading.kinds import ModelKinds, installed_kinds
from nano_inference.loading.packed import PackedTensor
from nano_inference.loading.pieces import DTYPES
from nano_inference.loading.sources import WeightSource
from nano_inference.models.families import program_of
from nano_inference.text.dialogue import load_dialogue
from nano_inference.text.tokenizer import kind_of, load_tokenizer
from nano_inference.types import BadRequest, ModelError


def show_info(name: str, overrides: Sequence[str], as_json: bool, common: Common) -> int:
    """Print the facts of a model, fetching it if necessary."""
    kinds = installed_kinds()
    facts = describe(open_checkpoint(fetch(name, common), overrides, kinds.formats), kinds)
    if as_json:
        print(json.dumps(facts))
        return 0
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):<{width}}  {_fact(key, value)}")
    return 0


def describe(checkpoint: Checkpoint, kinds: ModelKinds) -> dict[str, Any]:
    """Return the facts of a model as JSON values."""
    config, path, source = checkpoint.config, checkpoint.path, checkpoint.tokenizer
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    tokenizer = load_tokenizer(source, kinds.tokenizers)
    kind = None if source.gguf is not None else kind_of(Path(source.path), kinds.tokenizers)
    own = "none" if kind is None else kind.description
    facts = {
        "path": str(path),
        "architecture": config.architecture,
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "windows": dict(Counter("full" if layer.window is None else str(layer.window) for layer in config.layers)),
        "ropes": [
            f"{rope.kind}, theta {rope.theta:g}, {rope.rotary_dim} dimensions"
            + ("" if rope.table_dtype == "float32" else f", tables in {rope.table_dtype}")
            for rope in config.ropes
        ],
        "tied_embeddings": config.tie_embeddings,
        "file_precision": checkpoint.dtype,
        "file_bytes": sum(file.stat().st_size for file in files),
        "parameters": checkpoint.num_parameters,
        "ignored_tensors": ignored_tensors(checkpoint),
        "float32_bytes": checkpoint.num_parameters * FLOAT32,
        "kv_bytes_per_token": config.kv_bytes_per_token(FLOAT32),
        "tokenizer": own if source.gguf is None else f"gguf ({source.gguf.get('tokenizer.ggml.model')})",
        "chat_template": load_dialogue(source, tokenizer, kinds.tokenizers) is not None,
        "end_tokens": {token: tokenizer.token_text(token) for token in sorted(end_token_ids(config, tokenizer))},
    }
    if (state_bytes := program_of(config, kinds.families).state_bytes) > 0:
        facts["state_bytes"] = state_bytes
    if (inferred := checkpoint.inferred) is not None:  # constants that the files do not name
        constants = {name: {"value": one.value, "reason": one.reason} for name, one in inferred.values.items()}
        facts |= {"constants": constants, "warnings": list(inferred.warnings)}
    return facts


def ignored_tensors(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the numbers of tensors that the model does not compute with, by the start of their names."""
    return dict(Counter(checkpoint.config.names.ignored_as(name) or name for name in checkpoint.ignored))


def _fact(key: str, value: Any) -> str:
    if key == "windows":
        return ", ".join(f"{window} in {count} layers" for window, count in value.items())
    if key == "constants":
        return "".join(f"\n  {name} = {one['value']} ({one['reason']})" for name, one in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{inner} {text}" for inner, text in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes") or key == "kv_bytes_per_token":
        return f"{value:,} ({decimal(value)})"
    return f"{value:,}" if isinstance(value, int) else str(value)


# ---- estimates of memory use

FLOAT32 = 4
PANEL = 64  # outputs of a matrix are padded to a multiple (executors/cpu/c/formats.h)
_DEFAULTS = EngineConfig(model_path="any")
CONTEXT = _DEFAULTS.max_model_len  # tokens of context in the estimates of typical sizes
_MAX_SEQUENCES = _DEFAULTS.max_batch_size


class Size(NamedTuple):
    """A typical model: number of weights, and K and V values cached per token."""

    name: str
    parameters: int
    kv_values: int


SIZES = (
    Size("135M (SmolLM2)", 134_515_008, 2 * 30 * 3 * 64),
    Size("360M (SmolLM2)", 361_821_120, 2 * 32 * 5 * 64),
    Size("0.6B (Qwen3)", 596_049_920, 2 * 28 * 8 * 128),
    Size("1.7B (Qwen3)", 1_720_574_976, 2 * 28 * 8 * 128),
    Size("4B (Qwen3)", 4_022_468_096, 2 * 36 * 8 * 128),
    Size("8B (Qwen3)", 8_190_735_360, 2 * 36 * 8 * 128),
    Size("8B (Llama 3.1)", 8_030_261_248, 2 * 32 * 8 * 128),
)
PRECISIONS: Mapping[str, float] = {"bfloat16": 2.0, "int8": 1.0, "4 bits (Q4_0)": 18 / 32}
"""Bytes per weight; int8's scales per row are neglected."""


class Machine(NamedTuple):
    """This machine's memory, in bytes."""

    available: int
    kv_budget: int  # default capacity of the KV cache in bytes
    has_kernels: bool


def of_models(entries: Iterable[ModelEntry], machine: Machine) -> list[dict[str, Any]]:
    """Return estimates of every model on this machine, in the file's precision and in int8."""
    precisions = ("auto", "int8") if machine.has_kernels else ("float32",)
    rows: list[dict[str, Any]] = []
    for entry in entries:
        is_repo = entry.source == "hub" and not (entry.path / "config.json").is_file()  # of .gguf files, each a model
        files = [(f"{entry.name}:{file.name}", file) for file in sorted(entry.path.glob("*.gguf"))] if is_repo else []
        for name, path in files if is_repo else [(entry.name, entry.path)]:
            try:
                checkpoint = open_checkpoint(path)
                rows += [of_model(name, checkpoint, precision, machine) for precision in precisions]
            except (ModelError, BadRequest) as error:
                rows.append({"model": name, "problem": str(error)})
    return rows


def of_sizes(machine: Machine) -> list[dict[str, Any]]:
    """Return estimates of typical sizes in every precision."""
    return [
        {
            "size": size.name,
            "precision": precision,
            **_costs(int(size.parameters * each), FLOAT32 * size.kv_values, CONTEXT, machine),
        }
        for size in SIZES
        for precision, each in PRECISIONS.items()
    ]


def of_model(name: str, checkpoint: Checkpoint, precision: str, machine: Machine) -> dict[str, Any]:
    """Return an estimate of one model. `precision` is "auto", "int8", or "float32" without C kernels."""
    total = sum(
        weight_bytes(source, precision)
        for source_name, source in checkpoint.sources.items()
        if not (source_name == "lm_head.weight" and checkpoint.config.tie_embeddings)
    )
    context = min(CONTEXT, checkpoint.config.max_positions)
    kv_bytes = checkpoint.config.kv_bytes_per_token(FLOAT32)
    shown = f"auto ({checkpoint.dtype})" if precision == "auto" else precision
    return {
        "model": name,
        "precision": shown,
        "ignored_tensors": sum(ignored_tensors(checkpoint).values()),
        **_costs(total, kv_bytes, context, machine, program_of(checkpoint.config).state_bytes),
    }


def weight_bytes(source: WeightSource, precision: str) -> int:
    """Return the bytes of one tensor in memory, in the layout of `executors.cpu.weights`."""
    if len(source.shape) != 2 or precision == "float32":
        return FLOAT32 * math.prod(source.shape)
    rows = -(-source.shape[0] // PANEL) * PANEL
    values = rows * source.shape[1]
    packed = source if isinstance(source, PackedTensor) and not source.shift else None
    can = can_round if precision == "int8" else can_keep
    if packed is not None and can(packed.tensor.type_name, packed.shape[1]):
        return packed.tensor.num_bytes * rows // source.shape[0]
    if precision == "int8":
        return values + FLOAT32 * rows
    dtype = DTYPES.get(source.dtype)
    return values * min(FLOAT32, dtype.itemsize if dtype is not None else FLOAT32)


def _costs(weights: int, kv_bytes: int, context: int, machine: Machine, state_bytes: int = 0) -> dict[str, Any]:
    """Return the estimate for `weights` bytes, `kv_bytes` per token and `state_bytes` per slot of recurrent states."""
    budget, own_states = machine.kv_budget, SLOTS_PER_SEQUENCE * state_bytes
    if own_states <= budget // 2:
        budget -= count_states(budget, state_bytes, _MAX_SEQUENCES) * state_bytes
    return {
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_bytes,
        "state_bytes": state_bytes,
        "context": context,
        "context_kv_bytes": kv_bytes * context,
        "kv_budget_tokens": min(budget // kv_bytes, _MAX_SEQUENCES * context),
        "fits": weights + kv_bytes * context + own_states <= machine.available,
    }


# ---- `doctor`

_HEAD = ["model", "precision", "weights", "KV a token", "state", "KV of context", "KV budget", "fits"]
_NOTE = (
    "State: a recurrent state, of which a running sequence takes two. KV budget: capacity of the KV cache in tokens\n"
    "without --kv-cache-bytes. Fits: the weights and the cache of one whole context fit in the memory that is free now."
)


def run(as_json: bool, common: Common) -> int:
    """Print the facts."""
    facts = examine(cache_of(common), common.config)
    if as_json:
        print(json.dumps(facts))
        return 0
    for heading, part in facts.items():
        print(heading)
        if isinstance(part, list):
            print_rows(_HEAD, map(_cells, part))
        else:
            print("\n".join(f"  {key.replace('_', ' '):<26}{_shown(key, value)}" for key, value in part.items()))
    print(_NOTE)
    return 0


def examine(cache: Path, config: Path | None = None) -> dict[str, Any]:
    """Return facts as JSON values: each heading has a dictionary, or a list of rows."""
    from huggingface_hub import constants

    kernels = kernels_here()
    # Reversed: of a name that two entries of the path have, the first is imported.
    found = {one.name.lower().replace("_", "-"): one.version for one in reversed([*distributions()]) if one.name}
    entries, own = list_models(cache), default_file(os.environ)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    basis = Machine(
        available=available_memory(),
        kv_budget=free_bytes(torch.device("cpu"), 0.9),
        has_kernels=kernels["code"] != "torch",
    )
    return {
        "system": {
            "nano_inference": nano_inference.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "processor": processor() | limits(),
        "memory": {"total_bytes": total, "available_bytes": basis.available},
        "torch": {"threads": torch.get_num_threads(), "cuda_devices": devices},
        "kernels": kernels,
        "libraries": {name: found.get(name, "missing") for name in LIBRARIES},
        "settings": {
            "config_files": [str(path) for path in (config, own if own.exists() else None) if path is not None],
            "environment": sorted(name for name in os.environ if name.startswith(ENV_PREFIX)),
            "completion": installed(Path.home()),
        },
        "models": {
            "cache": str(cache),
            "cache_free_bytes": free_disk(cache),
            "hub_offline": bool(constants.HF_HUB_OFFLINE),
            "kv_budget_bytes": basis.kv_budget,
            "here": [entry.name for entry in entries],
        },
        "default model": {"name": WHEELS[0].name, "here": any(entry.name == WHEELS[0].name for entry in entries)},
        "models here": of_models(entries, basis),
        "typical sizes": of_sizes(basis),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    name = row.get("model") or row["size"]
    ignored = row.get("ignored_tensors", 0)
    if "problem" in row:
        return [name, row["problem"]]
    return [
        *(
            f"{name} (without {ignored} other tensors)" if ignored else name,
            row["precision"],
            decimal(row["weight_bytes"]),
            decimal(row["kv_bytes_per_token"]),
        ),
        decimal(row["state_bytes"]) if row["state_bytes"] else "none",
        f"{decimal(row['context_kv_bytes'])} / {row['context']}",
        *(f"{row['kv_budget_tokens']:,}", "yes" if row["fits"] else "no"),
    ]


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "no limit" if key.startswith("cgroup") else "unknown"
    if isinstance(value, bool) and key != "here":
        return "yes" if value else "no"
    if isinstance(value, bool):
        return "yes" if value else "no (`nano-inference models pull default` fetches it)"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if "bytes" in key:
        return decimal(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
LIBRARIES = (
    *("torch", "safetensors", "tokenizers", "tiktoken", "gguf", "jinja2", "huggingface-hub"),
    *("rich", "cyclopts", "numpy"),
)


def processor() -> dict[str, Any]:
    """Return the processor's name, those of its instruction sets that kernels use, and thread counts."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())  # of the first processor
    info = {key.strip(): value.strip() for key, _, value in pairs}
    present = set(info.get("flags", info.get("Features", "")).split())
    return {
        "name": info.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in present],
        "threads": os.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def limits(root: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Return the limits of this process's cgroup: processors and bytes, None without a limit."""

    def words(*names: str) -> list[str]:
        try:
            return " ".join((root / name).read_text(encoding="ascii") for name in names).split()
        except (OSError, UnicodeDecodeError):
            return []

    quota = words("cpu.max") or words("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    memory = words("memory.max") or words("memory/memory.limit_in_bytes")
    has_quota = len(quota) == 2 and quota[0].isdigit()
    return {
        "cgroup_processors": int(quota[0]) / int(quota[1]) if has_quota else None,
        "cgroup_memory_bytes": int(memory[0]) if memory and memory[0].isdigit() and int(memory[0]) < 1 << 60 else None,
    }


def free_disk(directory: Path) -> int | None:
    """Return the free bytes of the file system of a directory, which may not exist yet."""
    here = next((place for place in (directory, *directory.absolute().parents) if place.exists()), None)
    return None if here is None else shutil.disk_usage(here).free
