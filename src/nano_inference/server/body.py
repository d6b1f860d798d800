"""Reads a request body: strict JSON, then the schema; every error names its field. Then the fields that no route reads.

Those whose silent loss would change the answer are refused, others logged. A field with an empty value (null, false, 0,
"", [], {}), or with one that is listed here as harmless, is neither. In `sampling_params`, which trainers send, an
unknown name is refused, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from nano_inference.server.errors import ApiError, unsupported_field
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import Body, SamplingFields

MAX_DEPTH = 64
MAX_NAME = 200
"""Characters of a field's path in an error."""
_MAX_SIBLINGS = 8

_LIMITS = frozenset(
    {
        *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_long", "too_short"),
        *("string_too_long", "string_too_short", "string_pattern_mismatch", "literal_error"),
    }
)
"""pydantic's errors for values of the right type."""

_Body = TypeVar("_Body", bound=Body)
_log = logging.getLogger("nano_inference.server")


def parse(data: bytes, model: type[_Body]) -> _Body:
    """Return the body. Raises `ApiError` if it is not a JSON object or does not match the schema.

    Its status is 400, or the model's `malformed_status` unless a value is only beyond a limit.
    """
    value = read_json(data, model.malformed_status)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _schema_error(error, value, model.malformed_status) from None


def read_json(data: bytes, status: int = 400) -> dict[str, Any]:
    """Return a JSON object: no NaN, no infinity, no lone surrogate, `MAX_DEPTH` levels at most.

    Raises `ApiError` with the status.
    """
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(status, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        kind = kinds.get(type(value), "a number")
        raise ApiError(status, f"the body must be a JSON object, got {kind}", code="invalid_json")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _schema_error(error: ValidationError, value: dict[str, Any], malformed_status: int) -> ApiError:
    """Return the client's error for one of pydantic's; others than of limits come first if they have another status.

    For a value that matches no member of a union, that is the error with the longest path, or else one of a member
    whose type the value has.
    """
    found = error.errors(include_url=False, include_context=False, include_input=True)
    status = 400
    malformed = [one for one in found if one["type"] not in _LIMITS]
    if malformed and malformed_status != 400:
        found, status = malformed, malformed_status
    chosen = max(found, key=lambda one: (len(_path(one, value)), not one["type"].endswith("_type")))
    own = _path(chosen, value)
    name = _spelled(own)
    is_object = chosen["type"] in ("model_type", "model_attributes_type", "dict_type")
    text = (chosen["msg"][:1].lower() + chosen["msg"][1:]).replace(" after validation", "")
    message = "input should be an object" if is_object else text
    got = "" if chosen["type"] == "missing" else f", got {_shown(chosen['input'])}"
    # Other fields of the same object or list with the same error.
    paths = [_path(one, value) for one in found if one["type"] == chosen["type"]]
    others = list(dict.fromkeys(_spelled(path) for path in paths if path[:-1] == own[:-1] and path != own))
    also = f"; also {', '.join(others[:_MAX_SIBLINGS])}{', …' if others[_MAX_SIBLINGS:] else ''}" if others else ""
    return ApiError(status, f"{name}: {message}{got}{also}", param=name or None)


def _spelled(path: Sequence[int | str]) -> str:
    return ".".join(str(part)[:64] for part in path)[:MAX_NAME]


def _path(error: ErrorDetails, value: Any) -> list[int | str]:
    """Return the names and indices in an error's location that exist in the body, and the name of a missing field.

    pydantic's location also has the names of a union's members, such as "str" or "function-after[check(), list]". The
    body may have a field of the same name: the path ends at the value that the error is about.
    """
    path: list[int | str] = []
    known = 0
    for part in error["loc"]:
        if isinstance(value, dict):
            inside = part in value
        else:
            inside = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside:
            path.append(part)
            value = value[part]
            known = len(path) if value is error["input"] else known
    if error["type"] == "missing":
        return [*path[: known or None], error["loc"][-1]]
    return path[: known or None]


def _shown(value: Any) -> str:
    """Return the start of a value as text; does not read more of the value than it shows."""
    brief = Repr()
    brief.maxlevel, brief.maxstring, brief.maxlong = 2, 80, 60
    text = brief.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# ---- fields that no route reads -------------------------------------------------------------------------------------

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


def unread_fields(body: Body, model: ServedModel, *, answers: bool) -> list[str]:
    """Return the fields that have no effect, also those that are hints without effect on this model; 1,000 at most.

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
    return list(dict.fromkeys([*unread, *body.hints(knows)]))[:_MAX_LOGGED]


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
