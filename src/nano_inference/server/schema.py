"""Request bodies as strict pydantic models, with the limits that the OpenAPI document shows.

Fields as in OpenAI's API, with vLLM's extensions under vLLM's names (vllm/entrypoints/openai/*/protocol.py). What
`fields` does with others is said there; they are in `model_extra`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from nano_inference.config import MAX_LINEAGE

MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIAS = 1024
MAX_TOKEN_LIST = 65536
INT32 = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=INT32)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Samples = Annotated[int, Field(ge=1, le=INT32)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Factor = Annotated[float, Field(ge=0.01, le=100)]
CountOrOff = Annotated[int, Field(ge=-1, le=INT32)]  # -1: off, or no limit
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
SeedOrRandom = Annotated[int, Field(ge=-1, le=2**64 - 1)]  # -1: random
Alternatives = Annotated[int, Field(ge=0, le=1_000_000)]
AlternativesOrAll = Annotated[int, Field(ge=-1, le=1_000_000)]  # -1 is the whole vocabulary
MAX_NAMED = 128  # vLLM's limit of `logprob_token_ids`
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]
Salt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]
Lineage = Annotated[str, Field(min_length=1, max_length=MAX_LINEAGE)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
"""Validation stops at the first invalid id: a list of a million would have a million errors."""


def _small(value: Any) -> Any:
    """Refuse a large object before its entries are validated, for the same reason."""
    if isinstance(value, dict) and len(value) > MAX_BIAS:
        raise PydanticCustomError("too_long", "must have at most {limit} entries", {"limit": MAX_BIAS})
    return value


Bias = Annotated[
    dict[
        Annotated[str, Field(pattern="^[0-9]{1,10}$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=MAX_BIAS),
    BeforeValidator(_small),
]


class Body(BaseModel):
    """A request body: wrong types are refused, never converted; unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), frozen=True)

    malformed_status: ClassVar[int] = 400
    """Status of the error for a body that is no JSON object or has a value of a wrong type; beyond limits it is 400."""

    def hints(self, knows: Callable[[str], bool]) -> Iterable[str]:
        """Return the given fields on which no token of the answer depends, and that `strict` refuses.

        `knows` returns True for a variable that the model's chat template uses.
        """
        return ()


def effort_hints(effort: object, name: str, knows: Callable[[str], bool]) -> Iterator[str]:
    """Yield `name` if a reasoning effort has no effect: the chat template has no levels, and cannot switch it off."""
    if effort is not None and not knows("reasoning_effort") and not knows("enable_thinking"):
        yield name


FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionSpec(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments object; None for a function without arguments."""
    strict: bool | None = None
    """True: with tool_choice auto, too, the arguments follow the schema. They always do if a call is required."""


class Tool(Body):
    """A tool: a function, or the calculator that the server runs for a model trained to call it."""

    type: Annotated[str, Field(max_length=64)]
    function: FunctionSpec | None = None


class NamedFunction(Body):
    """A reference to a function."""

    name: FunctionName


class ToolChoice(Body):
    """The function that must be called, in the form of chat completions or of responses."""

    type: Annotated[str, Field(max_length=64)]
    function: NamedFunction | None = None
    name: FunctionName | None = None


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
GivenChoice = Annotated[str, Field(max_length=64)] | ToolChoice


class ToolFields(Body):
    """Fields about tools, with OpenAI's deprecated ones."""

    tools: Tools | None = None
    tool_choice: GivenChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: Annotated[str, Field(max_length=64)] | NamedFunction | None = None


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """The fields about sampling, stops and log-probabilities, with vLLM's names."""

    n: Samples | None = None
    stop: Stops | None = None
    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None

    top_k: CountOrOff | None = None
    min_p: Share | None = None
    repetition_penalty: Factor | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIAS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_LIST)] | None = None
    truncate_prompt_tokens: CountOrOff | None = None
    truncation_side: Literal["left", "right"] | None = None  # where `truncate_prompt_tokens` removes tokens
    prompt_logprobs: AlternativesOrAll | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_NAMED)] | None = None
    """Report these tokens in place of the most probable ones."""
    structured_outputs: dict[str, Any] | None = None
    return_raw_logprobs: bool | None = None
    """Specific to this server: also return log-probabilities of the raw logits, whatever `--logprobs-mode` is."""
    return_sampling_mask: bool | None = None
    """Specific to this server: also return the tokens that could be sampled at each position."""


class Sampling(SamplingFields):
    """The fields that completions and chat completions share."""

    model: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    stop_regex: Stops | None = None  # SGLang's: expressions of which a match ends the answer, which keeps it
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    request_id: Name | None = None
    cache_salt: Salt | None = None

    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    """Structured output as in OpenAI, vLLM, SGLang and llama.cpp; at most one of these and `structured_outputs`."""
    calculator: bool | None = None  # specific to this server: run the model's calculator calls during generation


class LlamaExtras(Body):
    """Fields of llama.cpp in the bodies of OpenAI's routes."""

    n_predict: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    """Has precedence over `max_tokens`; -1: up to the end of the context."""
    timings_per_token: bool | None = None  # return `timings`, in a stream with every chunk of the answer
    return_progress: bool | None = None  # report in a stream how much of the prompt is computed: `prompt_progress`


class CompletionBody(Sampling, LlamaExtras):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: AlternativesOrAll | None = None
    best_of: Count | None = None
    lineage: Lineage | None = None  # see `ChatBody.lineage`; for a prompt that ends with the tokens of a completion


class TextPart(Body):
    """A part of a message; types other than text are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The text of the part, or of a refusal; None without one."""
        return self.refusal if self.type == "refusal" else self.text


class Message(Body):
    """One message of a chat; further fields (name, tool_calls, tool_call_id) are passed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class RenderingFields(ToolFields):
    """Fields about the rendering of messages with the chat template."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # for templates that have a variable for it

    def hints(self, knows: Callable[[str], bool]) -> Iterable[str]:
        return effort_hints(self.reasoning_effort, "reasoning_effort", knows)


class TransferFields(Body):
    """vLLM's fields of disaggregated serving, of which only the tokens of the prompt are supported."""

    prompt_token_ids: TokenIds | None = None  # tokens of the prompt, used in place of the rendered messages


class ChatBody(Sampling, LlamaExtras, RenderingFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | Literal[0, 1] | None = None  # PipelineRL sends 1
    top_logprobs: AlternativesOrAll | None = None
    echo: bool | None = None
    kv_transfer_params: TransferFields | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    """llama.cpp's: "none" leaves the model's reasoning in the content."""
    separate_reasoning: bool | None = None  # SGLang's: False leaves the model's reasoning in the content
    include_reasoning: bool | None = None  # vLLM's: False leaves the model's reasoning out of the reply
    answer_token_ids: TokenIds | None = None
    """Specific to this server: ids that start the answer; the reply has the rest (with `echo`: all of it)."""
    sample_index: Count | None = None
    """Specific to this server: sample with the random numbers of this index among several samples of a request."""
    lineage: Lineage | None = None
    """Specific to this server: lineage of the tokens to continue; refused unless it is this server's."""


class TokenizeBody(RenderingFields):
    """POST /tokenize: vLLM's form (`prompt` or `messages`) or llama.cpp's (`content`)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class CountBody(RenderingFields):
    """POST /chat/completions/input_tokens: a chat whose tokens are counted."""

    model: str | None = None
    messages: Messages


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]


class ApplyTemplateBody(RenderingFields):
    """POST /apply-template: render messages without generating."""

    model: str | None = None
    messages: Messages
