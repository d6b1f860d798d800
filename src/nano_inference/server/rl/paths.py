"""Paths of the trainer routes. Those that change state need an admin key.

vLLM's names: vllm/entrypoints/serve/{rlhf,sleep,cache,instrumentator}/api_router.py. SGLang's names:
sglang/srt/entrypoints/http_server.py.
"""

from __future__ import annotations

from nano_inference.server.rl.facts import QUERIES
from nano_inference.server.rl.sglang import SGLANG_COMMANDS
from nano_inference.server.rl.vllm import VLLM_COMMANDS

REFUSED_COMMANDS = frozenset(
    {
        *("/update_weights_from_tensor", "/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update"),
        *("/get_weights_by_name", "/weights_checker", "/collective_rpc", "/release_kv_cache_memory"),
        *("/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
"""Commands that trainers send and this server does not support."""
QUESTIONS = frozenset(QUERIES)
"""GET paths, which change nothing; an ordinary key is enough."""

ADMIN_PATHS = frozenset({*VLLM_COMMANDS, *SGLANG_COMMANDS}) | REFUSED_COMMANDS
"""All paths that need an admin key."""
