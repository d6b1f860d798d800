"""Bodies to calls: a checked request body becomes what the engine is asked for and how the reply is to look. Pure."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from nano_inference.config import ServerConfig
from nano_inference.door import MatcherFactory, admit
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import ChatBody, CompletionBody, Message, Sampling
from nano_inference.server.ticket import Ask
from nano_inference.server.unsupported import refuse_unsupported
from nano_inference.text.bad_words import bad_words_matcher, both
from nano_inference.text.chat import RESERVED
from nano_inference.text.dialogue import Dialogue, Rendering
from nano_inference.text.stops import stop_matcher
from nano_inference.types import ModelError, SamplingParams

Kind = Literal["chat", "completion"]

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_TEMPLATE_KWARGS = 4096
_RESERVED_KWARGS = frozenset(
    {"tokenize", "return_dict", "return_tensors", "conversation", "chat_template", "padding", "truncation"}
    | {"max_length", "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | RESERVED
)
"""Arguments of Transformers' `apply_chat_template`, which a template's variable must not be, and what it has anyway."""
_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FIELD = re.compile(r"(?P<name>[a-z_]+)(?:\[\d+\])?(?:\.[a-z_]+)*(?=[ :]|$)")
_FIELDS = frozenset(CompletionBody.model_fields) | frozenset(ChatBody.model_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What a reply shows of each sample."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    drop_space: bool = False
    """A text begins here: SentencePiece's first space is none of its own."""
    logprobs: int | None = None
    """Alternatives of each token; None shows no log-probabilities."""
    prompt_logprobs: int | None = None
    echo: tuple[str, ...] = ()
    """For each prompt the text to put before its answers; empty when nothing is."""
    echo_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a client, ready for the engine and for its reply."""

    kind: Kind
    id: str
    model: str
    asks: tuple[Ask, ...]
    num_samples: int
    """Samples of each prompt."""
    num_tokens: int
    """Most tokens it may come to, prompts and answers."""
    shape: ReplyShape
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def total_samples(self) -> int:
        """Samples of all prompts."""
        return self.num_samples * len(self.asks)


def completion_call(body: CompletionBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/completions. Raises `ApiError` naming the field that is wrong."""
    refuse_unsupported(body.model_extra or {})
    name = model.name_for(body.model)
    if body.best_of not in (None, 0, body.n or 1):
        raise ApiError(400, "best_of is not supported by this server; n gives all samples", param="best_of")
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    texts, prompts = _prompts(body, model)
    echoes_logprobs = bool(body.echo and body.logprobs is not None)
    prompt_logprobs = body.logprobs if echoes_logprobs and body.prompt_logprobs is None else body.prompt_logprobs
    if echoes_logprobs and body.stream:
        raise ApiError(400, "echo with logprobs needs stream=false", param="echo")
    shape = _shape(
        body,
        config,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=texts if body.echo else (),
        echo_logprobs=echoes_logprobs,
    )
    return _call(body, model, config, salt, "completion", name, prompts, max_tokens, shape)


def chat_call(body: ChatBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/chat/completions. Raises `ApiError` naming the field that is wrong."""
    extra = body.model_extra or {}
    refuse_unsupported(extra)
    name = model.name_for(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise ApiError(400, "max_tokens must be at least 1 in a chat", param="max_tokens")
    dialogue = require_dialogue(model)
    rendering = rendering_of(body, dialogue, extra)
    messages = plain_messages(body.messages)
    prompt = _bad_request_as_400(lambda: dialogue.encode(messages, rendering))
    shape = _shape(
        body,
        config,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        echo=(str(messages[-1].get("content") or ""),) if body.echo else (),
        drop_space=model.tokenizer.drops_space,
    )
    return _call(body, model, config, salt, "chat", name, [prompt], max_tokens, shape)


def require_dialogue(model: ServedModel) -> Dialogue:
    """Return how the model is talked with. Raises `ApiError` for one that only continues texts."""
    if model.dialogue is None:
        raise ApiError(400, "the model has no chat template; /v1/completions continues a text", param="messages")
    return model.dialogue


def rendering_of(body: Any, dialogue: Dialogue, extra: Mapping[str, Any] = MappingProxyType({})) -> Rendering:
    """Return how messages are to be rendered: vLLM's four fields, and `reasoning_effort` where the template has it."""
    variables = dict(body.chat_template_kwargs or {})
    _check_variables(variables)
    effort = extra.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or not dialogue.knows("reasoning_effort"):
            raise ApiError(400, "reasoning_effort is not supported by this model", param="reasoning_effort")
        variables["reasoning_effort"] = effort
    goes_on = bool(body.continue_final_message)
    add_prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on and add_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    return Rendering(add_generation_prompt=add_prompt, continue_final=goes_on, extra=variables)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as a chat template takes them: contents as text, a developer as the system.

    Raises `ApiError` naming the part that is no text.
    """
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {**(message.model_extra or {}), "role": message.role, "content": message.content}
    if message.role == "developer":
        plain["role"] = "system"
    if isinstance(message.content, list):
        texts: list[str] = []
        for number, part in enumerate(message.content):
            where = f"messages.{index}.content.{number}"
            if part.type not in ("text", "input_text", "output_text"):
                raise ApiError(400, f"{where}.type: {part.type[:64]!r} is not supported, only text", param=where)
            if part.text is None:
                raise ApiError(400, f"{where}.text: field required", param=f"{where}.text")
            texts.append(part.text)
        plain["content"] = "\n".join(texts)
    if plain["content"] is None and not plain.get("tool_calls"):
        raise ApiError(400, f"messages.{index}.content: must be a text", param=f"messages.{index}.content")
    return plain


def _check_variables(variables: Mapping[str, Any]) -> None:
    """Refuse template variables that are large, that nest, or that have a meaning of their own."""
    if len(json.dumps(variables)) > _MAX_TEMPLATE_KWARGS:
        message = f"chat_template_kwargs must be at most {_MAX_TEMPLATE_KWARGS} bytes"
        raise ApiError(400, message, param="chat_template_kwargs")
    for name, value in variables.items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name in _RESERVED_KWARGS:
            raise ApiError(400, f"{where} is reserved", param="chat_template_kwargs")
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            message = f"{where} must be a number, a text, a boolean or a list of those"
            raise ApiError(400, message, param="chat_template_kwargs")


def _prompts(body: CompletionBody, model: ServedModel) -> tuple[tuple[str, ...], list[list[int]]]:
    """Return the texts (when they are echoed) and the ids of a completion's prompts."""
    given: Any = body.prompt
    is_ids = isinstance(given, list) and isinstance(given[0], int)
    several: list[Any] = given if isinstance(given, list) and not is_ids else [given]
    add_special = body.add_special_tokens is not False
    tokenizer = model.tokenizer
    prompts = [
        _bad_request_as_400(lambda one=one: tokenizer.encode(one, add_special=add_special))
        if isinstance(one, str)
        else one
        for one in several
    ]
    if not body.echo:
        return (), prompts
    texts = (one if isinstance(one, str) else _decoded(tokenizer, one, model.limits.vocab_size) for one in several)
    return tuple(texts), prompts


def _decoded(tokenizer: Any, ids: Sequence[int], vocab_size: int) -> str:
    known = min(vocab_size, tokenizer.vocab_size)
    if max(ids) >= known:
        raise ApiError(400, f"prompt: token id {max(ids)} is outside the vocabulary of {known}", param="prompt")
    return str(tokenizer.decode(ids))


def _shape(
    body: Sampling,
    config: ServerConfig,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    echo: tuple[str, ...],
    echo_logprobs: bool = False,
    drop_space: bool = False,
) -> ReplyShape:
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > config.max_logprobs:
            shown = "top_logprobs" if name == "logprobs" and isinstance(body, ChatBody) else name
            raise ApiError(400, f"{shown} must be at most {config.max_logprobs}, got {value}", param=shown)
    if prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs needs stream=false", param="prompt_logprobs")
    return ReplyShape(
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        drop_space=drop_space,
        logprobs=logprobs,
        prompt_logprobs=None if echo_logprobs and body.prompt_logprobs is None else prompt_logprobs,
        echo=echo,
        echo_logprobs=echo_logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def _call(
    body: Sampling,
    model: ServedModel,
    config: ServerConfig,
    salt: str,
    kind: Kind,
    name: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    shape: ReplyShape,
) -> Call:
    """Put a call together and check it against the engine's limits."""
    num_samples = body.n or 1
    if num_samples > config.max_n:
        raise ApiError(400, f"n must be at most {config.max_n}, got {num_samples}", param="n")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    wanted_prompt_logprobs = shape.prompt_logprobs
    if shape.echo_logprobs:
        wanted_prompt_logprobs = max(shape.logprobs or 0, shape.prompt_logprobs or 0)
    params = _bad_request_as_400(
        lambda: _sampling_params(body, model, config, max_tokens, shape.logprobs, wanted_prompt_logprobs)
    )
    matcher = _bad_request_as_400(lambda: _matcher(body, model, shape))
    asks: list[Ask] = []
    num_tokens = 0
    for prompt in prompts:
        ids = _fitting(prompt, body, model, max_tokens)
        request = _bad_request_as_400(lambda ids=ids: admit(0, ids, params, model.limits, seed=0))
        num_tokens += len(ids) + num_samples * request.max_new_tokens
        asks.append(Ask(prompt=request.prompt, params=params, num_samples=num_samples, salt=salt, make_matcher=matcher))
    options = body.stream_options
    prefix = "chatcmpl" if kind == "chat" else "cmpl"
    return Call(
        kind=kind,
        id=f"{prefix}-{body.request_id or uuid.uuid4().hex}",
        model=name,
        asks=tuple(asks),
        num_samples=num_samples,
        num_tokens=num_tokens,
        shape=shape,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _fitting(prompt: Sequence[int], body: Sampling, model: ServedModel, max_tokens: int | None) -> Sequence[int]:
    """Return the prompt, cut from the left where that was asked for. Raises `ApiError` when it is too long."""
    longest = model.limits.max_model_len - (0 if max_tokens == 0 else 1)
    keep = body.truncate_prompt_tokens
    if keep is not None:
        keep = min(longest, model.limits.max_model_len - (max_tokens or 1)) if keep == -1 else keep
        if keep < 1:
            raise ApiError(400, "truncate_prompt_tokens leaves no token", param="truncate_prompt_tokens")
        prompt = prompt[-keep:]
    if len(prompt) > longest:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens, which with an answer is longer than the context of "
            f"{model.limits.max_model_len}; shorten it or start the server with a larger --max-model-len",
            param="messages" if isinstance(body, ChatBody) else "prompt",
            code="context_length_exceeded",
            extra={"n_prompt_tokens": len(prompt), "n_ctx": model.limits.max_model_len},
        )
    return prompt


def _sampling_params(
    body: Sampling,
    model: ServedModel,
    config: ServerConfig,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the engine's parameters: the body's, else those that the model's files name, else the engine's."""
    chosen: dict[str, Any] = {
        name: model.generation[name] for name in _GENERATION_FIELDS if model.generation.get(name) is not None
    }
    given = (
        *_GENERATION_FIELDS,
        *("presence_penalty", "frequency_penalty", "seed", "min_tokens", "ignore_eos", "stop_token_ids"),
        *("logit_bias", "allowed_token_ids"),
    )
    chosen |= {name: getattr(body, name) for name in given if getattr(body, name) is not None}
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprobs_mode=config.logprobs_mode,
    )


def _matcher(body: Sampling, model: ServedModel, shape: ReplyShape) -> MatcherFactory | None:
    """Return what watches each sample: stop strings, words to keep out."""
    stops = stop_matcher(model.tokenizer, shape.stops) if shape.stops else None
    if not body.bad_words:
        return stops
    return both(stops, bad_words_matcher(model.tokenizer, body.bad_words, model.limits.vocab_size))


def _bad_request_as_400(work: Any) -> Any:
    """Run something of the engine's door or of the text room; its refusals are the client's fault."""
    try:
        return work()
    except ValueError as error:
        raise client_error(error) from None


def client_error(error: ValueError, param: str | None = None) -> ApiError:
    """Return what a client is told of a refusal: its text, and the field that it begins with or else `param`."""
    if isinstance(error, ModelError):  # names a file: of the server, not of the client
        return ApiError(400, "the model's chat template cannot render these messages", param="messages")
    found = _FIELD.match(str(error))
    is_field = found is not None and found["name"] in _FIELDS
    return ApiError(400, str(error), param=found.group() if found is not None and is_field else param)
