"""GET routes for trainers and routers: versions, states, load, and the configuration in vLLM's and SGLang's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request

import nano_inference
from nano_inference.server.errors import ApiError
from nano_inference.server.generation import JSON
from nano_inference.server.trainers.context import RLContext


async def _is_paused(context: RLContext, request: Request) -> JSON:
    """False while a pause still waits for running requests."""
    return {"is_paused": await context.link.engine.call(lambda engine: engine.is_paused), **await context.facts()}


async def _is_sleeping(context: RLContext, request: Request) -> JSON:
    return {"is_sleeping": bool(context.control.asleep), **await context.facts()}


async def _weight_info(context: RLContext, request: Request) -> JSON:
    info = await context.link.engine.call(lambda engine: engine.weight_info())
    return {**await context.facts(info), "label": info.label, "update": info.update}


async def _world_size(context: RLContext, request: Request) -> JSON:
    return {"world_size": 1}


async def _loads(context: RLContext, request: Request) -> JSON:
    """SGLang's load report with one entry, because there is one engine."""
    await (await context.link.engine.watch(lambda _: True))  # wait for a turn, so that earlier requests are counted
    stats, limits = context.link.last_stats, context.opened().model.limits
    running, waiting = (stats.num_running, stats.num_waiting) if stats else (0, 0)
    num_slots = limits.num_blocks * limits.block_size
    used = num_slots - (stats.num_free_blocks * limits.block_size if stats else num_slots)
    one = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": num_slots,
        "token_usage": used / num_slots,
    }
    program = nano_inference.__version__
    return {"program_version": program, "dp_rank_count": 1, "loads": [one], **await context.facts()}


async def _load(context: RLContext, request: Request) -> list[JSON]:
    """The load report of older versions of SGLang."""
    one = (await _loads(context, request))["loads"][0]
    names = {"num_reqs": "num_total_reqs", "num_waiting_reqs": "num_waiting_reqs", "num_tokens": "num_used_tokens"}
    return [{"rid": None, "dp_rank": 0, **{name: one[source] for name, source in names.items()}}]


async def _model_info(context: RLContext, request: Request) -> JSON:
    model = context.opened().model
    return {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "max_model_len": model.limits.max_model_len,
        **await context.facts(),
    }


async def _server_info(context: RLContext, request: Request) -> JSON:
    form = request.query_params.get("config_format", "json")
    if form != "json":
        raise ApiError(400, f"config_format must be json, got {form[:64]!r}", param="config_format")
    model, limits = context.opened().model, context.opened().model.limits
    engine = context.opened().engine.config
    lora = {"max_lora_rank": engine.max_adapter_rank, "max_loras": engine.max_adapters}
    dtype = await context.link.engine.call(lambda engine: engine.weights_dtype())
    return {
        "vllm_config": {  # the parts that trainers read
            "model_config": {
                "model": model.name,
                "served_model_name": model.name,
                "dtype": f"torch.{dtype}",
                "max_model_len": limits.max_model_len,
                "logprobs_mode": f"{context.config.logprobs_mode}_logprobs",
                "max_logprobs": context.config.max_logprobs,
            },
            "weight_transfer_config": {"backend": context.backend},
            "lora_config": lora if context.config.enable_lora else None,
            "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
            "cache_config": {"block_size": limits.block_size, "num_gpu_blocks": limits.num_blocks},
        },
        "model_path": model.name,
        "served_model_name": model.name,
        "tp_size": 1,
        "dp_size": 1,
        "max_total_num_tokens": limits.num_blocks * limits.block_size,
        "context_length": limits.max_model_len,
        "program_version": nano_inference.__version__,
        **await context.facts(),
    }


QUERIES: Mapping[str, Callable[[RLContext, Request], Awaitable[JSON | list[JSON]]]] = {
    "/is_paused": _is_paused,
    "/is_sleeping": _is_sleeping,
    "/weight_info": _weight_info,
    "/get_world_size": _world_size,
    "/v1/loads": _loads,
    "/get_load": _load,
    "/get_weight_version": lambda context, _: context.facts(),
    "/weight_version": lambda context, _: context.facts(),
    "/get_model_info": _model_info,
    "/model_info": _model_info,
    "/server_info": _server_info,
    "/get_server_info": _server_info,
}
DESCRIPTIONS = frozenset(
    {
        *("/v1/loads", "/get_load", "/get_weight_version", "/weight_version"),
        *("/get_model_info", "/model_info", "/server_info", "/get_server_info"),
    }
)
"""SGLang's routes about the model and the load, which its clients and routers use without a trainer."""
