"""Changes of the server that break what a client or trainer relies on, for `client_mutants.py`.

At least one for each test file of tests/clients. A change is a route under another name, or a field of a reply or a
check of a request that some client needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One replacement in the sources."""

    client: str
    """The file tests/clients/test_CLIENT.py must notice it, or tests/ROOM/test_CLIENT.py if it is ROOM/CLIENT."""
    breaks: str
    """What no longer works, for the table."""
    path: str
    """Source file below src/nano_inference/server."""
    old: str
    """Text that is in the file once."""
    new: str

    @property
    def test(self) -> str:
        """Path of the file that must notice it."""
        room, _, name = self.client.rpartition("/")
        return f"tests/{room or 'clients'}/test_{name}.py"


def route(client: str, path: str, file: str) -> Change:
    """Return the change that serves a route under another path."""
    return Change(client, f"`{path}` has another name", f"dialects/{file}.py", f'path="{path}"', f'path="{path}-gone"')


def rl_route(client: str, path: str, file: str) -> Change:
    """Return the change that serves a trainer's route under another path."""
    return Change(client, f"`{path}` has another name", f"trainers/{file}.py", f'"{path}",', f'"{path}-gone",')


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_RESPONSES = ("dialects/responses.py", '"/v1/responses", "/responses")', '"/responses",)')
_CALLS = ("replies.py", 'choice["message"]["tool_calls"]', 'choice["message"]["calls"]')
_STREAMED_CALLS = ("tools.py", '"function": {"arguments": event.text}', '"function": {"text": event.text}')
_STREAMED_TEXT = ("tools.py", 'deltas.append({"content": event.text})', 'deltas.append({"text": event.text})')
_CALL_ID = ("dialects/responses_reply.py", 'call_id=self._id("call"), ', "")
_MESSAGE_END = ("dialects/messages.py", '{"type": "message_delta", "delta"', '{"type": "message_end", "delta"')
_THINKING = ("dialects/messages.py", '("thinking_delta", "thinking")', '("thinking_delta", "text")')
_RESPONSE = ("dialects/ollama.py", '"response" if name == "content"', '"text" if name == "content"')
_PARTIAL_JSON = ("dialects/messages.py", '("input_json_delta", "partial_json")', '("input_json_delta", "json")')
_COMPLETE = (
    *("ended samples are reported as complete", "verl/server.py"),
    *('"aborted" if sample.finish_reason == "abort" else "completed"', '"completed"'),
)

CHANGES: Sequence[Change] = (
    route("aider", _CHAT, "openai"),
    Change("aider", "a body needs a Content-Type", "security.py", "kind != wanted and not is_bare", "kind != wanted"),
    route("aider", "/api/chat", "ollama"),
    route("aider", "/api/generate", "ollama"),
    Change("aider", "answers of `/api/generate` have no `response`", *_RESPONSE),
    route("anthropic", "/v1/messages", "messages"),
    Change("anthropic", "streams of messages have no `message_delta`", *_MESSAGE_END),
    route("claude_code", "/v1/messages", "messages"),
    Change("claude_code", "streamed thinking has no text", *_THINKING),
    Change("codex", "`/v1/responses` has another name", *_RESPONSES),
    Change("codex", "function calls of responses have no `call_id`", *_CALL_ID),
    route("continue", "/v1/messages", "messages"),
    Change("continue", "streamed calls of a chat have no arguments", *_STREAMED_CALLS),
    route("guidellm", _CHAT, "openai"),
    route("guidellm", _COMPLETIONS, "openai"),
    route("instructor", _CHAT, "openai"),
    Change("instructor", "chats have no `tool_calls`", *_CALLS),
    Change(
        *("langchain", "`/v1/embeddings` has another name", "dialects/openai.py"),
        *('("/v1/embeddings", "/embeddings")', '("/embeddings",)'),
    ),
    Change("langchain", "chats have no `tool_calls`", *_CALLS),
    route("litellm", _COMPLETIONS, "openai"),
    Change("litellm", "streams of chats have no `content`", *_STREAMED_TEXT),
    route("llm", _CHAT, "openai"),
    Change("llm", "streams of chats have no `content`", *_STREAMED_TEXT),
    route("lm_eval", _COMPLETIONS, "openai"),
    route("lm_eval", "/tokenizer_info", "tokens"),
    route("ollama", "/api/show", "ollama"),
    Change(
        *("ollama", "calls are left out of answers", "dialects/ollama.py"),
        *('({"tool_calls": calls} if calls else {})', '({"calls": calls} if calls else {})'),
    ),
    Change("open_responses", "`/v1/responses` has another name", *_RESPONSES),
    Change(
        *("open_responses", "responses have no `completed_at`", "dialects/responses_reply.py"),
        *('{"completed_at": None, "error"', '{"error"'),
    ),
    route("open_webui", "/api/tags", "ollama"),
    Change("open_webui", "streams of chats have no `content`", *_STREAMED_TEXT),
    Change("openai_agents", "`/v1/responses` has another name", *_RESPONSES),
    Change("openai_agents", "chats have no `tool_calls`", *_CALLS),
    route("pydantic_ai", "/v1/messages", "messages"),
    Change("pydantic_ai", "streamed calls of messages have no JSON", *_PARTIAL_JSON),
    route("ray_serve", _CHAT, "openai"),
    Change(
        *("ray_serve", "a healthy replica is reported as failed", "ray_serve.py"),
        *("answer.status_code != 200", "answer.status_code == 200"),
    ),
    route("recipes", _CHAT, "openai"),
    route("renderers", "/inference/v1/generate", "generate"),
    Change(
        *("renderers", "a listed model has no `max_model_len`", "model.py"),
        *('"max_model_len": self', '"max_len": self'),
    ),
    route("smolagents", _CHAT, "openai"),
    Change("smolagents", "chats have no `tool_calls`", *_CALLS),
    route("verifiers", _CHAT, "openai"),
    route("verifiers", "/inference/v1/generate", "generate"),
    Change("verl", *_COMPLETE),
    route("server/openai_client", _CHAT, "openai"),
    route("server/claude_code", "/v1/messages", "messages"),
    Change(
        *("server/claude_code", "what is new in the cache is not counted", "dialects/messages.py"),
        *('tokens": new if self.options.creates_cache else 0', 'tokens": 0'),
    ),
    route("server/continue", "/api/generate", "ollama"),
    route("server/open_webui", "/api/tags", "ollama"),
    rl_route("server/slime", "/weights_checker", "sglang"),
    Change(
        *("server/slime", "kept tokens of top_p have another name", "dialects/sglang.py"),
        *('{"top_p_token_ids": _int32', '{"top_p_tokens": _int32'),
    ),
    rl_route("server/areal", "/update_weights_from_distributed", "sglang"),
    rl_route("server/weights_from_tensor", "/update_weights_from_tensor", "sglang"),
    rl_route("server/prime_rl", "/init_broadcaster", "vllm"),
    rl_route("server/pipeline_rl", "/receive_weight_update", "vllm"),
    Change(
        *("weights/stateless_group", "NCCL's id is asked under another key", "../weights/nccl.py"),
        *('"broadcast_from/0/0"', '"broadcast_from/0/1"'),
    ),
    Change(
        *("integrations/trl", "log-probabilities of samples are 0", "../rl/trl.py"),
        *("[[logprob] for logprob in sample.logprobs]", "[[0.0] for _ in sample.logprobs]"),
    ),
    Change("integrations/verl", *_COMPLETE),
)
