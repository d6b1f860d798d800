"""Trainers' routes of replicas: a command reaches all of them, a weight update or an adapter all or none.

All replicas gather an update and hold it; only then does each install it, with one version number. A replica that
starts gets the weights in force, the pauses and the sleeps of the others before it gets requests. If the weights cannot
be read again, it needs an update: it gets no requests until the next complete one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlencode

import httpx2
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, queue_full, refused
from nano_inference.server.front.adapters import Adapters
from nano_inference.server.front.commands import (
    ABORT,
    COMMANDS,
    COMMIT,
    INSTEAD,
    LABEL,
    OF_ONE_ENGINE,
    SGLANGS,
    STATES,
    UPDATES,
    AdapterBody,
    Copies,
    Declined,
    Gone,
    Sent,
    commit_of,
    directory_of,
    merged_reply,
    waits_for_requests,
)
from nano_inference.server.front.process import ServerFailed
from nano_inference.server.front.servers import NEEDS_UPDATE, Server, Servers
from nano_inference.server.guard import GuardPolicy, read_body, while_connected
from nano_inference.server.schema import Body
from nano_inference.server.security import BYTES_TYPE, JSON_TYPE, load_admin_keys, load_keys
from nano_inference.server.trainers.adapters import UnloadBody
from nano_inference.server.trainers.context import Command, fields_of, json_response
from nano_inference.server.trainers.places import stamps_at, weights_root
from nano_inference.server.trainers.routes import sglangs_error
from nano_inference.server.trainers.schema import CommitBody, UpdateWeightsBody
from nano_inference.server.trainers.vllm import refuse_unheld

_LARGEST = 2**62  # of a client's version numbers: replicas accept larger ones for the updates that follow
_MARGIN_S = 10.0  # in which a replica reports that `weight_timeout` has passed
_ABORT_S, _RETRY_S = 30.0, 0.5  # most seconds of an abort, and between two while a replica still gathers
MAX_JOURNAL = 256  # commands that a new replica gets to become equal to the others
_TOO_MANY = f"were made by more than {MAX_JOURNAL} commands"
_TOO_LATE = "were not complete within"  # in the error after `weight_timeout`
_log = logging.getLogger("nano_inference.server")


class Trainers:
    """Answers the commands of trainers. Accessed on the event loop."""

    def __init__(self, servers: Servers, client: httpx2.AsyncClient, config: ServerConfig, policy: GuardPolicy) -> None:
        """Raises `ValueError` if `config.weights_dir` is not a directory."""
        self.version = 0  # the highest number of weights
        self._servers, self._client, self._policy = servers, client, policy
        self._root = weights_root(config.weights_dir)
        self._weight_s, self._answer_s = config.weight_timeout, config.weight_timeout + _MARGIN_S
        keys = keys_of_replicas(config, policy) or load_keys(config)
        self._headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self._phase: Literal["", "waiting", "aborted", "gathering", "installing"] = ""
        self._held: tuple[Sent, dict[Server, str]] | None = None
        """The update that a client holds, and the replicas that hold it with their URLs."""
        self._journal: list[Sent] = []  # what makes a new replica equal to the others
        self._commands: set[asyncio.Task[Any]] = set()
        self._lost = ""  # why the weights in force cannot be read again
        self._adapting = asyncio.Lock()
        self._adapters = Adapters(servers, lambda some, sent: self._everywhere(some, sent, self._answer_s))
        servers.prepare, servers.may_restart = self.prepare, lambda: not self._phase
        servers.bar_to_restart = lambda: self._lost and f"the weights in force {self._lost}: update them first"

    def answers(self, scope: Scope) -> bool:
        """Return whether a request is a command, which is answered here."""
        return scope["path"] in COMMANDS and scope["method"] in COMMANDS[scope["path"]].methods

    async def answer(self, scope: Scope, receive: Receive) -> Response:
        command = COMMANDS[scope["path"]]
        try:
            found = await self._answer(command, Request(scope), receive)
            return found if isinstance(found, Response) else json_response(found)
        except ApiError as error:
            if command in SGLANGS:
                return sglangs_error(scope, error)
            raise

    async def _answer(self, command: Command, request: Request, receive: Receive) -> dict[str, Any] | Response:
        path, data = command.path, b""
        if path in OF_ONE_ENGINE:
            raise ApiError(
                501, f"{path} needs one engine, and this server has replicas: {INSTEAD}", code="not_supported"
            )
        if not command.takes_stream:
            data = await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)
        body = fields_of(command, request, data)
        if path in UPDATES:
            return await self._update(command, body, receive)
        if isinstance(body, CommitBody):
            return await self._commit_held(body)
        sent = Sent(path=path, content=to_json(body.model_dump(exclude_none=True)), waits=waits_for_requests(body))
        if sent.waits:  # ends if its client leaves, as in one engine
            return await while_connected(self._command(sent), receive)
        task: asyncio.Task[Any]
        task = asyncio.create_task(self._adapt(sent, body) if isinstance(body, AdapterBody) else self._command(sent))
        self._commands.add(task)  # it reaches all replicas, also if the client leaves
        task.add_done_callback(self._commands.discard)
        return await while_connected(asyncio.shield(task), receive)

    async def prepare(self, server: Server) -> str:
        """Make a server that starts equal to the others; return why it cannot get requests, or nothing.

        Raises `ServerFailed` if it does not answer.
        """
        done: list[Sent] = []
        lost = lacks = ""
        while True:
            await self._servers.until(lambda: self._phase not in ("gathering", "installing"))
            if not (left := [one for one in (*self._journal, *self._adapters.loads) if one not in done]):
                # No await follows: the next update counts this server.
                return lost or lacks or (self._lost and f"the weights in force {self._lost}")
            done.append(sent := left[0])
            if sent.version is not None and not sent.is_partial:
                lost = ""
            if sent.adapter:
                lacks = await self._replay(server, sent) or lacks
            elif sent.version is None or not (lost or self._lost):
                lost = await self._replay(server, sent) or lost

    async def _replay(self, server: Server, sent: Sent) -> str:
        """Send a server what the others have got; return why it lacks the weights now, or nothing."""
        try:
            if sent.directory is not None and await stamps_at(self._root, *sent.directory) != sent.stamps:
                return f"{sent.directory[0]} has changed since it was installed"
            await self._ask(server, sent, self._answer_s)
            if sent.version is not None:
                await self._ask(server, commit_of(sent), self._answer_s)
        except Gone as error:
            raise ServerFailed(str(error)) from None
        except ApiError as error:
            if sent.version is None and not sent.adapter:
                return ""
            what = f"the adapter {sent.adapter}" if sent.adapter else "the weights in force"
            if error.status >= 500 or error.code == "os_error" or _TOO_LATE in error.message:
                raise ServerFailed(f"{what} cannot be read at the moment: {error}") from None
            return f"{what} cannot be read again: {error}"
        return ""

    # ---- commands ---------------------------------------------------------------------------------------------------

    async def _command(self, sent: Sent) -> dict[str, Any]:
        """Send a command to all replicas; return one reply for all. Raises the first one's error."""
        ends_update = False
        if sent.path == ABORT:
            if self._phase == "installing":
                raise ApiError(409, "busy: the update is being installed", code="busy")
            self._held = None
            if ends_update := self._phase in ("waiting", "gathering"):
                self._phase = "aborted"
                self._servers.notify()
        if not self._servers.running:
            raise queue_full("no replica accepts requests at the moment", code="no_replica")
        before = self._journal
        if sent.path in STATES or sent.path == LABEL:
            # The latest label counts, and of the same command the latest.
            self._journal = [
                one for one in before if one.path != sent.path or (one.path != LABEL and one.content != sent.content)
            ] + [sent]
        after = self._journal
        try:
            replies = await self._everywhere(self._servers.running, sent, self._answer_s)
            for server, reply in replies.items():
                if isinstance(reply, Declined) and server.state != "draining":
                    raise reply
        except BaseException:
            later = [one for one in self._journal if one not in after]
            dropped = [one for one in after if one not in self._journal]
            self._journal = [one for one in before if one not in dropped] + later
            raise
        answered = {server: one.json() for server, one in replies.items() if isinstance(one, httpx2.Response)}
        found = [one for server, one in answered.items() if server.state != NEEDS_UPDATE] or list(answered.values())
        if self._phase != "installing" and any(one.get("weights") == "discarded" for one in found):
            self._forget_updates("were discarded")
        elif len(self._journal) > MAX_JOURNAL:
            self._forget_updates(_TOO_MANY)
        return merged_reply(found) | ({"aborted": True, "closed_groups": []} if ends_update else {})

    def _forget_updates(self, lost: str) -> None:
        """Forget how to make earlier weights; `lost`: why those in force cannot be read again, if so."""
        self._lost = lost
        self._journal = [one for one in self._journal if one.path in STATES][-MAX_JOURNAL:]

    async def _adapt(self, sent: Sent, body: AdapterBody) -> Response:
        """Load or unload an adapter in all replicas, see `Adapters.change`. Raises `ApiError` 409 during an update."""
        sent = replace(sent, adapter=body.lora_name)
        if not isinstance(body, UnloadBody):
            stamps = await stamps_at(self._root, body.lora_path, "lora_path")
            sent = replace(sent, directory=(body.lora_path, "lora_path"), stamps=stamps)
        async with self._adapting:
            with self._claimed():
                self._phase = "installing"  # replicas that start wait until it is known whether it is loaded
                return await self._adapters.change(sent)

    # ---- updates ----------------------------------------------------------------------------------------------------

    async def _update(self, command: Command, body: Body, receive: Receive) -> dict[str, Any]:
        """Install an update in all replicas; with its `hold`, let them hold it. `receive` yields a stream's pieces."""
        fields = body.model_dump(exclude_none=True)
        if isinstance(body, UpdateWeightsBody):
            refuse_unheld(body)
        directory = None if command.takes_stream else directory_of(body)
        has_to_hold, held = bool(fields.get("hold")), {**fields, "hold": True}
        sent = Sent(
            path=command.path,
            query=urlencode(held) if command.takes_stream else "",
            content=b"" if command.takes_stream else to_json(held),
            directory=directory,
            stamps=() if directory is None else await stamps_at(self._root, *directory),
            is_partial=bool(fields.get("partial")),
            waits=waits_for_requests(body),
        )
        with self._claimed():
            waiting = self._until_started(sent, has_to_hold=has_to_hold)
            await (waiting if command.takes_stream else while_connected(waiting, receive))
            self._check_aborted()
            self._phase = "gathering"
            holders = self._holders(sent)
            copies = Copies(receive, len(holders)) if command.takes_stream else None
            with self._in_use(holders):
                reply = await self._gather(holders, sent, copies)
                if not has_to_hold:
                    version = self.version + 1
                    return {**command.reply, **await self._install(holders, replace(sent, version=version))}
            self._held = sent, {one: one.url for one in holders}
            return {**reply, "held_version": self.version + 1}

    async def _until_started(self, sent: Sent, *, has_to_hold: bool) -> None:
        """Wait until replicas that start can take part in an update, at most `weight_timeout`.

        One from a directory they can also read later, see `prepare`, if another replica runs and installs it at once.
        """

        def is_so() -> bool:
            is_read_later = sent.directory is not None and not has_to_hold and bool(self._holders(sent))
            starting = any(one.state in ("stopped", "starting", "draining") for one in self._servers.all)
            return self._phase == "aborted" or is_read_later or not starting

        with suppress(TimeoutError):
            async with asyncio.timeout(self._weight_s):
                await self._servers.until(is_so)

    async def _commit_held(self, body: CommitBody) -> dict[str, Any]:
        """Install the update that replicas hold. Raises `ApiError` if there is none, or if one of them has died."""
        if self._held is None:
            raise ApiError(400, "no weights are held: POST /update_weights with hold first", code="no_update")
        version = body.version or self.version + 1
        if version <= self.version:
            raise refused("version", f"must be >= {self.version + 1}, got {version}")
        if version > (largest := max(_LARGEST, self.version + 1)):
            raise refused("version", f"must be <= {largest}, got {version}")
        (sent, urls), self._held = self._held, None
        with self._claimed():
            self._phase = "gathering"
            holders = self._holders(sent)
            if {one: one.url for one in holders} != urls:
                await self._everywhere(holders, Sent(path=ABORT), _ABORT_S)
                raise ApiError(
                    409, "a replica was replaced since the weights were held: send them again", code="no_update"
                )
            fields = await self._install(holders, replace(sent, version=version))
        return {**COMMANDS[COMMIT].reply, **fields}

    def _holders(self, sent: Sent) -> list[Server]:
        """Return the replicas that an update concerns: a part of the weights is of no use to one that needs all."""
        left_out = ("draining", NEEDS_UPDATE) if sent.is_partial else ("draining",)
        return [one for one in self._servers.running if one.state not in left_out]

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Refuse other updates during the block. Raises `ApiError` 409 during another one."""
        if self._phase or self._held:
            how = f"install it with {COMMIT}, or abort it with {ABORT}" if self._held else "wait for its end"
            raise ApiError(409, f"busy: an update is {self._phase or 'staged'}; {how}", code="busy")
        self._phase = "waiting"
        try:
            yield
        finally:
            self._phase = ""
            self._servers.notify()

    @contextmanager
    def _in_use(self, servers: Sequence[Server]) -> Iterator[None]:
        """Count a request of each server during the block: one that drains is not stopped before its end."""
        for server in servers:
            server.num_open += 1
        try:
            yield
        finally:
            for server in servers:
                server.num_open -= 1
            self._servers.notify()

    async def _gather(self, holders: Sequence[Server], sent: Sent, copies: Copies | None) -> dict[str, Any]:
        """Let all replicas gather an update and hold it; return the first one's reply.

        If one fails, or the client leaves, none holds it any longer. Raises the error.
        """
        bodies: Sequence[bytes | AsyncIterator[bytes]]
        bodies = [sent.content] * len(holders) if copies is None else [copies.pieces(n) for n in range(len(holders))]
        pairs = zip(holders, bodies, strict=True)
        asking = [asyncio.ensure_future(self._ask(one, sent, self._answer_s, body)) for one, body in pairs]
        copying = [] if copies is None else [asyncio.ensure_future(copies.fill())]
        try:
            if not holders:
                lacking = " of a part of the weights" if sent.is_partial else ""
                raise queue_full(f"no replica accepts updates{lacking} at the moment", code="no_replica")
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
        while left := [one for one in asking if not one.done()]:
            await self._everywhere(holders, Sent(path=ABORT), _ABORT_S)
            await asyncio.wait(left, timeout=_RETRY_S)
        await self._everywhere(holders, Sent(path=ABORT), _ABORT_S)
        await asyncio.gather(*asking, return_exceptions=True)

    async def _install(self, holders: Sequence[Server], sent: Sent) -> dict[str, Any]:
        """Install what all replicas hold; return the fields of the new weights. The update is in force if one has it.

        One that fails is started again. Raises the first one's error if none has installed the update.
        """
        assert sent.version is not None
        self._phase = "installing"  # replicas that start wait until it is known whether the update is in force
        processes = [one.process for one in holders]
        replies = await asyncio.shield(self._everywhere(holders, commit_of(sent), self._answer_s))
        declined = {one: reply for one, reply in replies.items() if isinstance(reply, Declined)}
        installed = {one: reply for one, reply in replies.items() if isinstance(reply, httpx2.Response)}
        if not installed:
            if len(replies) < len(holders):
                self.version = sent.version  # one that died may have used the number
            await asyncio.shield(self._everywhere(list(declined), Sent(path=ABORT), _ABORT_S))
            for reply in declined.values():
                raise reply
            raise ApiError(503, "the replicas died before one had installed the update", code="replica_died")
        self.version = sent.version
        if sent.directory is None:
            self._forget_updates("came in the body of a request")
        else:
            if not sent.is_partial:
                self._forget_updates("")
            self._journal = [*self._journal, sent]
            if len(self._journal) > MAX_JOURNAL:
                self._forget_updates(_TOO_MANY)
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
        servers = [one for one in servers if one in self._servers.running]
        processes = [one.process for one in servers]
        outcomes = await asyncio.gather(*(self._ask(one, sent, limit) for one in servers), return_exceptions=True)
        replies: dict[Server, httpx2.Response | Declined] = {}
        for server, process, outcome in zip(servers, processes, outcomes, strict=True):
            if isinstance(outcome, Gone):
                _log.error("%s: %s", sent.path, outcome)
                if server.process is process:
                    self._servers.end(server)
            elif isinstance(outcome, BaseException) and not isinstance(outcome, Declined):
                raise outcome
            else:
                replies[server] = outcome
        return replies

    async def _ask(
        self, server: Server, sent: Sent, limit: float, body: bytes | AsyncIterator[bytes] | None = None
    ) -> httpx2.Response:
        """Return a replica's reply. Raises `Declined`; `Gone` if there is none within `limit` seconds.

        A command that `waits` has no limit, while the replica answers health checks.
        """
        content = sent.content if body is None else body
        kind = {"content-type": JSON_TYPE if isinstance(content, bytes) else BYTES_TYPE} if content else {}
        url = f"{server.url}{sent.path}?{sent.query}"
        asking = asyncio.ensure_future(self._client.post(url, content=content, headers={**self._headers, **kind}))
        try:
            with self._in_use([server]):
                while not (await asyncio.wait({asking}, timeout=limit))[0]:
                    if not sent.waits or server.state == "unreachable":
                        raise Gone(f"{server.name} did not answer within {limit:g} seconds")
                reply = asking.result()
        except httpx2.HTTPError as error:
            raise Gone(f"{server.name} died ({type(error).__name__})") from None
        finally:
            asking.cancel()
        if reply.status_code != 200:
            raise Declined(reply)
        return reply


def keys_of_replicas(config: ServerConfig, policy: GuardPolicy) -> tuple[str, ...]:
    """Return the admin keys that replicas accept: without any key a secret one, since they listen on TCP ports.

    Clients of the whole need none, if only this user can open its socket.
    """
    keys = load_admin_keys(config)
    needs_own = config.takes_commands and config.uds is not None and not keys and policy.keys.is_empty
    return (policy.admins.secret.hex(),) if needs_own else keys
