"""A command of trainers for several replicas: which of them it concerns, its body for each, one reply of all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.types import Receive

from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.guard import ClientGone
from nano_inference.server.schema import Body
from nano_inference.server.trainers.adapters import (
    FROM_TENSORS,
    SGLANG_LORA_COMMANDS,
    UNLOAD,
    VLLM_LORA_COMMANDS,
    LoadBody,
    SglangLoadBody,
    UnloadBody,
)
from nano_inference.server.trainers.context import Command
from nano_inference.server.trainers.places import Stamps
from nano_inference.server.trainers.schema import FromDiskBody, UpdateWeightsBody
from nano_inference.server.trainers.sglang import SGLANG_COMMANDS
from nano_inference.server.trainers.vllm import VLLM_COMMANDS

SGLANGS = (*SGLANG_COMMANDS, *SGLANG_LORA_COMMANDS)
COMMANDS: Mapping[str, Command] = {one.path: one for one in (*VLLM_COMMANDS, *VLLM_LORA_COMMANDS, *SGLANGS)}
OF_ONE_ENGINE = frozenset(
    {
        *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "/init_broadcaster"),
        *("/shutdown_weight_transfer_engine", "/receive_weight_update", "/init_weights_update_group"),
        *("/update_weights_from_distributed", "/destroy_weights_update_group", "/update_weights_from_tensor"),
        FROM_TENSORS,
    }
)
"""Commands of process groups and of shared memory, in which a replica that starts later cannot take part."""
UPDATES = frozenset({"/update_weights", "/update_weights_from_body", "/update_weights_from_disk"})
STATES = frozenset(
    {
        *("/pause", "/resume", "/sleep", "/wake_up", "/pause_generation", "/continue_generation"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
    }
)
COMMIT, ABORT, LABEL = "/commit_weight_update", "/abort_weight_update", "/update_weight_version"
INSTEAD = "give a directory to /update_weights or /update_weights_from_disk, or a file to /update_weights_from_body"
AdapterBody = LoadBody | SglangLoadBody | UnloadBody


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sent:
    """A command that every replica gets."""

    path: str
    query: str = ""
    content: bytes = b""
    version: int | None = None  # the number of an update's weights
    directory: tuple[str, str] | None = None  # of an update, its path and the field
    stamps: Stamps = ()  # the files in it
    is_partial: bool = False
    adapter: str = ""  # the name of the adapter that it loads
    waits: bool = False  # whether it takes effect only when requests have ended


class Declined(ApiError):
    """A replica answered with this error."""

    def __init__(self, reply: httpx2.Response) -> None:
        try:
            found = dict(reply.json()["error"])
        except (ValueError, KeyError, TypeError):  # not of this project's server
            found = {"message": reply.text}
        text, param, code = str(found.pop("message", "")), found.pop("param", None), found.pop("code", None)
        found.pop("type", None)
        headers = {name: reply.headers[name] for name in ("retry-after", "x-should-retry") if name in reply.headers}
        super().__init__(reply.status_code, text, param=param, code=code, headers=headers, extra=found)


class Gone(Exception):
    """A replica did not answer. The message is one line."""


class Copies:
    """Owns the pieces of a body that several readers get, at the speed of the slowest."""

    def __init__(self, receive: Receive, count: int) -> None:
        self.is_complete = False  # all readers have the last piece
        self._receive = receive
        self._queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(1) for _ in range(count)]

    async def fill(self) -> None:
        """Read the body to its end. Raises `ClientGone`."""
        piece: bytes | None = b""
        while piece is not None:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            is_last = not message.get("more_body", False)
            for piece in (message.get("body", b""), *((None,) if is_last else ())):
                for queue in self._queues:
                    await queue.put(piece)
        self.is_complete = True

    async def pieces(self, index: int) -> AsyncIterator[bytes]:
        while (piece := await self._queues[index].get()) is not None:
            yield piece


def commit_of(sent: Sent) -> Sent:
    return Sent(path=COMMIT, content=json.dumps({"version": sent.version}).encode(), waits=sent.waits)


def unload_of(name: str) -> Sent:
    return Sent(path=UNLOAD, content=json.dumps({"lora_name": name}).encode())


def waits_for_requests(body: Body) -> bool:
    fields = body.model_dump(include={"mode", "on_running", "wait_for_inflight_requests"})
    return "wait" in fields.values() or bool(fields.get("wait_for_inflight_requests"))


def directory_of(body: Body) -> tuple[str, str]:
    """Return an update's directory and its field. Raises `ApiError` for weights from a process group."""
    if isinstance(body, FromDiskBody):
        return body.model_path, "model_path"
    assert isinstance(body, UpdateWeightsBody)
    path, field = body.directory()
    if path is None:
        text = f"weight_dir: an update without a directory needs one engine, and this server has replicas: {INSTEAD}"
        raise ApiError(501, text, param="weight_dir", code="not_supported")
    return path, field


def merged_reply(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one reply of all: counts are added up. Raises `ApiError` if there is none, or if weights differ."""
    if not replies:
        raise queue_full("no replica accepts requests at the moment", code="no_replica")
    if len({one.get("checksum") for one in replies}) > 1:
        raise ApiError(500, "the replicas have different weights", code="weights_differ")
    merged = dict(replies[0])
    for name in {"num_aborted", "num_blocks", "flushed_items"} & merged.keys():
        merged[name] = sum(one[name] for one in replies)
    if "aborted" in merged:
        merged["aborted"] = any(one["aborted"] for one in replies)
    if str(merged.get("message")).endswith(" samples aborted"):
        merged["message"] = f"{merged['num_aborted']} samples aborted"
    return merged
