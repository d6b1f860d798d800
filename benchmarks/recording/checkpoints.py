"""Writes random tiny checkpoints: every family, every generation of nanochat, every kind of quantised block."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nano_inference.loading.catalog import DEFAULT_MODEL, default_cache, find_wheel
from nano_inference.loading.downloads import is_whole

# The families' tables need Transformers, which takes seconds to import: only what is written is imported.

GENERATIONS = ("G0", "G1", "G2", "G2e", "G2s", "G3", "G4")
BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


def names(only: Iterable[str] = ()) -> list[str]:
    """Return the names of all models, or of those that begin with one of `only`. Raises `ValueError` for none."""
    wanted = tuple(only)
    found = [f"nanochat-{name}" for name in GENERATIONS] + [f"gguf-{name}" for name in BLOCKS]
    if not wanted or any(not one.startswith(("nanochat", "gguf", "default")) for one in wanted):
        from tests.models.families import FAMILIES

        found = [*FAMILIES, *found]
    if default_model() is not None:
        found.append("default")
    chosen = [name for name in found if not wanted or name.startswith(wanted)]
    unknown = [one for one in wanted if not any(name.startswith(one) for name in found)]
    if unknown:
        raise ValueError(f"--only: no model's name begins with {', '.join(unknown)}; there are {', '.join(found)}")
    return chosen


def default_model() -> Path | None:
    """Return the default model's file where the cache has it; nothing is downloaded."""
    wheel = find_wheel(DEFAULT_MODEL)
    if wheel is None:
        return None
    path = default_cache(os.environ) / Path(wheel.member).name
    return path if is_whole(path, wheel) else None


def write(name: str, folder: Path) -> Path:
    """Write a model's files into a folder below `folder` and return the path to open."""
    directory = folder / name
    directory.mkdir()
    if name == "default":
        path = default_model()
        assert path is not None
        return path
    if name.startswith("nanochat-"):
        from tests.nanochat.tiny import base_meta, write_checkpoint

        generation = name.removeprefix("nanochat-")
        write_checkpoint(directory, generation, meta=base_meta(generation))
    elif name.startswith("gguf-"):
        return _write_blocks(directory / "model.gguf", name.removeprefix("gguf-"))
    else:
        _write_family(name, directory)
    return directory


def _write_family(name: str, directory: Path) -> None:
    """Write a family's model, without a progress bar for each file."""
    from transformers.utils import logging

    from tests.models.families import make_model

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    make_model(name, directory)


def _write_blocks(path: Path, kind_name: str) -> Path:
    """Write a Llama whose matrices are random blocks of one kind."""
    import gguf
    import numpy as np

    from tests.loading import tiny_models

    kind = gguf.GGMLQuantizationType[kind_name]
    model = tiny_models.make_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=3)
    rng = np.random.default_rng(int(kind))
    writer = gguf.GGUFWriter(path, "llama")
    tiny_models.write_metadata(writer, model.config, 64)
    writer.add_rope_freq_base(10000.0)
    for name, values in tiny_models.converted("llama", model).items():
        if values.ndim > 1:
            writer.add_tensor(
                name, tiny_models.random_blocks(values.shape[0], values.shape[1], kind, rng), raw_dtype=kind
            )
        else:
            writer.add_tensor(name, values)
    tiny_models.finish(writer)
    return path
