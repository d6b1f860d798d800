"""Every configuration of the kernels that the launchers can choose, for compilation ahead of time.

A configuration needs no GPU: `triton.compile` makes a cubin from the kernel, the types of its arguments and a variant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from types import MappingProxyType
from typing import Any, get_args

import torch

from nano_inference.executors.cuda.checks import DTYPES, MOST_KEYS
from nano_inference.executors.cuda.kernels import (
    adapt,
    advance,
    attend,
    attention,
    delta,
    fused,
    linear,
    lowrank,
    multiply,
    operate,
    pointwise,
    recur,
    sample,
    sampler,
    select,
)
from nano_inference.executors.cuda.kernels.variant import Variant
from nano_inference.executors.cuda.records import HEAD_DIMS, NORM_ORDERS, RATIOS
from nano_inference.executors.cuda.sample_records import MOST_TOKENS

TYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
)
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("q_TW", "k_SJD", "v_SJD", "out_THD"), "*P"),
        **dict.fromkeys(("table_RB", "start_R", "length_R", "shared_R", "row_QX", "shared_Q", "position_T"), "*i32"),
        **dict.fromkeys(("x_TK", "more_TK", "sum_TK", "norm_K", "weight_NK", "bias_N", "out_TN"), "*P"),
        **dict.fromkeys(("part_THND", "score_THN", "part_ZTN"), "*fp32"),
        "done_I": "*i32",
        **dict.fromkeys(("scale", "cap"), "fp32"),
        "logits_BV": "*P",
        **dict.fromkeys(("x_TW", "more_TW", "sum_TW", "weight_W", "out_TW", "gate_TW", "up_TW", "y_TW", "v_TW"), "*P"),
        **dict.fromkeys(("gate_TJ", "gate_T1", "before_TW", "table_VW", "qkv_TW", "q_THD", "q_norm_D"), "*P"),
        **dict.fromkeys(("k_norm_D", "cos_LF", "sin_LF"), "*P"),
        **dict.fromkeys(("x_TC", "weight_CK", "out_TC", "a_TH", "b_TH", "weight_V"), "*P"),
        **dict.fromkeys(("state_ZJC", "state_ZHXV", "a_log_H", "dt_bias_H"), "*fp32"),
        **dict.fromkeys(("part_R", "bound_P", "slot_P", "source_R", "column_W"), "*i32"),
        **dict.fromkeys(("a_1", "b_1", "share_1"), "*fp32"),
        **dict.fromkeys(("a_XMRK", "b_XNR"), "*P"),
        **dict.fromkeys(("rank_XM", "index_T", "start_M"), "*i32"),
        **dict.fromkeys(("low_TMR", "scale_XM"), "*fp32"),
        **dict.fromkeys(("eps", "offset"), "fp32"),
        **dict.fromkeys(("row_T", "token_T", "previous_T"), "*i32"),
        **dict.fromkeys(("work_BV", "best_BN", "raw_best_BN", "temperature_S", "bias_PV"), "*fp32"),
        **dict.fromkeys(("repetition_S", "presence_S", "frequency_S"), "*fp32"),
        **dict.fromkeys(("logprob_B", "raw_logprob_B", "top_logprob_BK", "ring_logprob_SK"), "*fp32"),
        **dict.fromkeys(("raw_mass_BN", "mass_BN", "kept_BN", "normaliser_B5", "top_p_S", "min_p_S"), "*fp64"),
        **dict.fromkeys(("cut_key_B", "seed_S"), "*i64"),
        **dict.fromkeys(
            ("cut_id_B", "slot_B", "token_B", "previous_B", "position_B", "length_B", "top_id_BK", "ring_token_SK"),
            "*i32",
        ),
        **dict.fromkeys(("count_PV", "mask_PW", "stop_SX", "report_S", "count_row_S", "bias_row_S"), "*i32"),
        **dict.fromkeys(("mask_row_S", "min_tokens_S", "max_tokens_S", "num_new_S", "sample_S", "position_S"), "*i32"),
        **dict.fromkeys(("top_k_S", "num_tops_S", "token_S", "previous_S", "state_S"), "*i32"),
    }
)
"""Types of arguments by name; P is the model's precision. All others are int32."""
_ALIGNED = frozenset(
    {
        "q_stride",
        "stride",
        "x_stride",
        "more_stride",
        "sum_stride",
        "num_in",
        "out_stride",
        "up_stride",
        "y_stride",
        "weight_stride",
        "qkv_stride",
        "slot_stride",
        "num_channels",
        "width",
        "range_size",
        "vocab_size",
    }
)
"""Numbers that are multiples of 16 in most models, so that loads are wide."""
_TILES = 128
"""Tiles of rows that share a prefix, of steps of up to 256 rows."""
_WEIGHTS = ((False, False), (True, False), (True, True))
"""Norms without and with weights, and with an offset."""
_HEAD_NORMS = tuple(one for one in product(NORM_ORDERS, _WEIGHTS) if one[0] != "none" or not one[1][0])
_INPUTS = (1024, 576, 100)
"""Numbers of inputs of a product for which its constants differ: whole tiles, whole small tiles, and neither."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A kernel with its constants and the types of its arguments."""

    kernel: Any
    variant: Variant
    traits: Mapping[str, str]
    """What distinguishes it from other configurations of the same kernel."""

    @property
    def kernel_name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def name(self) -> str:
        return " ".join((self.kernel_name, *(f"{key}={value}" for key, value in self.traits.items())))

    @property
    def num_rows(self) -> int:
        """Return the rows of a tile: tokens of a product, queries times heads of attention."""
        constants = self.variant.constants
        return int(constants["M"] * constants.get("PARTS", 1) * constants.get("W", 1))

    @property
    def sums(self) -> str:
        """Name the sums that it computes: all configurations with this name must add in the same order."""
        if self.kernel_name in ("attend_split", "attend_group"):
            return "attend dtype={dtype} head_dim={head_dim}".format(**self.traits)
        if self.kernel_name == "multiply_range":
            return "multiply dtype={dtype} inputs={inputs}".format(**self.traits)
        return self.name

    @property
    def parts(self) -> tuple[str, ...]:
        """Name the configurations that it replaces: it must add in their orders."""
        if self.kernel_name == "attend_row":
            return tuple(
                text.format(**self.traits)
                for text in (
                    "rotate_heads dtype={dtype} head_dim={head_dim} rotary=True norm={norm}",
                    "attend_split dtype={dtype} ratio=1 head_dim={head_dim} cap=False rows=16",
                )
            )
        if self.kernel_name == "multiply_norm":
            return tuple(
                text.format(**self.traits)
                for text in (
                    "norm_row dtype={dtype} more=True weight={weight}",
                    "multiply_range dtype={dtype} ranges={ranges} bias={bias} tile=1x16x32 inputs={inputs}",
                )
            )
        return ()

    @property
    def signature(self) -> dict[str, str]:
        """Return the type of each argument, as Triton writes it."""
        precision = self.traits.get("dtype", "fp32")
        names = {name: _TYPES.get(name, "i32") for name in self.kernel.arg_names}
        constants = dict.fromkeys(self.variant.constants, "constexpr")
        return {name: text.replace("*P", f"*{precision}") for name, text in (names | constants).items()}

    @property
    def attributes(self) -> dict[tuple[int, ...], list[list[str | int]]]:
        """Return the arguments that are multiples of 16 (pointers are), by index."""
        return {
            (index,): [["tt.divisibility", 16]]
            for index, (name, text) in enumerate(self.signature.items())
            if text.startswith("*") or name in _ALIGNED
        }


def configurations() -> tuple[Configuration, ...]:
    """Return every configuration."""
    return (*_attention(), *_sampler(), *_rows(), *_blocks(), *_states(), *_linear(), *_products_of_norms())


def _attention() -> Iterator[Configuration]:
    split, group, chunk = attention.attend_split, attention.attend_group, attention.attend_chunk
    kernels: dict[attend.Kind, Any] = {"split": split, "piece": split, "group": group, "chunk": chunk}
    for kind, dtype, ratio, dim, has_cap in product(get_args(attend.Kind), DTYPES, RATIOS, HEAD_DIMS, (False, True)):
        variant = attend.attend_variant(kind, dtype, ratio, dim, has_cap=has_cap, num_tiles=_TILES)
        traits = {"dtype": TYPE_NAMES[dtype], "ratio": str(ratio), "head_dim": str(dim), "cap": str(has_cap)}
        traits["rows"] = str(variant.constants["M"] * variant.constants.get("W", 1))
        yield Configuration(kernels[kind], variant, traits)
    for dtype, dim in product(DTYPES, HEAD_DIMS):
        traits = {"dtype": TYPE_NAMES[dtype], "head_dim": str(dim)}
        yield Configuration(attention.merge_split, attend.merge_variant(dim), traits)
        for order, (has_weight, has_offset) in _HEAD_NORMS:
            variant = attend.row_variant(dtype, dim, order, has_weight=has_weight, has_offset=has_offset)
            norm = f"{order}{'+weight' * has_weight}{'+offset' * has_offset}"
            yield Configuration(fused.attend_row, variant, traits | {"norm": norm})


def _sampler() -> Iterator[Configuration]:
    sizes = [1 << power for power in range(14, MOST_TOKENS.bit_length())]
    for dtype, has_cap in product(DTYPES, (False, True)):
        traits = {"dtype": TYPE_NAMES[dtype], "cap": str(has_cap)}
        yield Configuration(sampler.adjust_chunk, sample.adjust_variant(has_cap=has_cap), traits)
        for has_cut in (False, True):
            more = {**traits, "cut": str(has_cut)}
            yield Configuration(select.top_row, sample.tops_variant(has_cap=has_cap, has_cut=has_cut), more)
            for size in sizes:
                variant = sample.draw_variant(size, has_cap=has_cap, has_cut=has_cut)
                yield Configuration(sampler.draw_row, variant, {**more, "vocabulary": str(size)})
    for size in sizes:
        yield Configuration(select.cut_row, sample.cut_variant(size), {"vocabulary": str(size)})
        yield Configuration(sampler.sum_chunk, sample.sum_variant(size), {"vocabulary": str(size)})
    for kernel in (advance.load_rows, advance.advance_rows):
        yield Configuration(kernel, sample.advance_variant(), {})


def _rows() -> Iterator[Configuration]:
    """Kernels with a row or a head per program."""
    for dtype, has_more, (has_weight, has_offset) in product(DTYPES, (False, True), _WEIGHTS):
        variant = operate.norm_variant(has_more=has_more, has_weight=has_weight, has_offset=has_offset)
        traits = {"dtype": TYPE_NAMES[dtype], "more": str(has_more)}
        traits["weight"] = f"{has_weight}{'+offset' * has_offset}"
        yield Configuration(pointwise.norm_row, variant, traits)
    for dtype, dim, has_rotary, (order, (has_weight, has_offset)) in product(
        DTYPES, HEAD_DIMS, (False, True), _HEAD_NORMS
    ):
        variant = operate.rotate_variant(
            dtype, dim, order, has_rotary=has_rotary, has_weight=has_weight, has_offset=has_offset
        )
        traits = {"dtype": TYPE_NAMES[dtype], "head_dim": str(dim), "rotary": str(has_rotary)}
        traits["norm"] = f"{order}{'+weight' * has_weight}{'+offset' * has_offset}"
        yield Configuration(pointwise.rotate_heads, variant, traits)


def _blocks() -> Iterator[Configuration]:
    """Kernels with a block of columns per program."""
    for dtype in DTYPES:
        traits = {"dtype": TYPE_NAMES[dtype]}
        for kind in range(3):
            more, variant = {**traits, "kind": str(kind)}, operate.block_variant(KIND=kind)
            yield Configuration(pointwise.activate_block, variant, more)
            yield Configuration(pointwise.embed_block, variant, more)
        for has_a in (False, True):
            yield Configuration(pointwise.mix_block, operate.block_variant(HAS_A=has_a), {**traits, "a": str(has_a)})
        for kernel in (pointwise.gate_values_block, pointwise.smear_block, pointwise.softcap_block):
            yield Configuration(kernel, operate.block_variant(), traits)


def _states() -> Iterator[Configuration]:
    """Kernels of adapters, and of layers with recurrent states."""
    sizes = [1 << power for power in range(4, MOST_KEYS.bit_length())]
    for dtype in DTYPES:
        traits = {"dtype": TYPE_NAMES[dtype]}
        yield Configuration(lowrank.shrink_row, adapt.shrink_variant(), traits)
        yield Configuration(lowrank.expand_block, adapt.expand_variant(), traits)
        for taps, most_tokens in product((2, 4), (1, 2)):
            more = {**traits, "taps": str(taps), "tokens": str(most_tokens)}
            yield Configuration(delta.convolve_row, recur.convolve_variant(taps, most_tokens), more)
        for size in sizes:
            more = {**traits, "head_dim": str(size)}
            yield Configuration(delta.gated_norm_heads, recur.gated_norm_variant(size), more)
            for is_tiled in (False, True):
                variant = recur.delta_variant(size, is_tiled=is_tiled)
                yield Configuration(delta.advance_state, variant, {**more, "tiled": str(is_tiled)})
        for kernel in (delta.gate_block, delta.arrange_block):
            yield Configuration(kernel, operate.block_variant(), traits)


def _linear() -> Iterator[Configuration]:
    modes = {"one": (False, False), "split": (True, False), "summed": (False, True)}
    for dtype, (mode, (is_split, is_summed)), has_bias in product(DTYPES, modes.items(), (False, True)):
        traits = {"dtype": TYPE_NAMES[dtype], "ranges": mode, "bias": str(has_bias)}
        for tile in multiply.tiles_for(dtype):
            found = [
                multiply.range_variant(size, dtype, tile, is_split=is_split, is_summed=is_summed, has_bias=has_bias)
                for size in _INPUTS
            ]
            for variant in {str(one): one for one in found}.values():
                shape = {"tile": "{PARTS}x{M}x{BN}", "inputs": "{BK} even={IS_EVEN}"}
                texts = {key: text.format(**variant.constants) for key, text in shape.items()}
                yield Configuration(linear.multiply_range, variant, traits | texts)


def _products_of_norms() -> Iterator[Configuration]:
    """Kernels that replace a norm, a product and an activation."""
    ends = [(None, False), (None, True), *((kind, False) for kind in operate.ACTIVATIONS)]
    for dtype, is_split, has_offset, (kind, has_bias) in product(DTYPES, (False, True), (False, True), ends):
        traits = {"dtype": TYPE_NAMES[dtype], "ranges": "split" if is_split else "one", "kind": str(kind)}
        traits["weight"] = f"True{'+offset' * has_offset}"
        found = [
            multiply.norm_variant(size, dtype, kind, is_split=is_split, has_bias=has_bias, has_offset=has_offset)
            for size in _INPUTS
        ]
        for variant in {str(one): one for one in found}.values():
            more = {"bias": str(has_bias), "inputs": "{BK} even={IS_EVEN}".format(**variant.constants)}
            yield Configuration(fused.multiply_norm, variant, traits | more)


def pairwise(found: tuple[Configuration, ...], limit: int) -> tuple[Configuration, ...]:
    """Return at most `limit` configurations: every kernel and every value of a trait, then as many pairs as fit.

    Greedy: each time, the first of those with the most values, or pairs of values, that are still missing.
    """
    chosen: dict[str, Configuration] = {}
    for size in (1, 2):
        covers = [_combinations(one, size) for one in found]
        missing = frozenset[tuple[str, ...]]().union(*covers)
        missing -= frozenset(key for one in chosen.values() for key in _combinations(one, size))
        while missing and len(chosen) < limit:
            best = max(range(len(found)), key=lambda index: len(covers[index] & missing))
            chosen[found[best].name] = found[best]
            missing -= covers[best]
    return tuple(chosen.values())


def num_covered(found: Iterable[Configuration], size: int) -> int:
    """Return how many different combinations of `size` values occur in configurations; the kernel is a value, too."""
    return len(frozenset[tuple[str, ...]]().union(*(_combinations(one, size) for one in found)))


def _combinations(one: Configuration, size: int) -> frozenset[tuple[str, ...]]:
    traits = {"kernel": one.kernel_name, **one.traits}
    return frozenset(combinations((f"{key}={value}" for key, value in traits.items()), size))
