"""What clients may send: one pydantic model for each body, strict, with the limits that the OpenAPI document shows.

Fields as in OpenAI's API, with vLLM's extensions under vLLM's names (vllm/entrypoints/openai/*/protocol.py). What is
known but not done here is in `unsupported`; what nobody knows is left in `model_extra`.
"""

from __future__ import annotations

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
CountOrOff = Annotated[int, Field(ge=-1, le=INT32)]
"""-1 is off, or all there is."""
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Alternatives = Annotated[int, Field(ge=0, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]
Salt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]
Lineage = Annotated[str, Field(min_length=1, max_length=MAX_LINEAGE)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
"""Read up to the first that is wrong: a list of a million has a million errors."""


TEMPLATE_FIELDS = frozenset({"reasoning_effort"})
"""Given to the chat template when it speaks of them, refused otherwise (`prompts`)."""


def _small(value: Any) -> Any:
    """Refuse a large object before its entries are looked at, for the same reason."""
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
    """A request body: wrong types are refused, never converted; unknown fields are kept aside."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), frozen=True)

    neutral_names: ClassVar[frozenset[str]] = frozenset()
    """Further fields that are known, and refused unless they ask for nothing."""


FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionSpec(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the object that the arguments are; none for a function without any."""
    strict: bool | None = None
    """Taken: arguments are held to the schema when a call is required, and left to the model when it may choose."""


class Tool(Body):
    """A tool: a function, or the calculator that the server itself runs for a model made to call one."""

    type: Annotated[str, Field(max_length=64)]
    function: FunctionSpec | None = None


class NamedFunction(Body):
    """A function by its name."""

    name: FunctionName


class ToolChoice(Body):
    """The function that must be called, in the form of chat completions or that of responses."""

    type: Annotated[str, Field(max_length=64)]
    function: NamedFunction | None = None
    name: FunctionName | None = None


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
GivenChoice = Annotated[str, Field(max_length=64)] | ToolChoice


class ToolFields(Body):
    """The fields of a request that speak of tools, with OpenAI's former ones."""

    tools: Tools | None = None
    tool_choice: GivenChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: Annotated[str, Field(max_length=64)] | NamedFunction | None = None


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Taken and left out: there is nothing to obfuscate on one's own machine."""


class Sampling(Body):
    """The fields that completions and chat completions share."""

    model: Annotated[str, Field(max_length=512)] | None = None
    n: Samples | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_raw_logprobs: bool | None = None
    """Ours: also the model's own log-probabilities, whatever `--logprobs-mode` says."""
    return_sampling_mask: bool | None = None
    """Ours: also which tokens could be drawn at each position."""
    add_special_tokens: bool | None = None
    request_id: Name | None = None
    cache_salt: Salt | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    """What the answer must be, as OpenAI, vLLM, SGLang and llama.cpp call it; one of these at most (`structured`)."""
    calculator: bool | None = None
    """Ours: let the model's calculator answer while it writes."""

    user: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Alternatives | None = None
    best_of: Count | None = None
    lineage: Lineage | None = None
    """Ours: as in a chat, for a prompt that ends with a completion's tokens."""


class TextPart(Body):
    """A part of a message. Other types than text are refused by name."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a chat; further fields (name, tool_calls, tool_call_id) reach the model's template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(Sampling, ToolFields):
    """POST /v1/chat/completions."""

    neutral_names: ClassVar[frozenset[str]] = TEMPLATE_FIELDS

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    answer_token_ids: TokenIds | None = None
    """Ours: ids that the answer begins with; the reply tells what comes behind them (all of it with `echo`)."""
    sample_index: Count | None = None
    """Ours: draw as the sample of that number would be drawn among several of one request."""
    lineage: Lineage | None = None
    """Ours: the lineage of the tokens to continue; refused unless it is this server's."""
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(ToolFields):
    """POST /tokenize: vLLM's form (`prompt` or `messages`) or llama.cpp's (`content`)."""

    neutral_names: ClassVar[frozenset[str]] = TEMPLATE_FIELDS

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]


class ApplyTemplateBody(ToolFields):
    """POST /apply-template: the text that the model would read."""

    neutral_names: ClassVar[frozenset[str]] = TEMPLATE_FIELDS

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
