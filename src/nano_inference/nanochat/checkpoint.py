"""What nanochat's checkpoints are: the table of generations, and how one is inferred. No torch.

nanochat's checkpoints have no version field; rope base, soft cap, window sizes and more are constants of its source
code at the time. They are inferred from names and shapes of the weights, each with a reason, and can be overridden.
Source of the table: karpathy/nanochat's public history, October 2025 to July 2026 (docs/nanochat.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from nano_inference.loading.fields import Constant, Fields, shown
from nano_inference.models.config import ROPE_DTYPES, ModelConfig, RopeDtype
from nano_inference.support.checks import check_int, check_number
from nano_inference.types import BadRequest, ModelError

Shapes = Mapping[str, tuple[int, ...]]  # name of a weight -> its shape
DecodeWindow = Literal["short", "full"]


class Rules(NamedTuple):
    """Constants in the source of a generation."""

    rope_base: float
    qk_scale: float
    softcap: float
    gate_scale: float
    short_share: int  # a short window is this part of the sequence length, a third or a fourth rounded up to 128s
    rope_dtype: RopeDtype  # precision of the cos and sin tables; float32 means that of the computation
    signs: str  # what identifies the generation, for messages

    def constants(self, generation: str, sequence_len: int, window_pattern: str) -> Constants:
        part = self.short_share
        return Constants(
            generation=generation,
            sequence_len=sequence_len,
            rope_base=self.rope_base,
            qk_scale=self.qk_scale,
            softcap=self.softcap,
            gate_scale=self.gate_scale,
            window_pattern=window_pattern,
            short_window=sequence_len // 2 if part == 2 else -(-sequence_len // (128 * part)) * 128,
            norm_eps=FLOAT32_EPS,
            rope_dtype=self.rope_dtype,
        )


GENERATIONS: Mapping[str, Rules] = {
    "G0": Rules(10_000.0, 1.0, 15.0, 2.0, 2, "bfloat16", "no resid_lambdas"),
    "G1": Rules(10_000.0, 1.0, 15.0, 2.0, 2, "bfloat16", "resid_lambdas, no value embeddings"),
    "G2": Rules(10_000.0, 1.0, 15.0, 2.0, 2, "bfloat16", "value gates of 32 columns"),
    "G2e": Rules(10_000.0, 1.0, 15.0, 2.0, 2, "bfloat16", "bigram_embed"),
    "G2s": Rules(10_000.0, 1.0, 20.0, 2.0, 2, "float32", "value gates of 32 columns, trained 2026-03-02 to 09"),
    "G3": Rules(100_000.0, 1.15, 15.0, 3.0, 3, "float32", "value gates of 12 columns, no smear_gate"),
    "G4": Rules(100_000.0, 1.2, 15.0, 3.0, 4, "float32", "smear_gate"),
}
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
_COMMITS: Mapping[str, Mapping[str, str]] = {
    _CAP_15: {"generation": "G2"},
    "324e69c 4b40774 752abc8 aba30cb b07604e": {"generation": "G2s", "rope_dtype": "bfloat16"},
    "1052d25 1076f97 28894e1 d96558b f2899a1 f8ff043": {"generation": "G2s"},
}
"""nanochat's commits with value gates of 32 columns -> their constants."""

FLOAT32_EPS = 1.1920929e-07  # default epsilon of torch's rms_norm: float32's, whatever the input's precision
_MANY_TOKENS = 41_943_040  # `eval_tokens` of base runs since 2026-03-04
_SHOWN = 5
CONFIG_KEYS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")
_BY_HAND = "set by hand"
_ROPE_REASONS: Mapping[RopeDtype, str] = {
    "bfloat16": "rounded by upstream until 2026-03-04",
    "float32": "the computation's since 2026-03-04",
}
_WITH_WINDOWS = "as trained; upstream's fallback of 2026-01-16 to 30 had full"
_UNKNOWN_WINDOWS = (
    "decode_window=short is assumed; the weights do not show whether answers had no windows, as upstream's of "
    "2026-01-16 to 30 without FlashAttention 3 (override decode_window=full)"
)
_SOFTCAP_WARNING = (
    "soft cap 15 is assumed; runs of 2026-03-02 to 09 had 20 (override softcap=20). Greedy output is the same"
)

_PATTERN_WARNING = (
    "model_config has no window_pattern: L is assumed, as upstream does; mid-training in January 2026 used SSSL "
    "(override window_pattern=SSSL)"
)
_LAYER = r"transformer\.h\.\d+\."
_KNOWN = re.compile(
    rf"transformer\.wte\.weight|lm_head\.weight|{_LAYER}attn\.(c_q|c_k|c_v|c_proj|ve_gate)\.weight|"
    rf"{_LAYER}mlp\.(c_fc|c_proj)\.weight|value_embeds\.\d+\.weight|resid_lambdas|x0_lambdas|"
    r"smear_gate\.weight|smear_lambda|backout_lambda|bigram_embed\.embed\.weight|bigram_lambdas"
)
_PROTOTYPES = re.compile(r"value_embed_[AB]\b.*|value_embed\.weight|v0_lambdas")
_EXPERTS = re.compile(r".*\.(mlp\.(router|experts|shared_expert)|moe)\..*")


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
    """full: windows apply to the prompt's queries only, as upstream's of 2026-01-16 to 30 without FlashAttention 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanochatTerms:
    """The terms of nanochat's forward pass that differ between generations; by default a term is off."""

    generation: str  # a key of `GENERATIONS`
    padded_vocab_size: int  # rows of the embedding and of the head; logits are truncated to the vocabulary size
    qk_scale: float = 1.0  # factor of the normalised q, and of k
    long_window: int | None = None
    """Keys visible to a layer without a short window, including the query's own; matters beyond the trained length."""
    has_lambdas: bool = False  # each layer's input is r·x + z·x0, with x0 the embedding (from G1)
    gate_columns: int = 0  # columns of a layer's input that gate its value embedding (from G2); 0 if there are none
    gate_scale: float = 2.0  # factor of the gate's sigmoid
    smear_columns: int = 0  # columns of the embedding that gate the share of the previous token's (G4); 0 is no smear
    has_backout: bool = False  # a multiple of the middle layer's output is subtracted from the last one's (G4)
    bigram_rows: int = 0  # rows of the table of hashed token pairs (G2e); 0 if there is none
    has_hf_names: bool = False  # weights have the names of Transformers' port
    has_full_decode: bool = False
    """Windows apply to the prompt's queries only; answer tokens attend to all keys (decode_window=full)."""

    def __post_init__(self) -> None:
        check_int("padded_vocab_size", self.padded_vocab_size, 1, 2**31 - 1)
        check_number("qk_scale", self.qk_scale, 1e-6, 1e3)
        check_number("gate_scale", self.gate_scale, 0, 1e3, open_low=True)
        for name in ("gate_columns", "smear_columns", "bigram_rows"):
            check_int(name, getattr(self, name), 0)


def terms_of(config: ModelConfig) -> NanochatTerms:
    """Return the terms of a nanochat model. Raises `ModelError` for other configurations."""
    if not isinstance(config.terms, NanochatTerms):
        found = type(config.terms).__name__
        raise ModelError(f"{config.architecture}: family nanochat needs terms of the type NanochatTerms, got {found}")
    return config.terms


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
        usual = {"rope_dtype": "float32", "decode_window": "short"}
        found = [(name, getattr(self.constants, name), self.reasons[name]) for name in usual]
        notes = [f"{name}={now} ({why})" for name, now, why in found if now != usual[name] or why == _BY_HAND]
        is_of_january = self.constants.generation in ("G1", "G2", "G2e")
        return (*notes, _UNKNOWN_WINDOWS) if is_of_january and found[1][2] == _WITH_WINDOWS else tuple(notes)


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
    columns = _check_weights(origin, shapes)
    unknown = sorted((name for name in config.values if name not in CONFIG_KEYS), key=str)
    warnings = []
    if unknown:
        warnings.append(f"model_config has fields of no known generation, which are not used: {_listed(unknown)}")
    by_hand = override_values(overrides)
    recorded = constants_at(commit) if columns == 32 and "bigram_embed.embed.weight" not in shapes else {}
    generation, why = by_hand.get("generation"), _BY_HAND
    if generation is None and recorded:
        generation, why = recorded["generation"], f"git_commit {commit}"
    elif generation is None:
        generation = _generation(origin, shapes, columns, user_config, is_zero, warnings)
        why = GENERATIONS[generation].signs
    if generation == "G2" and not recorded and not {"generation", "softcap"} & set(overrides):
        warnings.append(_SOFTCAP_WARNING)
    sequence_len = by_hand.get("sequence_len") or config.integer("sequence_len")
    pattern, pattern_why = by_hand.get("window_pattern"), _BY_HAND
    if pattern is None:
        pattern, pattern_why = _window_pattern(origin, shapes, config, warnings)
    own, rules, has_short = f"{generation}'s", GENERATIONS[generation], "S" in pattern
    constants = rules.constants(generation, sequence_len, pattern)
    reasons = {
        **{"generation": why, "sequence_len": "model_config", "window_pattern": pattern_why},
        **{"rope_base": own, "qk_scale": own, "softcap": own, "norm_eps": "float32's epsilon"},
        "gate_scale": own if columns else f"{own}, but there are no value embeddings",
        "short_window": own if has_short else f"{own}, but no layer has one",
        "rope_dtype": f"{own}, {_ROPE_REASONS[rules.rope_dtype]}",
        "decode_window": _WITH_WINDOWS if has_short else f"{own}, but no layer has a short window",
    }
    if "rope_dtype" in recorded and not {"generation", "rope_dtype"} & set(by_hand):
        by_commit = {"rope_dtype": recorded["rope_dtype"]}
        constants, reasons["rope_dtype"] = replace(constants, **override_values(by_commit)), f"git_commit {commit}"
    constants, reasons = replace(constants, **by_hand), reasons | dict.fromkeys(by_hand, _BY_HAND)
    return Inferred(constants=constants, reasons=MappingProxyType(reasons), warnings=tuple(warnings))


def constants_at(commit: str | None) -> Mapping[str, str]:
    """Return the constants of value gates with 32 columns at a commit; empty for other commits and None."""
    if commit is None or len(commit) < 7:
        return {}
    return next((constants for commits, constants in _COMMITS.items() if commit[:7] in commits.split()), {})


def _check_weights(origin: str, shapes: Shapes) -> int:
    """Return the width of the value gates, 0 if there are none.

    Raises `ModelError` for weights of no generation on nanochat's master (forks would give wrong results), for wrong
    shapes, and for weights without those that they require.
    """
    experts = [name for name in shapes if _EXPERTS.fullmatch(name)]
    if experts:
        raise ModelError(f"{origin}: {experts[0]}: nanochat's mixture-of-experts branches are not supported")
    prototypes = [name for name in shapes if _PROTOTYPES.fullmatch(name)]
    gates = {name: shape for name, shape in shapes.items() if name.endswith(".ve_gate.weight")}
    values = [name for name in shapes if name.startswith("value_embeds.")]
    if prototypes or (values and not gates):
        name = (prototypes or values)[0]
        raise ModelError(f"{origin}: {name}: prototypes of value embeddings (January 2026) are not supported")
    unknown = sorted(name for name in shapes if not _KNOWN.fullmatch(name))
    if unknown:
        raise ModelError(f"{origin}: weights of no known nanochat generation: {_listed(unknown)}")
    smear = shapes.get("smear_gate.weight")
    if smear not in (None, (1, 24)):
        raise ModelError(f"{origin}: smear_gate.weight has the shape {smear}, not (1, 24)")
    if (smear is None) == ("backout_lambda" in shapes):
        raise ModelError(f"{origin}: has only one of smear_gate.weight and backout_lambda")
    if "bigram_embed.embed.weight" in shapes and not has_lambdas(shapes):
        raise ModelError(f"{origin}: has bigram_embed but neither resid_lambdas nor x0_lambdas")
    for name, shape in gates.items():
        if len(shape) != 2:
            raise ModelError(f"{origin}: {name} must be a matrix, got the shape {shape}")
    columns = sorted({shape[-1] for shape in gates.values()})
    if columns not in ([], [12], [32]):
        raise ModelError(f"{origin}: value gates of {columns} columns; known generations have 12 or 32")
    return columns[0] if columns else 0


def has_lambdas(shapes: Shapes) -> bool:
    """Return whether there are the lambdas that came with G1."""
    return bool({"resid_lambdas", "x0_lambdas"} & set(shapes))


def _listed(names: list[Any]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown(name) for name in names[:_SHOWN]) + rest


def _generation(
    origin: str,
    shapes: Shapes,
    columns: int,
    user_config: Mapping[str, Any],
    is_zero: Callable[[str], bool],
    warnings: list[str],
) -> str:
    if "bigram_embed.embed.weight" in shapes:
        return "G2e"
    if "smear_gate.weight" in shapes:
        smears = [name for name in ("smear_gate.weight", "smear_lambda", "backout_lambda") if name in shapes]
        if not all(is_zero(name) for name in smears):
            if columns == 32:
                raise ModelError(
                    f"{origin}: ambiguous: smear_gate of G4 with value gates of 32 columns, as in G2; "
                    "set the constants by hand (generation=…)"
                )
            return "G4"
        warnings.append(
            "smear and backout are all zero: treated as an older checkpoint, patched to load, with its constants"
        )
    if columns == 32:  # G2 and G2s differ in the soft cap and the tables only; a base run's settings distinguish them
        is_late = "adam_beta1" in user_config and user_config.get("eval_tokens") == _MANY_TOKENS
        return "G2s" if is_late else "G2"
    if columns == 12:
        return "G3"
    return "G1" if has_lambdas(shapes) else "G0"


def _window_pattern(origin: str, shapes: Shapes, config: Fields, warnings: list[str]) -> tuple[str, str]:
    """Return the pattern of windows and its reason."""
    if config.get("window_pattern") is None:
        if not has_lambdas(shapes):
            return "", "G0 has none"
        warnings.append(_PATTERN_WARNING)
        return "L", "missing in model_config"
    pattern = config.text("window_pattern", "").upper()
    if not pattern or set(pattern) - {"S", "L"}:
        raise ModelError(f"{origin}: window_pattern must be made of S and L, got {shown(config.get('window_pattern'))}")
    return pattern, "model_config"


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


def override_values(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of overrides. Raises `BadRequest` naming the first invalid one."""
    choices = {"generation": tuple(GENERATIONS), "rope_dtype": ROPE_DTYPES, "decode_window": ("short", "full")}
    found: dict[str, Any] = {}
    for name, text in overrides.items():
        value: Any = None
        if name in choices:
            wanted = f"one of {', '.join(choices[name])}"
            value = text if text in choices[name] else None
        elif name == "window_pattern":
            wanted = "made of S and L"
            value = None if set(text.upper()) - {"S", "L"} else text.upper()
        elif name in ("sequence_len", "short_window"):
            wanted = "an integer of 1 to 999999999"
            value = int(text) if re.fullmatch("0*[1-9][0-9]{0,8}", text) and len(text) <= 9 else None
        else:
            wanted = "a number above 0"
            try:
                value = float(text) if 0 < float(text) < 1e12 else None
            except ValueError:
                value = None
        if value is None:
            raise BadRequest("overrides", f"{name} must be {wanted}, got {shown(text)}")
        found[name] = value
    return found
