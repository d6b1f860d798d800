"""Trainer routes with SGLang's paths and bodies: sglang/srt/entrypoints/http_server.py and managers/io_struct.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request

from nano_inference.server.errors import ApiError, refused
from nano_inference.server.generation import JSON
from nano_inference.server.security import forwarded, parse_address
from nano_inference.server.trainers.context import Command, Reply, RLContext
from nano_inference.server.trainers.places import weights_at
from nano_inference.server.trainers.schema import (
    GROUP,
    AbortRequestBody,
    ContinueBody,
    DestroyGroupBody,
    FlushBody,
    FromDiskBody,
    FromGroupBody,
    FromTensorBody,
    MemoryBody,
    PauseGenerationBody,
    PostProcessBody,
    Rendezvous,
    WeightsCheckerBody,
)
from nano_inference.server.trainers.updates import Source
from nano_inference.types import PauseMode

TENSORS_FIELD = "serialized_named_tensors"
BUCKET = "flattened_bucket"
_MODES: Mapping[str, tuple[PauseMode, bool]] = {
    "abort": ("abort", False),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}
"""SGLang's pause mode -> the engine's, and whether the KV cache is cleared."""


async def _pause(rl: RLContext, body: PauseGenerationBody, request: Request) -> JSON:
    mode, clear_cache = _MODES[body.mode or "abort"]
    return {"num_aborted": await rl.control.pause(mode, clear_cache=clear_cache, receive=request.receive)}


async def _resume(rl: RLContext, body: ContinueBody, _: Request) -> None:
    await rl.control.resume()


async def _abort(rl: RLContext, body: AbortRequestBody, _: Request) -> JSON:
    if not body.rid and not body.abort_all:
        raise refused("rid", "name a request, or set abort_all=true")
    names = [body.rid] if isinstance(body.rid, str) else body.rid
    num_aborted = await rl.link.end_requests(None if body.abort_all else names)
    return {"message": f"{num_aborted} samples aborted", "num_aborted": num_aborted}


async def _flush(rl: RLContext, body: FlushBody, _: Request) -> JSON:
    return {"flushed_items": await rl.control.flush()}


async def _release_memory(rl: RLContext, body: MemoryBody, _: Request) -> None:
    await rl.control.release(_tags(body))


async def _resume_memory(rl: RLContext, body: MemoryBody, _: Request) -> JSON:
    hint = await rl.wake(_tags(body))
    asleep = ", ".join(sorted(rl.control.asleep))
    text = f"Memory is resumed once these are resumed, too: {asleep}." if asleep else "Memory resumed."
    return {"message": text, **hint}


def _tags(body: MemoryBody) -> list[str]:
    return list(body.tags) if body.tags else ["weights", "kv_cache", "cuda_graph"]


async def _update_from_disk(rl: RLContext, body: FromDiskBody, _: Request) -> Reply:
    _require_format(body.load_format, "auto", "safetensors")
    weights = await weights_at(rl.root, body.model_path, "model_path")
    return await rl.install(body.update(weights, hold=bool(body.hold)))


async def _init_group(rl: RLContext, body: Rendezvous, _: Request) -> JSON:
    await rl.join(body)
    return {"message": f"Joined the group {body.group_name or GROUP!r}."}


async def _update_from_group(rl: RLContext, body: FromGroupBody, _: Request) -> Reply:
    """Each call is one update, of the tensors that it names: trainers send their weights bucket by bucket."""
    _require_format(body.load_format)
    with rl.groups.receive(body.group_name, body.names, body.dtypes, body.shapes, "dtypes") as source:
        return await rl.install(body.update(source, partial=True))


async def _update_from_tensor(rl: RLContext, body: FromTensorBody, request: Request) -> Reply:
    """Each call is one update, as in `_update_from_group`."""
    require_same_machine(request)
    return await rl.install(body.update(shared_source(body.serialized_named_tensors, body.load_format), partial=True))


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
        text = f"{TENSORS_FIELD}: handles of shared memory are accepted from this machine only, and not through a proxy"
        raise ApiError(403, f"{text}; send the weights by another route", code="other_machine")


def shared_source(texts: Sequence[str], load_format: str | None) -> Source:
    """Return the tensors of the pickles of all ranks, of which there must be one. Raises `ApiError`."""
    if load_format not in (None, BUCKET):
        text = f"load_format {load_format!r} is not supported; known: none, and {BUCKET}"
        raise ApiError(400, text, param="load_format")
    if len(texts) != 1:
        text = f"{TENSORS_FIELD}: must have one entry, got {len(texts)}: to trainers, this server is one rank"
        raise ApiError(400, text, param=TENSORS_FIELD)
    return _shared(texts[0], is_bucket=load_format == BUCKET)


def _shared(text: str, *, is_bucket: bool) -> Source:
    """Yield the tensors. The pickle is read on the gathering thread."""
    from nano_inference.weights.shared_tensors import shared_weights  # imports torch: not on the event loop

    yield from shared_weights(text, is_bucket=is_bucket, field=TENSORS_FIELD)


async def _destroy_group(rl: RLContext, body: DestroyGroupBody, _: Request) -> JSON:
    if not rl.groups.leave(body.group_name):
        raise ApiError(400, f"there is no group {body.group_name!r}", param="group_name", code="no_group")
    return {"message": f"Left the group {body.group_name!r}."}


async def _post_process(rl: RLContext, body: PostProcessBody, _: Request) -> None:
    """An update installs its weights: nothing is left to be done."""


async def _check_weights(rl: RLContext, body: WeightsCheckerBody, _: Request) -> JSON:
    checksum = await rl.checksum()
    return {"checksum": checksum, "per_engine_checksum": checksum}


def _require_format(load_format: str | None, *known: str) -> None:
    if load_format is not None and load_format not in known:
        only = f"; known: {', '.join(known)}" if known else ""
        raise ApiError(400, f"load_format {load_format!r} is not supported{only}", param="load_format")


def _reply(text: str | None = None, **fields: object) -> Mapping[str, object]:
    return {"success": True, **fields, **({} if text is None else {"message": text})}


_EITHER = ("POST", "GET")  # SGLang accepts both, and some trainers send GET
_ONLINE = _reply("Succeeded to update parameter online.")
SGLANG_COMMANDS = (
    Command("/pause_generation", PauseGenerationBody, _pause, _reply("Generation paused successfully.", status="ok")),
    Command("/continue_generation", ContinueBody, _resume, _reply("Generation continued successfully.", status="ok")),
    Command("/abort_request", AbortRequestBody, _abort, _reply()),
    Command("/flush_cache", FlushBody, _flush, _reply("Cache flushed."), _EITHER),
    Command("/release_memory_occupation", MemoryBody, _release_memory, _reply("Memory released.")),
    Command("/resume_memory_occupation", MemoryBody, _resume_memory, _reply()),
    Command(
        "/update_weights_from_disk",
        FromDiskBody,
        _update_from_disk,
        {**_reply("Succeeded to update model weights."), "num_paused_requests": 0},
    ),
    Command("/init_weights_update_group", Rendezvous, _init_group, _reply()),
    Command("/update_weights_from_distributed", FromGroupBody, _update_from_group, _ONLINE),
    Command("/update_weights_from_tensor", FromTensorBody, _update_from_tensor, _ONLINE),
    Command("/destroy_weights_update_group", DestroyGroupBody, _destroy_group, _reply()),
    Command(
        "/post_process_weights",
        PostProcessBody,
        _post_process,
        _reply("Nothing to do: an update installs its weights."),
    ),
    Command("/weights_checker", WeightsCheckerBody, _check_weights, _reply("checksum"), _EITHER),
)
