"""GET /info: the served model, its limits and defaults, for the web page. Specific to this server."""

from __future__ import annotations

import nano_inference
from nano_inference.server.call import JSON
from nano_inference.server.config import ServerConfig
from nano_inference.server.model import ServedModel
from nano_inference.types import MODELS_OWN, SamplingParams

_PLAIN = SamplingParams()


def info(model: ServedModel, config: ServerConfig, max_running: int) -> JSON:
    """Return the reply; it has no file paths and nothing about clients."""
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
    """Return the sampling parameters of a request without any: the model's own, else the engine's."""
    return {name: model.generation.get(name, getattr(_PLAIN, name)) for name in MODELS_OWN}
