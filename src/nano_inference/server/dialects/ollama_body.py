"""Bodies of Ollama's API, and the fields of it that this server does not support.

Fields as in the documentation of Ollama's API and its Python client. Options that only concern memory,
threads or the loading of a model (`num_ctx`, `num_gpu`, `use_mmap`, …) and `keep_alive` are hints: they are not
declared, so they are logged once and ignored, and refused by a strict server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nano_inference.server.schema import (
    INT32,
    MAX_MESSAGES,
    MAX_PROMPTS,
    Alternatives,
    Body,
    Factor,
    Penalty,
    Samples,
    SeedOrRandom,
    Share,
    Stops,
    Temperature,
    Tools,
)

ModelName = Annotated[str, Field(max_length=512)]
Think = bool | Literal["low", "medium", "high", "max"]


class OllamaOptions(Body):
    """Options about the answer. Absent ones have the values of the model's files, or else Ollama's."""

    num_predict: Annotated[int, Field(ge=-2, le=INT32)] | None = None  # 0 or less: up to the end of the context
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None  # 0 or less: off
    top_p: Share | None = None  # 0 is not refused, because Ollama's clients send it for the most likely token
    min_p: Share | None = None
    seed: SeedOrRandom | None = None  # -1: random
    stop: Stops | None = None
    repeat_penalty: Factor | None = None
    """Covers the prompt and the answer; Ollama's covers the last `repeat_last_n` tokens."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    """-1: all tokens; 0: no penalty. Other windows are refused together with a penalty."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaTextBody(Body):
    """The fields that POST /api/generate and POST /api/chat share."""

    model: ModelName | None = None
    stream: bool | None = None  # a stream unless false
    format: Literal["", "json"] | dict[str, Any] | None = None  # "json", or the JSON schema of the answer
    options: OllamaOptions | None = None
    think: Think | None = None  # True, false or an effort: for chat templates that have a variable for it
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class OllamaGenerateBody(OllamaTextBody):
    """POST /api/generate."""

    prompt: str | None = None  # absent or empty: nothing is generated; clients load a model in this way
    system: str | None = None
    raw: bool | None = None  # True: the prompt is not a message, and the chat template is not used


class OllamaFunction(Body):
    """A call of a function in an earlier answer."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: dict[str, Any] | None = None


class OllamaToolCall(Body):
    """An entry of a message's `tool_calls`."""

    function: OllamaFunction


class OllamaMessage(Body):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    """Reasoning of an earlier answer, for chat templates that have a place for it (`reasoning_content`)."""
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=128)] | None = None  # the function whose result this message is


class OllamaChatBody(OllamaTextBody):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Absent or empty: nothing is generated."""
    tools: Tools | None = None


Text = Annotated[str, Field(min_length=1)]


class OllamaEmbedBody(Body):
    """POST /api/embed."""

    model: ModelName | None = None
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    truncate: bool | None = None  # False: a text longer than the context is refused, not cut at its end
    dimensions: Samples | None = None


class OllamaEmbeddingsBody(Body):
    """POST /api/embeddings, the older form: one text, and a vector that is not normalised."""

    model: ModelName | None = None
    prompt: Text


class OllamaShowBody(Body):
    """POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None  # the older name of `model`
