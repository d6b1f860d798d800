"""Trainers' routes of replicas: a command reaches all of them, a weight update all or none.

All replicas gather an update and hold it; only then does each install it, with one version number. A replica that
starts gets the weights in force, the pauses and the sleeps of the others before it gets requests. If the weights cannot
be read again, it needs an update: it gets no requests until the next complete one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

import httpx2
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, queue_full, refused
from nano_inference.server.front.copies import Copies
from nano_inference.server.front.process import ServerFailed
from nano_inference.server.front.servers import NEEDS_UPDATE, Server, Servers
from nano_inference.server.guard import GuardPolicy, read_body, while_connected
from nano_inference.server.schema import Body
from nano_inference.server.security import BYTES_TYPE, JSON_TYPE, load_admin_keys, load_keys
from nano_inference.server.trainers.context import Command, fields_of, json_response
from nano_inference.server.trainers.places import Stamps, stamps_at, weights_root
from nano_inference.server.trainers.routes import sglangs_error
from nano_inference.server.trainers.schema import CommitBody, FromDiskBody, UpdateWeightsBody
from nano_inference.server.trainers.sglang import SGLANG_COMMANDS
from nano_inference.server.trainers.vllm import VLLM_COMMANDS

COMMANDS: Mapping[str, Command] = {one.path: one for one in (*VLLM_COMMANDS, *SGLANG_COMMANDS)}
OF_ONE_ENGINE = frozenset(
    {
        *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "/init_broadcaster"),
        *("/shutdown_weight_transfer_engine", "/receive_weight_update", "/init_weights_update_group"),
        *("/update_weights_from_distributed", "/destroy_weights_update_group", "/update_weights_from_tensor"),
    }
)
"""Commands of process groups and of shared memory, in which a replica that starts later cannot take part."""
_UPDATES = frozenset({"/update_weights", "/update_weights_from_body", "/update_weights_from_disk"})
_STATES = frozenset(
    {
        *("/pause", "/resume", "/sleep", "/wake_up", "/pause_generation", "/continue_generation"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
    }
)
_COMMIT, _ABORT, _LABEL = "/commit_weight_update", "/abort_weight_update", "/update_weight_version"
_INSTEAD = "give a directory to /update_weights or /update_weights_from_disk, or a file to /update_weights_from_body"
_MARGIN_S = 10.0  # in which a replica reports that `weight_timeout` has passed
_ABORT_S, _RETRY_S = 30.0, 0.5  # most seconds of an abort, and between two while a replica still gathers
_TOO_LATE = "were not complete within"  # in the error after `weight_timeout`
_log = logging.getLogger("nano_inference.server")


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


class Trainers:
    """Answers the commands of trainers. Accessed on the event loop."""

    def __init__(self, servers: Servers, client: httpx2.AsyncClient, config: ServerConfig, policy: GuardPolicy) -> None:
        """Raises `ValueError` if `config.weights_dir` is not a directory."""
        self.version = 0  # the highest number of weights
        self._servers, self._client, self._policy = servers, client, policy
        self._root = weights_root(config.weights_dir)
        self._gather_s = config.weight_timeout + _MARGIN_S
        self._answer_s = config.weight_timeout + config.request_timeout
        keys = load_admin_keys(config) or load_keys(config)
        self._headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self._phase: Literal["", "waiting", "aborted", "gathering", "installing"] = ""
        self._held: tuple[Sent, dict[Server, str]] | None = None
        """The update that a client holds, and the replicas that hold it with their URLs."""
        self._journal: list[Sent] = []  # what makes a new replica equal to the others
        self._lost = ""  # why the weights in force cannot be read again
        servers.prepare = self.prepare

    @property
    def is_updating(self) -> bool:
        """Return whether an update is being gathered or installed."""
        return bool(self._phase)

    def answers(self, scope: Scope) -> bool:
        """Return whether a request is a command, which is answered here."""
        return scope["path"] in COMMANDS and scope["method"] in COMMANDS[scope["path"]].methods

    async def answer(self, scope: Scope, receive: Receive) -> Response:
        """Return the reply to a command. Raises `ApiError`, `ClientGone`."""
        command = COMMANDS[scope["path"]]
        try:
            return json_response(await self._answer(command, Request(scope), receive))
        except ApiError as error:
            if command in SGLANG_COMMANDS:
                return sglangs_error(scope, error)
            raise

    async def _answer(self, command: Command, request: Request, receive: Receive) -> dict[str, Any]:
        path, data = command.path, b""
        if path in OF_ONE_ENGINE:
            raise ApiError(
                501, f"{path} needs one engine, and this server has replicas: {_INSTEAD}", code="not_supported"
            )
        if not command.takes_stream:
            data = await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)
        body = fields_of(command, request, data)
        if path in _UPDATES:
            return await self._update(command, request, body, data, receive)
        if isinstance(body, CommitBody):
            return await self._commit_held(body)
        return await while_connected(self._command(Sent(path=path, query=request.url.query, content=data)), receive)

    def restart_all(self) -> None:
        """Start a rolling restart, unless new processes could not read the weights in force."""
        if self._lost:
            _log.error("rolling restart: refused, because the weights in force %s: update them first", self._lost)
        else:
            self._servers.restart_all()

    async def prepare(self, server: Server) -> str:
        """Make a server that starts equal to the others; return why it cannot get requests, or nothing.

        Raises `ServerFailed` if it does not answer.
        """
        done: list[Sent] = []
        lost = ""
        while True:
            await self._servers.until(lambda: self._phase not in ("gathering", "installing"))
            if not (left := [one for one in self._journal if one not in done]):
                # No await follows: the next update counts this server.
                return lost or (self._lost and f"the weights in force {self._lost}")
            done.append(sent := left[0])
            if sent.version is not None and not sent.is_partial:
                lost = ""
            if sent.version is None or not (lost or self._lost):
                lost = await self._replay(server, sent) or lost

    async def _replay(self, server: Server, sent: Sent) -> str:
        """Send a server what the others have got; return why it lacks the weights now, or nothing."""
        try:
            if sent.directory is not None and await stamps_at(self._root, *sent.directory) != sent.stamps:
                return f"{sent.directory[0]} has changed since it was installed"
            await self._ask(server, sent, self._gather_s)
            if sent.version is not None:
                await self._ask(server, _commit_of(sent.version), self._answer_s)
        except Gone as error:
            raise ServerFailed(str(error)) from None
        except ApiError as error:
            if sent.version is None:
                return ""
            if error.status >= 500 or error.code == "os_error" or _TOO_LATE in error.message:
                raise ServerFailed(f"the weights in force cannot be read at the moment: {error}") from None
            return f"the weights in force cannot be read again: {error}"
        return ""

    # ---- commands ---------------------------------------------------------------------------------------------------

    async def _command(self, sent: Sent) -> dict[str, Any]:
        """Send a command to all replicas; return one reply for all. Raises the first one's error."""
        ends_update = False
        if sent.path == _ABORT:
            if self._phase == "installing":
                raise ApiError(409, "busy: the update is being installed", code="busy")
            self._held = None
            if ends_update := self._phase in ("waiting", "gathering"):
                self._phase = "aborted"
                self._servers.notify()
        if is_kept := sent.path in _STATES or sent.path == _LABEL:
            same = (sent.path, sent.query, sent.content)
            self._journal = [one for one in self._journal if (one.path, one.query, one.content) != same] + [sent]
        try:
            replies = await self._everywhere(self._servers.running, sent, self._answer_s)
            for server, reply in replies.items():
                if isinstance(reply, Declined) and server.state != "draining":
                    raise reply
        except BaseException:
            if is_kept and sent in self._journal:
                self._journal.remove(sent)
            raise
        answered = {server: one.json() for server, one in replies.items() if isinstance(one, httpx2.Response)}
        found = [one for server, one in answered.items() if server.state != NEEDS_UPDATE] or list(answered.values())
        if self._phase != "installing" and any(one.get("weights") == "discarded" for one in found):
            self._forget_updates("were discarded")
        return _merged(found) | ({"aborted": True, "closed_groups": []} if ends_update else {})

    def _forget_updates(self, lost: str) -> None:
        """Forget how to make earlier weights; `lost`: why those in force cannot be read again, if so."""
        self._lost = lost
        self._journal = [one for one in self._journal if one.path in _STATES]

    # ---- updates ----------------------------------------------------------------------------------------------------

    async def _update(
        self, command: Command, request: Request, body: Body, data: bytes, receive: Receive
    ) -> dict[str, Any]:
        """Install an update in all replicas; with its `hold`, let them hold it. `receive` yields a stream's pieces."""
        fields = body.model_dump(include={"hold", "partial"})
        directory = None if command.takes_stream else _directory(body)
        query = [pair for pair in parse_qsl(request.url.query, keep_blank_values=True) if pair[0] != "hold"]
        sent = Sent(
            path=command.path,
            query=urlencode([*query, ("hold", "true")]),
            content=data,
            directory=directory,
            stamps=() if directory is None else await stamps_at(self._root, *directory),
            is_partial=bool(fields.get("partial")),
        )
        with self._claimed():
            await self._servers.until(
                lambda: self._phase == "aborted" or all(one.state != "starting" for one in self._servers.all)
            )
            self._check_aborted()
            self._phase = "gathering"
            holders = self._holders(sent)
            reply = await self._gather(holders, sent, Copies(receive, len(holders)) if command.takes_stream else None)
            if fields["hold"]:
                self._held = sent, {one: one.url for one in holders}
                return {**reply, "held_version": self.version + 1}
            return {**command.reply, **await self._install(holders, replace(sent, version=self.version + 1))}

    async def _commit_held(self, body: CommitBody) -> dict[str, Any]:
        """Install the update that replicas hold. Raises `ApiError` if there is none, or if one of them has died."""
        if self._held is None:
            raise ApiError(400, "no weights are held: POST /update_weights with hold first", code="no_update")
        version = body.version or self.version + 1
        if version <= self.version:
            raise refused("version", f"must be >= {self.version + 1}, got {version}")
        (sent, urls), self._held = self._held, None
        with self._claimed():
            self._phase = "gathering"
            holders = self._holders(sent)
            if {one: one.url for one in holders} != urls:
                await self._everywhere(holders, Sent(path=_ABORT), _ABORT_S)
                raise ApiError(
                    409, "a replica was replaced since the weights were held: send them again", code="no_update"
                )
            fields = await self._install(holders, replace(sent, version=version))
        return {**COMMANDS[_COMMIT].reply, **fields}

    def _holders(self, sent: Sent) -> list[Server]:
        """Return the replicas that an update concerns: a part of the weights is of no use to one that needs all."""
        left_out = ("draining", NEEDS_UPDATE) if sent.is_partial else ("draining",)
        return [one for one in self._servers.running if one.state not in left_out]

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Refuse other updates during the block. Raises `ApiError` 409 during another one."""
        if self._phase or self._held:
            how = f"install it with {_COMMIT}, or abort it with {_ABORT}" if self._held else "wait for its end"
            raise ApiError(409, f"busy: an update is {self._phase or 'staged'}; {how}", code="busy")
        self._phase = "waiting"
        try:
            yield
        finally:
            self._phase = ""
            self._servers.notify()

    async def _gather(self, holders: Sequence[Server], sent: Sent, copies: Copies | None) -> dict[str, Any]:
        """Let all replicas gather an update and hold it; return the first one's reply.

        If one fails, or the client leaves, none holds it any longer. Raises the error.
        """
        bodies: Sequence[bytes | AsyncIterator[bytes]]
        bodies = [sent.content] * len(holders) if copies is None else [copies.pieces(n) for n in range(len(holders))]
        pairs = zip(holders, bodies, strict=True)
        asking = [asyncio.ensure_future(self._ask(one, sent, self._gather_s, body)) for one, body in pairs]
        copying = [] if copies is None else [asyncio.ensure_future(copies.fill())]
        try:
            if not holders:
                raise queue_full("no replica accepts updates at the moment", code="no_replica")
            await asyncio.wait([*asking, *copying], return_when=asyncio.FIRST_EXCEPTION)
            for task in (*copying, *asking):
                if task.done():
                    task.result()
            self._check_aborted()
            return dict(asking[0].result().json())
        except BaseException as error:
            for task in copying if copies is None or copies.is_complete else (*copying, *asking):
                task.cancel()  # a replica refuses a file that is incomplete
            await asyncio.shield(self._drop(holders, asking))
            if isinstance(error, Gone):
                raise ApiError(503, f"{error}; no replica installs the update", code="replica_died") from None
            raise

    def _check_aborted(self) -> None:
        if self._phase == "aborted":
            raise ApiError(409, "the update was aborted", code="aborted")

    async def _drop(self, holders: Sequence[Server], asking: Sequence[asyncio.Future[httpx2.Response]]) -> None:
        """Abort an update in all replicas, also in those that have not started to gather it."""
        while left := [one for one in asking if not one.done()]:
            await self._everywhere(holders, Sent(path=_ABORT), _ABORT_S)
            await asyncio.wait(left, timeout=_RETRY_S)
        await self._everywhere(holders, Sent(path=_ABORT), _ABORT_S)
        await asyncio.gather(*asking, return_exceptions=True)

    async def _install(self, holders: Sequence[Server], sent: Sent) -> dict[str, Any]:
        """Install what all replicas hold; return the fields of the new weights. The update is in force if one has it.

        One that fails is started again. Raises the first one's error if none has installed the update.
        """
        assert sent.version is not None
        self._phase = "installing"  # replicas that start wait until it is known whether the update is in force
        processes = [one.process for one in holders]
        replies = await asyncio.shield(self._everywhere(holders, _commit_of(sent.version), self._answer_s))
        declined = {one: reply for one, reply in replies.items() if isinstance(reply, Declined)}
        installed = {one: reply for one, reply in replies.items() if isinstance(reply, httpx2.Response)}
        if not installed:
            if len(replies) < len(holders):
                self.version = sent.version  # one that died may have used the number
            await asyncio.shield(self._everywhere(list(declined), Sent(path=_ABORT), _ABORT_S))
            for reply in declined.values():
                raise reply
            raise ApiError(503, "the replicas died before one had installed the update", code="replica_died")
        self.version = sent.version
        if sent.directory is None:
            self._forget_updates("came in the body of a request")
        else:
            if not sent.is_partial:
                self._forget_updates("")
            self._journal.append(sent)
        for server, process in zip(holders, processes, strict=True):
            if server in installed and server.state == NEEDS_UPDATE:
                self._servers.mark(server, "ready")
            elif server in declined and server.process is process:
                _log.error("%s is started again: it could not install an update: %s", server.name, declined[server])
                self._servers.end(server)
        fields = next(iter(installed.values())).json()
        return {name: value for name, value in fields.items() if name != "message"}

    # ---- sending ----------------------------------------------------------------------------------------------------

    async def _everywhere(
        self, servers: Sequence[Server], sent: Sent, limit: float
    ) -> dict[Server, httpx2.Response | Declined]:
        """Return the replies of servers; end those that do not answer: they start again with what they have missed."""
        urls = [one.url for one in servers]
        outcomes = await asyncio.gather(*(self._ask(one, sent, limit) for one in servers), return_exceptions=True)
        replies: dict[Server, httpx2.Response | Declined] = {}
        for server, url, outcome in zip(servers, urls, outcomes, strict=True):
            if isinstance(outcome, Gone):
                _log.error("%s: %s", sent.path, outcome)
                if server.url == url:
                    self._servers.end(server)
            elif isinstance(outcome, BaseException) and not isinstance(outcome, Declined):
                raise outcome
            else:
                replies[server] = outcome
        return replies

    async def _ask(
        self, server: Server, sent: Sent, limit: float, body: bytes | AsyncIterator[bytes] | None = None
    ) -> httpx2.Response:
        """Return a replica's reply. Raises `Declined`; `Gone` if there is none within `limit` seconds."""
        content = sent.content if body is None else body
        kind = {"content-type": JSON_TYPE if isinstance(content, bytes) else BYTES_TYPE} if content else {}
        url = f"{server.url}{sent.path}?{sent.query}"
        server.num_open += 1  # a rolling restart waits for its end
        try:
            async with asyncio.timeout(limit):
                reply = await self._client.post(url, content=content, headers={**self._headers, **kind})
        except TimeoutError:
            raise Gone(f"{server.name} did not answer within {limit:g} seconds") from None
        except httpx2.HTTPError as error:
            raise Gone(f"{server.name} died ({type(error).__name__})") from None
        finally:
            server.num_open -= 1
            self._servers.notify()
        if reply.status_code != 200:
            raise Declined(reply)
        return reply


def _commit_of(version: int) -> Sent:
    return Sent(path=_COMMIT, content=json.dumps({"version": version}).encode())


def _directory(body: Body) -> tuple[str, str]:
    """Return an update's directory and its field. Raises `ApiError` for weights from a process group."""
    if isinstance(body, FromDiskBody):
        return body.model_path, "model_path"
    assert isinstance(body, UpdateWeightsBody)
    path, field = body.directory()
    if path is None:
        text = f"weight_dir: an update without a directory needs one engine, and this server has replicas: {_INSTEAD}"
        raise ApiError(501, text, param="weight_dir", code="not_supported")
    return path, field


def _merged(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
