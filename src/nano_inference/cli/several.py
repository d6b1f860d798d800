"""`serve --further-model`: several models behind one URL."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from nano_inference.cli.arguments import Typed, error_text
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of, fetch, for_any_directory
from nano_inference.cli.terminal import note
from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import served_name
from nano_inference.server.config import ServerConfig
from nano_inference.server.front.child import ReplicaFailed
from nano_inference.server.front.models import ModelEntry
from nano_inference.server.front.models_run import limits_of, model_setup, serve_models, weight_bytes
from nano_inference.server.model import tagged


def listen(
    engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed, listening: socket.socket, url: str
) -> int:
    """Serve on a bound socket; return the exit code."""
    entries, limits = entries_of(engine, config, common), limits_of(config)
    first, *further = [", ".join(entry.names) for entry in entries]
    memory = f"{limits.num_bytes / 2**30:.1f} GiB"
    serving = serve_models(
        config,
        listening,
        entries,
        limits,
        on_listening=lambda: note(f"listening on {config.uds or url}, loading {first}", common.quiet),
        on_ready=lambda: note(
            f"ready: {first}; loaded when a request names them: {', '.join(further)}\n"
            f"  {f'chat page {url}/, ' if config.pages else ''}models {url}/v1/models; loaded models may use {memory}",
            common.quiet,
            indent=2,
        ),
    )
    try:
        return asyncio.run(serving)
    except ReplicaFailed as error:
        note(f"nano-inference: {first}: {error_text(error, typed.names)}")
        return 1


def entries_of(engine: EngineConfig, config: ServerConfig, common: Common) -> list[ModelEntry]:
    """Return all models, fetching those that are not in the cache. Raises `ValueError` for a name used twice."""
    if engine.overrides:
        raise ValueError("overrides belong to one model: they cannot be set with further_model")
    entries = [_entry(engine, config, common, engine.model_path, config.served_model_name)]
    for text in config.further_model:
        name, equals, path = text.partition("=")
        if equals and not (name and path):
            raise ValueError(f"further_model must be a model, or NAME=PATH, got {text!r}")
        entries.append(_entry(engine, config, common, path if equals else text, (name,) if equals else ()))
    names = [tagged(name) for entry in entries for name in entry.names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"further_model: two models are named {name}; give one of them as NAME=PATH")
    return entries


def _entry(
    engine: EngineConfig, config: ServerConfig, common: Common, model: str, names: tuple[str, ...]
) -> ModelEntry:
    path = fetch(model, common)
    own = replace(engine, model_path=for_any_directory(model, path))
    names = names or (served_name(model, path),)
    setup = model_setup(own, config, names=names, cache=str(cache_of(common).absolute()))
    return ModelEntry(names=names, file_bytes=weight_bytes(path), setup=setup)
