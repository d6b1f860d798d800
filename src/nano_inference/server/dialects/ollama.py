"""Ollama's API: /api/generate, /api/chat and /api/embed; `ollama_models.py` has what its clients ask about the model.

Fields as in the documentation of Ollama's API and its Python client. A prompt of /api/generate is a user's message,
after `system` as the system's, unless `raw` is true or the model has no chat template. Sampling options that a request
lacks are those of the model's files, or else Ollama's, except `repeat_penalty` (1, not 1.1). A name without a tag means
the tag `latest`. Options about memory, threads or the loading of a model (`num_ctx`, `keep_alive`, …) have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic_core import from_json

from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry
from nano_inference.server.dialect import Converting, Describing, Dialect, Route
from nano_inference.server.dialects.ollama_embed import EMBEDDING_ROUTES, durations
from nano_inference.server.dialects.ollama_models import (
    ModelName,
    ShowBody,
    ps,
    ps_of_models,
    show,
    tags,
    tags_of_models,
    version,
)
from nano_inference.server.errors import ApiError, shortened, unsupported_field
from nano_inference.server.events import JSON_LINES, line
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import Reply, token_logprobs
from nano_inference.server.schema import (
    INT32,
    MAX_MESSAGES,
    Alternatives,
    Body,
    ChatBody,
    CompletionBody,
    Factor,
    Penalty,
    SeedOrRandom,
    Share,
    Stops,
    Temperature,
    Tools,
)
from nano_inference.server.transcript import Transcript
from nano_inference.server.translated import translated
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

# ---- bodies


class Options(Body):
    """Options about the answer. Absent ones have the values of the model's files, or else Ollama's."""

    num_predict: Annotated[int, Field(ge=-2, le=INT32)] | None = None  # 0 or less: up to the end of the context
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None  # 0 or less: off
    top_p: Share | None = None  # 0 is not refused, because Ollama's clients send it for the most likely token
    min_p: Share | None = None
    seed: SeedOrRandom | None = None  # -1: random
    stop: Stops | None = None
    repeat_penalty: Factor | None = None  # of prompt and answer; Ollama's covers the last `repeat_last_n` tokens
    repeat_last_n: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    """-1: all tokens; 0: no penalty. Other windows are refused together with a penalty."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class TextBody(Body):
    """The fields that POST /api/generate and POST /api/chat share."""

    model: ModelName | None = None
    stream: bool | None = None  # a stream unless false
    format: Literal["", "json"] | dict[str, Any] | None = None  # "json", or the JSON schema of the answer
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None  # for templates that have a variable for it
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class OllamaGenerateBody(TextBody):
    """POST /api/generate."""

    prompt: str | None = None  # absent or empty: nothing is generated; clients load a model in this way
    system: str | None = None
    raw: bool | None = None  # True: the prompt is not a message, and the chat template is not used


class FunctionCall(Body):
    """A call of a function in an earlier answer."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: dict[str, Any] | None = None


class ToolCall(Body):
    """An entry of a message's `tool_calls`."""

    function: FunctionCall


class OllamaMessage(Body):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None  # reasoning of an earlier answer, for templates that have a place for it
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=128)] | None = None  # the function whose result this message is


class OllamaChatBody(TextBody):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Absent or empty: nothing is generated."""
    tools: Tools | None = None


# ---- asking

_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's own, for what neither a request nor the model's files name."""
_NAMES = {"max_tokens": "options.num_predict", "response_format": "format", "json_schema": "format"}
"""Field of OpenAI's bodies -> Ollama's, where an error can name it: `options` are checked before."""
_SMALLEST_SHARE = 1e-6  # the `top_p` that keeps only the most likely token, for Ollama's 0


def ask_ollama_generate(body: OllamaGenerateBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /api/generate asks for. Raises `ApiError` naming the invalid field."""
    fields = _fields(body, model)
    if not body.prompt:
        return _empty(body, model)
    if not body.raw and model.dialogue is not None:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        return _chat(body, {**fields, "messages": messages}, {**_NAMES, "messages": "prompt"}, model, config, salt)
    for name in ("system", "think"):
        if getattr(body, name):
            reason = "raw is true" if body.raw else "the model has no chat template"
            raise unsupported_field(name, f"{name} is not supported here: {reason}")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    generation = translated({**fields, "prompt": body.prompt}, CompletionBody, _NAMES, model, config, salt)
    return replace(generation, options=_options(body))


def ask_ollama_chat(body: OllamaChatBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /api/chat asks for. Raises `ApiError` naming the invalid field."""
    fields = _fields(body, model)
    if not body.messages:
        return _empty(body, model)
    messages: list[JSON] = []
    for index, message in enumerate(body.messages):
        if (message.model_extra or {}).get("images"):
            raise unsupported_field(f"messages.{index}.images")
        plain: JSON = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_name:
            plain["name"] = message.tool_name
        if message.tool_calls:
            functions = [one.function for one in message.tool_calls]
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": one.name, "arguments": one.arguments or {}}}
                for one in functions
            ]
        messages.append(plain)
    if body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return _chat(body, {**fields, "messages": messages}, _NAMES, model, config, salt)


def _chat(
    body: TextBody, fields: JSON, names: Mapping[str, str], model: ServedModel, config: ServerConfig, salt: str
) -> Generation:
    if (think := body.think) is not None:
        fields["separate_reasoning"] = think is not False  # else it is in the text
        name = "reasoning_effort" if isinstance(think, str) else "enable_thinking"
        knows = model.dialogue is None or model.dialogue.knows(name)
        if knows:
            fields["chat_template_kwargs"] = {name: think}
        elif think is not False:  # such a model does not think
            text = f"think: {think!r} is not supported by this model: its template has no {name}"
            raise unsupported_field("think", text)
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return replace(translated(fields, ChatBody, names, model, config, salt), options=_options(body))


def _fields(body: TextBody, model: ServedModel) -> JSON:
    """Return the fields that a `CompletionBody` and a `ChatBody` share. Raises `ApiError` naming an unsupported one."""
    options = body.options or Options()
    has_penalty = options.repeat_penalty not in (None, 1.0) or options.presence_penalty or options.frequency_penalty
    if has_penalty and (options.repeat_last_n or 0) > 0:  # here penalties cover all tokens, not the last N
        where = "options.repeat_last_n"
        text = f"with a penalty it must be -1 (all tokens) or 0 (no penalty), got {options.repeat_last_n}"
        raise unsupported_field(where, f"{where}: {text}")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    sampling = {**_DEFAULTS, **model.generation}
    fields: JSON = {name: sampling[name] for name in _DEFAULTS}
    same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop", "seed")
    fields |= {name: value for name in same if (value := getattr(options, name)) is not None}
    fields |= {"top_k": max(0, fields["top_k"]), "top_p": max(fields["top_p"], _SMALLEST_SHARE)}
    if options.seed == -1:
        del fields["seed"]
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n == 0:
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["json_schema"] = body.format
    limit = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    return fields | {"model": body.model, "stream": body.stream is not False, "max_tokens": limit}


class ReplyOptions(NamedTuple):
    is_chat: bool
    is_unload: bool  # an empty request says that the model may go


def _options(body: TextBody) -> ReplyOptions:
    is_unload = (body.model_extra or {}).get("keep_alive") in (0, "0", "0s")
    return ReplyOptions(isinstance(body, OllamaChatBody), is_unload)


def _empty(body: TextBody, model: ServedModel) -> Generation:
    """Return a generation without a request for the engine: its reply says that the model is loaded."""
    return Generation(
        requests=(),
        num_samples=1,
        num_tokens=0,
        kind="completion",
        id="load",
        model=model.name_for(body.model),
        tokenizer=model.tokenizer,
        stream=body.stream is not False,
        options=_options(body),
    )


# ---- replies


class Pieces:
    """Collects what a reply's text contains: reasoning, content, and complete calls with their arguments as objects.

    The text of a call that does not become complete is content.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._source = ""  # the text of the call that is not complete

    def add(self, events: Iterable[Event], *, is_end: bool = True) -> JSON:
        """Return the fields of a message that these events add; a call is returned when it is complete."""
        content, thinking, calls = "", "", []
        for event in events:
            if isinstance(event, Content):
                content += self._source + event.text
                self._source = ""
            elif isinstance(event, Reasoning):
                thinking += event.text
            elif isinstance(event, CallStart):
                self._names[event.index], self._arguments[event.index] = event.name, []
                content, self._source = content + self._source, event.source
            elif isinstance(event, CallArguments):
                self._arguments[event.index].append(event.text)
                self._source += event.source
            elif isinstance(event, CallEnd):
                arguments = from_json("".join(self._arguments.pop(event.index)))
                function = {"index": event.index, "name": self._names[event.index], "arguments": arguments}
                calls.append({"function": function})
                self._source = ""
        if is_end:
            content, self._source = content + self._source, ""
        thought: JSON = {"thinking": thinking} if thinking else {}
        return {"content": content, **thought, **({"tool_calls": calls} if calls else {})}


@dataclass
class OllamaReply(Reply[ReplyOptions]):
    """The reply to /api/chat, with a message, or to /api/generate, with a text."""

    _pieces: Pieces = field(init=False, default_factory=Pieces)

    def whole(self) -> JSON:
        if not self.transcripts:
            reason = "unload" if self.options.is_unload else "load"
            return self._part({"content": ""}) | {"done": True, "done_reason": reason}
        (transcript,) = self.transcripts
        return self._part(self._pieces.add(transcript.events), transcript.entries) | self._ending(transcript)

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        is_end = decoded.finish_reason is not None
        fields = self._pieces.add(decoded.events, is_end=is_end)
        has_more = len(fields) > 1 or fields["content"] or (self.generation.logprobs is not None and decoded.entries)
        data = line(self._part(fields, decoded.entries) | {"done": False}) if has_more else b""
        return data + (line(self._part({"content": ""}) | self._ending(transcript)) if is_end else b"")

    def end(self) -> bytes:
        """Return nothing: the last delta has the last line; without an answer, the only line."""
        return b"" if self.transcripts else line(self.whole())

    @staticmethod
    def broken(error: ApiError, first: bytes = b"", number: int = 0) -> bytes:
        return line(error_body(error))

    def _part(self, fields: JSON, entries: Sequence[LogprobEntry] = ()) -> JSON:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        part: JSON = {"model": self.generation.model, "created_at": now}
        if self.options.is_chat:
            part["message"] = {"role": "assistant", **fields}
        else:
            part |= {"response" if name == "content" else name: value for name, value in fields.items()}
        if self.generation.logprobs is not None and entries:
            part["logprobs"] = token_logprobs(entries, self.generation)
        return part

    def _ending(self, transcript: Transcript) -> JSON:
        num_prompt, num_new = len(self.generation.requests[0].prompt), len(transcript.token_ids)
        counts = {"prompt_eval_count": num_prompt, "eval_count": num_new}
        return {"done": True, "done_reason": transcript.finish_reason, **durations([transcript]), **counts}


def error_body(error: ApiError) -> JSON:
    """Return Ollama's error object: the message alone."""
    return {"error": shortened(error.message)}


DIALECT = Dialect(
    generating=(
        *EMBEDDING_ROUTES,
        Route(
            path="/api/generate",
            body=OllamaGenerateBody,
            ask=ask_ollama_generate,
            reply=OllamaReply,
            summary="Answer a prompt; the interface of Ollama.",
            form=JSON_LINES,
            renders=True,
        ),
        Route(
            path="/api/chat",
            body=OllamaChatBody,
            ask=ask_ollama_chat,
            reply=OllamaReply,
            summary="Answer messages; the interface of Ollama.",
            form=JSON_LINES,
            renders=True,
        ),
    ),
    converting=(Converting(path="/api/show", body=ShowBody, work=show, summary="Describe a model; Ollama's form."),),
    describing=(
        Describing(
            path="/api/tags", describe=tags, of_models=tags_of_models, summary="List the model's names; Ollama's form."
        ),
        Describing(
            path="/api/ps", describe=ps, of_models=ps_of_models, summary="List the loaded models; Ollama's form."
        ),
        Describing(path="/api/version", describe=version, summary="Return the version of Ollama's API."),
    ),
    error_body=error_body,
)
