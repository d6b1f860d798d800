"""Infer a nanochat checkpoint's generation and the constants that its files do not contain. No torch.

nanochat's checkpoints have no version field; rope base, soft cap, window sizes and more are constants of its source
code at the time. They are inferred from names and shapes of the weights, each with a reason, and can be overridden.
Source of the table: karpathy/nanochat's public history, October 2025 to July 2026 (docs/nanochat.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from nano_inference.loading.fields import Fields, shown
from nano_inference.loading.inferred import Constant
from nano_inference.models.config import ROPE_DTYPES, RopeDtype
from nano_inference.types import BadRequest, ModelError

Shapes = Mapping[str, tuple[int, ...]]  # name of a weight -> its shape
DecodeWindow = Literal["short", "full"]
DECODE_WINDOWS: tuple[DecodeWindow, ...] = ("short", "full")

FLOAT32_EPS = 1.1920929e-07  # default epsilon of torch's rms_norm: float32's, whatever the input's precision
_MANY_TOKENS = 41_943_040  # `eval_tokens` of base runs since 2026-03-04
_SHOWN = 5
_SMEAR_SHAPE = (1, 24)
_CONFIG_KEYS = frozenset({"sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern"})
"""Fields of `model_config` in all generations of master."""
_BY_HAND = "set by hand"
_ROPE_REASONS: Mapping[RopeDtype, str] = {
    "bfloat16": "rounded by upstream until 2026-03-04",
    "float32": "the computation's since 2026-03-04",
}
_WITH_WINDOWS = "as trained; upstream's fallback of 2026-01-16 to 30 had full"
_OF_JANUARY = ("G1", "G2", "G2e")
_UNKNOWN_WINDOWS = (
    "decode_window=short is assumed; the weights do not show whether answers had no windows, as upstream's of "
    "2026-01-16 to 30 without FlashAttention 3 (override decode_window=full)"
)
_SOFTCAP_WARNING = (
    "soft cap 15 is assumed; runs of 2026-03-02 to 09 had 20 (override softcap=20). Greedy output is the same"
)
_LAYER = r"transformer\.h\.\d+\."
_KNOWN = re.compile(
    rf"transformer\.wte\.weight|lm_head\.weight|{_LAYER}attn\.(c_q|c_k|c_v|c_proj|ve_gate)\.weight|"
    rf"{_LAYER}mlp\.(c_fc|c_proj)\.weight|value_embeds\.\d+\.weight|resid_lambdas|x0_lambdas|"
    r"smear_gate\.weight|smear_lambda|backout_lambda|bigram_embed\.embed\.weight|bigram_lambdas"
)
_PROTOTYPES = re.compile(r"value_embed_[AB]\b.*|value_embed\.weight|v0_lambdas")
_EXPERTS = re.compile(r".*\.(mlp\.(router|experts|shared_expert)|moe)\..*")


class Rules(NamedTuple):
    """Constants in the source of a generation."""

    rope_base: float
    qk_scale: float
    softcap: float
    gate_scale: float
    short_share: int  # a short window is the sequence length divided by this …
    rounds: bool  # … rounded up to a multiple of 128 if True, else down to an integer
    rope_dtype: RopeDtype  # precision of the cos and sin tables; float32 means that of the computation
    signs: str  # what identifies the generation, for messages


GENERATIONS: Mapping[str, Rules] = {
    "G0": Rules(10_000.0, 1.0, 15.0, 2.0, 2, False, "bfloat16", "no resid_lambdas"),
    "G1": Rules(10_000.0, 1.0, 15.0, 2.0, 2, False, "bfloat16", "resid_lambdas, no value embeddings"),
    "G2": Rules(10_000.0, 1.0, 15.0, 2.0, 2, False, "bfloat16", "value gates of 32 columns"),
    "G2e": Rules(10_000.0, 1.0, 15.0, 2.0, 2, False, "bfloat16", "bigram_embed"),
    "G2s": Rules(10_000.0, 1.0, 20.0, 2.0, 2, False, "float32", "value gates of 32 columns, trained 2026-03-02 to 09"),
    "G3": Rules(100_000.0, 1.15, 15.0, 3.0, 3, True, "float32", "value gates of 12 columns, no smear_gate"),
    "G4": Rules(100_000.0, 1.2, 15.0, 3.0, 4, True, "float32", "smear_gate"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants that weights and configuration do not determine. Every field can be overridden."""

    generation: str
    sequence_len: int
    rope_base: float
    qk_scale: float
    softcap: float
    gate_scale: float
    window_pattern: str  # s and L, tiled over the layers, the last of which is L; empty if no layer has a window
    short_window: int  # tokens before each token to which an S layer attends
    norm_eps: float
    rope_dtype: RopeDtype
    """bfloat16: cos and sin are rounded to it, as upstream did until its commit 1076f97 (2026-03-04)."""
    decode_window: DecodeWindow = "short"
    """full: windows apply to the prompt's queries only, as in upstream's fallback without FlashAttention 3 between
    2026-01-16 (b62a5bc) and 2026-01-30 (3ba42e8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Constants, the reason for each, and warnings for the user."""

    constants: Constants
    reasons: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The generation and what identifies it, in a few words."""
        return f"nanochat {self.constants.generation} ({self.reasons['generation']})"

    @property
    def values(self) -> Mapping[str, Constant]:
        """Every constant with its reason."""
        return MappingProxyType(
            {name: Constant(value, self.reasons[name]) for name, value in asdict(self.constants).items()}
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Unusual, unknown or overridden rope_dtype and decode_window, with reasons; printed at load."""
        constants, reasons = self.constants, self.reasons
        usual = {"rope_dtype": "float32", "decode_window": "short"}
        found = tuple(
            f"{name}={getattr(constants, name)} ({reasons[name]})"
            for name, value in usual.items()
            if getattr(constants, name) != value or reasons[name] == _BY_HAND
        )
        is_unknown = constants.generation in _OF_JANUARY and reasons["decode_window"] == _WITH_WINDOWS
        return (*found, _UNKNOWN_WINDOWS) if is_unknown else found


def infer(
    origin: str,
    shapes: Shapes,
    config: Fields,
    *,
    user_config: Mapping[str, Any] = MappingProxyType({}),
    is_zero: Callable[[str], bool] = lambda name: False,
    overrides: Mapping[str, str] = MappingProxyType({}),
    commit: str | None = None,
) -> Inferred:
    """Return the generation of a checkpoint and its constants.

    `config` is meta's `model_config`; `user_config` that of the base run, and `commit` nanochat's commit in training
    (both determine the soft cap); `is_zero` says whether all values of a small weight are zero; `overrides` are the
    user's. Raises `ModelError` naming `origin` for weights of no known generation, and `BadRequest` for an invalid
    override.
    """
    refuse_unknown(origin, shapes)
    warnings = _unknown_keys(config)
    _refuse_halves(origin, shapes)
    columns = _gate_columns(origin, shapes)
    by_hand = override_values(overrides)
    recorded = constants_at(commit) if columns == {32} and "bigram_embed.embed.weight" not in shapes else {}
    generation, why = by_hand.get("generation"), _BY_HAND
    if generation is None and recorded:
        generation, why = recorded["generation"], f"git_commit {commit}"
    if generation is None:
        generation, why = _generation(origin, shapes, columns, user_config, is_zero, warnings)
    if generation == "G2" and not recorded and not {"generation", "softcap"} & set(overrides):
        warnings.append(_SOFTCAP_WARNING)
    sequence_len = by_hand.get("sequence_len") or config.integer("sequence_len")
    pattern, pattern_why = by_hand.get("window_pattern"), _BY_HAND
    if pattern is None:
        pattern, pattern_why = _window_pattern(origin, shapes, config, warnings)
    constants = _hard_coded(generation, sequence_len, pattern)
    reasons = _reasons(generation, has_short="S" in pattern, has_gates=bool(columns))
    reasons |= {"generation": why, "window_pattern": pattern_why}
    if "generation" not in by_hand and "rope_dtype" in recorded:
        constants = replace(constants, **override_values({"rope_dtype": recorded["rope_dtype"]}))
        reasons["rope_dtype"] = f"git_commit {commit}"
    reasons |= dict.fromkeys(by_hand, _BY_HAND)
    return Inferred(
        constants=replace(constants, **by_hand), reasons=MappingProxyType(reasons), warnings=tuple(warnings)
    )


def _unknown_keys(config: Fields) -> list[str]:
    """Return a warning that names fields of `model_config` that no generation has, if there are any."""
    unknown = [shown(name) for name in sorted(config.values, key=str) if name not in _CONFIG_KEYS]
    if not unknown:
        return []
    rest = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    names = ", ".join(unknown[:_SHOWN])
    return [f"model_config has fields of no known generation, which are not used: {names}{rest}"]


def _hard_coded(generation: str, sequence_len: int, pattern: str) -> Constants:
    """Return the constants in the source of a generation."""
    rules = GENERATIONS[generation]
    return Constants(
        generation=generation,
        sequence_len=sequence_len,
        rope_base=rules.rope_base,
        qk_scale=rules.qk_scale,
        softcap=rules.softcap,
        gate_scale=rules.gate_scale,
        window_pattern=pattern,
        short_window=short_window(sequence_len, rules),
        norm_eps=FLOAT32_EPS,
        rope_dtype=rules.rope_dtype,
    )


def _reasons(generation: str, *, has_short: bool, has_gates: bool) -> dict[str, str]:
    """Return the reason for each constant that the weights do not determine."""
    own = f"{generation}'s"
    return {
        "sequence_len": "model_config",
        "rope_base": own,
        "qk_scale": own,
        "softcap": own,
        "gate_scale": own if has_gates else f"{own}, but there are no value embeddings",
        "short_window": own if has_short else f"{own}, but no layer has one",
        "norm_eps": "float32's epsilon",
        "rope_dtype": f"{own}, {_ROPE_REASONS[GENERATIONS[generation].rope_dtype]}",
        "decode_window": _WITH_WINDOWS if has_short else f"{own}, but no layer has a short window",
    }


def short_window(sequence_len: int, rules: Rules) -> int:
    """Return the window of S layers in tokens before the query: sequence_len/2, or /3 or /4 rounded up to 128s."""
    if not rules.rounds:
        return sequence_len // rules.short_share
    return -(-sequence_len // rules.short_share // 128) * 128


def refuse_unknown(origin: str, shapes: Shapes) -> None:
    """Raise `ModelError` for weights of no generation on nanochat's master: forks would give wrong results."""
    experts = [name for name in shapes if _EXPERTS.fullmatch(name)]
    if experts:
        raise ModelError(f"{origin}: {experts[0]}: nanochat's mixture-of-experts branches are not supported")
    prototypes = [name for name in shapes if _PROTOTYPES.fullmatch(name)]
    has_gate = any(name.endswith(".ve_gate.weight") for name in shapes)
    values = [name for name in shapes if name.startswith("value_embeds.")]
    if prototypes or (values and not has_gate):
        name = (prototypes or values)[0]
        raise ModelError(f"{origin}: {name}: prototypes of value embeddings (January 2026) are not supported")
    unknown = sorted(name for name in shapes if not _KNOWN.fullmatch(name))
    if unknown:
        rest = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        names = ", ".join(shown(name) for name in unknown[:_SHOWN])
        raise ModelError(f"{origin}: weights of no known nanochat generation: {names}{rest}")


def parse_overrides(texts: Iterable[str] | Mapping[str, object]) -> dict[str, str]:
    """Parse `name=value`: one text, several, or a mapping. Raises `BadRequest` listing the names."""
    if isinstance(texts, Mapping):
        texts = [f"{name}={value}" for name, value in texts.items()]
    elif isinstance(texts, str):
        texts = [texts]
    found: dict[str, str] = {}
    known = [field.name for field in fields(Constants)]
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise BadRequest("overrides", f"{shown(text)} must be name=value, with a name of {', '.join(known)}")
        found[name] = value
    return found


def _generation(
    origin: str,
    shapes: Shapes,
    columns: set[int],
    user_config: Mapping[str, Any],
    is_zero: Callable[[str], bool],
    warnings: list[str],
) -> tuple[str, str]:
    """Return the generation and what identifies it; append to `warnings`."""
    if "bigram_embed.embed.weight" in shapes:
        return "G2e", GENERATIONS["G2e"].signs
    if "smear_gate.weight" in shapes:
        smears = [name for name in ("smear_gate.weight", "smear_lambda", "backout_lambda") if name in shapes]
        if not all(is_zero(name) for name in smears):
            if columns and columns != {12}:
                raise ModelError(
                    f"{origin}: ambiguous: smear_gate of G4 with value gates of 32 columns, as in G2; "
                    "set the constants by hand (generation=…)"
                )
            return "G4", GENERATIONS["G4"].signs
        warnings.append(
            "smear and backout are all zero: treated as an older checkpoint, patched to load, with its constants"
        )
    if columns == {12}:
        return "G3", GENERATIONS["G3"].signs
    if columns == {32}:
        return _softcap_of(user_config)
    found = "G1" if {"resid_lambdas", "x0_lambdas"} & set(shapes) else "G0"
    return found, GENERATIONS[found].signs


def _gate_columns(origin: str, shapes: Shapes) -> set[int]:
    """Return the width of the value gates, as a set of at most one. Raises `ModelError` for unknown widths."""
    gates = {name: shape for name, shape in shapes.items() if name.endswith(".ve_gate.weight")}
    for name, shape in gates.items():
        if len(shape) != 2:
            raise ModelError(f"{origin}: {name} must be a matrix, got the shape {shape}")
    columns = {shape[-1] for shape in gates.values()}
    if len(columns) > 1 or not columns <= {12, 32}:
        raise ModelError(f"{origin}: value gates of {sorted(columns)} columns; known generations have 12 or 32")
    return columns


def _refuse_halves(origin: str, shapes: Shapes) -> None:
    """Raise `ModelError` for wrong shapes and for weights without those that they require."""
    if shapes.get("smear_gate.weight", _SMEAR_SHAPE) != _SMEAR_SHAPE:
        raise ModelError(f"{origin}: smear_gate.weight has the shape {shapes['smear_gate.weight']}, not {_SMEAR_SHAPE}")
    if ("smear_gate.weight" in shapes) != ("backout_lambda" in shapes):
        raise ModelError(f"{origin}: has only one of smear_gate.weight and backout_lambda")
    if "bigram_embed.embed.weight" in shapes and not {"resid_lambdas", "x0_lambdas"} & set(shapes):
        raise ModelError(f"{origin}: has bigram_embed but neither resid_lambdas nor x0_lambdas")


def _softcap_of(user_config: Mapping[str, Any]) -> tuple[str, str]:
    """Return G2 or G2s, which differ in the soft cap only; a base run's settings distinguish them."""
    is_late = "adam_beta1" in user_config and user_config.get("eval_tokens") == _MANY_TOKENS
    found = "G2s" if is_late else "G2"
    return found, GENERATIONS[found].signs


def _window_pattern(origin: str, shapes: Shapes, config: Fields, warnings: list[str]) -> tuple[str, str]:
    """Return the pattern of windows and its reason; append to `warnings`."""
    has_lambdas = bool({"resid_lambdas", "x0_lambdas"} & set(shapes))
    if config.get("window_pattern") is None:
        if not has_lambdas:
            return "", "G0 has none"
        warnings.append(
            "model_config has no window_pattern: L is assumed, as upstream does; mid-training in January 2026 used "
            "SSSL (override window_pattern=SSSL)"
        )
        return "L", "missing in model_config"
    pattern = config.text("window_pattern", "").upper()
    if not pattern or set(pattern) - {"S", "L"}:
        raise ModelError(f"{origin}: window_pattern must be made of S and L, got {shown(config.get('window_pattern'))}")
    return pattern, "model_config"


def override_values(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of overrides. Raises `BadRequest` naming the first invalid one."""
    readers: dict[str, Callable[[str, str], Any]] = {
        "generation": partial(_override_choice, tuple(GENERATIONS)),
        "window_pattern": _override_pattern,
        "sequence_len": _override_int,
        "short_window": _override_int,
        "rope_dtype": partial(_override_choice, ROPE_DTYPES),
        "decode_window": partial(_override_choice, DECODE_WINDOWS),
    }
    return {name: readers.get(name, _override_number)(name, text) for name, text in overrides.items()}


def _override_pattern(name: str, text: str) -> str:
    if set(text.upper()) - {"S", "L"}:
        raise BadRequest("overrides", f"{name} must be made of S and L, got {shown(text)}")
    return text.upper()


def _override_choice(choices: Sequence[str], name: str, text: str) -> str:
    if text not in choices:
        raise BadRequest("overrides", f"{name} must be one of {', '.join(choices)}, got {shown(text)}")
    return text


def _override_int(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and int(text) > 0):
        raise BadRequest("overrides", f"{name} must be an integer of 1 to 999999999, got {shown(text)}")
    return int(text)


def _override_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e12:
        raise BadRequest("overrides", f"{name} must be a number above 0, got {shown(text)}")
    return value


_CAP_15 = (
    "00a562c 012da1a 02baa15 0307997 067daa7 07c4dd4 0a23f87 0c4ce36 0f3b6a4 0fe9acb 1144d18 124f49b 1415fb7 "
    "16b8ac7 1ddaad1 1ec0a34 212bdae 230d6cf 240a60f 2c062aa 2dffdc8 2e17723 2f09686 31b61d2 345935c 348fbb3 "
    "3b95d4f 3ba42e8 3c3a3d7 413e91a 41bb2ea 43078c3 433aacf 4585551 4800c62 48804bf 4a6e47b 4d6415b 4d8dbaf "
    "535f664 542beb0 5fdd5cd 6079f78 63bb583 64a651a 65df0de 685271d 6a341f2 6a477ee 6e9ef8f 718e5e9 72b9064 "
    "74554be 75b302f 77f8fb8 788dade 8180e1d 83dccc2 85b3e95 8630d32 8b4849d 8ebc14b 9652279 98eed6d 998b8f8 "
    "a54691b a67eba3 a91743c ace6740 ad55575 aeff095 b19b4f3 babde18 bac5a35 bb51378 c7ba252 cac43e8 cf5c9e5 "
    "d489a1f d510b13 d63b7ab d6c4f3b d9678ff dc291c6 e527521 e569b59 e7ed208 e85db6b e8fec97 eaf49a3 ebd4d9b "
    "f41dd3c f5fe792 fe55b09 ff46300"
)
"""Soft cap 15, tables in bfloat16: G2."""
_CAP_20_ROUNDED = "324e69c 4b40774 752abc8 aba30cb b07604e"  # soft cap 20, tables in bfloat16
_CAP_20 = "1052d25 1076f97 28894e1 d96558b f2899a1 f8ff043"  # soft cap 20, tables in the computation's precision: G2s
_COMMITS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (_CAP_15, {"generation": "G2"}),
    (_CAP_20_ROUNDED, {"generation": "G2s", "rope_dtype": "bfloat16"}),
    (_CAP_20, {"generation": "G2s"}),
)


def constants_at(commit: str | None) -> Mapping[str, str]:
    """Return the constants of value gates with 32 columns at a commit; empty for other commits and None."""
    if commit is None or len(commit) < 7:
        return {}
    return next((constants for commits, constants in _COMMITS if commit[:7] in commits.split()), {})
