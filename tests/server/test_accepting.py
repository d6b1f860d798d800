"""Accepting connections resumes as soon as descriptors are free."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from nano_inference.server.accepting import Acceptor


class Scarce:
    """A listening socket whose first `num_failures` calls of `accept` fail with errno `number`."""

    def __init__(self, num_failures: int, number: int) -> None:
        self.real = socket.create_server(("127.0.0.1", 0))
        self.left = num_failures
        self.number = number
        self.num_calls = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_calls += 1
        if self.left:
            self.left -= 1
            raise OSError(self.number, "too many open files")
        return self.real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


def test_accept_retries_once_per_failure() -> None:
    failures: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        for number in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            loop = asyncio.get_running_loop()
            listening: Any = Scarce(5, number)
            acceptor = Acceptor(loop, listening, Greeter)
            acceptor.start()
            port = listening.getsockname()[1]
            greeted = []
            while not greeted or greeted[-1] != b"hello":  # refused connections are closed
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    greeted.append(await reader.read())
                except ConnectionError:
                    greeted.append(b"")
                writer.close()
            assert not failures and listening.left == 0
            assert listening.num_calls <= 5 + 3 * len(greeted)
            await acceptor.close()
            await acceptor.close()

    asyncio.run(main())


def test_other_accept_errors_reach_the_loop() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[Any] = loop.create_future()
        loop.set_exception_handler(lambda _, context: seen.done() or seen.set_result(context["exception"]))
        listening: Any = Scarce(1, errno.EBADF)
        acceptor = Acceptor(loop, listening, Greeter)
        acceptor.start()
        _, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
        assert (await seen).errno == errno.EBADF
        writer.close()
        await acceptor.close()

    asyncio.run(main())
