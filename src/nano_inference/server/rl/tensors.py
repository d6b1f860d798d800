"""SGLang's POST /update_weights_from_tensor: weights as handles of memory that a trainer on the same machine shares.

Route and fields: sglang/srt/entrypoints/http_server.py and managers/io_struct.py. verl and slime call it for engines
beside their trainers, once per bucket, with one text per tensor-parallel rank.
"""

from __future__ import annotations

from starlette.requests import Request

from nano_inference.server.call import JSON
from nano_inference.server.clients import forwarded, parse_address
from nano_inference.server.errors import ApiError
from nano_inference.server.rl.context import RLContext
from nano_inference.server.rl.feed import Source
from nano_inference.server.rl.schema import FromTensorBody

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
