"""Fields of other servers without support here: refused by name, unless their value changes no token of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.errors import ApiError
from nano_inference.types import SamplingParams

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
    "include_reasoning": (None, True),
    "lora_request": EMPTY,
    "logits_processors": EMPTY,
    "watermarking": OFF,
    # SGLang
    "stop_regex": EMPTY,
    "lora_path": EMPTY,
    "session_params": EMPTY,
    "return_hidden_states": OFF,
    "custom_logit_processor": EMPTY,
    "custom_params": EMPTY,
    "separate_reasoning": (None, True),
    "no_stop_trim": OFF,
    "min_new_tokens": (None, 0),
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
    "reasoning_format": (None, "none", "auto"),
    "top_n_sigma": (None, -1, -1.0, 0, 0.0),
    "adaptive_target": (None, -1, -1.0),
    "min_keep": (None, 0),
    "lora": EMPTY,
    # Qwen's API
    "thinking_budget": (None,),
    # Ollama, which Open WebUI sends to every kind of server
    "tfs_z": (None, 1, 1.0),
    "format": EMPTY,
    "think": (None,),
}
"""Field -> values with which it changes nothing."""

HINTS: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "prediction": EMPTY,
    "prompt_cache_options": EMPTY,
    "prompt_cache_retention": (None, "in_memory"),
    # vLLM: options of beam search and of images, which are refused themselves; no tokenizer here adds spaces
    "length_penalty": (None, 1, 1.0),
    "early_stopping": OFF,
    "guided_decoding_backend": (None, "auto", "guidance"),
    "media_io_kwargs": EMPTY,
    "mm_processor_kwargs": EMPTY,
    "priority": (None, 0),
    "stream_interval": (None, 1),
    "spaces_between_special_tokens": (None, True),
    # SGLang
    "data_parallel_rank": (None, 0),
    "routed_dp_rank": (None, 0),
    "stream_reasoning": (None, True),
    # llama.cpp; the context is never shifted. The window of penalties matters only beside one: `refuse_window`
    "return_progress": OFF,
    "n_keep": (None, 0),
    "n_discard": (None, 0),
    "repeat_last_n": (None, -1),
    "penalty_last_n": (None, -1),
    "id_slot": (None, -1),
    "cache_prompt": (None, True),
    "backend_sampling": OFF,
}
"""Fields on which no token of an answer depends -> neutral values."""

LABELS: Mapping[str, tuple[Any, ...]] = {
    "user": EMPTY,
    "service_tier": (None, "auto", "default", "standard_only"),
    "store": OFF,
    "metadata": EMPTY,
    "prompt_cache_key": EMPTY,
    "safety_identifier": EMPTY,
    "verbosity": (None, "medium"),
}
"""Hints that bodies declare -> neutral values."""

REASONS: Mapping[str, str] = {
    "no_stop_trim": "use include_stop_str_in_output",
    "min_new_tokens": "use min_tokens",
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


def refuse_window(fields: Mapping[str, Any], params: SamplingParams) -> None:
    """Raise `ApiError` naming a window of the last N tokens for penalties, if there is one: here they cover all."""
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        return
    for name in ("repeat_last_n", "penalty_last_n"):
        if not is_one_of(fields.get(name), HINTS[name]):
            text = f"{name} is not supported together with a penalty, except -1: penalties cover all tokens"
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
