"""`ServedModel`: names, tokenizer, chat template, limits and defaults of the served model, without the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import nano_inference
from nano_inference.core.admission import Limits
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.text.dialogue import Dialogue
from nano_inference.text.generation_config import MODELS_OWN, ChatDefaults
from nano_inference.text.grammar import Grammars
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import AdapterInfo, SamplingParams

OWNER = "nano-inference"  # `owned_by` of the models in GET /v1/models
_PLAIN = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What routes need to parse requests and make replies."""

    names: tuple[str, ...]  # names that requests may use; the first is the default
    any_name: bool  # True if requests may use any other name as well
    created: int  # time of loading, seconds since 1970
    tokenizer: Tokenizer
    dialogue: Dialogue | None  # chat template and parts; None for a base model without a chat template
    grammars: Grammars  # compiler and cache of grammars for structured output
    limits: Limits
    generation: Mapping[str, Any]
    """Default sampling fields of requests: those of the model's generation_config.json, or none."""
    chat_defaults: ChatDefaults  # default sampling fields of the chat page
    max_positions: int  # maximum context of the model's configuration, in tokens
    file_name: str = ""  # name of the model's file or directory, without the directories above it; empty if unknown
    prefills: bool = False  # True if a last message of the assistant is continued unless a request decides it
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Facts shown by GET /info: architecture, precision, kernels."""
    longest_token: int  # bytes of the longest token; bounds a text's number of tokens from below
    adapters: tuple[AdapterInfo, ...] = ()  # loaded LoRA adapters, whose names requests may give as the model's

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (*self.names, *(one.name for one in self.adapters))

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: the program's version and a digest of the model's facts.

        Its form is llama.cpp's, whose clients expect a `b` and a build number.
        """
        facts = f"{self.name} {sorted(self.facts.items())}"
        return f"b{nano_inference.__version__}-{sha256(facts.encode()).hexdigest()[:8]}"

    @property
    def calculates(self) -> bool:
        return self.dialogue is not None and self.dialogue.tool is not None

    def name_for(self, asked: str | None) -> str:
        """Return the model name for the reply. Raises `ApiError` 404 for an unknown name.

        As in Ollama, a name without a tag means the tag `latest`.
        """
        if asked is None or asked == "":
            return self.name
        if self.any_name or tagged(asked) in map(tagged, self.all_names):
            return asked
        raise unknown_model(asked, self.all_names)

    def adapter_for(self, asked: str | None) -> str | None:
        """Return the name of the adapter that a request's `model` means; None if it means the model alone."""
        found = self._adapter(asked)
        return None if found is None else found.name

    def _adapter(self, asked: str | None) -> AdapterInfo | None:
        return next((one for one in self.adapters if asked and tagged(one.name) == tagged(asked)), None)

    def card(self, name: str) -> dict[str, Any]:
        """Return the /v1/models entry of one of the names."""
        adapter = self._adapter(name)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": OWNER,
            "root": self.name if adapter is None else PurePath(adapter.source).name or name,
            "parent": None if name == self.name else self.name,
            "max_model_len": self.limits.max_model_len,
            "permission": [],
            "calculator": self.calculates,
            "chat_defaults": dict(self.chat_defaults.sampling),
        }


def unknown_model(asked: str, names: Sequence[str]) -> ApiError:
    """Return the 404 of a request for a model that is not served; `names` are those that are."""
    known = ", ".join(names)
    return ApiError(
        404, f"the model {asked[:200]!r} does not exist; served: {known}", param="model", code="model_not_found"
    )


def tagged(name: str) -> str:
    """Return a model's name with its tag, as Ollama writes it: `latest` if it has none."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def info(model: ServedModel, config: ServerConfig, max_running: int, state_slots: int) -> dict[str, Any]:
    """Return the reply of GET /info, for the web page; it has no file paths and nothing about clients."""
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
        "state_slots": state_slots,
        "max_n": config.max_n,
        "max_logprobs": config.max_logprobs,
        "logprobs_mode": config.logprobs_mode,
        "chats": model.dialogue is not None,
        "calculator": model.calculates,
        "sampling_defaults": {name: model.generation.get(name, getattr(_PLAIN, name)) for name in MODELS_OWN},
        "generation_config": config.generation_config,
        "chat_defaults": dict(model.chat_defaults.sampling),
        "chat_defaults_source": model.chat_defaults.source,
        **model.facts,
    }
