"""The requests whose replies are golden: for each dialect, in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A request to one of the servers of `servers.NAMES`."""

    name: str
    server: str
    path: str
    body: JSON | None = None
    """None for a GET."""
    headers: Mapping[str, str] = field(default_factory=dict)


HELLO = [{"role": "user", "content": "hello"}]
BAD_ROLE = [{"role": "stranger", "content": "hello"}]
GREEDY: JSON = {"temperature": 0, "max_tokens": 8}
SEEDED: JSON = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 8}
SCHEMA: JSON = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PARAMETERS: JSON = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
LOOK: JSON = {"name": "look", "description": "Look somewhere.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LOOK}]
CALL: JSON = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "4"},
]
IDS = [71, 68, 75, 75, 78]
"""Tokens of the random model's prompts of ids."""


def _posts(server: str, path: str, shared: JSON, bodies: Mapping[str, JSON]) -> list[Case]:
    return [Case(name, server, path, {**shared, **body}) for name, body in bodies.items()]


def _chat() -> list[Case]:
    path = "/v1/chat/completions"
    names: JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}}
    random = {
        "text": GREEDY,
        "seeded": SEEDED,
        "system and history": {
            **GREEDY,
            "messages": [
                {"role": "system", "content": "Be brief."},
                *HELLO,
                {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": [{"type": "text", "text": "more"}]},
            ],
        },
        "two samples": {**SEEDED, "n": 2},
        "log-probabilities": {**GREEDY, "logprobs": True, "top_logprobs": 2},
        "usage in a stream": {**GREEDY, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "stop string": {**GREEDY, "max_tokens": 40, "stop": ["e"]},
        "stop string kept": {**GREEDY, "max_tokens": 40, "stop": ["e"], "include_stop_str_in_output": True},
        "schema": {**SEEDED, "max_tokens": 60, **names},
        "object": {**SEEDED, "max_tokens": 10, "response_format": {"type": "json_object"}},
        "regular expression": {**SEEDED, "structured_outputs": {"regex": "[ab]{4}"}},
        "choice": {**SEEDED, "structured_outputs": {"choice": ["yes", "no"]}},
        "bias and penalties": {**GREEDY, "logit_bias": {"65": 50}, "presence_penalty": 1.5, "frequency_penalty": 1},
        "continued": {
            **GREEDY,
            "messages": [*HELLO, {"role": "assistant", "content": "He"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "token ids": {**GREEDY, "return_token_ids": True},
        "prompt log-probabilities": {**GREEDY, "max_tokens": 1, "prompt_logprobs": 1},
        "error: limit": {"max_tokens": -1},
        "error: type": {"temperature": "hot"},
        "error: role": {"messages": BAD_ROLE},
        "error: unsupported": {"modalities": ["audio"]},
        "error: too long": {"messages": [{"role": "user", "content": "x" * 600}]},
        "error: model": {"model": "another"},
    }
    reasoner = {
        "reasoning": {"max_tokens": 20},
        "without reasoning": {"max_tokens": 20, "chat_template_kwargs": {"enable_thinking": False}},
        "cut in reasoning": {"max_tokens": 2},
        "call": {"max_tokens": 20, "tools": TOOLS},
        "call required": {"max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
        "call refused": {"max_tokens": 20, "tools": TOOLS, "tool_choice": "none"},
        "call, two samples": {"max_tokens": 20, "tools": TOOLS, "n": 2},
        "result": {"max_tokens": 20, "tools": TOOLS, "messages": CALLED},
        "error: tool": {"tools": [{"type": "function", "function": {"name": "no name"}}]},
    }
    return [
        *_posts("random", path, {"messages": HELLO}, random),
        *_posts("reasoner", path, {"messages": HELLO, "temperature": 0}, reasoner),
    ]


def _completions() -> list[Case]:
    return _posts(
        "random",
        "/v1/completions",
        {"prompt": "hello"},
        {
            "text": GREEDY,
            "seeded": SEEDED,
            "ids": {**GREEDY, "prompt": IDS},
            "two prompts, two samples": {**SEEDED, "prompt": ["hello", "world"], "n": 2},
            "best of two": {**SEEDED, "n": 2, "logprobs": 1},
            "echo": {**GREEDY, "echo": True},
            "echo with log-probabilities": {**GREEDY, "max_tokens": 2, "echo": True, "logprobs": 2},
            "log-probabilities": {**GREEDY, "logprobs": 2},
            "stop string": {**GREEDY, "max_tokens": 40, "stop": ["e", "zz"]},
            "stop token": {**GREEDY, "max_tokens": 40, "stop_token_ids": [68], "ignore_eos": True},
            "schema": {**SEEDED, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
            "grammar": {**SEEDED, "structured_outputs": {"grammar": 'start: "ab" | "cd"'}},
            "truncated": {**GREEDY, "truncate_prompt_tokens": 3},
            "token ids": {**GREEDY, "return_token_ids": True},
            "usage in a stream": {**GREEDY, "stream_options": {"include_usage": True}},
            "nothing": {**GREEDY, "max_tokens": 0, "echo": True, "logprobs": 1},
            "error: prompt": {"prompt": []},
            "error: token": {"prompt": [100_000]},
            "no limit": {**GREEDY, "max_tokens": 100_000, "stop": ["e"]},
            "error: unsupported": {"suffix": "!"},
        },
    )


def _responses() -> list[Case]:
    path, limit = "/v1/responses", {"temperature": 0, "max_output_tokens": 8}
    tools = [{"type": "function", **LOOK}]
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
    random = {
        "text": limit,
        "messages": {**limit, "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]},
        "instructions": {**limit, "instructions": "Be brief."},
        "log-probabilities": {**limit, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        "schema": {
            "temperature": 0,
            "max_output_tokens": 60,
            "text": {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}},
        },
        "error: limit": {"max_output_tokens": -1},
        "error: input": {"input": [{"type": "input_image", "image_url": "x"}]},
        "error: previous": {"previous_response_id": "resp_0"},
    }
    reasoner = {
        "reasoning": {},
        "cut in reasoning": {"max_output_tokens": 2},
        "call": {"tools": tools},
        "call required": {"tools": tools, "tool_choice": "required"},
        "result": {"tools": tools, "input": [*HELLO, call, result]},
        "error: tool": {"tools": [{"type": "function"}]},
    }
    return [
        *_posts("random", path, {"input": "hello", "store": False}, random),
        *_posts("reasoner", path, {"input": "hello", "store": False, "temperature": 0}, reasoner),
        Case("input tokens", "random", "/v1/responses/input_tokens", {"input": "hello"}),
    ]


def _messages() -> list[Case]:
    path, limit = "/v1/messages", {"temperature": 0, "max_tokens": 8}
    tools = [{"name": "look", "description": "Look somewhere.", "input_schema": PARAMETERS}]
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"}
    history = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    random = {
        "text": limit,
        "system": {**limit, "system": [{"type": "text", "text": "Be brief."}]},
        "stop sequence": {**limit, "max_tokens": 40, "stop_sequences": ["e"]},
        "truncation": {**limit, "temperature": 1.0, "top_k": 1, "top_p": 0.9},
        "schema": {"temperature": 0, "max_tokens": 60, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        "error: limit": {"max_tokens": 0},
        "error: no limit": {},
        "error: role": {**limit, "messages": BAD_ROLE},
        "error: model": {**limit, "model": "another"},
    }
    reasoner = {
        "reasoning": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "cut in reasoning": {"max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        "call": {"tools": tools},
        "call required": {"tools": tools, "tool_choice": {"type": "any"}},
        "result": {"tools": tools, "messages": history},
        "error: tool": {"tools": [{"name": "no name", "input_schema": PARAMETERS}]},
    }
    version = {"anthropic-version": "2023-06-01"}
    bodies = [
        *_posts("random", path, {"model": "random", "messages": HELLO}, random),
        *_posts(
            "reasoner", path, {"model": "reasoner", "messages": HELLO, "max_tokens": 60, "temperature": 0}, reasoner
        ),
        Case("count", "random", f"{path}/count_tokens", {"model": "random", "messages": HELLO}),
    ]
    return [Case(one.name, one.server, one.path, one.body, version) for one in bodies]


def _ollama() -> list[Case]:
    options: JSON = {"options": {"temperature": 0, "num_predict": 8}}
    seeded: JSON = {"options": {"temperature": 1.0, "seed": 7, "num_predict": 8, "top_k": 20}}
    free: JSON = {"options": {"temperature": 0, "num_predict": 60}}
    called = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]},
        {"role": "tool", "tool_name": "look", "content": "4"},
    ]
    chats = {
        "chat": options,
        "chat, seeded": seeded,
        "chat, stop": {"options": {"temperature": 0, "num_predict": 40, "stop": ["e"]}},
        "chat, schema": {**free, "format": SCHEMA},
        "chat, json": {"options": {"temperature": 0, "num_predict": 10}, "format": "json"},
        "chat, log-probabilities": {**options, "logprobs": True, "top_logprobs": 2},
        "chat, error": {"messages": BAD_ROLE},
        "chat, error: option": {"options": {"num_predict": "many"}},
        "chat, error: model": {"model": "another"},
    }
    thoughts = {
        "chat, thinking": {"think": True},
        "chat, not thinking": {"think": False},
        "chat, call": {"tools": TOOLS},
        "chat, result": {"tools": TOOLS, "messages": called},
    }
    texts = {
        "generate": options,
        "generate, raw": {**options, "raw": True},
        "generate, system": {**options, "system": "Be brief."},
        "generate, schema": {**free, "format": SCHEMA},
        "generate, error": {**options, "suffix": "!"},
    }
    return [
        *_posts("random", "/api/chat", {"model": "random", "messages": HELLO}, chats),
        *_posts("reasoner", "/api/chat", {"model": "reasoner", "messages": HELLO, **free}, thoughts),
        *_posts("random", "/api/generate", {"model": "random", "prompt": "hello"}, texts),
        Case("embed", "random", "/api/embed", {"model": "random", "input": ["hello", "world"]}),
        Case("embeddings", "random", "/api/embeddings", {"model": "random", "prompt": "hello"}),
        Case("show", "random", "/api/show", {"model": "random"}),
        *(Case(name, "random", f"/api/{name}") for name in ("tags", "ps", "version")),
    ]


def _llamacpp() -> list[Case]:
    greedy: JSON = {"temperature": 0, "n_predict": 8}
    bodies: Mapping[str, JSON] = {
        "text": greedy,
        "seeded": {"temperature": 1.0, "seed": 7, "n_predict": 8, "top_k": 20, "min_p": 0.01},
        "ids": {**greedy, "prompt": IDS},
        "two prompts": {**greedy, "prompt": ["hello", "world"]},
        "stop string": {**greedy, "n_predict": 40, "stop": ["e"]},
        "log-probabilities": {**greedy, "n_probs": 2},
        "log-probabilities after sampling": {
            **greedy,
            "n_probs": 2,
            "post_sampling_probs": True,
            "temperature": 1.0,
            "seed": 7,
        },
        "tokens": {**greedy, "return_tokens": True},
        "grammar": {**greedy, "grammar": 'root ::= "ab" | "cd"'},
        "schema": {**greedy, "n_predict": 60, "json_schema": SCHEMA},
        "bias": {**greedy, "logit_bias": [[65, 50.0]]},
        "fields": {**greedy, "response_fields": ["content", "tokens_evaluated"]},
        "error: type": {"n_predict": "many"},
        "error: grammar": {"grammar": "root :="},
        "error: prompt": {"prompt": []},
    }
    return [
        *_posts("random", "/completion", {"prompt": "hello"}, bodies),
        Case("props", "random", "/props"),
        Case("embeddings", "random", "/v1/embeddings", {"input": "hello", "encoding_format": "base64"}),
    ]


def _sglang() -> list[Case]:
    greedy: JSON = {"temperature": 0, "max_new_tokens": 8}
    hot: JSON = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 8, "top_k": 20}
    bodies: Mapping[str, JSON] = {
        "text": {"sampling_params": greedy},
        "seeded": {"sampling_params": hot},
        "ids": {"text": None, "input_ids": IDS, "sampling_params": greedy},
        "batch": {"text": ["hello", "world"], "sampling_params": greedy},
        "two samples": {"sampling_params": {**hot, "n": 2}},
        "stop string": {"sampling_params": {**greedy, "max_new_tokens": 40, "stop": ["e"]}},
        "stop token": {"sampling_params": {**greedy, "stop_token_ids": [68], "ignore_eos": True}},
        "log-probabilities": {
            "sampling_params": greedy,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5],
            "return_text_in_logprobs": True,
        },
        "prompt log-probabilities": {"sampling_params": greedy, "return_logprob": True, "logprob_start_len": 0},
        "schema": {"sampling_params": {**greedy, "max_new_tokens": 60, "json_schema": '{"type": "boolean"}'}},
        "regular expression": {"sampling_params": {**hot, "regex": "[ab]{4}"}},
        "bias": {"sampling_params": {**greedy, "logit_bias": {"65": 50.0}}},
        "error: no prompt": {"text": None, "sampling_params": greedy},
        "error: limit": {"sampling_params": {"max_new_tokens": -1}},
        "error: unsupported": {"sampling_params": greedy, "image_data": ["x"]},
    }
    asked = ("/get_model_info", "/get_server_info", "/get_weight_version", "/v1/loads", "/get_load", "/health_generate")
    return [*_posts("random", "/generate", {"text": "hello"}, bodies), *(Case(path, "random", path) for path in asked)]


def _tokens_in() -> list[Case]:
    def params(**fields: Any) -> JSON:
        return {"sampling_params": {"temperature": 0, "max_tokens": 8, **fields}}

    return _posts(
        "random",
        "/inference/v1/generate",
        {"token_ids": IDS},
        {
            "ids": params(),
            "seeded": params(temperature=1.0, seed=7, top_p=0.9),
            "two samples": params(temperature=1.0, seed=7, n=2),
            "log-probabilities": params(logprobs=2),
            "raw log-probabilities": params(temperature=0.5, seed=7, logprobs=0, return_raw_logprobs=True),
            "prompt log-probabilities": params(prompt_logprobs=1, max_tokens=1),
            "sampling mask": params(temperature=1.0, seed=7, top_k=3, return_sampling_mask=True),
            "stop token": params(stop_token_ids=[68], ignore_eos=True),
            "stop string": params(stop=["e"], max_tokens=40),
            "schema": params(structured_outputs={"json": SCHEMA}, max_tokens=60),
            "penalties": params(repetition_penalty=1.2, min_tokens=3),
            "error: no ids": {"token_ids": [], **params()},
            "error: limit": params(max_tokens=-1),
            "error: unsupported": {**params(), "lora_request": {"name": "x"}},
        },
    )


def _tokens() -> list[Case]:
    return [
        Case("tokenize", "random", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
        Case("tokenize llama.cpp's way", "random", "/tokenize", {"content": "hello", "with_pieces": True}),
        Case("tokenize a chat", "reasoner", "/tokenize", {"messages": HELLO, "tools": TOOLS}),
        Case("tokenize nothing", "random", "/tokenize", {}),
        Case("detokenize", "random", "/detokenize", {"tokens": IDS}),
        Case("detokenize no token", "random", "/detokenize", {"tokens": [100_000]}),
        Case("apply template", "reasoner", "/apply-template", {"messages": CALLED, "tools": TOOLS}),
        Case("count", "random", "/v1/chat/completions/input_tokens", {"messages": HELLO}),
        Case("tokenizer", "random", "/tokenizer_info"),
        Case("models", "random", "/v1/models"),
        Case("model", "random", "/v1/models/random"),
        Case("no model", "random", "/v1/models/another"),
        Case("version", "random", "/version"),
        Case("no path", "random", "/v1/nothing"),
        Case("embedding", "random", "/v1/embeddings", {"input": ["hello", "world"], "dimensions": 4}),
        Case("embedding of ids", "random", "/v1/embeddings", {"input": [IDS]}),
        Case("no embedding", "random", "/v1/embeddings", {"input": []}),
    ]


def _nanochat() -> list[Case]:
    sums = [{"role": "user", "content": "What is 12 + 34?"}]
    return [
        *_posts(
            "calculator",
            "/chat/completions",
            {"messages": sums, "temperature": 0.0, "max_tokens": 40},
            {
                "sum": {},
                "top-k": {"top_k": 1, "temperature": 1.0},
                "cut": {"max_tokens": 3},
                "history": {"messages": [*sums, {"role": "assistant", "content": "46"}, *sums]},
                "error: temperature": {"temperature": 5.0},
                "error: top-k": {"top_k": 1000},
                "error: no message": {"messages": []},
                "error: role": {"messages": BAD_ROLE},
            },
        ),
        Case(
            "OpenAI's route",
            "calculator",
            "/v1/chat/completions",
            {"messages": sums, "temperature": 0, "max_tokens": 40, "calculator": True},
        ),
        Case("stats", "calculator", "/stats"),
    ]


def _trainers() -> list[Case]:
    def post(name: str, path: str, **body: Any) -> Case:
        return Case(name, "trainer", path, body)

    def get(path: str) -> Case:
        return Case(f"GET {path}", "trainer", path)

    asked: JSON = {"token_ids": IDS, "sampling_params": {"temperature": 0, "max_tokens": 4, "logprobs": 0}}
    return [
        *(get(path) for path in ("/weight_info", "/weight_version", "/is_paused", "/is_sleeping", "/get_world_size")),
        post("generate", "/inference/v1/generate", **asked),
        post("pause", "/pause"),
        get("/is_paused"),
        post("resume", "/resume"),
        post("pause, unknown mode", "/pause", mode="later"),
        post("SGLang's pause", "/pause_generation", mode="abort"),
        post("SGLang's continue", "/continue_generation"),
        post("sleep", "/sleep", level=1),
        get("/is_sleeping"),
        post("wake", "/wake_up"),
        post("release", "/release_memory_occupation"),
        post("occupy", "/resume_memory_occupation"),
        post("reset the cache", "/reset_prefix_cache"),
        post("flush", "/flush_cache"),
        post("abort nothing", "/abort_request", rid="none"),
        post("abort all", "/abort_requests"),
        post("from disk", "/update_weights_from_disk", model_path="step-1", weight_version="one"),
        post("generate, version 1", "/inference/v1/generate", **asked),
        post("from disk, again", "/update_weights_from_disk", model_path="step-2"),
        post("generate, version 2", "/inference/v1/generate", **asked),
        post("from disk, outside", "/update_weights_from_disk", model_path="../random"),
        post("from disk, missing", "/update_weights_from_disk", model_path="step-3"),
        post("label", "/update_weight_version", new_version="two"),
        get("/weight_version"),
        post("commit without an update", "/commit_weight_update"),
        post("abort without an update", "/abort_weight_update"),
        post("finish without an update", "/finish_weight_update"),
        post("group without fields", "/init_weights_update_group"),
        post(
            "update without a group", "/update_weights_from_distributed", names=["x"], dtypes=["float32"], shapes=[[1]]
        ),
        post("engine without fields", "/init_weight_transfer_engine"),
        post("broadcaster without fields", "/init_broadcaster"),
        post("receive without a group", "/receive_weight_update"),
        post("adapter", "/load_lora_adapter", lora_name="x", lora_path="y"),
        get("/weight_info"),
    ]


DIALECTS: Mapping[str, tuple[Case, ...]] = {
    "chat": tuple(_chat()),
    "completions": tuple(_completions()),
    "responses": tuple(_responses()),
    "messages": tuple(_messages()),
    "ollama": tuple(_ollama()),
    "llamacpp": tuple(_llamacpp()),
    "sglang": tuple(_sglang()),
    "tokens_in": tuple(_tokens_in()),
    "tokens": tuple(_tokens()),
    "nanochat": tuple(_nanochat()),
    "trainers": tuple(_trainers()),
}
"""Each dialect's file in `replies/` -> its requests."""
STREAMED = frozenset(DIALECTS) - {"tokens", "trainers"}
"""Dialects whose requests with a body are sent a second time with `"stream": true`."""
