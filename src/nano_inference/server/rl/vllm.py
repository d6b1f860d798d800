"""The trainers' routes in vLLM's words: vllm/entrypoints/serve/{rlhf,sleep,cache}/api_router.py, and prime-rl's one.

`X-Request-Id` names requests there; here they have the ids of their replies, or those that clients gave them.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from nano_inference.server.errors import ApiError
from nano_inference.server.rl.context import JSON, Do, RLContext
from nano_inference.server.rl.feed import Source
from nano_inference.server.rl.schema import (
    GROUP,
    UPDATE_FORMS,
    AbortBody,
    CheckBody,
    FinishUpdateBody,
    InitTransferBody,
    LabelBody,
    Nothing,
    PauseBody,
    ResetBody,
    SleepBody,
    StartUpdateBody,
    UpdateInfo,
    UpdateWeightsBody,
    WakeBody,
)
from nano_inference.types import WeightLabel

_PACKED = "packed is not supported: broadcast each tensor for itself, in the order of names"


def vllm_commands(context: RLContext) -> Mapping[str, Do]:
    """Return what each path does."""
    return {
        **_flow(context),
        **_memory(context),
        **_transfer(context),
        **_versions(context),
    }


def _flow(context: RLContext) -> dict[str, Do]:
    async def pause(request: Request) -> JSON:
        """vLLM's defaults: abort, and no K/V is kept."""
        body = await context.read(request, PauseBody)
        mode = "wait" if body.wait_for_inflight_requests else body.mode or "abort"
        if body.wait_for_inflight_requests and body.mode not in (None, "wait"):
            raise ApiError(400, "wait_for_inflight_requests and mode disagree", param="mode")
        clear_cache = body.clear_cache is not False
        ended = await context.control.pause(mode, clear_cache=clear_cache, receive=request.receive)
        return {"status": "paused", "num_aborted": ended, **await context.facts()}

    async def resume(request: Request) -> JSON:
        await context.read(request, Nothing)
        await context.control.resume()
        return {"status": "resumed", **await context.facts()}

    async def abort(request: Request) -> JSON:
        body = await context.read(request, AbortBody)
        ended = await context.control.abort(body.request_ids)
        return {"status": "ok", "num_aborted": ended, **await context.facts()}

    async def reset(request: Request) -> JSON:
        body = await context.read(request, ResetBody)
        freed = await context.control.flush(recompute=bool(body.reset_running_requests))
        return {"success": True, "num_blocks": freed, **await context.facts()}

    return {"/pause": pause, "/resume": resume, "/abort_requests": abort, "/reset_prefix_cache": reset}


def _memory(context: RLContext) -> dict[str, Do]:
    async def sleep(request: Request) -> JSON:
        """vLLM's defaults: level 1, and what runs is aborted."""
        body = await context.read(request, SleepBody)
        level = 1 if body.level is None else body.level
        await context.control.sleep(level, body.mode or "abort", request.receive)
        return {"status": "sleeping", "level": level, **await context.facts()}

    async def wake(request: Request) -> JSON:
        body = await context.read(request, WakeBody)
        facts = await context.wake(body.tags or None)
        return {"status": "awake" if not context.control.asleep else "sleeping", **facts}

    return {"/sleep": sleep, "/wake_up": wake}


def _transfer(context: RLContext) -> dict[str, Do]:
    async def init(request: Request) -> JSON:
        info = (await context.read(request, InitTransferBody)).init_info
        if info.packed:
            raise ApiError(400, f"init_info.{_PACKED}", param="init_info.packed")
        await context.join(info)
        return {"message": "Weight transfer initialized", **await context.facts()}

    async def start(request: Request) -> JSON:
        body = await context.read(request, StartUpdateBody)
        if body.is_checkpoint_format is False:
            text = "is_checkpoint_format=false is not supported: weights come under their Hugging Face names"
            raise ApiError(400, text, param="is_checkpoint_format")
        return {"message": "Weight update started", **await context.facts(await context.updates.start())}

    async def update(request: Request) -> JSON:
        body = await context.read(request, UpdateWeightsBody)
        directory, field = _directory_of(body)
        is_part = context.updates.is_open or (context.updates.takes_parts and body.weight_dir is None)
        if directory is not None and not is_part:
            info = await context.install_directory(directory, field, label=_label_of(body), checksum=body.checksum)
        else:
            _require_unnamed(body)
            source = await _source_of(context, body.update_info, directory, field)
            group = None if directory is not None or body.update_info is None else body.update_info.group_name or GROUP
            info = await context.updates.add(source, group)
        return {"message": "Weights updated", **await context.facts(info)}

    async def finish(request: Request) -> JSON:
        body = await context.read(request, FinishUpdateBody)
        info = await context.updates.finish(body.weight_version, body.checksum)
        return {"message": "Weight update finished", **await context.facts(info)}

    async def abort(request: Request) -> JSON:
        """Ours: an update that was left open, or waits for a trainer that has gone, is in everybody's way."""
        await context.read(request, Nothing)
        return await context.abort_update()

    async def shut_down(request: Request) -> JSON:
        await context.read(request, Nothing)
        if context.updates.is_open:
            await context.updates.abort()
        left = context.groups.leave_all()
        return {"message": "Weight transfer shut down", "num_groups": left, **await context.facts()}

    return {
        "/init_weight_transfer_engine": init,
        "/start_weight_update": start,
        "/update_weights": update,
        "/finish_weight_update": finish,
        "/abort_weight_update": abort,
        "/shutdown_weight_transfer_engine": shut_down,
    }


def _label_of(body: UpdateWeightsBody) -> WeightLabel | None:
    """Return the name of what comes. Raises `ApiError` 400 for two that differ."""
    if body.version is not None and body.weight_version not in (None, body.version):
        raise ApiError(400, "version and weight_version disagree", param="version")
    return body.version if body.weight_version is None else body.weight_version


def _require_unnamed(body: UpdateWeightsBody) -> None:
    """Refuse what can only be said of a whole update."""
    for name in ("weight_version", "version", "checksum"):
        if getattr(body, name) is not None:
            text = f"{name}: an update in parts is named and checked by /finish_weight_update"
            raise ApiError(400, text, param=name)


def _directory_of(body: UpdateWeightsBody) -> tuple[str | None, str]:
    """Return the directory that an update names, if it does, and the field; refuse two, and what is not done here."""
    info = body.update_info
    extra = {**(body.model_extra or {}), **((info.model_extra or {}) if info else {})}
    for name in UPDATE_FORMS:
        if extra.get(name):
            raise ApiError(501, f"{name} is not supported: broadcast plain tensors, or name a directory", param=name)
    if info is not None and info.packed:
        raise ApiError(400, f"update_info.{_PACKED}", param="update_info.packed")
    named = {"weight_dir": body.weight_dir}
    if info is not None:
        named |= {"update_info.weight_dir": info.weight_dir, "update_info.path": info.path}
    found = [(path, field) for field, path in named.items() if path is not None]
    if len(found) > 1 or (found and info is not None and info.names is not None):
        raise ApiError(400, "update_info: give either names, dtype_names and shapes, or one directory")
    return found[0] if found else (None, "")


async def _source_of(context: RLContext, info: UpdateInfo | None, directory: str | None, field: str) -> Source:
    """Return where a part of the open update comes from."""
    context.updates.require_open()
    if directory is not None:
        return await context.weights_in(directory, field)
    if info is None or info.names is None or info.dtype_names is None or info.shapes is None:
        raise ApiError(
            400, "update_info: names, dtype_names and shapes are needed, or a directory", param="update_info"
        )
    return context.groups.receive(info.group_name or GROUP, info.names, info.dtype_names, info.shapes, "dtype_names")


def _versions(context: RLContext) -> dict[str, Do]:
    async def label(request: Request) -> JSON:
        body = await context.read(request, LabelBody)
        engine = context.engine

        def name() -> None:
            engine.label_weights(body.new_version)

        if body.abort_all_requests:
            await context.link.end_requests(first=name)
        else:
            await context.link.call(name)
        facts = await context.facts()
        text = f"Weight version updated to {facts['weight_version']}"
        return {"success": True, "message": text, "new_version": body.new_version, **facts}

    async def check(request: Request) -> JSON:
        """The engine's own thread reads all weights for that: steps wait meanwhile."""
        body = await context.read(request, CheckBody)
        if body.action not in ("checksum", "compare"):
            raise ApiError(400, f"action must be checksum or compare, got {body.action!r}", param="action")
        if body.action == "compare" and body.checksum is None:
            raise ApiError(400, "checksum: compare needs the one to compare with", param="checksum")
        found = await context.link.call(context.engine.weights_checksum)
        reply: JSON = {"success": True, "message": body.action, "checksum": found}
        if body.action == "compare":
            reply |= {"success": found == body.checksum, "equal": found == body.checksum}
        return {**reply, **await context.facts()}

    return {"/update_weight_version": label, "/weight_checker": check}
