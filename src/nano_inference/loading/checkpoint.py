"""Opens model files of any installed format; checks headers at once and reads weights lazily."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from nano_inference.loading.fields import read_json
from nano_inference.loading.formats import FORMATS_GROUP, Checkpoint, ModelFormat, main_dtype
from nano_inference.loading.gguf import gguf_config, gguf_sources
from nano_inference.loading.gguf_file import PLAIN, read_gguf
from nano_inference.loading.hf_config import model_config
from nano_inference.loading.listing import PICKLED, only_gguf
from nano_inference.loading.safetensors_file import open_weights
from nano_inference.loading.sources import own_sources, same_values
from nano_inference.models.parts import EMBEDDING, HEAD
from nano_inference.support.files import exists, is_present, path_of
from nano_inference.support.plugins import table
from nano_inference.text.kinds import TokenizerSource
from nano_inference.types import BadRequest, ModelError

__all__ = ["Checkpoint", "installed_formats", "open_checkpoint"]

_log = logging.getLogger("nano_inference")


def installed_formats() -> Mapping[str, ModelFormat]:
    """Return the formats of this package and of installed plugins, by name. Raises `PluginError`."""
    return table(FORMATS_GROUP, OWN_FORMATS, ModelFormat)


def open_checkpoint(
    path: str | Path, overrides: Iterable[str] = (), formats: Mapping[str, ModelFormat] | None = None
) -> Checkpoint:
    """Open a Hugging Face directory, a .gguf file (or a directory with one), or a path of another format.

    `formats` defaults to the installed ones; the last that recognises the path opens it, so that plugins precede this
    package's formats. `overrides` set constants that the files do not contain ("softcap=20", or a mapping). Reads
    headers and configuration only. Raises `ModelError` if something is missing, damaged or not supported, `BadRequest`
    for overrides that the format does not support.
    """
    path = Path(path)
    if not exists(path_of(path, "model")):
        raise ModelError(f"{ascii(str(path))[1:-1]}: no such file or directory")
    formats = installed_formats() if formats is None else formats
    given = overrides if isinstance(overrides, str | Mapping) else tuple(overrides)
    found = next((one for one in reversed([*formats.values()]) if one.recognises(path)), None)
    if given and (found is None or not found.takes_overrides):
        titles = " or ".join(one.title for one in formats.values() if one.takes_overrides)
        only = f"{path} is not {titles}; other formats" if titles else "the installed formats"
        raise BadRequest("overrides", f"{only} have no constants to override")
    if found is None:
        why = "neither a file nor a directory"
        if path.is_dir():
            why, path = "cannot be opened", only_gguf(path)
        elif path.suffix in PICKLED:
            why = "a pickle, which can run code and is never read: convert it to safetensors"
        elif path.is_file():
            why = "not a .gguf file; for Hugging Face files give the directory"
        raise ModelError(f"{path}: {why}")
    checkpoint = found.open(path, given)
    sources, ignored = own_sources(checkpoint.sources, checkpoint.config.names, str(path))
    if ignored:
        dtype = main_dtype(path, sources)
        checkpoint = replace(checkpoint, sources=MappingProxyType(sources), ignored=ignored, dtype=dtype)
    # Head and embedding are tied unless the files have a head that differs. Files with a head only give it both names.
    # Same as `tie_weights` in Transformers' `from_pretrained`.
    head, table = (checkpoint.sources.get(name) for name in (HEAD, EMBEDDING))
    if not checkpoint.config.tie_embeddings or head is None:
        return checkpoint
    if table is None:
        return replace(checkpoint, sources=MappingProxyType({**checkpoint.sources, EMBEDDING: head}))
    if same_values(head, table):
        return checkpoint
    _log.warning("%s: %s differs from %s, so they are not tied", checkpoint.path, HEAD, EMBEDDING)
    return replace(checkpoint, config=replace(checkpoint.config, tie_embeddings=False))


def _open_gguf(path: Path, _: Iterable[str]) -> Checkpoint:
    path = only_gguf(path) if path.is_dir() else path
    file = read_gguf(path)
    config = gguf_config(file)
    sizes = Counter[str]()
    for tensor in file.tensors.values():
        sizes[tensor.type_name] += tensor.num_bytes
    type_name = sizes.most_common(1)[0][0]
    return Checkpoint(
        path=path,
        config=config,
        tokenizer=TokenizerSource(str(path), file.metadata),
        dtype=PLAIN.get(type_name, type_name),
        sources=MappingProxyType(gguf_sources(file, config)),
        generation=MappingProxyType({}),
    )


def _is_hugging_face(path: Path) -> bool:
    return path.is_dir() and is_present(path / "config.json")


def _open_hugging_face(directory: Path, _: Iterable[str]) -> Checkpoint:
    fields = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if is_present(generation_path) else None
    config = model_config(fields, generation)
    sources = open_weights(directory)
    return Checkpoint(
        path=directory,
        config=config,
        tokenizer=TokenizerSource(str(directory)),
        dtype=main_dtype(directory, sources),
        sources=MappingProxyType(sources),
        generation=MappingProxyType(dict(generation.values) if generation else {}),
    )


OWN_FORMATS: Mapping[str, ModelFormat] = {
    "huggingface": ModelFormat(title="a Hugging Face directory", recognises=_is_hugging_face, open=_open_hugging_face),
    "gguf": ModelFormat(
        title="a GGUF file",
        recognises=lambda path: (
            not _is_hugging_face(path) and any(path.glob("*.gguf"))
            if path.is_dir()
            else path.is_file() and path.suffix == ".gguf"
        ),
        open=_open_gguf,
    ),
}
"""The formats of this package."""
