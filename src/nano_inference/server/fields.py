"""Fields of a body that no route reads: those whose silent loss would change the answer are refused, others logged.

A field with an empty value (null, false, 0, "", [], {}), or with one that is listed here as harmless, is neither. In
`sampling_params`, which trainers send, an unknown name is refused, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_inference.server.errors import ApiError, unsupported_field
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body, SamplingFields

_EVEN_EMPTY = ("think", "thinking_budget", "thinking_token_budget")
"""Fields with which false or 0 asks for something, too."""
PROMPT_FIELDS: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("suffix", "documents", "chat_template", "template", "context", "prompt_embeds", "input_embeds", "features"),
        *("images", "image_data", "video_data", "audio_data", "multimodal_data", "content_parts", "session_params"),
        *("conversation", "prompt"),
    ),
    (),
)
"""Fields that change what a model reads -> values, beside the empty ones, with which they do not."""
ANSWER_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **PROMPT_FIELDS,
    # what the answer must look like, and what may be called in it
    **dict.fromkeys(("tools", "functions", "structured_outputs", "guided_decoding", "format", "json_schema"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ()),
    **dict.fromkeys(("regex", "ebnf", "grammar", "audio", "web_search_options", "mcp_servers", "container"), ()),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    # how its tokens are drawn
    **dict.fromkeys(("logit_bias", "presence_penalty", "frequency_penalty", "samplers", "use_beam_search"), ()),
    **dict.fromkeys(("lora_request", "lora_path", "lora_id", "lora", "mirostat", "dynatemp_range"), ()),
    **dict.fromkeys(("logits_processors", "custom_logit_processor", "dry_multiplier", "xtc_probability"), ()),
    **dict.fromkeys(("watermarking", "min_keep", "min_p", "bad_words", "allowed_token_ids", "grammar_lazy"), ()),
    "grammar_triggers": (),
    **dict.fromkeys(("top_n_sigma", "adaptive_target"), (-1,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "typical_p", "tfs_z", "beam_width", "n", "best_of"), (1,)),
    # where it ends
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict", "stop", "stop_regex", "min_new_tokens"), ()),
    **dict.fromkeys(("max_new_tokens", "stop_sequences", "stop_token_ids", "min_tokens", "ignore_eos", "echo"), ()),
    **dict.fromkeys(("answer_token_ids", "truncate_prompt_tokens", "include_stop_str_in_output"), ()),
    **dict.fromkeys(("no_stop_trim", "t_max_predict_ms", "repetition_detection", "kv_transfer_params"), ()),
    **dict.fromkeys(("reasoning_effort", *_EVEN_EMPTY), ()),
    "reasoning_budget_tokens": (-1,),
}
"""The same for what is written, on routes that generate."""
_PARTS = (
    *("stream_options", "options", "sampling_params", "custom_params"),
    *("reasoning", "output_config", "text", "format"),
)
"""Fields whose objects are looked into."""
_LISTED = ("tools", "function")
"""Fields whose objects are looked into for the log only: what they lack, their type decides."""
_IDLE_PARAMS = frozenset(
    {"flat_logprobs", "skip_clone", "spaces_between_special_tokens", "length_penalty", "early_stopping"}
    | {"guided_decoding_backend", "stream_interval", "priority"}
)
"""Parameters of vLLM's and SGLang's sampling on which no token depends; trainers' other names are refused."""
_WINDOWS = ("repeat_last_n", "penalty_last_n")
_PENALTIES: Mapping[str, float] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
_MAX_LOGGED = 1000

_log = logging.getLogger("nano_inference.server")


def unread_fields(body: Body, model: ServedModel, *, answers: bool) -> list[str]:
    """Return the fields that have no effect, also those that are hints without effect on this model.

    Raises `ApiError` naming the first one whose loss would change the prompt or, with `answers`, the answer.
    """

    def knows(name: str) -> bool:
        return model.dialogue is not None and model.dialogue.knows(name)

    refused = ANSWER_FIELDS if answers else PROMPT_FIELDS
    unread = list(_unread(body))
    for path in unread:
        head, _, name = f".{path}".rpartition(".")
        if any(part in _LISTED for part in head.split(".")):
            continue
        if name in refused:
            raise unsupported_field(path)
        # A trainer whose parameter is misspelt would learn from other samples.
        if path.startswith("sampling_params.") and name not in _IDLE_PARAMS:
            raise ApiError(400, f"{path} is not a known field", param=path, code="unknown_field")
    # llama.cpp counts penalties over the last N tokens; here they cover all.
    for name in _WINDOWS if answers and isinstance(body, SamplingFields) else ():
        if (body.model_extra or {}).get(name) not in (None, -1):
            for penalty, off in _PENALTIES.items():
                value = getattr(body, penalty)
                if (model.generation.get(penalty, off) if value is None else value) != off:
                    text = f"{name} is not supported together with {penalty}, except -1: penalties cover all tokens"
                    raise unsupported_field(name, text)
    return list(dict.fromkeys([*unread, *body.hints(knows)]))


def _unread(body: Body, place: str = "") -> Iterator[str]:
    """Yield the path of each field without a reader whose value asks for something, also in parts of the body."""
    for name, value in (body.model_extra or {}).items():
        is_set = bool(value) or (name in _EVEN_EMPTY and value is not None)
        is_read = name == "cache_control"  # by the usage of Anthropic's API
        if is_set and not is_read and value not in ANSWER_FIELDS.get(name, ()):
            yield f"{place}{name[:64]}"
    for name in _PARTS + _LISTED:
        part = getattr(body, name, None)
        for one in part if isinstance(part, list) else [part]:
            if isinstance(one, Body):
                yield from _unread(one, f"{place}{name}.")


@dataclass(slots=True)
class IgnoredFields:
    """Owns the names that were logged already; accessed only on the event loop."""

    strict: bool
    logged: set[str] = field(default_factory=set)

    def report(self, names: Sequence[str]) -> None:
        """Log each field without effect once; with `strict`, raise `ApiError`."""
        if names and self.strict:
            shown = ", ".join(map(repr, names[:8]))
            raise ApiError(400, f"fields without effect: {shown}", param=names[0], code="unknown_field")
        new = sorted(set(names) - self.logged)[: _MAX_LOGGED - len(self.logged)]
        self.logged.update(new)
        if new:
            more = f" and {len(new) - 8} more" if new[8:] else ""
            _log.warning("fields without effect are ignored: %s%s", ", ".join(map(repr, new[:8])), more)
