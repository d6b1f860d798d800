"""Routes that prime-rl and PipelineRL add to vLLM's, for weights that their trainers broadcast.

Sources: prime_rl/inference/vllm/server.py (559b447), pipelinerl/vllm1.py (58d3934). Both trainers use vLLM's
communicator (`weights.stateless`); with `backend` gloo, an extension, torch's.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from nano_inference.server.call import JSON
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.context import Command, RLContext
from nano_inference.server.trainers.schema import InitBroadcasterBody, InitInfo, ReceiveUpdateBody
from nano_inference.types import WeightInfo, WeightLabel

BROADCASTER = "prime-rl"  # name of the group that /init_broadcaster joins


async def _init_broadcaster(context: RLContext, request: Request) -> JSON:
    """Ranks count inference servers from 0; the trainer is added in front."""
    body = await context.read(request, InitBroadcasterBody)
    if body.quantize_in_weight_transfer:
        text = "quantize_in_weight_transfer: weights in the layout of vLLM's kernels are not supported; set it to false"
        raise ApiError(400, text, param="quantize_in_weight_transfer", code="not_supported")
    if body.session_id not in (None, "default"):
        text = "session_id: transfers by NIXL are not supported; configure the broadcast as nccl or filesystem"
        raise ApiError(400, text, param="session_id", code="not_supported")
    if body.rank_offset >= body.inference_world_size:
        text = f"rank_offset must be below inference_world_size, got {body.rank_offset} of {body.inference_world_size}"
        raise ApiError(400, text, param="rank_offset")
    info = InitInfo(
        master_address=body.host,
        master_port=body.port,
        rank_offset=body.rank_offset + 1,
        world_size=body.inference_world_size + 1,
        group_name=BROADCASTER,
        backend=body.backend or "nccl",
    )
    await context.join(info)
    return {"status": "ok", **await context.facts()}


async def install_broadcast(context: RLContext, label: WeightLabel | None, checksum: str | None) -> WeightInfo:
    """Install the weights that prime-rl's trainer broadcasts next; return their version."""
    source = context.groups.receive_state_dicts(BROADCASTER)
    return await context.updates.install(source, label=label, checksum=checksum, group=BROADCASTER)


async def _receive_update(context: RLContext, request: Request) -> JSON:
    """PipelineRL's update: one broadcast per tensor. Requests continue after it, and weights not named stay."""
    body = await context.read(request, ReceiveUpdateBody)
    names = [one.name for one in body.parameters_info]
    dtypes, shapes = ([getattr(one, field) for one in body.parameters_info] for field in ("dtype", "shape"))
    source = context.groups.receive(body.group_name, names, dtypes, shapes, "parameters_info", False)
    info = await context.updates.install(source, label=body.version, partial=True, group=body.group_name)
    return {"status": "ok", **await context.facts(info)}


PRIME_RL_COMMANDS: Mapping[str, Command] = {
    "/init_broadcaster": _init_broadcaster,
    "/receive_weight_update": _receive_update,
}
