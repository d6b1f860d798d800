"""A trainer's PEFT adapter as plain data: its configuration and its tensors. PEFT is not imported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

WRAPPER = "_checkpoint_wrapped_module."  # prefix of parameters whose activations are checkpointed


def plain_config(config: Any) -> dict[str, Any]:
    """Return a PEFT configuration, or a mapping of its fields, as the JSON of its file adapter_config.json."""
    fields = config if isinstance(config, Mapping) else config.to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=_plain))
    return plain


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def adapter_tensors(model: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of an adapter of a `PeftModel`, with the names of adapter_model.safetensors."""
    for full, parameter in model.named_parameters():
        module, found, rest = full.replace(WRAPPER, "").rpartition(f".{name}.")
        if found and model.prefix in module:
            yield f"{module}.{rest}", parameter.detach()
