"""Fields of other servers without support here: refused by name, unless their value changes no token of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.errors import ApiError

OFF: tuple[Any, ...] = (None, False)
EMPTY: tuple[Any, ...] = (None, [], {}, "")

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # supported on paths whose body declares them
    "tools": EMPTY,
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": EMPTY,
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": EMPTY,
    "guided_json": EMPTY,
    "guided_regex": EMPTY,
    "guided_choice": EMPTY,
    "guided_grammar": EMPTY,
    "regex": EMPTY,
    "ebnf": EMPTY,
    "json_schema": EMPTY,
    "grammar": EMPTY,
    # OpenAI
    "suffix": EMPTY,
    "modalities": (None, ["text"]),
    "audio": EMPTY,
    "web_search_options": (None,),
    "moderation": (None,),
    # vLLM
    "use_beam_search": OFF,
    "prompt_embeds": EMPTY,
    "documents": EMPTY,
    "chat_template": (None,),
    "vllm_xargs": EMPTY,
    "kv_transfer_params": EMPTY,
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    # SGLang
    "stop_regex": EMPTY,
    "lora_path": EMPTY,
    "session_params": EMPTY,
    "return_hidden_states": OFF,
    "custom_logit_processor": EMPTY,
    # llama.cpp
    "n_predict": (None,),
    "n_probs": (None, 0),
    "t_max_predict_ms": (None, 0),
    "samplers": EMPTY,
    "mirostat": (None, 0),
    "typical_p": (None, 1, 1.0),
    "dynatemp_range": (None, 0, 0.0),
    "dry_multiplier": (None, 0, 0.0),
    "xtc_probability": (None, 0, 0.0),
    "repeat_penalty": (None, 1, 1.0),
    # Ollama, which Open WebUI sends to every kind of server
    "tfs_z": (None, 1, 1.0),
    "format": EMPTY,
    "think": (None,),
}
"""Field -> values with which it changes nothing."""

HINTS: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "prediction": EMPTY,
    # vLLM: options of beam search and of images, which are refused themselves; the tokenizers library adds no spaces
    "length_penalty": (None, 1, 1.0),
    "early_stopping": OFF,
    "guided_decoding_backend": (None,),
    "media_io_kwargs": EMPTY,
    "mm_processor_kwargs": EMPTY,
    "priority": (None, 0),
    "stream_interval": (None, 1),
    "spaces_between_special_tokens": (None, True, False),
    # SGLang
    "data_parallel_rank": (None, 0),
    "routed_dp_rank": (None, 0),
    # llama.cpp; the context is never shifted
    "return_progress": OFF,
    "n_keep": (None, 0),
    "id_slot": (None, -1),
    "cache_prompt": (None, True),
    "backend_sampling": OFF,
}
"""Fields on which no token of an answer depends -> neutral values."""

REASONS: Mapping[str, str] = {
    "session_params": "no sessions are kept; send the whole conversation as input_ids, whose prefix is cached",
}
"""Field -> why it is refused and what to do, if its name does not say."""


def reason_of(name: str) -> str:
    """Return the end of a refusal: a colon and the reason, or nothing."""
    return f": {REASONS[name]}" if name in REASONS else ""


def refuse_unsupported(fields: Mapping[str, Any], where: str = "") -> None:
    """Raise `ApiError` naming the first field of `NEUTRAL` whose value is not neutral."""
    for name, value in fields.items():
        if name in NEUTRAL and not is_one_of(value, NEUTRAL[name]):
            text = f"{where}{name} is not supported here{reason_of(name)}"
            raise ApiError(400, text, param=name, code="unsupported_field")


def unknown_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return the unknown field names, sorted."""
    return sorted(name for name in fields if name not in NEUTRAL and name not in HINTS)


def hinting_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of `HINTS` whose value is not neutral, sorted."""
    return sorted(name for name, value in fields.items() if name in HINTS and not is_one_of(value, HINTS[name]))


def is_one_of(value: Any, neutral: Sequence[Any]) -> bool:
    """Return True if a value is one of these, of the same type: True is not 1."""
    return any(type(value) is type(one) and value == one for one in neutral)
