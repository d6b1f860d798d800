"""LoRA adapters (arXiv 2106.09685) as PEFT saves them: a configuration, and two tensors for each adapted matrix.

The tensors decide which matrices are adapted; the configuration gives their scales. What PEFT can save beyond that is
refused by the name of the field or tensor, before values are read.

Shapes: R ranks, N outputs and K inputs of a matrix.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nano_inference.loading.fields import read_json
from nano_inference.loading.pieces import DTYPES, FileRange, fill, is_finite, open_at
from nano_inference.loading.safetensors_file import num_bytes, read_header
from nano_inference.loading.sources import exchanged_heads
from nano_inference.models.names import NameRules
from nano_inference.models.ops import Embed, Linear, WeightSpec
from nano_inference.models.program import Program
from nano_inference.support.checks import check_int, check_number
from nano_inference.support.files import shown
from nano_inference.support.memory import huge_empty
from nano_inference.support.packages import needed
from nano_inference.types import BadRequest, ModelError

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
FIELD = "adapter"  # of errors about tensors and files
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias")
_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("megatron_core", "qalora_group_size", "runtime_config"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config"),  # see `init_lora_weights`
)
"""Fields that say which tensors there are, or how they are trained. Any other field must be empty or false."""
_SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the matrices of the model as they are."""
MAX_SECONDS = 2.0  # in which the configuration's patterns must match
MAX_PATTERNS, MAX_PATTERN = 2000, 200  # patterns of a field, and characters of one
_COSTLY = re.compile(r"\{|\(\?[R\d&P+-]")  # repeats are unfolded in memory before any limit of time; recursion


class LowRank(NamedTuple):
    """What an adapter adds to a matrix's product: y += scale · (x Aᵀ) Bᵀ."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter in main memory, float32 or bfloat16."""

    pairs: Mapping[str, LowRank]  # by the name of the program's weight
    rank: int  # the largest
    num_bytes: int


def read_adapter(source: Path, program: Program, names: NameRules, *, max_rank: int) -> Adapter:
    """Read an adapter of a program from the directory that PEFT wrote.

    Raises `BadRequest` naming a field of the configuration, or `adapter` for its files and tensors.
    """
    try:
        scale_of = _scales(read_json(source / CONFIG_NAME).values, max_rank)
        ranges = read_header(source / TENSORS_NAME)
        found = _matched(ranges.items(), program, names, scale_of)
        values = _values(source / TENSORS_NAME, [part for pair in found.values() for part in (pair.a, pair.b)])
    except ModelError as error:
        raise BadRequest(FIELD, str(error)) from error
    return _adapter({name: _Pair(values[id(a)], values[id(b)], scale) for name, (a, b, scale) in found.items()}, names)


def adapter_from(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    program: Program,
    names: NameRules,
    *,
    max_rank: int,
) -> Adapter:
    """Return an adapter of a program from PEFT's configuration and (name, dense float tensor) pairs.

    Names may be those of a state dict or of a file. Raises `BadRequest` as `read_adapter` does.
    """
    scale_of = _scales(config, max_rank)
    return _adapter(_matched(tensors, program, names, scale_of), names)


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


S = TypeVar("S", bound=_Shaped)


class _Pair(NamedTuple, Generic[S]):
    a: S
    b: S
    scale: float


def _scales(config: Mapping[str, Any], max_rank: int) -> Callable[[str, int], float]:
    """Check a configuration; return a function from (module, its tensors' rank) to the scale."""
    if config.get("peft_type") != "LORA":
        raise BadRequest("peft_type", f"must be LORA, got {shown(config.get('peft_type'))}")
    for name, value in config.items():
        if value and name not in (*_READ, *_WITHOUT_EFFECT):
            raise BadRequest(str(name)[:80], f"is not supported, got {shown(value)}")
    if config.get("bias", "none") not in (None, "none"):
        raise BadRequest("bias", f"must be none, got {shown(config['bias'])}")
    if config.get("init_lora_weights") not in _SAME_BASE:
        raise BadRequest("init_lora_weights", f"{shown(config['init_lora_weights'])} changes the matrices of the model")
    has_root = bool(config.get("use_rslora"))
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    check_int("r", rank, 1, max_rank)
    check_number("lora_alpha", alpha, -1e6, 1e6)
    ranks, alphas = (_patterns(name, config.get(name)) for name in ("rank_pattern", "alpha_pattern"))
    for one in ranks.values():
        check_int("rank_pattern", one, 1, max_rank)
    for one in alphas.values():
        check_number("alpha_pattern", one, -1e6, 1e6)
    deadline = time.monotonic() + MAX_SECONDS

    def scale_of(module: str, num_ranks: int) -> float:
        wanted = _of_pattern("rank_pattern", ranks, module, rank, deadline)
        if num_ranks != wanted:
            raise BadRequest("r", f"{shown(module)}: its tensors have the rank {num_ranks}, the configuration {wanted}")
        own: float = _of_pattern("alpha_pattern", alphas, module, alpha, deadline)
        return own / (math.sqrt(num_ranks) if has_root else num_ranks)

    return scale_of


class _Pattern(Protocol):
    def fullmatch(self, string: str, *, timeout: float) -> object | None: ...


def _patterns(name: str, given: Any) -> dict[_Pattern, Any]:
    """Return compiled patterns: PEFT matches the end of a module's name, from a dot on (`get_pattern_key`)."""
    if not isinstance(given or {}, Mapping):
        raise BadRequest(name, f"must map patterns to numbers, got {shown(given)}")
    patterns = {str(key): value for key, value in (given or {}).items()}
    if len(patterns) > MAX_PATTERNS or max(map(len, patterns), default=0) > MAX_PATTERN:
        raise BadRequest(name, f"must have at most {MAX_PATTERNS} patterns of at most {MAX_PATTERN} characters")
    if costly := next(filter(_COSTLY.search, patterns), None):
        raise BadRequest(name, f"{shown(costly)}: repeats in braces and recursion are not supported")
    if not patterns:
        return {}
    with needed(f"{name} of an adapter"):
        import regex
    try:
        return {regex.compile(rf"(?:.*\.)?(?:{key})"): value for key, value in patterns.items()}
    except (regex.error, MemoryError, RecursionError) as error:
        raise BadRequest(name, f"has an invalid pattern: {error}") from None


def _of_pattern(name: str, patterns: Mapping[_Pattern, Any], module: str, other: Any, deadline: float) -> Any:
    """Return the value of the first pattern that matches a module's name, else `other`."""
    try:
        for pattern, value in patterns.items():
            if pattern.fullmatch(module, timeout=max(1e-3, deadline - time.monotonic())):
                return value
    except (TimeoutError, MemoryError):
        raise BadRequest(name, f"takes more than {MAX_SECONDS:g} seconds to match, or too much memory") from None
    return other


def _matched(
    named: Iterable[tuple[str, S]], program: Program, names: NameRules, scale_of: Callable[[str, int], float]
) -> dict[str, _Pair[S]]:
    """Return the tensors by weight; checks names and shapes. Tensors of parts that the program lacks are ignored."""
    targets = _targets(program)
    found: dict[str, dict[str, S]] = {}
    modules: dict[str, str] = {}
    for name, tensor in named:
        parsed = _TENSOR.fullmatch(name)
        if parsed is None:
            raise BadRequest(FIELD, f"{shown(name)} is no lora_A.weight or lora_B.weight of a linear layer")
        module, side = parsed.groups()
        own = names.own(f"{module}.weight")
        if own is None:
            continue
        if own not in targets:
            raise BadRequest(FIELD, f"{shown(name)}: the model has no such matrix")
        sides = found.setdefault(own, {})
        if side in sides:
            raise BadRequest(FIELD, f"{shown(name)}: there are two of them")
        sides[side], modules[own] = tensor, module
    if not found:
        raise BadRequest(FIELD, "has no tensors of the model")
    pairs: dict[str, _Pair[S]] = {}
    for own, sides in found.items():
        if len(sides) < 2:
            raise BadRequest(FIELD, f"{shown(modules[own])}: lora_A or lora_B is missing")
        a, b, spec = sides["A"], sides["B"], targets[own]
        (num_out, num_in), num_ranks = spec.shape, a.shape[0] if a.shape else 0
        if tuple(a.shape) != (num_ranks, num_in) or tuple(b.shape) != (num_out, num_ranks):
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise BadRequest(FIELD, f"{shown(modules[own])}: shapes {shapes} do not fit a matrix of {spec.shape}")
        pairs[spec.name] = _Pair(a, b, scale_of(modules[own], num_ranks))
    return pairs


def _targets(program: Program) -> dict[str, WeightSpec]:
    """Return the matrices of projections, by name; a head that shares the embeddings by its own."""
    tables = {op.table.name for op in program.ops if isinstance(op, Embed)}
    specs = (spec for op in program.ops if isinstance(op, Linear) for spec in op.matrices)
    return {name: spec for spec in specs for name in (spec.name, *spec.tied) if name not in tables}


def _values(path: Path, ranges: Sequence[FileRange]) -> dict[int, Tensor]:
    """Return the values of ranges of one file, by the id of the range; in one read if they are adjacent."""
    sizes = [num_bytes(one) for one in ranges]
    first = min(one.offset for one in ranges)
    span = max(one.offset + size for one, size in zip(ranges, sizes, strict=True)) - first
    found: dict[int, Tensor] = {}
    if span > sum(sizes):
        for one in ranges:
            found[id(one)] = torch.empty(one.shape, dtype=DTYPES[one.dtype])
            one.read_into(found[id(one)])
        return found
    memory = huge_empty((span,), torch.uint8, torch.device("cpu"))
    with open_at(path, first) as file:
        fill(file, path, memory)
    for one, size in zip(ranges, sizes, strict=True):
        dtype, start = DTYPES[one.dtype], one.offset - first
        flat = memory[start : start + size]
        found[id(one)] = (flat.clone() if start % dtype.itemsize else flat).view(dtype).view(one.shape)
    return found


def _adapter(found: Mapping[str, _Pair[Tensor]], names: NameRules) -> Adapter:
    """Return an adapter with checked values, in the program's order of heads."""
    pairs: dict[str, LowRank] = {}
    for name, (a, b, scale) in found.items():
        is_short = a.dtype == b.dtype == torch.bfloat16
        a_RK, b_NR = (one.to("cpu", torch.bfloat16 if is_short else torch.float32) for one in (a, b))
        if not (is_finite(a_RK) and is_finite(b_NR)):
            raise BadRequest(FIELD, f"{name.removesuffix('.weight')}: contains NaN or infinity")
        place = None if names.tiled is None else names.tiled.place_of(name)
        if names.tiled is not None and place is not None:
            order = (place, names.tiled.num_k_heads, names.tiled.num_v_heads)
            a_RK, b_NR = (
                (a_RK, exchanged_heads(b_NR, *order)) if place[0] == 0 else (exchanged_heads(a_RK, *order), b_NR)
            )
        pairs[name] = LowRank(a_RK, b_NR, scale)
    rank = max(pair.a_RK.size(0) for pair in pairs.values())
    return Adapter(pairs=pairs, rank=rank, num_bytes=sum(one.nbytes for pair in pairs.values() for one in pair[:2]))
