"""The trainer routes. Without `--enable-rl`, those that describe the model and the load are open, and the paths of the
others return an error that names the option; those of adapters need `--enable-lora`.

Commands, which change state, need an admin key. vLLM's names:
vllm/entrypoints/serve/{rlhf,sleep,cache,instrumentator}/api_router.py. SGLang's names:
sglang/srt/entrypoints/http_server.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.trainers.adapters import SGLANG_LORA_COMMANDS, VLLM_LORA_COMMANDS
from nano_inference.server.trainers.context import CLIENT_ERRORS, RLContext, client_error, json_response
from nano_inference.server.trainers.control import Control
from nano_inference.server.trainers.facts import DESCRIPTIONS, QUERIES
from nano_inference.server.trainers.groups import Groups
from nano_inference.server.trainers.places import weights_root
from nano_inference.server.trainers.sglang import SGLANG_COMMANDS
from nano_inference.server.trainers.updates import Updates
from nano_inference.server.trainers.vllm import VLLM_COMMANDS
from nano_inference.types import AdapterInfo

REFUSED_COMMANDS = frozenset(
    {
        *("/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update"),
        *("/get_weights_by_name", "/collective_rpc", "/release_kv_cache_memory"),
    }
)
"""Commands that trainers send and this server does not support."""
QUESTIONS = frozenset(QUERIES)  # GET paths, which change nothing; an ordinary key is enough
LORA_PATHS = frozenset(one.path for one in (*VLLM_LORA_COMMANDS, *SGLANG_LORA_COMMANDS))
ADMIN_PATHS = frozenset(one.path for one in (*VLLM_COMMANDS, *SGLANG_COMMANDS)) | LORA_PATHS | REFUSED_COMMANDS
"""All paths that need an admin key."""
STREAM_PATHS = frozenset(one.path for one in VLLM_COMMANDS if one.takes_stream)
Endpoint = Callable[[Request], Awaitable[Response]]


def rl_routes(
    link: EngineLink,
    config: ServerConfig,
    policy: GuardPolicy,
    opened: Callable[[], LoadedModel],
    set_adapters: Callable[[Sequence[AdapterInfo]], None],
) -> list[Route]:
    """Return the routes. They do not check keys: `guard` must be in front of them.

    `opened` returns the loaded model, or raises `ApiError` while it is loading; `set_adapters` changes its adapters.
    Raises `ValueError` if `config.weights_dir` is not a directory.
    """

    async def serve_adapters() -> None:
        set_adapters(await link.engine.adapters())

    context = RLContext(
        config=config,
        policy=policy,
        link=link,
        opened=opened,
        root=weights_root(config.weights_dir),
        control=Control(link),
        updates=Updates(link, config.weight_timeout),
        groups=Groups(config.weight_timeout, lambda: opened().engine.weight_shapes()),
        serve_adapters=serve_adapters,
    )
    is_open = QUESTIONS if config.enable_rl else DESCRIPTIONS
    routes = [Route(path, partial(_answer, path, context), methods=["GET"]) for path in QUERIES if path in is_open]
    vllms = (*(VLLM_COMMANDS if config.enable_rl else ()), *(VLLM_LORA_COMMANDS if config.enable_lora else ()))
    sglangs = (*(SGLANG_COMMANDS if config.enable_rl else ()), *(SGLANG_LORA_COMMANDS if config.enable_lora else ()))
    routes += [Route(one.path, partial(one.run, context), methods=one.methods) for one in vllms]
    routes += [Route(one.path, _sglangs(partial(one.run, context)), methods=one.methods) for one in sglangs]
    if not config.enable_lora:
        routes += [_refused(path, 404, _NEEDS_LORA, ("GET", "POST")) for path in sorted(LORA_PATHS)]
    if not config.enable_rl:
        closed = sorted((ADMIN_PATHS | QUESTIONS) - DESCRIPTIONS - LORA_PATHS)
        return [*routes, *(_refused(path, 404, _NEEDS_RL, ("GET", "POST")) for path in closed)]
    return [*routes, *(_refused(path, 501, _UNSUPPORTED, ("POST",)) for path in sorted(REFUSED_COMMANDS))]


_NEEDS_RL = "no such path: {}; the routes for trainers need --enable-rl"
_NEEDS_LORA = "no such path: {}; the routes for adapters need --enable-lora"
_UNSUPPORTED = "{} is not supported by this server"


async def _answer(path: str, context: RLContext, request: Request) -> Response:
    try:
        return json_response(await QUERIES[path](context, request))
    except CLIENT_ERRORS as error:
        raise client_error(error) from None


def _sglangs(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint whose error replies have SGLang's `success` and `message` next to the error object."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ApiError as error:
            return sglangs_error(request.scope, error)

    return answer


def sglangs_error(scope: Scope, error: ApiError) -> Response:
    """Return an error reply with SGLang's `success` and `message`, and note the error for the access log."""
    scope["state"]["log_fields"] = {"error": error}
    body = error.to_dict()
    failed = {"success": False, "message": body["error"]["message"], **body}
    return json_response(failed, error.status, error.headers)


def _refused(path: str, status: int, text: str, methods: tuple[str, ...]) -> Route:
    async def refuse(request: Request) -> Response:
        raise ApiError(status, text.format(path), code="not_supported" if status == 501 else None)

    return Route(path, _sglangs(refuse) if status == 501 else refuse, methods=methods)
