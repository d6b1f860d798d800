"""Paths of the trainer routes. Those that change state need an admin key.

vLLM's names: vllm/entrypoints/serve/{rlhf,sleep,cache,instrumentator}/api_router.py. SGLang's names:
sglang/srt/entrypoints/http_server.py.
"""

from __future__ import annotations

VLLM_COMMANDS = frozenset(
    {
        *("/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/update_weight_version", "/weight_checker", "/shutdown_weight_transfer_engine"),
        "/abort_weight_update",  # an extension
    }
)
SGLANG_COMMANDS = frozenset(
    {
        *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"),
        *("/update_weights_from_disk", "/init_weights_update_group", "/update_weights_from_distributed"),
        *("/destroy_weights_update_group", "/release_memory_occupation", "/resume_memory_occupation"),
    }
)
REFUSED_COMMANDS = frozenset(
    {
        *("/update_weights_from_tensor", "/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update"),
        *("/get_weights_by_name", "/weights_checker", "/collective_rpc", "/release_kv_cache_memory"),
        *("/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
"""Commands that trainers send and this server does not support."""
QUESTIONS = frozenset(
    {
        *("/is_paused", "/is_sleeping", "/weight_info", "/server_info", "/get_world_size"),
        *("/get_model_info", "/model_info", "/get_server_info", "/v1/loads"),
    }
)
"""GET paths, which change nothing; an ordinary key is enough."""

ADMIN_PATHS = VLLM_COMMANDS | SGLANG_COMMANDS | REFUSED_COMMANDS
"""All paths that need an admin key."""
