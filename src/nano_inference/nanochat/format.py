"""nanochat's checkpoint format: opens its own files, exported directories, Transformers' port, and models in memory.

Sizes in `model_config` are compared with the shapes of the weights; a contradiction is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nano_inference.loading.fields import Fields, read_json
from nano_inference.loading.formats import Checkpoint, ModelFormat, main_dtype
from nano_inference.loading.pt_file import read_pt, unwrapped
from nano_inference.loading.safetensors_file import open_weights
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.config import ROPE_DTYPES, LayerConfig, ModelConfig, RopeConfig
from nano_inference.nanochat.checkpoint import (
    CONFIG_KEYS,
    Constants,
    Inferred,
    NanochatTerms,
    Shapes,
    has_lambdas,
    infer,
    override_values,
    parse_overrides,
    terms_of,
)
from nano_inference.nanochat.dialogue import ASSISTANT_END, BOS_TOKENS
from nano_inference.nanochat.files import TOKENIZER_FILES, NanochatFiles, find_files
from nano_inference.nanochat.kinds import TOKENIZER
from nano_inference.support.files import is_present
from nano_inference.text.kinds import TokenizerKind, TokenizerSource
from nano_inference.text.tokenizer import OWN_TOKENIZERS, load_tokenizer
from nano_inference.text.tool_format import special_tokens
from nano_inference.types import BadRequest, ModelError

HF_TYPE = "nanochat"  # `model_type` of Transformers' port, which implements G0 only
OWN_TYPE = "nanochat_"  # prefix of `model_type` in exported directories of any generation, such as nanochat_g4
HF_ROPE_DTYPE = "nanochat_rope_dtype"  # field of config.json with the precision of rotary tables; not Transformers'
MAX_LAYERS = 10_000
TOKENIZERS: Mapping[str, TokenizerKind] = {**OWN_TOKENIZERS, "nanochat": TOKENIZER}
_TITLE = "a nanochat checkpoint"
_SMALL = 4096  # most values of a weight that is tested for zeros
_FILL: Mapping[str, float] = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}  # for a missing one, as upstream's loader
_END_FROM_LAST = (5, 9)  # distance of assistant_end and bos from the vocabulary's end, in nanochat's order


def is_exported(directory: Path) -> bool:
    """Return whether a directory is an exported nanochat model: for Transformers' port, or with nanochat's names."""
    path = directory / "config.json"
    if not is_present(path):
        return False
    kind = read_json(path).get("model_type")
    return isinstance(kind, str) and (kind == HF_TYPE or kind.startswith(OWN_TYPE))


def open_path(path: Path, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open nanochat's own files in any layout, a directory written by `models export`, or one of Transformers' port.

    Maps a .pt file into memory. Raises `ModelError` for a damaged path or one with none of these, and `BadRequest`
    for overrides of the port, whose config.json has every constant.
    """
    by_hand = parse_overrides(overrides)
    if not is_exported(path):
        files = find_files(path)
        if files is None:
            raise ModelError(f"{path}: is not {_TITLE}")
        return open_nanochat(files, by_hand)
    if read_json(path / "config.json").text("model_type", "").startswith(OWN_TYPE):
        return open_own(path, by_hand)
    if by_hand:
        raise BadRequest("overrides", f"{path} is not {_TITLE}; only its constants can be overridden")
    return open_hf_nanochat(path)


def _recognises(path: Path) -> bool:
    if path.is_dir() and is_present(path / "config.json"):
        return is_exported(path)
    return find_files(path) is not None


FORMAT = ModelFormat(title=_TITLE, recognises=_recognises, open=open_path, takes_overrides=True)


def open_nanochat(files: NanochatFiles, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open a checkpoint's `.pt` and meta files; `overrides` are the user's `name=value` texts.

    Raises `ModelError` naming a file that is damaged, of unknown generation or contradicts another, and `BadRequest`
    for an invalid override.
    """
    tensors = read_pt(files.weights)
    meta = read_json(files.meta)
    return _open(
        files.weights,
        {name: TensorSource(tensor) for name, tensor in tensors.items()},
        meta.within("model_config"),
        TokenizerSource(str(files.tokenizer or files.weights.parent)),
        user_config=meta.mapping("user_config") if files.source in (None, "base") else {},
        overrides=parse_overrides(overrides),
        commit=files.git_commit,
    )


def open_tensors(
    weights: Mapping[str, torch.Tensor], model_config: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Checkpoint:
    """Open a model in memory, such as one in training; `model_config` as in meta files."""
    config = Fields("model_config", model_config)
    return _open(Path("model"), named_sources(weights), config, None, overrides=parse_overrides(overrides))


def named_sources(weights: Mapping[str, torch.Tensor]) -> dict[str, WeightSource]:
    """Return tensors as sources, without prefixes of torch's wrappers. Raises `ModelError` for duplicate names."""
    named: dict[str, WeightSource] = {
        unwrapped(name): TensorSource(tensor.detach()) for name, tensor in weights.items()
    }
    if len(named) < len(weights):
        raise ModelError("weights: a name occurs twice, with and without a wrapper's prefix")
    return named


def open_own(directory: Path, overrides: Iterable[str] = ()) -> Checkpoint:
    """Open an exported directory of safetensors with nanochat's names and every constant in `config.json`."""
    by_hand, config = parse_overrides(overrides), read_json(directory / "config.json")
    constants: Mapping[str, Any] = config.mapping("constants")
    written = {name: str(value) for name, value in constants.items() if value not in (0, 0.0, None)}
    try:
        override_values(parse_overrides(written))
    except ValueError as error:
        raise ModelError(f"{config.origin}: constants: {error}") from None
    source, model_config = TokenizerSource(str(directory)), config.within("model_config")
    checkpoint = _open(directory, open_weights(directory), model_config, source, overrides=written | by_hand)
    assert isinstance(checkpoint.inferred, Inferred)
    reasons = {**checkpoint.inferred.reasons, **dict.fromkeys(written.keys() - by_hand.keys(), "config.json")}
    inferred = replace(checkpoint.inferred, reasons=MappingProxyType(reasons), warnings=())
    return replace(checkpoint, inferred=inferred)


def open_hf_nanochat(directory: Path) -> Checkpoint:
    """Open a directory of Transformers' port (G0)."""
    path = directory / "generation_config.json"
    generation = read_json(path) if is_present(path) else None
    sources = open_weights(directory)
    return Checkpoint(
        path=directory,
        config=hf_nanochat_config(read_json(directory / "config.json"), generation),
        tokenizer=TokenizerSource(str(directory)),
        dtype=main_dtype(directory, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType(dict(generation.values) if generation else {}),
    )


def _open(
    path: Path,
    weights: Mapping[str, WeightSource],
    config: Fields,
    tokenizer: TokenizerSource | None,
    *,
    user_config: Mapping[str, Any] = MappingProxyType({}),
    overrides: Mapping[str, str],
    commit: str | None = None,
) -> Checkpoint:
    origin, sources = str(path), dict(weights)
    shapes = {name: source.shape for name, source in sources.items()}

    def is_zero(name: str) -> bool:
        if math.prod(shapes[name]) > _SMALL:
            return False
        values = torch.empty(shapes[name])
        sources[name].read_into(values)
        return not values.any()

    inferred = infer(
        origin, shapes, config, user_config=user_config, is_zero=is_zero, overrides=overrides, commit=commit
    )
    missing = [name for name in _FILL if name not in sources]
    if len(missing) == 1:  # one of the two kinds of lambdas
        name = missing[0]
        sources[name] = TensorSource(torch.full((config.integer("n_layer", high=MAX_LAYERS),), _FILL[name]))
        note = f"the weights have no {name}: {_FILL[name]:g} is used for each layer, as upstream does"
        inferred = replace(inferred, warnings=(*inferred.warnings, note))
    model = nanochat_config(origin, shapes, config, inferred.constants)
    return Checkpoint(
        path=path,
        config=replace(model, **_ends(origin, model, tokenizer)),
        tokenizer=tokenizer or TokenizerSource(origin),
        dtype=main_dtype(path, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType({}),
        inferred=inferred,
    )


def _ends(origin: str, model: ModelConfig, source: TokenizerSource | None) -> dict[str, Any]:
    """Return end tokens and bos of the tokenizer, else by their usual positions in the vocabulary."""
    if source is None or not any((Path(source.path) / name).is_file() for name in TOKENIZER_FILES):
        end, bos = (model.vocab_size - place for place in _END_FROM_LAST)
        return {"eos_token_ids": (end, bos), "bos_token_id": bos} if bos >= 0 else {}
    tokenizer = load_tokenizer(source, TOKENIZERS)
    if tokenizer.vocab_size != model.vocab_size:
        sizes = f"vocab_size is {model.vocab_size}, but the tokenizer in {source.path} has {tokenizer.vocab_size}"
        raise ModelError(f"{origin}: {sizes}")
    special = special_tokens(tokenizer)
    ends = [special[name] for name in (ASSISTANT_END, *BOS_TOKENS) if name in special]
    bos_id = next((special[name] for name in BOS_TOKENS if name in special), tokenizer.bos_id)
    return {"eos_token_ids": tuple(ends) or tokenizer.eos_ids, "bos_token_id": bos_id}


def nanochat_config(origin: str, shapes: Shapes, config: Fields, constants: Constants) -> ModelConfig:
    """Return the configuration without end tokens. Raises `ModelError` for sizes that contradict each other."""
    vocab_size, hidden = config.integer("vocab_size"), config.integer("n_embd")
    num_layers, num_heads = config.integer("n_layer", high=MAX_LAYERS), config.integer("n_head")
    num_kv_heads = config.integer("n_kv_head", num_heads)
    if hidden % num_heads:
        raise ModelError(f"{origin}: n_embd ({hidden}) must be a multiple of n_head ({num_heads})")
    head_dim = hidden // num_heads
    _check_shapes(origin, shapes, num_layers, vocab_size, hidden, num_kv_heads * head_dim)
    # The pattern is tiled over the layers; the last one has no window. N tokens before a query give N + 1 keys.
    pattern = constants.window_pattern or "L"
    kinds = [pattern[i % len(pattern)] for i in range(num_layers - 1)]
    windows = [constants.short_window + 1 if kind == "S" else None for kind in kinds]
    gates = [shape[-1] for name, shape in shapes.items() if name.endswith(".ve_gate.weight")]
    try:
        rope = RopeConfig(
            theta=constants.rope_base, rotary_dim=head_dim, reverse=True, table_dtype=constants.rope_dtype
        )
        return ModelConfig(
            architecture=f"nanochat {constants.generation}",
            family="nanochat",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layers=tuple(LayerConfig(window=window) for window in (*windows, None)),
            ropes=(rope,),
            max_positions=constants.sequence_len,
            norm_eps=constants.norm_eps,
            logits_softcap=constants.softcap,
            terms=NanochatTerms(
                generation=constants.generation,
                padded_vocab_size=shapes["transformer.wte.weight"][0],
                qk_scale=constants.qk_scale,
                long_window=constants.sequence_len + 1 if constants.window_pattern else None,
                has_lambdas=has_lambdas(shapes),
                gate_columns=gates[0] if gates else 0,
                gate_scale=constants.gate_scale,
                smear_columns=shapes.get("smear_gate.weight", (0,))[-1],
                has_backout="backout_lambda" in shapes,
                bigram_rows=shapes.get("bigram_embed.embed.weight", (0,))[0],
                has_full_decode=constants.decode_window == "full",
            ),
        )
    except ValueError as error:
        raise ModelError(f"{origin}: {error}") from None


def _check_shapes(origin: str, shapes: Shapes, num_layers: int, vocab_size: int, hidden: int, num_keys: int) -> None:
    """Compare shapes with `model_config`, before memory is allocated. Raises `ModelError`."""
    found = {int(match[1]) for name in shapes if (match := re.match(r"transformer\.h\.(\d{1,6})\.", name))}
    if found != set(range(num_layers)):
        raise ModelError(f"{origin}: n_layer is {num_layers}, but there are weights of {len(found)} layers")
    tables = {"transformer.wte.weight": None, "transformer.h.0.attn.c_k.weight": (num_keys, "n_kv_head and n_embd")}
    if "bigram_embed.embed.weight" in shapes:
        tables["bigram_embed.embed.weight"] = (5 * vocab_size, "vocab_size")
    for name, wanted in tables.items():
        shape = shapes.get(name)
        if shape is None:
            raise ModelError(f"{origin}: has no {name}")
        if len(shape) != 2:
            raise ModelError(f"{origin}: {name} must be a matrix, got the shape {shape}")
        if wanted is not None and shape[0] != wanted[0]:
            raise ModelError(f"{origin}: {name} must have {wanted[0]} rows by {wanted[1]}, the file has {shape[0]}")
        if wanted is None and shape[0] < vocab_size:
            raise ModelError(f"{origin}: vocab_size is {vocab_size}, but the embedding has {shape[0]} rows")
        if wanted is None and shape[1] != hidden:
            raise ModelError(f"{origin}: n_embd is {hidden}, but the embedding has {shape[1]} columns")


def model_config_of(config: ModelConfig) -> dict[str, Any]:
    """Return `model_config` as in nanochat's meta files."""
    kinds = "".join("L" if layer.window is None else "S" for layer in config.layers)
    values = (config.max_positions, config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads)
    out: dict[str, Any] = dict(zip(CONFIG_KEYS, (*values, config.hidden_size, kinds), strict=True))
    if isinstance(config.terms, NanochatTerms) and config.terms.long_window is None:
        del out["window_pattern"]
    return out


def own_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of an exported directory with nanochat's names: any generation, every constant.

    Transformers does not know its `model_type`; as "nanochat" it would load a later generation as G0.
    """
    terms, model_config = terms_of(config), model_config_of(config)
    windows = [layer.window for layer in config.layers if layer.window is not None]
    constants = Constants(
        generation=terms.generation,
        sequence_len=config.max_positions,
        rope_base=config.ropes[0].theta,
        qk_scale=terms.qk_scale,
        softcap=config.logits_softcap or 0.0,
        gate_scale=terms.gate_scale,
        window_pattern=model_config.get("window_pattern", ""),
        short_window=windows[0] - 1 if windows else 0,
        norm_eps=config.norm_eps,
        rope_dtype=config.ropes[0].table_dtype,
        decode_window="full" if terms.has_full_decode else "short",
    )
    return {
        "model_type": f"{OWN_TYPE}{terms.generation.lower()}",
        "architectures": [f"Nanochat{terms.generation}"],
        "model_config": model_config,
        "constants": asdict(constants),
    }


def hf_nanochat_config(config: Fields, generation: Fields | None = None) -> ModelConfig:
    """Return the configuration in a `config.json` of Transformers' port: G0, with the port's default values.

    Raises `ModelError` naming the wrong field.
    """
    hidden, num_heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 6)
    head_dim = config.integer("head_dim", hidden // num_heads)
    activation = config.text("hidden_act", "relu2")
    if activation != "relu2" or config.flag("attention_bias", False) or config.flag("tie_word_embeddings", False):
        raise ModelError(f"{config.origin}: only relu2 without attention_bias or tie_word_embeddings is supported")
    parameters = config.within("rope_parameters")  # or the older rope_theta beside them
    kind = parameters.text("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise ModelError(f"{config.origin}: rope type {kind!r} is not supported for nanochat")
    table_dtype = config.text(HF_ROPE_DTYPE, "float32")
    if table_dtype not in ROPE_DTYPES:
        raise config.bad(HF_ROPE_DTYPE, f"one of {', '.join(ROPE_DTYPES)}")
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    vocab_size = config.integer("vocab_size", 50304)
    num_layers = config.integer("num_hidden_layers", 12, high=MAX_LAYERS)
    ends = [*_ids(config), *(_ids(generation) if generation else [])]
    try:
        return ModelConfig(
            architecture="NanoChatForCausalLM",
            family="nanochat",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size", 8192),
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            layers=(LayerConfig(),) * num_layers,
            ropes=(RopeConfig(theta=theta, rotary_dim=head_dim, reverse=True, table_dtype=table_dtype),),
            max_positions=config.integer("max_position_embeddings", 2048),
            norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0),
            logits_softcap=config.number("final_logit_softcapping", 15.0),
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token < vocab_size)),
            bos_token_id=config.optional_integer("bos_token_id", low=0),
            terms=NanochatTerms(generation="G0", padded_vocab_size=vocab_size, has_hf_names=True),
        )
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{config.origin}: {error}") from None


def _ids(fields: Fields) -> list[int]:
    """Return `eos_token_id`, an id or a list, as a list."""
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if value is not None and any(type(token) is not int or token < 0 for token in ids):
        raise fields.bad("eos_token_id", "a token id or a list of them")
    return [] if value is None else ids
