"""Turns prompts and messages of a body into token ids, checked and truncated to the context. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, refused
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import ChatBody, CompletionBody, Message, RenderingFields, Sampling, TextPart
from nano_inference.server.tools import ToolUse
from nano_inference.text.chat import RESERVED
from nano_inference.text.dialogue import Dialogue, Rendering
from nano_inference.text.templates import TemplateLimit
from nano_inference.text.tool_format import speaks_of_tools
from nano_inference.text.tool_prompt import with_tools
from nano_inference.types import BadRequest, ModelError

_Rendered = TypeVar("_Rendered", bound=RenderingFields)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_CALCULATOR_PARTS = frozenset({"python", "python_output"})


class Prompt(NamedTuple):
    """Token ids of a prompt, and the text put before its answer with `echo`."""

    ids: Sequence[int]
    echo: str


def completion_prompts(body: CompletionBody, model: ServedModel, max_tokens: int | None) -> list[Prompt]:
    """Return the prompts of a completion: one or several, given as text or ids. Raises `ApiError`.

    The echo of a text is the text itself, unless the prompt was truncated.
    """
    tokenizer, given = model.tokenizer, body.prompt
    several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    prompts: list[Prompt] = []
    for one in several:
        ids: Sequence[int] = one
        if isinstance(one, str):
            if body.truncate_prompt_tokens is None:
                check_text_length([one], "prompt", model)
            with api_errors("prompt"):
                ids = tokenizer.encode(one, add_special=body.add_special_tokens is not False)
        kept = fit_to_context(ids, body, model, max_tokens)
        echo = ""
        if body.echo and isinstance(one, str) and len(kept) == len(ids):
            echo = one
        elif body.echo:
            check_known(kept, model, "prompt")
            echo = tokenizer.decode(kept)
        prompts.append(Prompt(kept, echo))
    return prompts


def chat_prompt(body: ChatBody, model: ServedModel, max_tokens: int | None, use: ToolUse | None) -> Prompt:
    """Return the prompt of a chat; `echo` is the text of the last message. Raises `ApiError`."""
    dialogue = require_dialogue(model)
    messages, rendering = read_messages(body, dialogue, use)
    given: Sequence[int] | None = None
    if (transfer := body.kv_transfer_params) is not None:
        for name, value in (transfer.model_extra or {}).items():
            if value:
                where = f"kv_transfer_params.{name[:64]}"
                raise ApiError(400, f"{where} is not supported here", param=where, code="unsupported_field")
        given = transfer.prompt_token_ids  # of a prompt that another server tokenized
    if given is not None:
        check_known(given, model, "kv_transfer_params.prompt_token_ids")
        ids = given
    else:
        if body.truncate_prompt_tokens is None:
            contents = (message.get("content") for message in messages)
            parts = (one if isinstance(one, list) else [{"text": one or ""}] for one in contents)
            check_text_length((part["text"] for several in parts for part in several), "messages", model)
        with api_errors("messages"):
            ids = dialogue.encode(messages, rendering)
    return Prompt(fit_to_context(ids, body, model, max_tokens), str(messages[-1].get("content") or ""))


def read_messages(
    body: RenderingFields, dialogue: Dialogue, use: ToolUse | None
) -> tuple[Sequence[Mapping[str, Any]], Rendering]:
    """Return a body's messages and rendering options for the chat template, with tools. Raises `ApiError`."""
    variables = dict(body.chat_template_kwargs or {})
    try:
        check_variables(variables)
    except ValueError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from None
    # A reasoning effort is a level, or only whether the model reasons; a template with neither is of a model that does
    # not reason, for which every level is the same.
    if (effort := body.reasoning_effort) is not None:
        if dialogue.knows("reasoning_effort"):
            variables = {"reasoning_effort": effort, **variables}
        elif dialogue.knows("enable_thinking"):
            variables = {"enable_thinking": effort != "none", **variables}
    continues = bool(body.continue_final_message)
    add_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and add_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise ApiError(400, message, param="continue_final_message")
    rendering = Rendering(add_generation_prompt=add_prompt, continue_final=continues, extra=variables)

    messages: Sequence[Mapping[str, Any]] = plain_messages(body.messages or (), dialogue)
    functions = () if use is None else use.functions
    has_calls = any(
        one["role"] in ("tool", "function") or one.get("tool_calls") or one.get("function_call") for one in messages
    )
    if functions or has_calls:
        with api_errors("messages"):
            messages = with_tools(messages, functions, dialogue.tool_template)
    if functions and speaks_of_tools(dialogue.tool_template):
        rendering = replace(rendering, tools=functions)
    return messages, rendering


def require_dialogue(model: ServedModel) -> Dialogue:
    """Return the model's dialogue. Raises `ApiError` for a model without a chat template."""
    if model.dialogue is None:
        raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
    return model.dialogue


def with_prefill(body: _Rendered, model: ServedModel) -> _Rendered:
    """Return the body; if the server continues answers and the body leaves it open, with `continue_final_message`."""
    messages = body.messages or []
    is_open = body.continue_final_message is None and body.add_generation_prompt is None
    if not (model.prefills and is_open and messages and messages[-1].role == "assistant" and messages[-1].content):
        return body
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise refused("messages", "of two answers at the end, none can be continued")
    return body.model_copy(update={"continue_final_message": True})


def plain_messages(messages: Sequence[Message], dialogue: Dialogue | None = None) -> list[dict[str, Any]]:
    """Return messages as `dialogue` takes them: contents as text, role developer as system.

    With a calculator, the parts of earlier answers are kept, so that calculator calls are encoded as calls again.
    Raises `ApiError` naming the part that is not text.
    """
    kinds = _CALCULATOR_PARTS if dialogue is not None and dialogue.tool is not None else frozenset[str]()
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        extra = dict(message.model_extra or {})
        parts = extra.pop("parts", None) if kinds else None
        plain: dict[str, Any] = {**extra, "role": message.role, "content": message.content}
        if message.role == "developer":
            plain["role"] = "system"
        if parts:
            plain["content"] = _answer_parts(parts, f"messages.{index}.parts", kinds)
        elif isinstance(message.content, list):
            texts = [_text_of(part, f"messages.{index}.content.{n}", kinds) for n, part in enumerate(message.content)]
            plain["content"] = "\n".join(texts)
            if any(part.type in kinds for part in message.content):
                types = ("text" if part.type in _TEXT_PARTS else part.type for part in message.content)
                plain["content"] = [{"type": kind, "text": text} for kind, text in zip(types, texts, strict=True)]
        if plain["content"] is None and not (plain.get("tool_calls") or plain.get("function_call")):
            if message.role != "assistant":
                where = f"messages.{index}.content"
                raise refused(where, "must be a string or a list of text parts")
            plain["content"] = plain.get("refusal") or ""  # cut off in its reasoning, or a refusal
        found.append(plain)
    return found


def _text_of(part: TextPart, where: str, kinds: Collection[str]) -> str:
    if part.type not in _TEXT_PARTS and part.type not in kinds:
        raise ApiError(400, f"{where}.type: {part.type[:64]!r} is not supported, only text", param=where)
    if part.words is None:
        raise refused(f"{where}.text", "field required")
    return part.words


def _answer_parts(parts: Any, where: str, kinds: Collection[str]) -> list[dict[str, str]]:
    known = {"text", *kinds}
    objects = [one for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []
    are_known = all(one.get("type") in known and isinstance(one.get("text"), str) for one in objects)
    if not isinstance(parts, list) or len(objects) != len(parts) or not are_known:
        raise refused(where, f"must be a list of {{type, text}} with a type in {sorted(known)}")
    return [{"type": one["type"], "text": one["text"]} for one in objects]


def check_known(ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Raise `ApiError` naming the field if an id is outside the tokenizer's vocabulary."""
    known = min(model.limits.vocab_size, model.tokenizer.vocab_size)
    if max(ids) >= known:
        raise refused(field, f"token id {max(ids)} is outside the vocabulary of {known}")


def check_text_length(texts: Iterable[str], field: str, model: ServedModel) -> None:
    """Raise `ApiError` naming the field for texts too long for the context whatever their tokens.

    Tokenizing megabytes takes seconds.
    """
    fewest = sum(map(len, texts)) // model.longest_token
    if fewest > model.limits.max_model_len:
        raise too_long(fewest, f"at least {fewest} tokens", field, model)


def fit_to_context(prompt: Sequence[int], body: Sampling, model: ServedModel, max_tokens: int | None) -> Sequence[int]:
    """Return the prompt, truncated as requested. Raises `ApiError` if it is too long."""
    longest = model.limits.max_model_len - (0 if max_tokens == 0 else 1)
    keep = body.truncate_prompt_tokens
    if keep is not None:
        if keep == 0:
            raise ApiError(400, "truncate_prompt_tokens leaves no token", param="truncate_prompt_tokens")
        room = model.limits.max_model_len - (max_tokens or 1)
        prompt = kept_tokens(
            prompt, keep if keep > 0 else room if 0 < room < longest else longest, body.truncation_side
        )
    if len(prompt) > longest:
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        raise too_long(len(prompt), f"{len(prompt)} tokens", field, model)
    return prompt


def kept_tokens(ids: Sequence[int], count: int, side: str | None) -> Sequence[int]:
    """Return at most `count` ids, without those on the given side (default: left)."""
    return ids[:count] if side == "right" else ids[-count:]


def too_long(num_tokens: int, shown: str, field: str, model: ServedModel, *, answered: bool = True) -> ApiError:
    """Return the error of a text with more tokens than the context has room for; `answered`: with an answer."""
    limits = model.limits
    context = limits.max_model_len if answered else min(limits.max_model_len, limits.num_blocks * limits.block_size)
    found = "the prompt" if answered else field
    much = "which with an answer exceeds the available context size" if answered else "too large for the context"
    way_out = "" if answered else " or set truncate_prompt_tokens"
    if context == limits.max_model_len < model.max_positions:
        way_out += " or start the server with a larger --max-model-len"
    return ApiError(
        400,
        f"{found} has {shown}, {much} of {context}; shorten it{way_out}",
        param=field,
        code="context_length_exceeded",
        extra={"n_prompt_tokens": num_tokens, "n_ctx": context},
    )


_FIELDS = frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)


@contextmanager
def api_errors(param: str | None = None) -> Iterator[None]:
    """Raise `BadRequest` and `ModelError` of the block as `ApiError`; `param` is the field if the error names none.

    Any other `ValueError` is a fault of the server and passes unchanged.
    """
    try:
        yield
    except (BadRequest, ModelError) as error:
        raise to_api_error(error, param) from None


def to_api_error(error: ValueError, param: str | None = None) -> ApiError:
    """Return the 400 for an error: its message, and its field if a body has it, else `param`."""
    if isinstance(error, TemplateLimit):
        return refused("messages", error.reason)
    if isinstance(error, ModelError):  # its message names a file of the server
        return ApiError(400, "the model's chat template cannot render these messages", param="messages")
    field = error.field if isinstance(error, BadRequest) else ""
    return ApiError(400, str(error), param=field if re.split(r"[.\[]", field)[0] in _FIELDS else param)


_MAX_BYTES = 4096
_RESERVED = frozenset(
    {"tokenize", "return_dict", "return_tensors", "conversation", "chat_template", "padding", "truncation"}
    | {"max_length", "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | RESERVED
)
"""Names that template variables must not have: arguments of Transformers' `apply_chat_template`, built-in variables."""


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise `ValueError` that begins with `chat_template_kwargs` for variables too large, nested or reserved."""
    if len(json.dumps(variables)) > _MAX_BYTES:
        raise ValueError(f"chat_template_kwargs must be at most {_MAX_BYTES} bytes")
    for name, value in variables.items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name in _RESERVED:
            raise ValueError(f"{where} is reserved")
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise ValueError(f"{where} must be a number, a string, a boolean or a list of those")


def default_variables(config: ServerConfig) -> Mapping[str, Any]:
    """Return the operator's variables. Raises `ModelError` as `check_variables` raises `ValueError`."""
    variables: Mapping[str, Any] = json.loads(config.chat_template_kwargs or "{}")
    try:
        check_variables(variables)
    except ValueError as error:
        raise ModelError(str(error).replace("chat_template_kwargs", "--chat-template-kwargs", 1)) from None
    return variables
