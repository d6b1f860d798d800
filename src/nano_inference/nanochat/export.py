"""Write nanochat checkpoints for Transformers (G0), as safetensors (every generation) or as nanochat's own files.

Files are written into a hidden sibling directory, read back, compared and renamed, so an export is complete or absent.
Weights keep their bits and precision.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nano_inference.executors.staging import rows_of
from nano_inference.loading.formats import Checkpoint
from nano_inference.loading.pieces import DTYPES
from nano_inference.loading.safetensors_file import SINGLE_NAME
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.nanochat.checkpoint import GENERATIONS, NanochatTerms
from nano_inference.nanochat.convert import from_hf, to_hf
from nano_inference.nanochat.dialogue import ASSISTANT_END, CHAT_TEMPLATE
from nano_inference.nanochat.files import FILE_NAME, TOKENIZER_FILES, find_files
from nano_inference.nanochat.format import (
    HF_ROPE_DTYPE,
    HF_TYPE,
    TOKENIZERS,
    model_config_of,
    open_hf_nanochat,
    open_nanochat,
    open_own,
    own_config,
)
from nano_inference.nanochat.pickled import encoding_of, nanochat_tokenizer, read_fields, token_sizes
from nano_inference.nanochat.program import hf_name
from nano_inference.support.files import exists, path_of, sync
from nano_inference.text.kinds import TokenizerSource
from nano_inference.text.tokenizer import load_tokenizer
from nano_inference.types import ModelError

_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SHOWN = 80
_ENDS = frozenset({"eos_token_ids", "bos_token_id"})  # not in nanochat's own files: the tokenizer defines them


def export_hf(checkpoint: Checkpoint, tokenizer_dir: Path | None, out_dir: Path) -> Path:
    """Write a G0 checkpoint for `NanoChatForCausalLM` of Transformers 5, with its tokenizer and chat template.

    Omits rows that pad the vocabulary. Raises `ModelError`, with nothing written, for later generations or other
    constants (which the port would load as G0), and if `out_dir` exists and is not empty.
    """
    config = _for_hf(checkpoint)
    sources = {hf_name(name): source for name, source in _own_names(checkpoint).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        sources[name] = rows_of(sources[name], 0, config.vocab_size)
    with _appearing(out_dir) as hidden:
        _write_json(hidden / "config.json", _hf_config(config, sources))
        ends = list(config.eos_token_ids)
        ids = {"bos_token_id": config.bos_token_id, "eos_token_id": ends or None, "pad_token_id": [*ends, None][0]}
        _write_json(hidden / "generation_config.json", ids)
        _write_safetensors(hidden / SINGLE_NAME, sources)
        if tokenizer_dir is not None and not (tokenizer_dir / FILE_NAME).is_file():
            _copy(tokenizer_dir, hidden, _HF_FILES)
        elif tokenizer_dir is not None:  # convert tokenizer.pkl
            named, path = nanochat_tokenizer(tokenizer_dir).named, tokenizer_dir / FILE_NAME
            core = to_hf(read_fields(path), named["bos_token"], str(path))
            core.save(str(hidden / "tokenizer.json"))
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **named,
                "pad_token": named["eos_token"],
                "model_max_length": config.max_positions,
                "clean_up_tokenization_spaces": False,
            }
            _write_json(hidden / "tokenizer_config.json", settings)
            if core.token_to_id(ASSISTANT_END) is not None:
                (hidden / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        _check_vocabulary(hidden, tokenizer_dir, config)
        _check_same(checkpoint, config, open_hf_nanochat(hidden).config)
    return out_dir


def export_safetensors(checkpoint: Checkpoint, tokenizer_dir: Path | None, out_dir: Path) -> Path:
    """Write any generation as safetensors with nanochat's names, with every constant in config.json.

    Copies the tokenizer's files. Raises `ModelError` as `export_hf`.
    """
    config = _own_form(checkpoint)
    with _appearing(out_dir) as hidden:
        _write_json(hidden / "config.json", own_config(config))
        _write_safetensors(hidden / SINGLE_NAME, _own_names(checkpoint))
        if tokenizer_dir is not None:
            _copy(tokenizer_dir, hidden, (FILE_NAME, *_HF_FILES))
        _check_vocabulary(hidden, tokenizer_dir, config)
        _check_same(checkpoint, config, open_own(hidden).config, _ENDS)
    return out_dir


def export_nanochat(checkpoint: Checkpoint, tokenizer_dir: Path | None, out_dir: Path) -> Path:
    """Write nanochat's own files into a flat directory: model and meta of step 0, tokenizer.pkl and token_bytes.pt.

    Loads the whole model into memory. Raises `ModelError` as `export_hf`, and if the files, which have no constants,
    would be read with other constants than the checkpoint's. The norm's epsilon and, for a checkpoint of Transformers'
    port, the precision of rotary tables may differ.
    """
    config = _own_form(checkpoint)
    if _terms(checkpoint).has_hf_names:
        rounded = GENERATIONS[_terms(checkpoint).generation].rope_dtype
        config = replace(config, ropes=tuple(replace(rope, table_dtype=rounded) for rope in config.ropes))
    with _appearing(out_dir) as hidden:
        torch.save(
            {name: _tensor(name, source) for name, source in _own_names(checkpoint).items()}, hidden / "model_000000.pt"
        )
        _write_json(hidden / "meta_000000.json", {"step": 0, "model_config": model_config_of(config)})
        if tokenizer_dir is not None:
            if (tokenizer_dir / FILE_NAME).is_file():
                found = read_fields(tokenizer_dir / FILE_NAME)
                _copy(tokenizer_dir, hidden, (FILE_NAME,))
            else:
                _copy(tokenizer_dir, hidden, ())
                found = from_hf(tokenizer_dir / "tokenizer.json")
                (hidden / FILE_NAME).write_bytes(pickle.dumps(encoding_of(found), protocol=4))
            torch.save(torch.tensor(token_sizes(found), dtype=torch.int32), hidden / "token_bytes.pt")
        _check_vocabulary(hidden, tokenizer_dir, config)
        files = find_files(hidden)
        assert files is not None
        _check_same(checkpoint, config, open_nanochat(files).config, _ENDS | {"norm_eps"})
    return out_dir


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Yield a hidden directory that is renamed to `target` at the end, or deleted after an error."""
    if exists(path_of(target, "directory")) and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target}: exists and is not an empty directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        yield hidden
        for path in hidden.iterdir():
            sync(path)
        hidden.chmod(0o755)
        if target.is_dir():
            target.rmdir()
        hidden.rename(target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _terms(checkpoint: Checkpoint) -> NanochatTerms:
    terms = checkpoint.config.terms
    if not isinstance(terms, NanochatTerms):
        found = checkpoint.config.architecture
        raise ModelError(f"{checkpoint.path}: is {found}; only nanochat models can be exported")
    return terms


def _for_hf(checkpoint: Checkpoint) -> ModelConfig:
    """Return the configuration expected when the export is read. Raises `ModelError` if the port cannot compute it."""
    terms, config = _terms(checkpoint), checkpoint.config
    if terms.generation != "G0":
        raise ModelError(
            f"{checkpoint.path}: is of generation {terms.generation}, and Transformers supports G0 only: "
            "export it as safetensors"
        )
    plain = NanochatTerms(generation="G0", padded_vocab_size=config.vocab_size, has_hf_names=True)
    changed = replace(terms, padded_vocab_size=config.vocab_size, has_hf_names=True)
    names = [field.name for field in fields(plain) if getattr(plain, field.name) != getattr(changed, field.name)]
    names += ["windows"] if any(layer.window is not None for layer in config.layers) else []
    if names:
        raise ModelError(f"{checkpoint.path}: Transformers does not support {', '.join(names)}: export as safetensors")
    return replace(config, architecture="NanoChatForCausalLM", terms=plain)


def _own_form(checkpoint: Checkpoint) -> ModelConfig:
    """Return the configuration expected when an export with nanochat's names is read."""
    terms = replace(_terms(checkpoint), has_hf_names=False)
    return replace(checkpoint.config, architecture=f"nanochat {terms.generation}", terms=terms)


def _own_names(checkpoint: Checkpoint) -> dict[str, WeightSource]:
    """Return the weights under nanochat's own names."""
    parts = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [f"transformer.h.{i}.{part}.weight" for i in range(checkpoint.config.num_layers) for part in parts]
    ours = {hf_name(name): name for name in ("transformer.wte.weight", *names)}
    renamed = ours if _terms(checkpoint).has_hf_names else {}
    return {renamed.get(name, name): source for name, source in checkpoint.tensors()}


def _check_same(
    checkpoint: Checkpoint, wanted: ModelConfig, got: ModelConfig, unless: frozenset[str] | set[str] = frozenset()
) -> None:
    """Raise `ModelError` if the configuration read back differs from the one exported."""
    names = [field.name for field in fields(wanted) if field.name not in unless]
    for name in names:
        mine, theirs = getattr(wanted, name), getattr(got, name)
        if mine != theirs:
            became = f"{str(mine)[:_SHOWN]} would be read as {str(theirs)[:_SHOWN]}"
            raise ModelError(f"{checkpoint.path}: cannot be exported in this format: {name} {became}")


def _check_vocabulary(directory: Path, tokenizer_dir: Path | None, config: ModelConfig) -> None:
    if tokenizer_dir is None:
        return
    size = load_tokenizer(TokenizerSource(str(directory)), TOKENIZERS).vocab_size
    if size != config.vocab_size:
        raise ModelError(f"{tokenizer_dir}: the tokenizer has {size} tokens, the model {config.vocab_size}")


def _hf_config(config: ModelConfig, sources: Mapping[str, WeightSource]) -> dict[str, Any]:
    """Return the port's config.json, explicit where its defaults differ from nanochat (widths, epsilon, ids)."""
    widest = max({source.dtype for source in sources.values()}, key=lambda name: (DTYPES[name].itemsize, name))
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": HF_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "relu2",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.ropes[0].theta},
        HF_ROPE_DTYPE: config.ropes[0].table_dtype,
        "final_logit_softcapping": config.logits_softcap,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": next(iter(config.eos_token_ids), None),
        "pad_token_id": next(iter(config.eos_token_ids), None),
        "use_cache": True,
        "dtype": widest,
    }


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    if not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{source}: has neither {' nor '.join(TOKENIZER_FILES)}")
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, sources: Mapping[str, WeightSource]) -> None:
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, source in sources.items():  # the library refuses tensors that share memory
        tensor = _tensor(name, source)
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    try:
        save_file(found, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"{path}: cannot be written: {error}") from None


def _tensor(name: str, source: WeightSource) -> Tensor:
    """Return a weight as a tensor, in its own precision."""
    if isinstance(source, TensorSource):
        return source.tensor
    if source.dtype not in DTYPES:
        raise ModelError(f"{name}: the dtype {source.dtype} cannot be exported")
    tensor = torch.empty(source.shape, dtype=DTYPES[source.dtype])
    source.read_into(tensor)
    return tensor
