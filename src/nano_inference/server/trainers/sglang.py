"""Trainer routes with SGLang's paths and bodies: sglang/srt/entrypoints/http_server.py and managers/io_struct.py.

Error replies have SGLang's `success` and `message` in addition to the error object.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from nano_inference.server.call import JSON
from nano_inference.server.clients import forwarded, parse_address
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.context import Command, Endpoint, RLContext, json_response, run_command
from nano_inference.server.trainers.feed import Source
from nano_inference.server.trainers.schema import (
    AbortRequestBody,
    ContinueBody,
    DestroyGroupBody,
    FlushBody,
    FromDiskBody,
    FromGroupBody,
    FromTensorBody,
    InitGroupBody,
    MemoryBody,
    PauseGenerationBody,
    PostProcessBody,
    WeightsCheckerBody,
)
from nano_inference.types import PauseMode

_FIELD = "serialized_named_tensors"
_BUCKET = "flattened_bucket"


async def update_from_tensor(context: RLContext, request: Request) -> JSON:
    """Each call is one update, of the tensors that it names: trainers send their weights bucket by bucket."""
    require_same_machine(request)
    body = await context.read(request, FromTensorBody)
    if body.load_format not in (None, _BUCKET):
        text = f"load_format {body.load_format!r} is not supported; known: none, and {_BUCKET}"
        raise ApiError(400, text, param="load_format")
    if len(body.serialized_named_tensors) != 1:
        num_ranks = len(body.serialized_named_tensors)
        text = f"{_FIELD}: must have one entry, got {num_ranks}: to trainers, this server is one rank"
        raise ApiError(400, text, param=_FIELD)
    info = await context.updates.install(
        _weights(body.serialized_named_tensors[0], is_bucket=body.load_format == _BUCKET),
        label=body.weight_version,
        checksum=body.checksum,
        on_running="abort" if body.abort_all_requests else "keep",
        partial=True,
    )
    return {"success": True, "message": "Succeeded to update parameter online.", **await context.facts(info)}


def require_same_machine(request: Request) -> None:
    """Raise `ApiError` 403 if the request comes from another machine, where its handles mean nothing here.

    A peer is on this machine if its address is loopback or the one that it connected to, or if it uses a UNIX socket.
    Proxies, which would appear to be here, are refused if they add X-Forwarded-For. nginx's defaults and TCP forwards
    do not: their requests are accepted.
    """
    peer, own = request.client, request.scope.get("server")
    address = parse_address(peer.host) if peer is not None else None
    is_here = peer is None or (
        address is not None and (address.is_loopback or (own is not None and address == parse_address(own[0])))
    )
    if not is_here or forwarded(request.scope["headers"]):
        text = f"{_FIELD}: handles of shared memory are accepted from this machine only, and not through a proxy"
        raise ApiError(403, f"{text}; send the weights by another route", code="other_machine")


def _weights(text: str, *, is_bucket: bool) -> Source:
    """Yield the weights. The pickle is read on the gathering thread."""
    from nano_inference.weights.shared_tensors import shared_weights  # imports torch: not on the event loop

    yield from shared_weights(text, is_bucket=is_bucket, field=_FIELD)


_MODES: Mapping[str, tuple[PauseMode, bool]] = {
    "abort": ("abort", False),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}
"""SGLang's pause mode -> the engine's, and whether the KV cache is cleared."""


def sglang_endpoint_of(command: Command, context: RLContext) -> Endpoint:
    """Return the endpoint that responds with a command's JSON, and with SGLang's fields on failure."""

    async def endpoint(request: Request) -> Response:
        try:
            return json_response(await run_command(command, context, request))
        except ApiError as error:
            request.scope["state"]["log_fields"] = {"error": error}
            body = error.to_dict()
            failed = {"success": False, "message": body["error"]["message"], **body}
            return json_response(failed, error.status, error.headers)

    return endpoint


def unsupported(path: str) -> Command:
    """Return a command that fails with 501."""

    async def refuse(context: RLContext, request: Request) -> JSON:
        raise ApiError(501, f"{path} is not supported by this server", code="not_supported")

    return refuse


async def _pause(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, PauseGenerationBody)
    mode, clear_cache = _MODES[body.mode or "abort"]
    num_aborted = await context.control.pause(mode, clear_cache=clear_cache, receive=request.receive)
    text = "Generation paused successfully."
    return {"success": True, "status": "ok", "message": text, "num_aborted": num_aborted, **await context.facts()}


async def _resume(context: RLContext, request: Request) -> JSON:
    await context.read(request, ContinueBody)
    await context.control.resume()
    text = "Generation continued successfully."
    return {"success": True, "status": "ok", "message": text, **await context.facts()}


async def _abort(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, AbortRequestBody)
    if not body.rid and not body.abort_all:
        raise ApiError(400, "rid: name a request, or set abort_all=true", param="rid")
    names = [body.rid] if isinstance(body.rid, str) else body.rid
    num_aborted = await context.control.abort(None if body.abort_all else names)
    text = f"{num_aborted} samples aborted"
    return {"success": True, "message": text, "num_aborted": num_aborted, **await context.facts()}


async def _flush(context: RLContext, request: Request) -> JSON:
    await context.read(request, FlushBody)
    freed = await context.control.flush()
    return {"success": True, "message": "Cache flushed.", "flushed_items": freed, **await context.facts()}


async def _release_memory(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, MemoryBody)
    await context.control.release(_tags(body))
    return {"success": True, "message": "Memory released.", **await context.facts()}


async def _resume_memory(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, MemoryBody)
    facts = await context.wake(_tags(body))
    asleep = ", ".join(sorted(context.control.asleep))
    text = f"Memory is resumed once these are resumed, too: {asleep}." if asleep else "Memory resumed."
    return {"success": True, "message": text, **facts}


def _tags(body: MemoryBody) -> list[str]:
    return list(body.tags) if body.tags else ["weights", "kv_cache", "cuda_graph"]


async def _update_from_disk(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, FromDiskBody)
    _require_format(body.load_format, ("auto", "safetensors"))
    info = await context.updates.install(
        await context.weights_in(body.model_path, "model_path"),
        label=body.weight_version,
        checksum=body.checksum,
        on_running="abort" if body.abort_all_requests else "keep",
    )
    text = "Succeeded to update model weights."
    return {"success": True, "message": text, "num_paused_requests": 0, **await context.facts(info)}


async def _init_group(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, InitGroupBody)
    await context.join(body)
    return {"success": True, "message": f"Joined the group {body.group_name!r}.", **await context.facts()}


async def _update_from_group(context: RLContext, request: Request) -> JSON:
    """Each call is one update: trainers send their weights bucket by bucket."""
    body = await context.read(request, FromGroupBody)
    _require_format(body.load_format, ())
    source = context.groups.receive(body.group_name, body.names, body.dtypes, body.shapes, "dtypes")
    info = await context.updates.install(
        source,
        label=body.weight_version,
        checksum=body.checksum,
        on_running="abort" if body.abort_all_requests else "keep",
        partial=True,
        group=body.group_name,
    )
    return {"success": True, "message": "Succeeded to update parameter online.", **await context.facts(info)}


async def _destroy_group(context: RLContext, request: Request) -> JSON:
    body = await context.read(request, DestroyGroupBody)
    if not context.groups.leave(body.group_name):
        raise ApiError(400, f"there is no group {body.group_name!r}", param="group_name", code="no_group")
    return {"success": True, "message": f"Left the group {body.group_name!r}.", **await context.facts()}


async def _post_process(context: RLContext, request: Request) -> JSON:
    await context.read(request, PostProcessBody)
    return {"success": True, "message": "Nothing to do: an update installs its weights.", **await context.facts()}


async def _check_weights(context: RLContext, request: Request) -> JSON:
    """Blocks steps while the engine thread reads all weights."""
    await context.read(request, WeightsCheckerBody)
    checksum = await context.link.engine.call(lambda engine: engine.weights_checksum())
    reply = {"success": True, "message": "checksum", "checksum": checksum, "per_engine_checksum": checksum}
    return {**reply, **await context.facts()}


def _require_format(load_format: str | None, known: tuple[str, ...]) -> None:
    if load_format is not None and load_format not in known:
        only = f"; known: {', '.join(known)}" if known else ""
        raise ApiError(400, f"load_format {load_format!r} is not supported{only}", param="load_format")


SGLANG_COMMANDS: Mapping[str, Command] = {
    "/pause_generation": _pause,
    "/continue_generation": _resume,
    "/abort_request": _abort,
    "/flush_cache": _flush,
    "/release_memory_occupation": _release_memory,
    "/resume_memory_occupation": _resume_memory,
    "/update_weights_from_disk": _update_from_disk,
    "/init_weights_update_group": _init_group,
    "/update_weights_from_distributed": _update_from_group,
    "/update_weights_from_tensor": update_from_tensor,
    "/destroy_weights_update_group": _destroy_group,
    "/post_process_weights": _post_process,
    "/weights_checker": _check_weights,
}
