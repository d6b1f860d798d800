"""The trainer routes. Without `--enable-rl`, those that describe the model and the load are open, and the paths of the
others return an error that names the option.

Commands, which change state, need an admin key. vLLM's names:
vllm/entrypoints/serve/{rlhf,sleep,cache,instrumentator}/api_router.py. SGLang's names:
sglang/srt/entrypoints/http_server.py.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.trainers.context import endpoint_of, make_context
from nano_inference.server.trainers.facts import DESCRIPTIONS, QUERIES
from nano_inference.server.trainers.sglang import SGLANG_COMMANDS, sglang_endpoint_of, unsupported
from nano_inference.server.trainers.vllm import VLLM_COMMANDS

REFUSED_COMMANDS = frozenset(
    {
        *("/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update"),
        *("/get_weights_by_name", "/collective_rpc", "/release_kv_cache_memory"),
        *("/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
"""Commands that trainers send and this server does not support."""
QUESTIONS = frozenset(QUERIES)  # GET paths, which change nothing; an ordinary key is enough

ADMIN_PATHS = frozenset({*VLLM_COMMANDS, *SGLANG_COMMANDS}) | REFUSED_COMMANDS  # all paths that need an admin key
STREAM_PATHS = frozenset({"/update_weights_from_body"})
"""Commands whose body is bytes, and whose fields are in the query."""
_ALSO_GET = frozenset({"/flush_cache", "/weights_checker"})
"""Commands that SGLang also accepts as GET, as some trainers send them."""


def rl_routes(
    link: EngineLink, config: ServerConfig, policy: GuardPolicy, opened: Callable[[], LoadedModel]
) -> list[Route]:
    """Return the routes. They do not check keys: `guard` must be in front of them.

    `opened` returns the loaded model, or raises `ApiError` while it is loading. Raises `ValueError` if
    `config.weights_dir` is not a directory.
    """
    context = make_context(link, config, policy, opened)
    questions = [Route(path, endpoint_of(command, context), methods=["GET"]) for path, command in QUERIES.items()]
    if not config.enable_rl:
        described = [route for route in questions if route.path in DESCRIPTIONS]
        return [*(_hint(path) for path in sorted((ADMIN_PATHS | QUESTIONS) - DESCRIPTIONS)), *described]
    endpoints = {path: endpoint_of(command, context) for path, command in VLLM_COMMANDS.items()}
    endpoints |= {path: sglang_endpoint_of(command, context) for path, command in SGLANG_COMMANDS.items()}
    endpoints |= {path: sglang_endpoint_of(unsupported(path), context) for path in sorted(REFUSED_COMMANDS)}
    return [
        *(
            Route(path, endpoint, methods=["POST", "GET"] if path in _ALSO_GET else ["POST"])
            for path, endpoint in endpoints.items()
        ),
        *questions,
    ]


def _hint(path: str) -> Route:
    async def disabled(request: Request) -> Response:
        raise ApiError(404, f"no such path: {path}; the routes for trainers need --enable-rl")

    return Route(path, disabled, methods=["GET", "POST"])
