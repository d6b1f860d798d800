"""Every field of every body: two requests that differ only in it, and how their replies differ.

The tables are complete: each declared field, also of nested bodies, needs an entry. Fields without effect are listed as
such and must change nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import httpx2
import pytest
import tokenizers

import nano_inference
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialects.responses import LOGPROBS
from nano_inference.server.dialects.responses_reply import encoded
from nano_inference.server.schema import Body
from tests.server.mounted import CONVERTING, GENERATING, NANOCHATS, ids, mounted
from tests.server.reasoner import make_reasoner
from tests.server.tiny import Running, make_tiny, running
from tests.server.trainer import make_adapter

pytestmark = pytest.mark.slow

JSON = dict[str, Any]
COMPLETE, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE, SGLANG, LLAMA, WEB = "/inference/v1/generate", "/generate", "/completion", "/chat/completions"
EMBED, COUNT = "/v1/embeddings", "/v1/messages/count_tokens"
INPUT_TOKENS = "/v1/responses/input_tokens"
COUNT_CHAT = "/v1/chat/completions/input_tokens"
OLLAMA, OLLAMA_CHAT, OLLAMA_EMBED = "/api/generate", "/api/chat", "/api/embed"
OLLAMA_VECTOR, SHOW = "/api/embeddings", "/api/show"
TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
COUNTING = {INPUT_TOKENS: RESPONSES, COUNT: MESSAGES, COUNT_CHAT: CHAT}
"""A path that only reads a prompt -> the path that also answers it."""
BODIES: Mapping[str, type[Body]] = MappingProxyType(
    {one.path: one.body for one in GENERATING} | {one.path: one.body for one in CONVERTING}
)
CALCULATOR = Path(nano_inference.__file__).parent / "nanochat" / "data" / "calculator"
TALK = (
    "{% if enable_thinking is defined and not enable_thinking %}~{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}{% if mood is defined %}{{ mood }}{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""A chat template with variables, whose prompts are shorter than a block of the cache."""


class _Absent:
    """No value: the field is absent."""


ABSENT = _Absent()


class Turn(NamedTuple):
    """Two values of one field, further fields of both requests, and the expected difference of their replies."""

    what: str
    """A name of `Seen.part`; "nothing" for a field without effect, "elsewhere" for one with a separate test."""
    one: Any
    two: Any
    more: JSON
    at: str
    """Path of the field, if not in the first entry of each list."""
    model: str


def turn(what: str, one: Any, two: Any = ABSENT, /, *, at: str = "", model: str = "tiny", **more: Any) -> Turn:
    """Return a case in which changing the value changes `what`."""
    return Turn(what, one, two, more, at, model)


def idle(one: Any, two: Any = ABSENT, /, **more: Any) -> Turn:
    """Return a case in which changing the value changes nothing."""
    return turn("nothing", one, two, **more)


def shown_by(test: str) -> Turn:
    """Return a case covered by a test below."""
    return turn("elsewhere", test)


Table = Mapping[str, Turn]


def joined(base: Any, more: Any) -> Any:
    """Return a body with further fields, merging nested objects."""
    if not isinstance(base, dict) or not isinstance(more, dict):
        return more
    both = {**base, **{name: joined(base.get(name), value) for name, value in more.items()}}
    return {name: value for name, value in both.items() if value is not ABSENT}


def placed(body: Any, at: list[str], value: Any) -> Any:
    """Return a body with a value at a path; a name after a list means its first entry."""
    if isinstance(body, list):
        index, rest = (int(at[0]), at[1:]) if at[0].isdigit() else (0, at)
        return [placed(one, rest, value) if number == index else one for number, one in enumerate(body)]
    body = dict(body or {})
    name, *rest = at
    if rest:
        body[name] = placed(body.get(name), rest, value)
    elif value is ABSENT:
        body.pop(name, None)
    else:
        body[name] = deepcopy(value)
    return body


def both_bodies(path: str, field: str, case: Turn) -> tuple[JSON, JSON]:
    """Return the two requests of a case."""
    at = (case.at or field).split(".")
    assert [part for part in at if not part.isdigit()] == field.split("."), "an entry changes its own field"
    whole = joined(BASES[path], case.more)
    one, two = (placed(whole, at, value) for value in (case.one, case.two))
    return one, two


def fields_of(body: type[Body], where: str = "") -> set[str]:
    """Return a body's fields as clients write them; nested fields with dots."""
    found: set[str] = set()
    for name, field in body.model_fields.items():
        place = f"{where}{field.alias or name}"
        found |= {place}.union(*(fields_of(inner, f"{place}.") for inner in bodies_in(field.annotation)))
    return found


def bodies_in(annotation: Any) -> set[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return {annotation}
    return {body for one in get_args(annotation) for body in bodies_in(one)}


SEEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "text": frozenset({"text", "content", "token", "response"}),
        "tokens": frozenset({"token_ids", "output_ids", "tokens"}),
        "logprobs": frozenset(
            {"logprobs", "prompt_logprobs", "raw_logprobs", "completion_probabilities"}
            | {"output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs"}
            | {"output_token_ids_logprobs"}
        ),
        "prompt": frozenset(
            {"prompt_token_ids", "prompt_tokens", "tokens_evaluated", "prompt", "input_tokens"} | {"prompt_eval_count"}
        ),
        "cached": frozenset({"cached_tokens", "tokens_cached", "cache_read_input_tokens"}),
        "written": frozenset({"cache_creation_input_tokens"}),
        "end": frozenset(
            {"finish_reason", "stop_reason", "stop_type", "stopping_word", "stop_sequence", "status"} | {"done_reason"}
        ),
        "index": frozenset({"index"}),
        "calls": frozenset({"tool_calls", "arguments", "input", "name"}),
        "vector": frozenset({"embedding", "embeddings"}),
        "settings": frozenset({"generation_settings"}),
        "echo": frozenset(
            {"tools", "format", "verbosity", "store", "metadata", "user", "prompt_cache_key", "safety_identifier"}
        ),
    }
)
"""Aspect of a reply -> names of its fields. Further aspects: "error", "form", "id", "reply"."""
VOLATILE = frozenset(
    {"id", "request_id", "call_id", "item_id", "created", "created_at", "completed_at", "e2e_latency", "timings"}
    | {"sequence_number", "signature"}
    | {"total_duration", "prompt_eval_duration", "eval_duration"}
)
"""Different each time."""


class Seen(NamedTuple):
    """The compared parts of a reply."""

    error: tuple[int, str]
    leaves: list[tuple[tuple[str, ...], Any]]
    form: frozenset[tuple[str, ...]]
    """Paths of names, and the names of each event."""

    def part(self, what: str) -> list[tuple[Any, ...]]:
        """Return the values of an aspect."""
        if what == "form":
            return sorted(self.form)
        if what == "id":
            return [leaf for leaf in self.leaves if leaf[0] in (("id",), ("request_id",), ("meta_info", "id"))]
        named = SEEN.get(what)
        if named is None:
            return [leaf for leaf in self.leaves if not (VOLATILE | SEEN["cached"]) & {*leaf[0]}]
        taken = [leaf for leaf in self.leaves if named & {*leaf[0]} and leaf[0][-2:] != ("usage", "input_tokens")]
        return [leaf for leaf in taken if not VOLATILE & {*leaf[0]}]


def seen(reply: httpx2.Response) -> Seen:
    """Return the compared parts of a reply, complete or streamed."""
    kind = reply.headers["content-type"]
    is_stream = kind.startswith(("text/event-stream", "application/x-ndjson"))
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith(("data: ", "{"))]
    values = [json.loads(line) for line in lines if line != "[DONE]"] if is_stream else [reply.json()]
    leaves = [leaf for value in values for leaf in leaves_of(value)]
    form = {("events",) if is_stream else ("whole reply",)} | {path for path, _ in leaves}
    form |= {tuple(sorted(value)) for value in values if isinstance(value, dict)}
    error = "" if reply.status_code == 200 else message_of(values[0])
    return Seen((reply.status_code, error), leaves, frozenset(form))


def message_of(refusal: JSON) -> str:
    """Return an error's field and text; Ollama's errors are only a text."""
    error = refusal["error"]
    return error if isinstance(error, str) else f"{param_of(refusal)}: {error['message']}"


def param_of(refusal: JSON) -> str:
    """Return the field that an error names, if its dialect has a place for it."""
    error = refusal["error"]
    return str(error.get("param") or error.get("details", {}).get("param") or "")


def leaves_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of names, value) of each leaf of a value."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from leaves_of(one, (*path, name))
    elif isinstance(value, list) and value:
        for one in value:
            yield from leaves_of(one, path)
    else:
        yield path, value


def alike(one: list[tuple[Any, ...]], two: list[tuple[Any, ...]]) -> bool:
    """Return True if two parts are equal within rounding of sums in another order."""
    return len(one) == len(two) and all(map(_alike, one, two))


def _alike(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    if isinstance(one[-1], float) and isinstance(two[-1], float):
        return one[:-1] == two[:-1] and abs(one[-1] - two[-1]) < 1e-4
    return one == two


def asked(server: Running, path: str, body: JSON) -> Seen:
    return seen(server.post(path, body))


A, B, NEWLINE = ids("ab\n")
START, END = 256, 257
LETTERS: JSON = {str(A): 100.0, str(B): 100.0}
LONG = "a long prompt that fills more than one block of the cache " * 2
SCHEMA: JSON = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
OTHER_SCHEMA: JSON = {"type": "object", "properties": {"wide": {"enum": [1, 2]}}, "required": ["wide"]}
NOTHING: JSON = {"name": "f", "description": "Does.", "parameters": {"type": "object", "properties": {}}}
F: JSON = {"name": "f", "description": "Does.", "parameters": SCHEMA}
G: JSON = {"name": "long_g", "description": "Does.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": one} for one in (F, G)]
SURE: JSON = {"max_tokens": 120, "ignore_eos": False}
"""max_tokens for a call or a structure."""


def refused() -> list[JSON]:
    """Return a history that ends with a refusal."""
    return [{"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}]


def user(content: Any) -> list[JSON]:
    return [{"role": "user", "content": content}]


SAMPLING: Table = {
    "model": turn("error", "other", "tiny"),
    "n": turn("index", 2, 1),
    "stop": turn("end", "a", "never", logit_bias=LETTERS, max_tokens=24),
    "stop_regex": turn("end", "[ab]", "never", logit_bias=LETTERS, max_tokens=24),
    "stream": turn("form", True, False),
    "stream_options": turn("error", {"include_usage": True}, stream=False),
    "stream_options.include_usage": turn("form", True, False, stream=True),
    "stream_options.continuous_usage_stats": turn(
        "form", True, False, stream=True, stream_options={"include_usage": True}
    ),
    "temperature": turn("tokens", 0.0, 2.0),
    "top_p": turn("tokens", 0.01, 1.0),
    "presence_penalty": turn("tokens", 2.0, -2.0, temperature=2.0, max_tokens=48),
    "frequency_penalty": turn("tokens", 2.0, -2.0, temperature=0.0, logit_bias=LETTERS, max_tokens=16),
    "logit_bias": turn("tokens", {str(A): 100.0}, {str(B): 100.0}),
    "seed": turn("tokens", 1, 2),
    "max_tokens": turn("tokens", 2, 3),
    "top_k": turn("tokens", 1, -1),
    "min_p": turn("tokens", 1.0, 0.0),
    "repetition_penalty": turn("tokens", 100.0, 1.0, temperature=0.0, max_tokens=24),
    "min_tokens": turn("tokens", 4, 0, ignore_eos=False, logit_bias={str(END): 100.0}),
    "ignore_eos": turn("tokens", True, False, logit_bias={str(END): 100.0}),
    "stop_token_ids": turn("end", [A], [B], logit_bias={str(A): 100.0}),
    "include_stop_str_in_output": turn("text", True, False, stop="a", logit_bias={str(A): 100.0}),
    "skip_special_tokens": turn("text", True, False, logit_bias={str(START): 100.0}),
    "bad_words": turn("tokens", ["a"], ["b"], logit_bias=LETTERS, max_tokens=12),
    "allowed_token_ids": turn("tokens", [A], [B]),
    "truncate_prompt_tokens": turn("prompt", 2, 3),
    "prompt_logprobs": turn("logprobs", 1, 2),
    "return_token_ids": turn("form", True, False),
    "return_raw_logprobs": turn("form", True, False),
    "return_sampling_mask": turn("form", True, False, top_k=2),
    "request_id": turn("id", "one", "two"),
    "response_format": turn("text", {"type": "json_object"}, {"type": "text"}, **SURE),
    "structured_outputs": turn("text", {"regex": "[ab]{2}"}, {"regex": "[cd]{2}"}, **SURE),
    "guided_json": turn("text", {"enum": [1]}, {"enum": [2]}, **SURE),
    "guided_regex": turn("text", "[ab]{2}", "[cd]{2}", **SURE),
    "guided_choice": turn("text", ["yes"], ["no"], **SURE),
    "guided_grammar": turn("text", 'start: "a"', 'start: "b"', **SURE),
    "regex": turn("text", "[ab]{2}", "[cd]{2}", **SURE),
    "ebnf": turn("text", 'root ::= "a"', 'root ::= "b"', **SURE),
    "grammar": turn("text", 'root ::= "a"', 'root ::= "b"', **SURE),
    "json_schema": turn("text", {"enum": [1]}, {"enum": [2]}, **SURE),
}
"""Fields with the same meaning on several paths, in OpenAI's and vLLM's names."""
TOOL_FIELDS: Table = {
    "tools": turn("prompt", TOOLS),
    "tools.type": turn("error", "web_search", "function", tools=TOOLS),
    "tools.function": turn("error", ABSENT, F, tools=TOOLS[:1]),
    "tools.function.name": turn("prompt", "f", "another", tools=TOOLS[:1]),
    "tools.function.description": turn("prompt", "Does.", "Does that.", tools=TOOLS[:1]),
    "tools.function.parameters": turn("prompt", SCHEMA, OTHER_SCHEMA, tools=TOOLS[:1]),
    "tools.function.strict": idle(True, tools=TOOLS[:1]),
    "functions": turn("prompt", [F], [F, G]),
    "functions.name": turn("prompt", "f", "another", functions=[F]),
    "functions.description": turn("prompt", "Does.", "Does that.", functions=[F]),
    "functions.parameters": turn("prompt", SCHEMA, OTHER_SCHEMA, functions=[F]),
    "functions.strict": idle(True, functions=[F]),
}
"""Tool fields on all paths with messages."""
NAMED: JSON = {"type": "function", "function": {"name": "f"}}
UNFIT: JSON = {"name": "f", "parameters": {"type": "object", "not": {"required": ["x"]}}}
"""A function whose schema no grammar can enforce."""
CALLING: Table = {
    "tools.function.strict": turn("error", True, False, tools=[{"type": "function", "function": UNFIT}]),
    "functions.strict": turn("error", True, False, functions=[UNFIT]),
    "tool_choice": turn("calls", "required", "none", tools=TOOLS, **SURE),
    "tool_choice.type": turn("error", "allowed_tools", "function", tools=TOOLS, tool_choice=NAMED, **SURE),
    "tool_choice.function": turn("error", ABSENT, {"name": "f"}, tools=TOOLS, tool_choice=NAMED, **SURE),
    "tool_choice.function.name": turn("calls", "f", "long_g", tools=TOOLS, tool_choice=NAMED, **SURE),
    "tool_choice.name": turn("calls", "f", "long_g", tools=TOOLS, tool_choice={"type": "function"}, **SURE),
    "parallel_tool_calls": turn(
        "calls", True, False, tools=[{"type": "function", "function": NOTHING}], tool_choice="required",
        logit_bias={str(NEWLINE): 100.0}, **SURE
    ),
    "function_call": turn("calls", {"name": "f"}, "none", functions=[F, G], **SURE),
    "function_call.name": turn("calls", "f", "long_g", functions=[F, G], function_call={"name": "f"}, **SURE),
}  # fmt: skip
RENDERED_TOOL_FIELDS: Table = {
    "tool_choice": turn("error", "required", "none", tools=[]),
    "tool_choice.type": turn("error", "allowed_tools", "function", tools=TOOLS, tool_choice=NAMED),
    "tool_choice.function": turn("error", ABSENT, {"name": "f"}, tools=TOOLS, tool_choice=NAMED),
    "tool_choice.function.name": turn("error", "h", "f", tools=TOOLS, tool_choice=NAMED),
    "tool_choice.name": turn("error", "h", "f", tools=TOOLS, tool_choice={"type": "function"}),
    "parallel_tool_calls": idle(False, tools=TOOLS),
    "function_call": turn("error", {"name": "h"}, "none", functions=[F, G]),
    "function_call.name": turn("error", "h", "f", functions=[F, G], function_call={"name": "f"}),
}
"""Tool fields on paths without generation: only an invalid tool_choice has an effect."""
READING: Table = {
    "messages": turn("prompt", user("abc"), user("abcd")),
    "messages.role": turn("prompt", "user", "developer"),
    "messages.content": turn("prompt", "abc", "abcd"),
    "messages.content.type": turn("error", "image_url", "text", messages=user([{"type": "text", "text": "a"}])),
    "messages.content.text": turn("prompt", "a", "bc", messages=user([{"type": "text", "text": "a"}])),
    "messages.content.refusal": turn("prompt", "a", "bc", messages=refused()),
    "add_generation_prompt": turn("prompt", True, False),
    "continue_final_message": turn("prompt", True, False),
    "chat_template_kwargs": turn("prompt", {"mood": "!"}, {"mood": "??"}),
    "reasoning_effort": turn("prompt", "low", "high"),
    **TOOL_FIELDS,
}
"""Fields that affect the rendering of messages."""


def renamed(table: Table, names: Mapping[str, str], below: str = "") -> Table:
    """Return a table with a dialect's names; with `below`, its fields are in that object."""

    def theirs(name: str) -> str:
        head, dot, rest = name.partition(".")
        return f"{names.get(head, head)}{dot}{rest}"

    def moved(case: Turn) -> Turn:
        more = {theirs(name): value for name, value in case.more.items()}
        return case._replace(more={below: more} if below else more)

    return {f"{below}.{theirs(name)}" if below else theirs(name): moved(case) for name, case in table.items()}


def without(table: Table, *names: str) -> Table:
    return {name: case for name, case in table.items() if name not in names}


def only(table: Table, *names: str) -> Table:
    return {name: table[name] for name in names}


_FREE: JSON = {"temperature": 1.0, "seed": 1, "ignore_eos": True}
BASES: Mapping[str, JSON] = MappingProxyType(
    {
        COMPLETE: {"prompt": "abc", "max_tokens": 6, "return_token_ids": True, **_FREE},
        CHAT: {"messages": user("abc"), "max_tokens": 6, "return_token_ids": True, **_FREE},
        RESPONSES: {"input": "abc", "max_output_tokens": 6, "return_token_ids": True, **_FREE},
        INPUT_TOKENS: {"input": "abc"},
        MESSAGES: {
            "messages": user("abc"), "max_tokens": 6, "temperature": 1.0, "seed": 1, "return_token_ids": True
        },
        GENERATE: {"token_ids": ids("abc"), "sampling_params": {"max_tokens": 6, **_FREE}},
        SGLANG: {
            "text": "abc",
            "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 1, "ignore_eos": True},
        },
        LLAMA: {
            "prompt": "abc", "n_predict": 6, "return_tokens": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **_FREE
        },
        WEB: {"messages": user("abc"), "max_tokens": 12, "temperature": 0.0, "top_k": 0},
        EMBED: {"input": "abc"},
        COUNT: {"messages": user("abc")},
        COUNT_CHAT: {"messages": user("abc")},
        OLLAMA: {"prompt": "abc", "stream": False, "options": {"num_predict": 6, "seed": 1}},
        OLLAMA_CHAT: {"messages": user("abc"), "stream": False, "options": {"num_predict": 6, "seed": 1}},
        OLLAMA_EMBED: {"input": "abc"},
        OLLAMA_VECTOR: {"prompt": "abc"},
        SHOW: {},
        TOKENIZE: {"messages": user("abc")},
        DETOKENIZE: {"tokens": ids("abc")},
        TEMPLATE: {"messages": user("abc")},
    }
)  # fmt: skip
SUM: JSON = {"temperature": 0.0, "max_tokens": 24, "seed": ABSENT, "ignore_eos": False}

LLAMA_EXTRAS: Table = {
    "n_predict": turn("tokens", 2, 3),
    "timings_per_token": turn("form", True, False),
    "return_progress": turn("form", True, False, stream=True),
}
COMPLETE_TABLE: Table = {
    **SAMPLING,
    "prompt": turn("prompt", "abc", "abd"),
    "echo": turn("text", True, False),
    **LLAMA_EXTRAS,
    "logprobs": turn("logprobs", 1, 2),
    "logprob_token_ids": turn("logprobs", [A], [B], logprobs=1),
    "truncation_side": turn("prompt", "left", "right", truncate_prompt_tokens=2, return_token_ids=True),
    "best_of": turn("error", 2, 1),
    "lineage": turn("error", "another"),
    "add_special_tokens": turn("prompt", True, False),
    "cache_salt": turn("cached", "complete1", "complete2", prompt=LONG),
    "return_tokens_as_token_ids": turn("logprobs", True, False, logprobs=1),
    "calculator": turn("text", True, False, model="calculator", prompt="<|user_start|>What is 123 plus 456?"
                       "<|user_end|><|assistant_start|>", **SUM),
}  # fmt: skip
CHAT_TABLE: Table = {
    **SAMPLING,
    **READING,
    **CALLING,
    "answer_token_ids": turn("prompt", [84, 85], [84, 86, 87]),
    "kv_transfer_params": turn("prompt", {"prompt_token_ids": ids("xy")}),
    "kv_transfer_params.prompt_token_ids": turn("prompt", ids("xy"), ids("xz")),
    "reasoning_format": turn("text", "none", "auto", model="reasoner"),
    "separate_reasoning": turn("text", False, True, model="reasoner"),
    "include_reasoning": turn("form", False, True, model="reasoner"),
    "sample_index": turn("text", 0, 1, temperature=1.0, seed=1, max_tokens=8),
    "lineage": turn("error", "another"),
    "max_completion_tokens": turn("tokens", 2, 3),
    **LLAMA_EXTRAS,
    "logprobs": turn("form", True, False),
    "top_logprobs": turn("logprobs", 1, 2, logprobs=True),
    "logprob_token_ids": turn("logprobs", [A], [B], logprobs=True),
    "truncation_side": turn("prompt", "left", "right", truncate_prompt_tokens=2, return_token_ids=True),
    "echo": turn("text", True, False),
    "add_special_tokens": turn("error", True, False),
    "cache_salt": turn("cached", "chat1", "chat2", messages=user(LONG)),
    "return_tokens_as_token_ids": turn("logprobs", True, False, logprobs=True),
    "calculator": turn("text", True, False, model="calculator", messages=user("What is 123 plus 456?"), **SUM),
}
ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
ITEM_TALK = [ITEM_CALL, {"type": "function_call_output", "call_id": "c", "output": "sun"}]
ITEM_THOUGHT = [*user("abc"), {"type": "reasoning"}, *ITEM_TALK]
ITEM_PARTS = [ITEM_CALL, {**ITEM_TALK[1], "output": [{"type": "input_text", "text": "sun"}]}]
ITEM_REFUSED = [
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "abc"}]},
    {"type": "message", "role": "user", "content": "abc"},
]
ITEM_REFUSED_PARTS = [ITEM_CALL, {**ITEM_TALK[1], "output": [{"type": "refusal", "refusal": "sun"}]}]
ITEM_TEXT = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "abc"}]}]
SUM_TURNS = [*user("What is 1 plus 2?"), {"role": "assistant", "content": "3"}, *user("And 2 plus 2?")]
SURE_HERE: JSON = {"max_output_tokens": 120, "ignore_eos": False}
SUM_HERE: JSON = {"temperature": 0.0, "max_output_tokens": 24, "seed": ABSENT, "ignore_eos": False}
FLAT = [{"type": "function", **one} for one in (F, G)]
SPACE = [{"type": "namespace", "name": "n", "description": "Works.", "tools": FLAT}]
FORMAT: JSON = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1]}}}
OWN_RESPONSES: Table = {
    "n": turn("error", 2, 1),
    "max_tokens": turn("error", 2),
    "prompt_logprobs": turn("error", 1),
    "response_format": turn("error", {"type": "json_object"}),
    "stream_options.include_usage": idle(False, stream=True),
    "stream_options.continuous_usage_stats": turn("error", True, False, stream=True),
    "input": turn("prompt", "abc", user("abd")),
    "input.type": turn("error", "item_reference", "message", input=user("abc")),
    "input.role": turn("prompt", "user", "developer", input=user("abc")),
    "input.content": turn("prompt", "abc", "abd", input=user("abc")),
    "input.content.type": turn("error", "input_image", "input_text", input=ITEM_TEXT),
    "input.content.text": turn("prompt", "abc", "abd", input=ITEM_TEXT),
    "input.content.refusal": turn("prompt", "abc", "abcde", input=ITEM_REFUSED),
    "input.parts": turn("prompt", [{"type": "python", "text": "1+2"}], at="input.1.parts", input=SUM_TURNS,
                        model="calculator"),
    "input.call_id": turn("error", "d", "c", input=ITEM_TALK),
    "input.name": turn("prompt", "f", "g", input=ITEM_TALK),
    "input.arguments": turn("prompt", '{"x": 1}', '{"x": 2}', input=ITEM_TALK),
    "input.namespace": turn("prompt", "n", "space", input=ITEM_TALK),
    "input.encrypted_content": turn("prompt", encoded("abc"), encoded("abd"), at="input.1.encrypted_content",
                                    input=ITEM_THOUGHT, model="reasoner"),
    "input.output": turn("prompt", "sun", "rain", at="input.1.output", input=ITEM_TALK),
    "input.output.type": turn("error", "input_image", "input_text", at="input.1.output.0.type", input=ITEM_PARTS),
    "input.output.text": turn("prompt", "sun", "rain", at="input.1.output.0.text", input=ITEM_PARTS),
    "input.output.refusal": turn("prompt", "sun", "rain", at="input.1.output.0.refusal", input=ITEM_REFUSED_PARTS),
    "instructions": turn("prompt", "Be."),
    "max_output_tokens": turn("tokens", 2, 3),
    "include": turn("logprobs", [LOGPROBS], []),
    "top_logprobs": turn("logprobs", 1, 2, include=[LOGPROBS]),
    "logprob_token_ids": turn("logprobs", [A], [B], include=[LOGPROBS]),
    "truncation_side": turn("text", "left", "right", truncate_prompt_tokens=2),
    "text": turn("text", FORMAT, {"format": {"type": "text"}}, **SURE_HERE),
    "text.format": turn("text", FORMAT["format"], {"type": "text"}, **SURE_HERE),
    "text.format.type": turn("text", "json_schema", "text", text=FORMAT, **SURE_HERE),
    "text.format.name": turn("echo", "n", "m", text=FORMAT, **SURE_HERE),
    "text.format.description": turn("echo", "d", "e", text=FORMAT, **SURE_HERE),
    "text.format.schema": turn("text", {"enum": [1]}, {"enum": [2]}, text=FORMAT, **SURE_HERE),
    "text.format.strict": turn("echo", True, False, text=FORMAT, **SURE_HERE),
    "text.verbosity": idle("low", "high"),
    "tools": turn("prompt", FLAT, FLAT[:1]),
    "tools.type": turn("error", "web_search", "function", tools=FLAT),
    "tools.name": turn("prompt", "f", "another", tools=FLAT),
    "tools.description": turn("prompt", "Does.", "Does that.", tools=FLAT),
    "tools.parameters": turn("prompt", SCHEMA, OTHER_SCHEMA, tools=FLAT),
    "tools.strict": turn("echo", True, False, tools=FLAT),
    "tools.external_web_access": turn("error", True, False, tools=[{"type": "web_search"}]),
    "tools.tools": turn("prompt", FLAT, FLAT[:1], tools=SPACE),
    "tools.tools.type": turn("error", "custom", "function", tools=SPACE),
    "tools.tools.name": turn("prompt", "f", "another", tools=SPACE),
    "tools.tools.description": turn("prompt", "Does.", "Does that.", tools=SPACE),
    "tools.tools.parameters": turn("prompt", SCHEMA, OTHER_SCHEMA, tools=SPACE),
    "tools.tools.strict": turn("echo", True, False, tools=SPACE),
    "tool_choice": turn("calls", "required", "none", tools=FLAT, **SURE_HERE),
    "parallel_tool_calls": turn(
        "calls", True, False, tools=[{"type": "function", **NOTHING}], tool_choice="required",
        logit_bias={str(NEWLINE): 100.0}, **SURE_HERE
    ),
    "reasoning": turn("prompt", {"effort": "low"}, {"effort": "high"}),
    "reasoning.effort": turn("prompt", "low", "high"),
    "reasoning.summary": idle("auto"),
    "reasoning.generate_summary": idle("auto"),
    "store": turn("echo", True, False),
    "metadata": turn("echo", {"a": "b"}, {"a": "c"}),
    "user": turn("echo", "me", "you"),
    "prompt_cache_key": turn("echo", "k", "l"),
    "safety_identifier": turn("echo", "s", "t"),
    "chat_template_kwargs": turn("prompt", {"mood": "!"}, {"mood": "??"}),
    "continue_final_message": turn("prompt", True, False),
    "add_special_tokens": turn("error", True, False),
    "cache_salt": turn("cached", "responses1", "responses2", input=LONG),
    "return_tokens_as_token_ids": turn("logprobs", True, False, include=[LOGPROBS]),
    "calculator": turn("text", True, False, model="calculator", input="What is 123 plus 456?", **SUM_HERE),
    "timings_per_token": turn("form", True, False),
    "return_progress": turn("form", True, False, stream=True),
    "previous_response_id": turn("error", "resp_1"),
}  # fmt: skip
RESPONSES_TABLE: Table = {
    **renamed(without(SAMPLING, *OWN_RESPONSES), {"max_tokens": "max_output_tokens"}),
    **OWN_RESPONSES,
}

USE: JSON = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
RESULT: JSON = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}
CALLED = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
RESULT_PARTS = [CALLED[0], {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "sun"}]}]}]
PART = [{"type": "text", "text": "abc"}]
WORKS = [{"name": one["name"], "description": "Does.", "input_schema": SCHEMA} for one in (F, G)]
SCHEMED: JSON = {"type": "json_schema", "schema": {"enum": [1]}}
ANTHROPIC: Table = {
    "model": turn("error", "other", "tiny"),
    "messages": turn("prompt", user("abc"), user("abcd")),
    "messages.role": turn("prompt", "user", "assistant"),
    "messages.content": turn("prompt", "abc", "abcd"),
    "messages.content.type": turn("error", "image", "text", messages=user(PART)),
    "messages.content.text": turn("prompt", "abc", "abcd", messages=user(PART)),
    "messages.content.id": turn("error", "toolu_2", "toolu_1", messages=CALLED),
    "messages.content.name": turn("prompt", "f", "gg", messages=CALLED),
    "messages.content.input": turn("prompt", {"x": 1}, {"x": 22}, messages=CALLED),
    "messages.content.thinking": shown_by("test_thinking_between_calls"),
    "messages.content.tool_use_id": turn(
        "error", "toolu_2", "toolu_1", at="messages.1.content.0.tool_use_id", messages=CALLED
    ),
    "messages.content.content": turn("prompt", "sun", "rain", at="messages.1.content.0.content", messages=CALLED),
    "messages.content.is_error": turn("prompt", True, False, at="messages.1.content.0.is_error", messages=CALLED),
    "messages.content.content.type": turn(
        "error", "image", "text", at="messages.1.content.0.content.0.type", messages=RESULT_PARTS
    ),
    "messages.content.content.text": turn(
        "prompt", "sun", "rain", at="messages.1.content.0.content.0.text", messages=RESULT_PARTS
    ),
    "system": turn("prompt", "Be."),
    "system.type": turn("error", "image", "text", system=PART),
    "system.text": turn("prompt", "abc", "abcd", system=PART),
    "tools": turn("prompt", WORKS),
    "tools.type": turn("error", "bash_20250124", "custom", tools=WORKS),
    "tools.name": turn("prompt", "f", "another", tools=WORKS),
    "tools.description": turn("prompt", "Does.", "Does that.", tools=WORKS),
    "tools.input_schema": turn("prompt", SCHEMA, OTHER_SCHEMA, tools=WORKS),
    "tools.strict": idle(True, tools=WORKS),
    "thinking": turn("prompt", {"type": "disabled"}),
    "thinking.type": turn("prompt", "disabled", "adaptive"),
    "thinking.budget_tokens": idle(1024, 2048, thinking={"type": "enabled"}),
    "thinking.display": idle("omitted", "summarized", thinking={"type": "enabled"}),
    "context_management": turn("error", {"edits": [{"type": "compact"}]}, {"edits": []}),
    "context_management.edits": turn("error", [{"type": "compact"}], [{"type": "clear_thinking_20251015"}]),
    "context_management.edits.type": turn(
        "error", "compact", "clear_thinking_20251015", context_management={"edits": [{}]}
    ),
    "output_config": turn("prompt", {"effort": "low"}),
    "output_config.effort": turn("prompt", "low", "high"),
    "output_config.format.type": turn("error", "text", "json_schema", output_config={"format": SCHEMED}),
    "output_format.type": turn("error", "text", "json_schema", output_format=SCHEMED),
    "chat_template_kwargs": turn("prompt", {"mood": "!"}, {"mood": "??"}),
    "cache_control": turn("written", {"type": "ephemeral"}),
}
MUST: JSON = {"tools": WORKS, "max_tokens": 120}
MESSAGES_TABLE: Table = {
    **ANTHROPIC,
    "thinking.display": turn("text", "omitted", "summarized", model="reasoner", thinking={"type": "enabled"}),
    "tools.strict": turn("error", True, False, tools=[{"name": "f", "input_schema": UNFIT["parameters"]}]),
    **only(SAMPLING, "stream", "temperature", "top_p", "seed", "max_tokens", "return_token_ids"),
    "top_k": turn("tokens", 1, 0),
    "stop_sequences": turn("end", ["a"], ["b"], max_tokens=60, output_format={"type": "json_schema", "schema":
                           {"enum": ["a b"]}}),
    "tool_choice": turn("calls", {"type": "any"}, {"type": "none"}, **MUST),
    "tool_choice.type": turn("calls", "any", "none", **MUST),
    "tool_choice.name": turn("calls", "f", "long_g", tool_choice={"type": "tool"}, **MUST),
    "tool_choice.disable_parallel_tool_use": turn(
        "calls", True, False, tools=[{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        tool_choice={"type": "any"}, max_tokens=400, temperature=2.0
    ),
    "output_config.format": turn("text", SCHEMED, max_tokens=60),
    "output_config.format.schema": turn(
        "text", {"enum": [1]}, {"enum": [2]}, max_tokens=60, output_config={"format": SCHEMED}
    ),
    "output_format": turn("text", SCHEMED, max_tokens=60),
    "output_format.schema": turn("text", {"enum": [1]}, {"enum": [2]}, max_tokens=60, output_format=SCHEMED),
    "cache_salt": turn("cached", "messages1", "messages2", messages=user(LONG)),
}  # fmt: skip

PARAMS = "sampling_params"
SHARED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos"),
)
GENERATE_TABLE: Table = {
    **renamed(only(SAMPLING, *SHARED, "truncate_prompt_tokens", "allowed_token_ids", "bad_words"), {}, PARAMS),
    **renamed(only(SAMPLING, "prompt_logprobs", "return_raw_logprobs"), {}, PARAMS),
    **only(SAMPLING, "model", "stream", "stream_options", "request_id"),
    **only(SAMPLING, *(name for name in SAMPLING if name.startswith("stream_options."))),
    "sampling_params.truncate_prompt_tokens": turn("prompt", 2, 3, return_token_ids=True),
    "sampling_params.structured_outputs": turn(
        "tokens", {"regex": "[ab]{2}"}, {"regex": "[cd]{2}"}, sampling_params={"ignore_eos": False}
    ),
    "sampling_params.return_sampling_mask": turn("reply", True, False, sampling_params={"top_k": 2}),
    "sampling_params.skip_special_tokens": turn(
        "end", True, False, sampling_params={"logit_bias": {str(START): 100.0}, "stop": "_start|><|im"}
    ),
    "sampling_params.logprobs": turn("logprobs", 1, 2),
    "sampling_params.truncation_side": turn(
        "prompt", "left", "right", return_token_ids=True, sampling_params={"truncate_prompt_tokens": 2}
    ),
    "sampling_params.logprob_token_ids": turn("logprobs", [A], [B], sampling_params={"logprobs": 1}),
    "sampling_params.skip_reading_prefix_cache": turn("cached", False, True, token_ids=ids(LONG), cache_salt="skip"),
    "sampling_params.detokenize": idle(False),
    "sampling_params.include_stop_str_in_output": idle(
        True, sampling_params={"stop": "a", "logit_bias": {str(A): 100.0}}
    ),
    "sampling_params.output_kind": turn("error", 2, 1, stream=True),
    "sampling_params": turn("tokens", {"max_tokens": 2, "seed": 1}, {"max_tokens": 3, "seed": 1}),
    "token_ids": turn("prompt", ids("abc"), ids("ab"), return_token_ids=True),
    "return_token_ids": turn("form", True, False),
    "cache_salt": turn("cached", "generate1", "generate2", token_ids=ids(LONG)),
    "answer_start": turn("logprobs", 1, 3, token_ids=ids("abcab"), sampling_params={"prompt_logprobs": 0}),
    "token_offsets": idle([[0, 1]] * 3),
    "assistant_tokens_mask": idle([0] * 3),
}
SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
SCORED: JSON = {"return_logprob": True}
SGLANG_TABLE: Table = {
    **renamed(
        only(SAMPLING, *SHARED, "skip_special_tokens", "json_schema", "regex", "ebnf", "stop_regex"),
        SGLANG_NAMES,
        PARAMS,
    ),
    **only(SAMPLING, "stream"),
    "sampling_params.n": turn("form", 2, 1, stream=True),
    "sampling_params.no_stop_trim": turn(
        "text", True, False, sampling_params={"stop": "a", "logit_bias": {str(A): 100.0}}
    ),
    "sampling_params": turn(
        "tokens", {"max_new_tokens": 2, "temperature": 0.0}, {"max_new_tokens": 3, "temperature": 0.0}
    ),
    "text": turn("prompt", "abc", "abcd"),
    "input_ids": turn("prompt", ids("abc"), ids("ab"), text=ABSENT),
    "return_logprob": turn("form", True, False),
    "logprob_start_len": turn("logprobs", 0, 1, **SCORED),
    "top_logprobs_num": turn("logprobs", 1, 2, **SCORED),
    "token_ids_logprob": turn("logprobs", [A], [B], **SCORED),
    "return_text_in_logprobs": turn("logprobs", True, False, **SCORED),
    "return_sampling_mask": turn("form", True, False),
    "rid": turn("id", "one", "two"),
    "extra_key": turn("cached", "sglang1", "sglang2", text=LONG),
    "lora_path": turn("tokens", "adapter"),
    "sampling_params.custom_params": turn("form", {"return_top_p_token_ids": True}, None, sampling_params={"top_k": 2}),
    "sampling_params.custom_params.return_top_p_token_ids": turn("form", True, False, sampling_params={"top_k": 2}),
}
LLAMA_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "n": "n_cmpl"}
LLAMA_TABLE: Table = {
    **renamed(only(SAMPLING, "model", "n", "temperature", "top_k", "top_p", "min_p", "max_tokens"), LLAMA_NAMES),
    **renamed(only(SAMPLING, "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"), LLAMA_NAMES),
    **renamed(only(SAMPLING, "stop", "ignore_eos", "logit_bias", "grammar", "json_schema", "stream"), LLAMA_NAMES),
    "prompt": turn("prompt", "abc", ["abd", 5]),
    "repeat_last_n": turn("tokens", -1, 0, repeat_penalty=100.0, temperature=0.0, n_predict=24),
    "n_probs": turn("logprobs", 1, 2),
    "post_sampling_probs": turn("form", True, False, n_probs=2),
    "max_tokens": turn("tokens", 2, 3, n_predict=ABSENT),
    "cache_prompt": turn("cached", True, False, prompt=f"llama.cpp reads {LONG}"),
    "return_tokens": turn("tokens", True, False),
    "timings_per_token": turn("form", True, False, stream=True),
    "return_progress": turn("form", True, False, stream=True),
    "response_fields": turn("form", ["content"], ["stop"]),
}
WEB_TABLE: Table = {
    "messages": turn("text", user("abc"), user("abd")),
    "messages.role": turn("text", "user", "assistant", messages=[*user("abc"), *user("abc")]),
    "messages.content": turn("text", "abc", "abd"),
    "temperature": turn("text", 0.0, 2.0),
    "max_tokens": turn("text", 2, 12),
    "top_k": turn("text", 1, 0, temperature=2.0),
}
EMBED_TABLE: Table = {
    "input": turn("vector", "abc", "abd"),
    "model": turn("error", "other", "tiny"),
    "encoding_format": turn("vector", "base64", "float"),
    "dimensions": turn("vector", 4, 8),
    "pooling": turn("vector", "last", "mean"),
    "normalize": turn("vector", True, False),
    "truncate_prompt_tokens": turn("vector", 2, 3),
    "truncation_side": turn("vector", "left", "right", truncate_prompt_tokens=2),
    "add_special_tokens": turn("vector", True, False),
    "cache_salt": shown_by("test_embedding_salt_separates_cached_prefixes"),
}
OPTIONS: Table = {
    name: case._replace(what="text")
    for name, case in renamed(only(SAMPLING, "temperature", "top_k", "top_p", "min_p", "seed"), {}, "options").items()
}
NO_TEMPERATURE: JSON = {"options": {"temperature": 0.0, "num_predict": 48}}
OLLAMA_SHARED: Table = {
    **only(SAMPLING, "model", "stream"),
    **OPTIONS,
    "options": turn("text", {"num_predict": 2, "seed": 1}, {"num_predict": 3, "seed": 1}),
    "options.num_predict": turn("text", 2, 3),
    "options.stop": turn("text", "1", "never", format={"enum": [100]}, options={"num_predict": 60}),
    "options.repeat_penalty": turn("text", 100.0, 1.0, **NO_TEMPERATURE),
    "options.repeat_last_n": turn(
        "text", -1, 0, options={"repeat_penalty": 100.0, "temperature": 0.0, "num_predict": 48}
    ),
    "options.presence_penalty": turn("text", 2.0, -2.0, options={"temperature": 2.0, "num_predict": 48}),
    "options.frequency_penalty": turn("text", 2.0, -2.0, **NO_TEMPERATURE),
    "format": turn("text", {"enum": [1]}, {"enum": [2]}, options={"num_predict": 60}),
    "think": turn("prompt", False, "high"),
    "logprobs": turn("form", True, False),
    "top_logprobs": turn("logprobs", 1, 2, logprobs=True),
}
OLLAMA_TABLE: Table = {
    **OLLAMA_SHARED,
    "prompt": turn("prompt", "abc", "abcd"),
    "system": turn("prompt", "Be."),
    "raw": turn("prompt", True, False),
}
OLLAMA_CALL: JSON = {"function": {"name": "f", "arguments": {"x": 1}}}
OLLAMA_CALLED: list[JSON] = [
    *user("abc"),
    {"role": "assistant", "tool_calls": [OLLAMA_CALL]},
    {"role": "tool", "content": "sun"},
]
OLLAMA_CHAT_TABLE: Table = {
    **OLLAMA_SHARED,
    **only(READING, "messages", "messages.content"),
    **only(READING, *(name for name in READING if name.startswith("tools"))),
    "messages.role": turn("text", "user", "assistant", at="messages.1.role", messages=user("abc") * 2),
    "tools.function.strict": CALLING["tools.function.strict"],
    "messages.thinking": shown_by("test_thinking_of_earlier_answers"),
    "messages.tool_name": shown_by("test_thinking_of_earlier_answers"),
    "messages.tool_calls": turn("prompt", [OLLAMA_CALL], at="messages.1.tool_calls", messages=OLLAMA_CALLED),
    "messages.tool_calls.function": turn(
        "prompt", OLLAMA_CALL["function"], {"name": "ff"}, at="messages.1.tool_calls.0.function", messages=OLLAMA_CALLED
    ),
    "messages.tool_calls.function.name": turn(
        "prompt", "f", "ff", at="messages.1.tool_calls.0.function.name", messages=OLLAMA_CALLED
    ),
    "messages.tool_calls.function.arguments": turn(
        "prompt", {"x": 1}, {"x": 22}, at="messages.1.tool_calls.0.function.arguments", messages=OLLAMA_CALLED
    ),
}  # fmt: skip
OLLAMA_EMBED_TABLE: Table = {
    **only(EMBED_TABLE, "model", "input", "dimensions"),
    "truncate": turn("error", False, True, input=LONG * 6, model="short"),
}
OLLAMA_VECTOR_TABLE: Table = {**only(EMBED_TABLE, "model"), "prompt": turn("vector", "abc", "abd")}
SHOW_TABLE: Table = {"model": turn("error", "other", "tiny"), "name": shown_by("test_older_name_of_a_model")}
TEXT: JSON = {"messages": ABSENT, "prompt": "abc"}
PIECES: JSON = {"messages": ABSENT, "content": "abc"}


def seen_as(what: str, table: Table) -> Table:
    """Return a table whose prompt differences appear in another aspect."""
    return {name: case._replace(what=what) if case.what == "prompt" else case for name, case in table.items()}


TOKENIZE_TABLE: Table = {
    **seen_as("tokens", {**READING, **RENDERED_TOOL_FIELDS}),
    "model": turn("error", "other", "tiny"),
    "prompt": turn("tokens", "abc", "abd", **TEXT),
    "content": turn("tokens", "abc", "abd", **PIECES),
    "add_special_tokens": turn("tokens", True, False, **TEXT),
    "add_special": turn("tokens", True, False, **PIECES),
    "return_token_strs": turn("reply", True, False, **TEXT),
    "with_pieces": turn("form", True, False, **PIECES),
}
DETOKENIZE_TABLE: Table = {"model": turn("form", "tiny"), "tokens": turn("prompt", ids("abc"), ids("abd"))}
TEMPLATE_TABLE: Table = {**READING, **RENDERED_TOOL_FIELDS, "model": turn("error", "other", "tiny")}
TABLES: Mapping[str, Table] = MappingProxyType(
    {
        COMPLETE: COMPLETE_TABLE,
        CHAT: CHAT_TABLE,
        RESPONSES: RESPONSES_TABLE,
        MESSAGES: MESSAGES_TABLE,
        GENERATE: GENERATE_TABLE,
        SGLANG: SGLANG_TABLE,
        LLAMA: {**LLAMA_TABLE, "prompt.prompt_string": turn("prompt", "abc", "abd", prompt={"prompt_string": "a"})},
        WEB: WEB_TABLE,
        EMBED: EMBED_TABLE,
        OLLAMA: OLLAMA_TABLE,
        OLLAMA_CHAT: OLLAMA_CHAT_TABLE,
        OLLAMA_EMBED: OLLAMA_EMBED_TABLE,
        OLLAMA_VECTOR: OLLAMA_VECTOR_TABLE,
        SHOW: SHOW_TABLE,
        TOKENIZE: TOKENIZE_TABLE,
        DETOKENIZE: DETOKENIZE_TABLE,
        TEMPLATE: TEMPLATE_TABLE,
    }
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Running]]:
    """Servers of the tiny model (start token, template variables, room for tools), the calculator's and a reasoner."""
    directory = make_tiny(tmp_path_factory.mktemp("every"), 4096)
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    core.post_processor = tokenizers.processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 258)])
    core.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TALK)
    reasoner = make_reasoner(tmp_path_factory.mktemp("reasoner"))
    adapter = make_adapter(tmp_path_factory.mktemp("adapters") / "adapter", 1)
    options: JSON = {"port": 0, "log_requests": False, "enable_lora": True, "lora_modules": (f"adapter={adapter}",)}
    with (
        mounted(directory, NANOCHATS, config=ServerConfig(**options)) as tiny,
        running(directory, max_model_len=336) as short,
        running(CALCULATOR) as calculator,
        running(reasoner) as reasoning,
    ):
        yield {"tiny": tiny, "short": short, "calculator": calculator, "reasoner": reasoning}


def test_tables_have_every_field() -> None:
    for path, body in BODIES.items():
        wanted = fields_of(body)
        if path in COUNTING:
            assert wanted <= set(TABLES[COUNTING[path]]), path
        else:
            assert set(TABLES[path]) == wanted, path


def effect_of(servers: Mapping[str, Running], path: str, field: str) -> str:
    """Send a case's requests; return how their replies contradict the table, "" if they do not."""
    case = TABLES[path][field]
    if case.what == "elsewhere":
        return "" if callable(globals()[case.one]) else "no such test"
    server = servers[case.model]
    one, two = both_bodies(path, field, case)
    if case.what == "cached":
        asked(server, path, one)  # which leaves its prompt in the cache
    first, second = (asked(server, path, body) for body in (one, two))
    if second.error != (200, ""):
        return f"refused: {second.error}"
    if case.what == "error":
        status, listed = first.error
        is_listed = {*field.split(".")} & {*re.findall(r"\w+", listed)}
        wanted = 404 if field in ("model", "previous_response_id") else 400
        return "" if status == wanted and is_listed else f"not refused as wanted: {first.error}"
    if first.error != (200, ""):
        return f"refused: {first.error}"
    if case.what == "nothing":
        parts = [[leaf for leaf in one.part("reply") if field not in leaf[0]] for one in (first, second)]
        return "" if all(parts) and alike(*parts) else f"it changes the reply: {parts}"
    parts = [one.part(case.what) for one in (first, second)]
    if not any(parts) or alike(*parts):
        return f"no {case.what}, or the same: {parts}"
    again = first if case.what == "cached" else asked(server, path, one)
    return "" if alike(again.part(case.what), parts[0]) else "it differs by chance"


@pytest.mark.parametrize("path", TABLES)
def test_every_field_has_the_listed_effect(servers: Mapping[str, Running], path: str) -> None:
    wrong = {field: found for field in TABLES[path] if (found := effect_of(servers, path, field))}
    assert wrong == {}


def test_equal_requests_have_equal_replies(servers: Mapping[str, Running]) -> None:
    """Otherwise every field would seem to have an effect."""
    for path, body in BASES.items():
        first, second = (asked(servers["tiny"], path, body) for _ in range(2))
        assert first.error == (200, "") and first.form == second.form, path
        assert first.part("reply") and alike(first.part("reply"), second.part("reply")), path


def test_embedding_salt_separates_cached_prefixes(servers: Mapping[str, Running]) -> None:
    server = servers["tiny"]
    for salt, cached in (("embed1", True), ("embed2", False)):
        asked(server, EMBED, {"input": LONG, "cache_salt": "embed1"})
        reply = server.post(COMPLETE, {"prompt": LONG, "max_tokens": 1, "cache_salt": salt}).json()
        assert (reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is cached


def test_older_name_of_a_model(servers: Mapping[str, Running]) -> None:
    replies = [servers["tiny"].post(SHOW, {"name": name}) for name in ("tiny", "other")]
    assert [reply.status_code for reply in replies] == [200, 404]


def test_thinking_of_earlier_answers(servers: Mapping[str, Running], tmp_path: Path) -> None:
    template = "{% for one in messages %}{{ one.content }}{{ one.reasoning_content }}{{ one.name }}{% endfor %}"
    with running(make_tiny(tmp_path, template=template)) as server:
        counts = []
        for fields in ({}, {"thinking": "abcd"}, {"tool_name": "abcdefg"}):
            message = {"role": "assistant", "content": "x", **fields}
            body = joined(BASES[OLLAMA_CHAT], {"messages": [message]})
            counts.append(server.post(OLLAMA_CHAT, body).json()["prompt_eval_count"])
    assert [count - counts[0] for count in counts] == [0, 4, 7]


def prompt_tokens(server: Running, path: str, body: JSON) -> int:
    """Return the number of tokens of the prompt in a reply."""
    reply = server.post(path, body).json()
    usage = reply.get("usage", reply)
    return sum(usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_read_input_tokens"))


@pytest.mark.parametrize("path", COUNTING)
def test_a_prompt_is_counted_as_it_is_read(servers: Mapping[str, Running], path: str) -> None:
    counted, generating = BODIES[path].model_fields, COUNTING[path]
    cases = {field: case for field, case in TABLES[generating].items() if case.what == "prompt"}
    for field, case in cases.items():
        for body in both_bodies(generating, field, case) if field.split(".")[0] in counted else ():
            mine = {name: value for name, value in body.items() if name in counted}
            server = servers[case.model]
            assert prompt_tokens(server, path, mine) == prompt_tokens(server, generating, body), (field, body)
    assert servers["tiny"].post(path, {**BASES[path], "model": "other"}).status_code == 404


def test_thinking_between_calls(tmp_path: Path) -> None:
    template = "{% for one in messages %}{{ one.content }}{{ one.reasoning_content }}{% endfor %}"
    with running(make_tiny(tmp_path, template=template)) as server:
        counts = []
        for text in ("a", "abcd"):
            blocks = [{"type": "thinking", "thinking": text, "signature": "s"}, USE]
            body = joined(BASES[MESSAGES], {"messages": [{**CALLED[0], "content": blocks}, CALLED[1]]})
            counts.append(prompt_tokens(server, MESSAGES, body))
    assert counts[1] - counts[0] == 3
