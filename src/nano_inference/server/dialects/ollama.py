"""Ollama's API: /api/generate, /api/chat, /api/embed, and what its clients ask about the model.

A prompt of /api/generate is a user's message, after `system` as the system's, unless `raw` is true or the model has no
chat template. Sampling options that a request lacks are those of the model's files, or else Ollama's, except
`repeat_penalty` (1, not 1.1). A name without a tag means the tag `latest`. The bodies are in `ollama_body.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Converting, Describing, Dialect, Generating
from nano_inference.server.dialects.ollama_body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    OllamaShowBody,
    OllamaTextBody,
)
from nano_inference.server.dialects.ollama_models import ps, ps_of_models, show, tags, tags_of_models, version
from nano_inference.server.dialects.ollama_reply import OllamaReply, durations, error_body, stream_error
from nano_inference.server.embedding import EmbeddingBody, embedding_call, embedding_reply
from nano_inference.server.errors import ApiError, renamed
from nano_inference.server.events import JSON_LINES
from nano_inference.server.model import ServedModel
from nano_inference.server.prompts import api_errors
from nano_inference.server.schema import ChatBody, CompletionBody
from nano_inference.server.shape import ReplyShape
from nano_inference.server.translating import (
    as_body,
    reworded,
    translated_call,
    unsupported_field,
)
from nano_inference.text.tokenizer import Tokenizer

_SPARE_TOKENS = 64  # tokens read beyond the limit, because a text that is cut inside a word has other tokens at its end


def embed_call(body: OllamaEmbedBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/embed. Raises `ApiError` naming the invalid field."""
    given: Any = body.input
    if body.truncate is not False:
        given = _cut(given, model) if isinstance(given, str) else [_cut(text, model) for text in given]
    fields: JSON = {"model": body.model, "input": given, "dimensions": body.dimensions}
    try:
        return _call(as_body(fields, EmbeddingBody), model, config, salt, is_list=True)
    except ApiError as error:
        raise reworded(error, lambda text: text.replace("truncate_prompt_tokens", "truncate")) from None


def embeddings_call(body: OllamaEmbeddingsBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/embeddings. Raises `ApiError` naming the invalid field."""
    try:
        fields: JSON = {"model": body.model, "input": _cut(body.prompt, model), "normalize": False}
        return _call(as_body(fields, EmbeddingBody), model, config, salt, is_list=False)
    except ApiError as error:
        raise renamed(error, {"input": "prompt"}) from None


def _call(body: EmbeddingBody, model: ServedModel, config: ServerConfig, salt: str, *, is_list: bool) -> Call:
    call = embedding_call(body, model, config, salt)
    return replace(call, make_reply=partial(OllamaEmbedReply, body=body, is_list=is_list))


def _cut(text: str, model: ServedModel) -> list[int]:
    """Return a text's token ids without those behind the context, as Ollama does."""
    limits = model.limits
    limit = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    with api_errors("input"):
        return model.tokenizer.encode(text[: (limit + _SPARE_TOKENS) * model.longest_token])[:limit]


class OllamaEmbedReply(Reply):
    """The vectors as a list, or the only one."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int, *, body: EmbeddingBody, is_list: bool) -> None:
        self._call = call
        self._body = body
        self._is_list = is_list

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the reply's JSON. Raises `ApiError` if a text failed."""
        samples = [transcript.sample for transcript in transcripts if transcript.sample is not None]
        vectors = [entry["embedding"] for entry in embedding_reply(self._body, self._call.model, samples)["data"]]
        if not self._is_list:
            return {"embedding": vectors[0]}
        times = durations(transcripts)
        return {
            "model": self._call.model,
            "embeddings": vectors,
            "total_duration": times["total_duration"],
            "load_duration": times["load_duration"],
            "prompt_eval_count": sum(len(request.prompt) for request in self._call.requests),
        }

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        return b""


_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's own, for what neither a request nor the model's files name."""
_SAME_NAME = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "stop")
_NAMES: Mapping[str, str] = {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "json_schema": "format",
}
"""Field of OpenAI's bodies -> Ollama's, where an error can name it: `options` are checked before."""
_SMALLEST_SHARE = 1e-6  # the `top_p` that keeps only the most likely token, for Ollama's 0


def generate_call(body: OllamaGenerateBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/generate. Raises `ApiError` naming the invalid field."""
    fields = _common_fields(body, model)
    if not body.prompt:
        return _empty_call(body, model, "completion")
    if not body.raw and model.dialogue is not None:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        fields |= {"messages": messages, "chat_template_kwargs": _template_variables(body, model)}
        return _chat(body, fields, {**_NAMES, "messages": "prompt"}, model, config, salt, is_chat=False)
    for name in ("system", "think"):
        if getattr(body, name):
            reason = "raw is true" if body.raw else "the model has no chat template"
            raise unsupported_field(name, f"{name} is not supported here: {reason}")
    if body.logprobs:
        fields |= {"logprobs": body.top_logprobs or 0}
    call = translated_call({**fields, "prompt": body.prompt}, CompletionBody, _NAMES, model, config, salt)
    return replace(call, make_reply=partial(OllamaReply, is_chat=False))


def ollama_chat_call(body: OllamaChatBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /api/chat. Raises `ApiError` naming the invalid field."""
    fields = _common_fields(body, model)
    if not body.messages:
        return _empty_call(body, model, "chat")
    messages = [_message(f"messages.{index}", message) for index, message in enumerate(body.messages)]
    fields |= {"messages": messages, "chat_template_kwargs": _template_variables(body, model)}
    if body.tools:
        fields |= {"tools": [tool.model_dump(exclude_none=True) for tool in body.tools]}
    return _chat(body, fields, _NAMES, model, config, salt, is_chat=True)


def _chat(
    body: OllamaTextBody,
    fields: JSON,
    names: Mapping[str, str],
    model: ServedModel,
    config: ServerConfig,
    salt: str,
    *,
    is_chat: bool,
) -> Call:
    """Return the call of a chat completion with these fields; reasoning is in the text if `think` is false."""
    if body.think is not None:
        fields |= {"separate_reasoning": body.think is not False}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    call = translated_call(fields, ChatBody, names, model, config, salt)
    return replace(call, make_reply=partial(OllamaReply, is_chat=is_chat))


def _empty_call(body: OllamaTextBody, model: ServedModel, kind: Any) -> Call:
    """Return a call without a request for the engine: its reply says that the model is loaded."""
    is_unload = (body.model_extra or {}).get("keep_alive") in (0, "0", "0s")
    return Call(
        kind=kind,
        id="load",
        model=model.name_for(body.model),
        requests=(),
        num_samples=1,
        num_tokens=0,
        shape=ReplyShape(),
        make_reply=partial(OllamaReply, is_chat=kind == "chat", end="unload" if is_unload else "load"),
        stream=body.stream is not False,
    )


def _common_fields(body: OllamaTextBody, model: ServedModel) -> JSON:
    """Return the fields of a `CompletionBody` or `ChatBody`. Raises `ApiError` for a field without support."""
    options = body.options or OllamaOptions()
    has_penalty = options.repeat_penalty not in (None, 1.0) or options.presence_penalty or options.frequency_penalty
    if has_penalty and (options.repeat_last_n or 0) > 0:  # here penalties cover all tokens, not the last N
        where = "options.repeat_last_n"
        text = f"with a penalty it must be -1 (all tokens) or 0 (no penalty), got {options.repeat_last_n}"
        raise unsupported_field(where, f"{where}: {text}")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    sampling = {**_DEFAULTS, **model.generation}
    fields: JSON = {name: sampling[name] for name in _DEFAULTS}
    fields |= {name: getattr(options, name) for name in _SAME_NAME if getattr(options, name) is not None}
    if options.top_k is not None:
        fields["top_k"] = max(0, options.top_k)
    if options.top_p is not None:
        fields["top_p"] = max(options.top_p, _SMALLEST_SHARE)
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n == 0:
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["json_schema"] = body.format
    return fields | {
        "model": body.model,
        "stream": body.stream is not False,
        "max_tokens": options.num_predict if options.num_predict is not None and options.num_predict > 0 else None,
        "seed": None if options.seed == -1 else options.seed,
    }


def _template_variables(body: OllamaTextBody, model: ServedModel) -> JSON:
    """Return the variables of the chat template for `think`. Raises `ApiError` if the template has none for it."""
    think, dialogue = body.think, model.dialogue
    if think is None or dialogue is None:
        return {}
    name = "reasoning_effort" if isinstance(think, str) else "enable_thinking"
    if dialogue.knows(name):
        return {name: think}
    if think is False:  # such a model does not think
        return {}
    raise unsupported_field("think", f"think: {think!r} is not supported by this model: its template has no {name}")


def _message(place: str, message: OllamaMessage) -> JSON:
    """Return a message of a chat completion."""
    if (message.model_extra or {}).get("images"):
        raise unsupported_field(f"{place}.images")
    plain: JSON = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": one.function.name, "arguments": one.function.arguments or {}}}
            for one in message.tool_calls
        ]
    return plain


DIALECT = Dialect(
    generating=(
        Generating(
            path="/api/generate",
            body=OllamaGenerateBody,
            to_call=generate_call,
            summary="Answer a prompt; the interface of Ollama.",
            form=JSON_LINES,
            renders=True,
        ),
        Generating(
            path="/api/chat",
            body=OllamaChatBody,
            to_call=ollama_chat_call,
            summary="Answer messages; the interface of Ollama.",
            form=JSON_LINES,
            renders=True,
        ),
        Generating(
            path="/api/embed",
            body=OllamaEmbedBody,
            to_call=embed_call,
            summary="Return embedding vectors of texts; the interface of Ollama.",
            streams=False,
        ),
        Generating(
            path="/api/embeddings",
            body=OllamaEmbeddingsBody,
            to_call=embeddings_call,
            summary="Return the embedding vector of a text; an older interface of Ollama.",
            streams=False,
        ),
    ),
    converting=(
        Converting(path="/api/show", body=OllamaShowBody, work=show, summary="Describe a model; Ollama's form."),
    ),
    describing=(
        Describing(
            path="/api/tags",
            describe=tags,
            of_models=tags_of_models,
            summary="List the model's names; Ollama's form.",
        ),
        Describing(
            path="/api/ps", describe=ps, of_models=ps_of_models, summary="List the loaded models; Ollama's form."
        ),
        Describing(path="/api/version", describe=version, summary="Return the version of Ollama's API."),
    ),
    error_body=error_body,
    stream_error=stream_error,
)
