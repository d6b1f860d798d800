"""The trainers' routes, put together; without `--enable-rl` their paths say how they are opened."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nano_inference.config import ServerConfig
from nano_inference.server.engine_link import EngineLink
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.rl.context import answered, make_context
from nano_inference.server.rl.facts import questions
from nano_inference.server.rl.paths import ADMIN_PATHS, QUESTIONS, REFUSED_COMMANDS
from nano_inference.server.rl.sglang import refused, sglang_commands, told
from nano_inference.server.rl.vllm import vllm_commands
from nano_inference.server.served import LoadedModel

_ALSO_GET = frozenset({"/flush_cache"})
"""Commands that SGLang takes as a GET, too, and that trainers send so."""


def rl_routes(
    link: EngineLink, config: ServerConfig, policy: GuardPolicy, opened: Callable[[], LoadedModel]
) -> list[Route]:
    """Return the routes. They need a guard around them, which keeps out whoever has no admin key.

    `opened` returns what was loaded, or raises an `ApiError` while nothing is. A field that nobody knows is refused
    here. Raises `ValueError` for a `weights_dir` that is no directory.
    """
    if not config.enable_rl:
        return [_hint(path) for path in sorted(ADMIN_PATHS | QUESTIONS)]
    context = make_context(link, config, policy, opened)
    endpoints = {path: answered(do) for path, do in vllm_commands(context).items()}
    endpoints |= {path: told(do) for path, do in sglang_commands(context).items()}
    endpoints |= {path: told(refused(path)) for path in sorted(REFUSED_COMMANDS)}
    return [
        *(
            Route(path, endpoint, methods=["POST", "GET"] if path in _ALSO_GET else ["POST"])
            for path, endpoint in endpoints.items()
        ),
        *(Route(path, answered(do), methods=["GET"]) for path, do in questions(context).items()),
    ]


def _hint(path: str) -> Route:
    """Return the route of a path that is closed."""

    async def closed(request: Request) -> Response:
        raise ApiError(404, f"no such path: {path}; trainers' routes are opened with --enable-rl")

    return Route(path, closed, methods=["GET", "POST"])
