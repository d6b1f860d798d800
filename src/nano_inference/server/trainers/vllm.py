"""Trainer routes with vLLM's paths and bodies: vllm/entrypoints/serve/{rlhf,sleep,cache}/api_router.py.

Requests are named by the ids of their replies or by ids that clients chose; vLLM uses `X-Request-Id`. The last routes
are those that prime-rl (prime_rl/inference/vllm/server.py, 559b447) and PipelineRL (pipelinerl/vllm1.py, 58d3934) add,
for weights that their trainers broadcast by vLLM's communicator (`weights.stateless`); with `backend` gloo, an
extension, by torch's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request

from nano_inference.async_engine import DrivenEngine
from nano_inference.server.call import JSON
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.body_stream import BodyStream, weights_in_body
from nano_inference.server.trainers.context import Command, RLContext
from nano_inference.server.trainers.groups import Packed
from nano_inference.server.trainers.schema import (
    GROUP,
    UPDATE_FORMS,
    AbortBody,
    CheckBody,
    EmptyBody,
    FinishUpdateBody,
    FromBodyQuery,
    InitBroadcasterBody,
    InitInfo,
    InitTransferBody,
    LabelBody,
    PauseBody,
    ReceiveUpdateBody,
    ResetBody,
    SleepBody,
    StartUpdateBody,
    UpdateInfo,
    UpdateWeightsBody,
    WakeBody,
)
from nano_inference.types import WeightLabel
from nano_inference.weights.updates import WeightUpdate

BROADCASTER = "prime-rl"  # name of the group that /init_broadcaster joins
_BUCKET_BYTES = 1 << 30  # vLLM's default size of packed broadcasts


async def _pause(context: RLContext, request: Request) -> JSON:
    """vLLM's defaults: mode abort, and the KV cache is cleared."""
    body = await context.read(request, PauseBody)
    mode = "wait" if body.wait_for_inflight_requests else body.mode or "abort"
    if body.wait_for_inflight_requests and body.mode not in (None, "wait"):
        raise ApiError(400, "wait_for_inflight_requests and mode disagree", param="mode")
    clear_cache = body.clear_cache is not False
    num_aborted = await context.control.pause(mode, clear_cache=clear_cache, receive=request.receive)
    return {"status": "paused", "num_aborted": num_aborted, **await context.facts()}


async def _resume(context: RLContext, request: Request) -> JSON:
    await context.read(request, EmptyBody)
    await context.control.resume()
    return {"status": "resumed", **await context.facts()}


async def _abort_requests(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, AbortBody)
    num_aborted = await context.control.abort(body.request_ids)
    return {"status": "ok", "num_aborted": num_aborted, **await context.facts()}


async def _reset_prefix_cache(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, ResetBody)
    freed = await context.control.flush(recompute=bool(body.reset_running_requests))
    return {"success": True, "num_blocks": freed, **await context.facts()}


async def _sleep(context: RLContext, request: Request) -> JSON:
    """vLLM's defaults: level 1, mode abort."""
    body = await context.read(request, SleepBody)
    level = 1 if body.level is None else body.level
    await context.control.sleep(level, body.mode or "abort", request.receive)
    return {"status": "sleeping", "level": level, **await context.facts()}


async def _wake_up(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, WakeBody)
    facts = await context.wake(body.tags or None)
    return {"status": "awake" if not context.control.asleep else "sleeping", **facts}


async def _init_transfer(context: RLContext, request: Request) -> JSON:
    info = (await context.read(request, InitTransferBody)).init_info
    await context.join(info, _packed(info) or None)
    return {"message": "Weight transfer initialized", **await context.facts()}


async def _start_update(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, StartUpdateBody)
    if body.is_checkpoint_format is False:
        text = "is_checkpoint_format=false is not supported: send weights under their Hugging Face names"
        raise ApiError(400, text, param="is_checkpoint_format")
    return {"message": "Weight update started", **await context.facts(await context.updates.start())}


async def _update_weights(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, UpdateWeightsBody)
    directory, field = _directory_of(body)
    is_part = context.updates.is_open or (context.updates.takes_parts and body.weight_dir is None)
    if body.hold:
        return await _hold(context, body, directory, field)
    for name in ("on_running", "partial", "allow_nonfinite"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name}: needs hold=true", param=name)
    if body.update_info is None and not is_part and context.groups.has(BROADCASTER):
        source = context.groups.receive_state_dicts(BROADCASTER)  # `weight_dir` has markers only
        label = _label_of(body)
        info = await context.updates.install(source, label=label, checksum=body.checksum, group=BROADCASTER)
    elif directory is not None and not is_part:
        label, weights = _label_of(body), await context.weights_in(directory, field)
        info = await context.updates.install(weights, label=label, checksum=body.checksum)
    else:
        for name in ("weight_version", "version", "checksum"):
            if getattr(body, name) is not None:
                text = f"{name}: for an update in parts, give it to /finish_weight_update"
                raise ApiError(400, text, param=name)
        context.updates.require_open()
        part, group = body.update_info, None
        if directory is not None:
            source = await context.weights_in(directory, field)
        elif part is None or part.names is None or part.dtype_names is None or part.shapes is None:
            text = "update_info: give names, dtype_names and shapes, or a directory"
            raise ApiError(400, text, param="update_info")
        else:
            group = part.group_name or GROUP
            source = context.groups.receive(
                group, part.names, part.dtype_names, part.shapes, "dtype_names", _packed(part)
            )
        info = await context.updates.add(source, group)
    return {"message": "Weights updated", **await context.facts(info)}


async def _hold(context: RLContext, body: UpdateWeightsBody, directory: str | None, field: str) -> JSON:
    """An extension: gather weights from a directory without installing them."""
    if directory is None:
        raise ApiError(400, "hold: give the weights as a directory, in weight_dir", param="hold")
    update = WeightUpdate(
        weights=await context.weights_in(directory, field),
        label=_label_of(body),
        on_running=body.on_running or "keep",
        partial=bool(body.partial),
        allow_nonfinite=bool(body.allow_nonfinite),
        checksum=body.checksum,
    )
    held = await context.updates.hold(update)
    return {"message": "Weights held", "held_version": held, **await context.facts()}


async def _commit_update(context: RLContext, request: Request) -> JSON:
    """An extension: several servers gather the same weights, and install them only if all have succeeded."""
    await context.read(request, EmptyBody)
    info = await context.updates.commit()
    return {"message": "Weights updated", **await context.facts(info)}


async def _finish_update(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, FinishUpdateBody)
    info = await context.updates.finish(body.weight_version, body.checksum)
    return {"message": "Weight update finished", **await context.facts(info)}


async def _abort_update(context: RLContext, request: Request) -> JSON:
    """An extension: an open update, or one that waits for a dead trainer, blocks all others."""
    await context.read(request, EmptyBody)
    return await context.abort_update()


async def _shut_down_transfer(context: RLContext, request: Request) -> JSON:
    await context.read(request, EmptyBody)
    if context.updates.is_open:
        await context.updates.abort()
    num_groups = context.groups.leave_all()
    return {"message": "Weight transfer shut down", "num_groups": num_groups, **await context.facts()}


def _label_of(body: UpdateWeightsBody) -> WeightLabel | None:
    """Return the label of the new weights. Raises `ApiError` 400 if `version` and `weight_version` differ."""
    if body.version is not None and body.weight_version not in (None, body.version):
        raise ApiError(400, "version and weight_version disagree", param="version")
    return body.version if body.weight_version is None else body.weight_version


def _directory_of(body: UpdateWeightsBody) -> tuple[str | None, str]:
    """Return (directory, its field), or (None, ""). Raises `ApiError` for two sources or unsupported fields."""
    info = body.update_info
    extra = {**(body.model_extra or {}), **((info.model_extra or {}) if info else {})}
    for name in UPDATE_FORMS:
        if extra.get(name):
            raise ApiError(501, f"{name} is not supported: broadcast plain tensors or name a directory", param=name)
    paths = {"weight_dir": body.weight_dir}
    if info is not None:
        paths |= {"update_info.weight_dir": info.weight_dir, "update_info.path": info.path}
    found = [(path, field) for field, path in paths.items() if path is not None]
    if len(found) > 1 or (found and info is not None and info.names is not None):
        raise ApiError(400, "update_info: give either names, dtype_names and shapes, or one directory")
    return found[0] if found else (None, "")


def _packed(info: InitInfo | UpdateInfo) -> Packed:
    """Return the size of packed broadcasts, False for single ones, None if the trainer does not say."""
    if info.packed is None:
        return None
    return (info.packed_buffer_size_bytes or _BUCKET_BYTES) if info.packed else False


async def _update_from_body(context: RLContext, request: Request) -> JSON:
    """An extension: the body is a safetensors file, which is read while it arrives."""
    query = context.read_query(request, FromBodyQuery)
    stream = BodyStream()
    receiving = asyncio.create_task(stream.receive_all(request.receive))
    try:
        info = await context.updates.install(
            weights_in_body(stream, context.opened().engine.weight_shapes()),
            label=query.weight_version,
            checksum=query.checksum,
            on_running="abort" if query.abort_all_requests else "keep",
            partial=bool(query.partial),
        )
    finally:
        stream.end("the update has ended")
        receiving.cancel()
    return {"message": "Weights updated", **await context.facts(info)}


async def _set_label(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, LabelBody)

    def set_label(engine: DrivenEngine) -> None:
        engine.label_weights(body.new_version)

    if body.abort_all_requests:
        await context.link.end_requests(first=set_label)
    else:
        await context.link.engine.call(set_label)
    facts = await context.facts()
    text = f"Weight version updated to {facts['weight_version']}"
    return {"success": True, "message": text, "new_version": body.new_version, **facts}


async def _check_weights(context: RLContext, request: Request) -> JSON:
    """Blocks steps: the engine thread reads all weights."""
    body = await context.read(request, CheckBody)
    if body.action not in ("checksum", "compare"):
        raise ApiError(400, f"action must be checksum or compare, got {body.action!r}", param="action")
    if body.action == "compare" and body.checksum is None:
        raise ApiError(400, "checksum: required for the action compare", param="checksum")
    checksum = await context.link.engine.call(lambda engine: engine.weights_checksum())
    reply: JSON = {"success": True, "message": body.action, "checksum": checksum}
    if body.action == "compare":
        reply |= {"success": checksum == body.checksum, "equal": checksum == body.checksum}
    return {**reply, **await context.facts()}


# ---- prime-rl and PipelineRL -----------------------------------------------------------------------------------------


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


async def _receive_update(context: RLContext, request: Request) -> JSON:
    """PipelineRL's update: one broadcast per tensor. Requests continue after it, and weights not named stay."""
    body = await context.read(request, ReceiveUpdateBody)
    names = [one.name for one in body.parameters_info]
    dtypes, shapes = ([getattr(one, field) for one in body.parameters_info] for field in ("dtype", "shape"))
    source = context.groups.receive(body.group_name, names, dtypes, shapes, "parameters_info", False)
    info = await context.updates.install(source, label=body.version, partial=True, group=body.group_name)
    return {"status": "ok", **await context.facts(info)}


VLLM_COMMANDS: Mapping[str, Command] = {
    "/init_broadcaster": _init_broadcaster,
    "/receive_weight_update": _receive_update,
    "/pause": _pause,
    "/resume": _resume,
    "/abort_requests": _abort_requests,
    "/reset_prefix_cache": _reset_prefix_cache,
    "/sleep": _sleep,
    "/wake_up": _wake_up,
    "/init_weight_transfer_engine": _init_transfer,
    "/start_weight_update": _start_update,
    "/update_weights": _update_weights,
    "/update_weights_from_body": _update_from_body,
    "/finish_weight_update": _finish_update,
    "/commit_weight_update": _commit_update,
    "/abort_weight_update": _abort_update,
    "/shutdown_weight_transfer_engine": _shut_down_transfer,
    "/update_weight_version": _set_label,
    "/weight_checker": _check_weights,
}
