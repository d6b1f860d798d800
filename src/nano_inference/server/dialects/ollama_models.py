"""What Ollama's clients ask about the model: /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated

from pydantic import Field

from nano_inference.server.dialect import Occupancy, UnloadedModel
from nano_inference.server.generation import JSON
from nano_inference.server.model import ServedModel, tagged
from nano_inference.server.schema import Body
from nano_inference.text.dialogue import TemplateDialogue

ModelName = Annotated[str, Field(max_length=512)]
VERSION = "0.13.0"
"""The version of Ollama whose API this follows: clients refuse servers that are older than what they need."""
_NEVER = "9999-12-31T23:59:59Z"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


class ShowBody(Body):
    """POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None  # the older name of `model`


def tags(model: ServedModel, occupancy: Occupancy) -> JSON:
    """Return the reply of GET /api/tags: every name of the model and of its adapters, with its tag."""
    return {"models": [_entry(name, model) for name in model.all_names]}


def tags_of_models(replies: Sequence[JSON], unloaded: Sequence[UnloadedModel]) -> JSON:
    """Return the reply of GET /api/tags of several models. Of those that are not loaded, only the size is known."""
    entries = [entry for reply in replies for entry in reply["models"]]
    return {"models": [*entries, *(_entry(name, model) for model in unloaded for name in model.names)]}


def ps_of_models(replies: Sequence[JSON], unloaded: Sequence[UnloadedModel]) -> JSON:
    """Return the reply of GET /api/ps of several models: the loaded ones."""
    return {"models": [entry for reply in replies for entry in reply["models"]]}


def ps(model: ServedModel, occupancy: Occupancy) -> JSON:
    """Return the reply of GET /api/ps: the served model, which is never unloaded."""
    entry = _entry(model.name, model)
    del entry["modified_at"]
    vram = 0 if model.facts.get("device") == "cpu" else entry["size"]
    loaded = {"expires_at": _NEVER, "size_vram": vram, "context_length": model.limits.max_model_len}
    return {"models": [entry | loaded]}


def version(model: ServedModel, occupancy: Occupancy) -> JSON:
    return {"version": VERSION}


def show(body: ShowBody, model: ServedModel) -> JSON:
    """Return the reply of POST /api/show. Raises `ApiError` for an unknown model."""
    model.name_for(body.model or body.name)
    family = _family(model)
    lengths: JSON = {"context_length": model.limits.max_model_len, "embedding_length": model.limits.hidden_size}
    if model.facts.get("layers") is not None:
        lengths["block_count"] = model.facts["layers"]
    source = model.dialogue.template.source if isinstance(model.dialogue, TemplateDialogue) else "{{ .Prompt }}"
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in model.generation.items()),
        "template": source,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.facts.get("parameters") or 0,
            **{f"{family}.{name}": value for name, value in lengths.items()},
        },
        "capabilities": capabilities(model),
        "modified_at": _time(model),
    }


def capabilities(model: ServedModel) -> list[str]:
    """Return Ollama's names of what the model can do."""
    dialogue = model.dialogue
    chats = [] if dialogue is None else ["tools"]
    thinks = dialogue is not None and (dialogue.knows("enable_thinking") or dialogue.knows("reasoning_effort"))
    return ["completion", "embedding", *chats, *(["thinking"] if thinks else [])]


def _entry(name: str, model: ServedModel | UnloadedModel) -> JSON:
    shown = tagged(name)
    if isinstance(model, UnloadedModel):
        size = model.file_bytes
    else:
        size = (model.facts.get("parameters") or 0) * _BYTES.get(str(model.facts.get("file_precision")), 1)
    return {
        "name": shown,
        "model": shown,
        "modified_at": _time(model),
        "size": size,
        "digest": sha256(f"{model.names[0]} {model.created}".encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel | UnloadedModel) -> JSON:
    if isinstance(model, UnloadedModel):
        unknown: JSON = {"parent_model": "", "format": "", "family": "", "families": []}
        return unknown | {"parameter_size": "", "quantization_level": ""}
    family = _family(model)
    count = model.facts.get("parameters") or 0
    size = next((f"{count / unit:.1f}{letter}" for unit, letter in _UNITS if count >= unit), str(count))
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": str(model.facts.get("file_precision") or ""),
    }


def _family(model: ServedModel) -> str:
    return str(model.facts.get("architecture") or "unknown")


def _time(model: ServedModel | UnloadedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
