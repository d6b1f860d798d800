"""Trainer routes with vLLM's paths and bodies: vllm/entrypoints/serve/{rlhf,sleep,cache}/api_router.py.

Requests are named by the ids of their replies or by ids that clients chose; vLLM uses `X-Request-Id`. The last routes
are those that prime-rl (prime_rl/inference/vllm/server.py, 559b447) and PipelineRL (pipelinerl/vllm1.py, 58d3934) add,
for weights that their trainers broadcast by vLLM's communicator (`weights.nccl`); with `backend` gloo, an
extension, by torch's.
"""

from __future__ import annotations

from starlette.requests import Request

from nano_inference.async_engine import DrivenEngine
from nano_inference.server.errors import ApiError, refused
from nano_inference.server.generation import JSON
from nano_inference.server.trainers.body_stream import BodyStream
from nano_inference.server.trainers.context import Command, Reply, RLContext
from nano_inference.server.trainers.places import weights_at
from nano_inference.server.trainers.schema import (
    GROUP,
    AbortBody,
    CheckBody,
    CommitBody,
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
    UpdateWeightsBody,
    WakeBody,
)
from nano_inference.types import WeightInfo
from nano_inference.weights.updates import WeightUpdate

BROADCASTER = "prime-rl"  # name of the group that /init_broadcaster joins


async def _pause(rl: RLContext, body: PauseBody, request: Request) -> JSON:
    """vLLM's defaults: mode abort, and the KV cache is cleared."""
    mode = "wait" if body.wait_for_inflight_requests else body.mode or "abort"
    if body.wait_for_inflight_requests and body.mode not in (None, "wait"):
        raise ApiError(400, "wait_for_inflight_requests and mode disagree", param="mode")
    clear_cache = body.clear_cache is not False
    return {"num_aborted": await rl.control.pause(mode, clear_cache=clear_cache, receive=request.receive)}


async def _resume(rl: RLContext, body: EmptyBody, _: Request) -> None:
    await rl.control.resume()


async def _abort_requests(rl: RLContext, body: AbortBody, _: Request) -> JSON:
    return {"num_aborted": await rl.link.end_requests(body.request_ids)}


async def _reset_prefix_cache(rl: RLContext, body: ResetBody, _: Request) -> JSON:
    return {"num_blocks": await rl.control.flush(recompute=bool(body.reset_running_requests))}


async def _sleep(rl: RLContext, body: SleepBody, request: Request) -> JSON:
    """vLLM's defaults: level 1, mode abort."""
    level = 1 if body.level is None else body.level
    await rl.control.sleep(level, body.mode or "abort", request.receive)
    return {"level": level}


async def _wake_up(rl: RLContext, body: WakeBody, _: Request) -> JSON:
    hint = await rl.wake(body.tags or None)
    return {"status": "sleeping" if rl.control.asleep else "awake", **hint}


async def _init_transfer(rl: RLContext, body: InitTransferBody, _: Request) -> None:
    await rl.join(body.init_info, body.init_info.bucket_bytes or None)


async def _start_update(rl: RLContext, body: StartUpdateBody, _: Request) -> None:
    if body.is_checkpoint_format is False:
        text = "is_checkpoint_format=false is not supported: send weights under their Hugging Face names"
        raise ApiError(400, text, param="is_checkpoint_format")
    await rl.updates.start()


async def _update_weights(rl: RLContext, body: UpdateWeightsBody, _: Request) -> Reply:
    directory, field = body.directory()
    is_part = rl.updates.is_open or (rl.updates.takes_parts and body.weight_dir is None)
    if body.hold:
        if directory is None:
            raise refused("hold", "give the weights as a directory, in weight_dir")
        return await rl.install(body.update(await weights_at(rl.root, directory, field)))
    refuse_unheld(body)
    if body.update_info is None and not is_part and rl.groups.has(BROADCASTER):
        # `weight_dir` has markers only.
        with rl.groups.receive_state_dicts(BROADCASTER) as source:
            return await rl.install(body.update(source))
    if directory is not None and not is_part:
        return await rl.install(body.update(await weights_at(rl.root, directory, field)))
    in_parts = "for an update in parts, give it to /finish_weight_update"
    _refuse_given(body, ("weight_version", "version", "checksum"), in_parts)
    opened, part = rl.updates.require_open(), body.update_info
    if directory is not None:
        await opened.add(await weights_at(rl.root, directory, field))
    elif part is None or part.names is None or part.dtype_names is None or part.shapes is None:
        raise refused("update_info", "give names, dtype_names and shapes, or a directory")
    else:
        tensors = part.names, part.dtype_names, part.shapes
        with rl.groups.receive(part.group_name or GROUP, *tensors, "dtype_names", part.bucket_bytes) as source:
            await opened.add(source)
    return None


def refuse_unheld(body: UpdateWeightsBody) -> None:
    """Raise `ApiError` for an option of held updates without `hold`."""
    if not body.hold:
        _refuse_given(body, ("on_running", "partial", "allow_nonfinite"), "needs hold=true")


def _refuse_given(body: UpdateWeightsBody, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(body, name) is not None:
            raise refused(name, why)


async def _update_from_body(rl: RLContext, body: FromBodyQuery, request: Request) -> Reply:
    """An extension: the body is a safetensors file, which is read while it arrives."""
    stream = BodyStream(request.receive)
    try:
        weights = stream.weights(rl.opened().engine.weight_shapes())
        return await rl.install(body.update(weights, partial=bool(body.partial), hold=bool(body.hold)))
    finally:
        stream.end()


async def _finish_update(rl: RLContext, body: FinishUpdateBody, _: Request) -> WeightInfo:
    return await rl.updates.finish(body.weight_version, body.checksum)


async def _commit_update(rl: RLContext, body: CommitBody, _: Request) -> WeightInfo:
    """An extension: several servers gather the same weights, and install them only if all have succeeded."""
    return await rl.updates.commit(body.version)


async def _abort_update(rl: RLContext, body: EmptyBody, _: Request) -> JSON:
    """An extension: an open update, or one that waits for a dead trainer, blocks all others.

    The groups that it receives from are left, because their ranks are out of step.
    """
    names = rl.groups.receiving()
    if not await rl.updates.abort():
        return {"aborted": False}
    return {"aborted": True, "closed_groups": [name for name in names if rl.groups.leave(name)]}


async def _shut_down_transfer(rl: RLContext, body: EmptyBody, _: Request) -> JSON:
    if rl.updates.is_open:
        await rl.updates.abort()
    return {"num_groups": rl.groups.leave_all()}


async def _set_label(rl: RLContext, body: LabelBody, _: Request) -> JSON:
    def set_label(engine: DrivenEngine) -> None:
        engine.label_weights(body.new_version)

    if body.abort_all_requests:
        await rl.link.end_requests(first=set_label)
    else:
        await rl.link.engine.call(set_label)
    return {"message": f"Weight version updated to {body.new_version}", "new_version": body.new_version}


async def _check_weights(rl: RLContext, body: CheckBody, _: Request) -> JSON:
    if body.action not in ("checksum", "compare"):
        raise ApiError(400, f"action must be checksum or compare, got {body.action!r}", param="action")
    if body.action == "compare" and body.checksum is None:
        raise refused("checksum", "required for the action compare")
    checksum = await rl.checksum()
    is_equal = checksum == body.checksum
    compared = {"success": is_equal, "equal": is_equal} if body.action == "compare" else {}
    return {"message": body.action, "checksum": checksum, **compared}


# ---- prime-rl and PipelineRL -----------------------------------------------------------------------------------------


async def _init_broadcaster(rl: RLContext, body: InitBroadcasterBody, _: Request) -> None:
    """Ranks count inference servers from 0; the trainer is added in front."""
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
    await rl.join(info)


async def _receive_update(rl: RLContext, body: ReceiveUpdateBody, _: Request) -> Reply:
    """PipelineRL's update: one broadcast per tensor. Requests continue after it, and weights not named stay."""
    names, dtypes, shapes = zip(*((one.name, one.dtype, one.shape) for one in body.parameters_info), strict=True)
    with rl.groups.receive(body.group_name, names, dtypes, shapes, "parameters_info", False) as source:
        return await rl.install(WeightUpdate(weights=source, label=body.version, partial=True))


VLLM_COMMANDS = (
    Command("/pause", PauseBody, _pause, {"status": "paused"}),
    Command("/resume", EmptyBody, _resume, {"status": "resumed"}),
    Command("/abort_requests", AbortBody, _abort_requests, {"status": "ok"}),
    Command("/reset_prefix_cache", ResetBody, _reset_prefix_cache, {"success": True}),
    Command("/sleep", SleepBody, _sleep, {"status": "sleeping"}),
    Command("/wake_up", WakeBody, _wake_up, {}),
    Command(
        "/init_weight_transfer_engine", InitTransferBody, _init_transfer, {"message": "Weight transfer initialized"}
    ),
    Command("/start_weight_update", StartUpdateBody, _start_update, {"message": "Weight update started"}),
    Command("/update_weights", UpdateWeightsBody, _update_weights, {"message": "Weights updated"}),
    Command(
        "/update_weights_from_body", FromBodyQuery, _update_from_body, {"message": "Weights updated"}, takes_stream=True
    ),
    Command("/finish_weight_update", FinishUpdateBody, _finish_update, {"message": "Weight update finished"}),
    Command("/commit_weight_update", CommitBody, _commit_update, {"message": "Weights updated"}),
    Command("/abort_weight_update", EmptyBody, _abort_update, {}),
    Command(
        "/shutdown_weight_transfer_engine", EmptyBody, _shut_down_transfer, {"message": "Weight transfer shut down"}
    ),
    Command("/update_weight_version", LabelBody, _set_label, {"success": True}),
    Command("/weight_checker", CheckBody, _check_weights, {"success": True}),
    Command("/init_broadcaster", InitBroadcasterBody, _init_broadcaster, {"status": "ok"}),
    Command("/receive_weight_update", ReceiveUpdateBody, _receive_update, {"status": "ok"}),
)
