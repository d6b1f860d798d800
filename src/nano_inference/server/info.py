"""GET /info: the model that is served and what may be asked of it. Of our own; the web page reads it."""

from __future__ import annotations

import nano_inference
from nano_inference.config import ServerConfig
from nano_inference.server.call import JSON
from nano_inference.server.model import ServedModel
from nano_inference.types import MODELS_OWN, SamplingParams

_PLAIN = SamplingParams()


def info(model: ServedModel, config: ServerConfig, max_running: int) -> JSON:
    """Return what there is, as plain JSON values; nothing of where the model lies or who asks."""
    limits = model.limits
    return {
        "server": f"nano-inference {nano_inference.__version__}",
        "model": model.name,
        "names": list(model.names),
        "context": limits.max_model_len,
        "model_context": model.max_positions,
        "vocabulary": limits.vocab_size,
        "kv_tokens": limits.num_blocks * limits.block_size,
        "max_running": max_running,
        "max_n": config.max_n,
        "max_logprobs": config.max_logprobs,
        "logprobs_mode": config.logprobs_mode,
        "chats": model.dialogue is not None,
        "calculator": model.calculates,
        "sampling_defaults": sampling_defaults(model),
        "generation_config": config.generation_config,
        "chat_defaults": dict(model.chat_defaults.sampling),
        "chat_defaults_source": model.chat_defaults.source,
        **model.facts,
    }


def sampling_defaults(model: ServedModel) -> JSON:
    """Return what a request samples with that says nothing: the model's own settings, else the engine's."""
    return {name: model.generation.get(name, getattr(_PLAIN, name)) for name in MODELS_OWN}
