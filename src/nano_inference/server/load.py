"""Loads a model for serving: engine, tokenizer, chat template, names, metrics. Runs in the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nano_inference.build import EngineParts, assemble
from nano_inference.config import EngineConfig
from nano_inference.engine import InferenceEngine
from nano_inference.executors.devices import pick_device
from nano_inference.loading.catalog import catalog_sampling
from nano_inference.loading.formats import Checkpoint, sampling_defaults
from nano_inference.loading.kinds import installed_kinds
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import LoadedModel
from nano_inference.server.metrics import Metrics
from nano_inference.server.model import ServedModel, tagged
from nano_inference.server.prompts import default_variables
from nano_inference.support.files import path_of
from nano_inference.text.chat import given_template
from nano_inference.text.dialogue import Dialogue, TemplateDialogue, load_dialogue
from nano_inference.text.generation_config import chat_defaults
from nano_inference.text.grammar import Grammars
from nano_inference.text.kinds import TokenizerKind, TokenizerSource
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import BadRequest, ModelError, UpdateBusy

_LOGGER = logging.getLogger(__name__)

CPU_STEP_TOKENS = 256
"""Default tokens of a step on a CPU. A step of 2048 prompt tokens takes seconds there, in which no other request gets a
token or can be aborted."""


def open_model(engine_config: EngineConfig, config: ServerConfig, *, name: str, path: Path) -> LoadedModel:
    """Load the model at `path`; it is served as `name` unless `served_model_name` is set.

    Raises `ModelError` and `ValueError` as `assemble` does.
    """
    engine_config = for_serving(replace(engine_config, model_path=str(path)), config.max_tokens_per_batch)
    is_used = config.generation_config == "auto"

    def check(checkpoint: Checkpoint, load: Callable[[], Tokenizer]) -> None:
        if is_used:
            sampling_defaults(checkpoint)

    kinds = installed_kinds()
    parts = assemble(engine_config, on_open=check, kinds=kinds)
    assert parts.checkpoint is not None and parts.executor is not None, "assemble opens a checkpoint"
    assert parts.load_tokenizer is not None, "it has a tokenizer"
    parts.executor.warm_up(lambda done, total: None)
    own = sampling_defaults(parts.checkpoint) if is_used else valid_defaults(parts.checkpoint)
    given = {"temperature": config.temp, "seed": config.default_seed}
    set_fields = {name: value for name, value in given.items() if value is not None}
    chats = chat_defaults(own, catalog_sampling(name))
    if config.temp is not None:
        chats = chats._replace(sampling=MappingProxyType({**chats.sampling, "temperature": config.temp}))
    tokenizer = parts.load_tokenizer()
    engine = InferenceEngine(engine_config, parts=parts)
    names = config.served_model_name or (name,)
    load_adapters(engine, config.lora_modules, names)
    model = ServedModel(
        names=names,
        any_name=config.any_model,
        created=int(time.time()),
        tokenizer=tokenizer,
        dialogue=served_dialogue(config, parts.checkpoint.tokenizer, tokenizer, kinds.tokenizers),
        grammars=Grammars(tokenizer, engine.limits.vocab_size, parts.eos_token_ids),
        limits=engine.limits,
        file_name=path.name,
        prefills=config.prefill_assistant,
        max_positions=parts.checkpoint.config.max_positions,
        generation=MappingProxyType({**(own if is_used else {}), **set_fields}),
        chat_defaults=chats,
        facts=model_facts(engine_config, parts),
        longest_token=max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)),
        adapters=engine.adapters(),
    )
    metrics = Metrics(
        model_name=model.name,
        num_blocks=parts.kv.num_blocks,
        block_size=parts.kv.block_size,
        cache_config=cache_facts(engine_config, parts),
    )
    return LoadedModel(engine=engine, metrics=metrics, model=model, step_tokens=engine_config.max_tokens_per_batch)


def load_adapters(engine: InferenceEngine, modules: Sequence[str], names: Sequence[str]) -> None:
    """Load adapters given as NAME=PATH. Raises `ValueError` for one that cannot be loaded, or has a name in use."""
    used = set(map(tagged, names))
    for module in modules:
        name, _, path = module.partition("=")
        if tagged(name) in used:
            raise ValueError(f"lora_modules: the name {name} is used twice")
        used.add(tagged(name))
        try:
            engine.load_adapter(name, path_of(path, "lora_modules"))
        except (BadRequest, UpdateBusy) as error:
            raise ValueError(f"lora_modules: {name}: {error}") from None


def served_dialogue(
    config: ServerConfig, source: TokenizerSource, tokenizer: Tokenizer, kinds: Mapping[str, TokenizerKind]
) -> Dialogue | None:
    """Return the dialogue of the configured chat template, or else the model's. Raises `ModelError`."""
    variables = default_variables(config)
    if config.chat_template is not None or config.chat_template_file is not None:
        template = given_template(config.chat_template, config.chat_template_file, tokenizer)
        return TemplateDialogue(template, tokenizer, variables=variables, has_dates=config.template_dates)
    dialogue = load_dialogue(source, tokenizer, kinds)
    if not variables and not config.template_dates:
        return dialogue
    if not isinstance(dialogue, TemplateDialogue):
        flag = "--chat-template-kwargs" if variables else "--template-dates"
        raise ModelError(f"{flag}: the model has no chat template")
    return replace(dialogue, variables=variables, has_dates=config.template_dates)


def valid_defaults(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the model's sampling defaults for the chat page; if they are invalid, log a warning and return none."""
    try:
        return sampling_defaults(checkpoint)
    except ModelError as error:
        _LOGGER.warning("the chat page ignores the model's sampling defaults: %s", error)
        return {}


def for_serving(config: EngineConfig, max_tokens_per_batch: int | None) -> EngineConfig:
    """Return the engine configuration with steps of `max_tokens_per_batch`, or of the device's default size."""
    if max_tokens_per_batch is None and pick_device(config.device).type == "cpu":
        max_tokens_per_batch = min(config.max_tokens_per_batch, CPU_STEP_TOKENS)
    return replace(config, max_tokens_per_batch=max_tokens_per_batch or config.max_tokens_per_batch)


def model_facts(config: EngineConfig, parts: EngineParts) -> Mapping[str, Any]:
    checkpoint = parts.checkpoint
    assert checkpoint is not None, "assemble opens a checkpoint"
    return {
        "architecture": checkpoint.config.architecture,
        "layers": checkpoint.config.num_layers,
        "parameters": checkpoint.num_parameters,
        "file_precision": checkpoint.dtype,
        "dtype": config.dtype,
        "device": pick_device(config.device).type,
        "kernels": parts.code,
        "end_token_ids": sorted(parts.eos_token_ids),
        "generation": None if checkpoint.inferred is None else checkpoint.inferred.headline,
    }


def cache_facts(config: EngineConfig, parts: EngineParts) -> Mapping[str, str]:
    num_slots = parts.kv.num_blocks * parts.kv.block_size
    return {
        "cache_type": config.cache_type,
        "cache_dtype": config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "gpu_memory_utilization": f"{config.gpu_memory_utilization:g}",
        "enable_prefix_caching": "True",
        "kv_cache_max_concurrency": f"{num_slots / parts.max_model_len:.2f}",
    }
