"""Render unknown templates in worker processes, which have limits on time and memory and can be killed."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import minijinja

import nano_inference
from nano_inference.children import PYTHON, start_worker
from nano_inference.text.json_view import unview
from nano_inference.text.template_worker import HEADER, LIMIT, MAX_MEMORY, MEMORY, REFUSED, max_cpu_s
from nano_inference.text.templates import TemplateLimit, Templates
from nano_inference.types import BadRequest

MAX_WORKERS = 4
"""Limit on the worker processes of one model's templates; further renderings wait for a free worker."""
WALL_PER_CPU = 10
"""Limit on a rendering's wall-clock time, as a multiple of its CPU time limit (a worker may wait for a CPU)."""
MAX_TEXT = 64 << 20
"""Limit on the bytes of one rendered text."""
_POLL_S = 0.1
"""Seconds of one poll. Polls are counted instead of reading the clock, so that a suspended process loses no time."""
_CHUNK = 1 << 16
_CODE = "import sys; sys.path += sys.argv[1:]; from nano_inference.text.template_worker import main; main()"
_OUT_OF_MEMORY = f"the chat template takes more than {MAX_MEMORY >> 20} MiB of memory to render these messages"


class TemplateWorkers:
    """Owns the worker processes of one model's templates, which are started on demand, reused, and replaced if killed.

    Thread-safe; usable after a fork, when the child starts new workers.
    """

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_WORKERS)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._is_closed = False
        weakref.finalize(self, _end_all, self._all)

    def render(self, name: str, data: Mapping[str, Any]) -> str:
        """Return the text of one rendering.

        Raises `BadRequest` if the template refuses the messages, `TemplateLimit` for a rendering that exceeds
        `max_cpu_s`, `WALL_PER_CPU` times that, `MAX_MEMORY`, `MAX_TEXT` or the limits of `rendering`.
        """
        try:
            request = json.dumps([name, data], default=unview).encode()
        except ValueError as error:  # an integer with more digits than Python converts to text
            raise BadRequest(f"the messages cannot be written as JSON: {error}") from None
        with self._places:
            worker = self._take()
            try:
                reply = worker.ask(request)
            except _WorkerFailure as failure:
                self._drop(worker)
                self._check_open()
                raise TemplateLimit(self._templates.where, str(failure)) from None
            except BaseException:  # an interrupt may leave part of a reply in the pipe
                self._drop(worker)
                raise
            self._put_back(worker)
        return self._text_of(reply)

    def close(self) -> None:
        """Kill the processes; running and later calls of `render` raise `RuntimeError`."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
        for worker in busy:  # the thread that uses a worker closes its pipes
            worker.kill()
        for worker in idle:
            self._drop(worker)

    def _take(self) -> _Worker:
        """Return an idle live worker, or a new one."""
        while True:
            with self._lock:
                self._check_open()
                worker = self._idle.pop() if self._idle else None
                if worker is None:
                    worker = _Worker(self._templates)
                    self._all.add(worker)
                    return worker
            if worker.is_usable():
                return worker
            self._drop(worker)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the workers that render this chat template were closed")

    def _put_back(self, worker: _Worker) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
                return
        self._drop(worker)

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.end()

    def _text_of(self, reply: bytes) -> str:
        kind, text = reply[:1], reply[1:].decode("utf-8", "surrogatepass")
        if kind == REFUSED:
            raise BadRequest(text)
        if kind in (LIMIT, MEMORY):
            raise TemplateLimit(self._templates.where, text if kind == LIMIT else _OUT_OF_MEMORY)
        return text


class _WorkerFailure(Exception):
    """A worker did not reply; the message is the reason."""


class _Worker:
    """Owns one worker process and its pipes; used by one thread at a time; any thread may call `kill`."""

    def __init__(self, templates: Templates) -> None:
        """Start the process, isolated: it can import only this package, MiniJinja and the standard library."""
        homes = [str(Path(str(module.__file__)).parents[1]) for module in (nano_inference, minijinja)]
        self._owner = os.getpid()
        self._process = start_worker([*PYTHON, "-S", "-c", _CODE, *homes], cwd=Path("/"))
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._unsent = _frame(json.dumps(templates._asdict()).encode())
        """The templates, sent before the first request."""
        self._cpu_s = 0.0
        """CPU time limit of the latest request, in seconds."""

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def is_usable(self) -> bool:
        """Return True if the process is alive and was started by this process, not by the parent of a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """Return the reply to a request. After `_WorkerFailure` the worker must not be used again."""
        self._cpu_s = max_cpu_s(len(request))
        polls = _PollBudget(self._cpu_s * WALL_PER_CPU)
        unsent, self._unsent = self._unsent + _frame(request), b""
        self._send(unsent, polls)
        (size,) = HEADER.unpack(self._receive(HEADER.size, polls))
        if size > MAX_TEXT:
            raise _WorkerFailure(f"the chat template writes more than {MAX_TEXT >> 20} MiB of text")
        return self._receive(size, polls)

    def kill(self) -> None:
        """Kill the process, unless the parent of a fork started it."""
        if self._owner == os.getpid():
            self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for it and close the pipes."""
        self.kill()
        if self._owner == os.getpid():
            self._process.wait()
        self._input.close()
        self._output.close()

    def _send(self, data: bytes, polls: _PollBudget) -> None:
        rest = memoryview(data)
        while rest:
            polls.until_ready(self._input, select.POLLOUT)
            try:
                rest = rest[os.write(self._input.fileno(), rest[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._failure() from None

    def _receive(self, size: int, polls: _PollBudget) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            polls.until_ready(self._output, select.POLLIN)
            part = os.read(self._output.fileno(), min(_CHUNK, size - len(parts)))
            if not part:
                raise self._failure()
            parts += part
        return bytes(parts)

    def _failure(self) -> _WorkerFailure:
        """Return the reason why the process closed its pipes."""
        self._process.kill()  # it may have closed its pipes without ending
        code = self._process.wait()
        if code == -signal.SIGPROF:
            message = f"the chat template takes more than {self._cpu_s:.3g} s of CPU time to render these messages"
            return _WorkerFailure(message)
        if code == -signal.SIGABRT:  # Rust aborts when memory runs out
            return _WorkerFailure(_OUT_OF_MEMORY)
        return _WorkerFailure(f"the chat template ended the process that renders it (exit status {code})")


class _PollBudget:
    """Counts the polls that one rendering has left."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = round(seconds / _POLL_S)

    def until_ready(self, pipe: IO[bytes], event: int) -> None:
        """Wait until a pipe is ready for `event`. Raises `_WorkerFailure` after the last poll."""
        poll = select.poll()
        poll.register(pipe.fileno(), event)
        while not poll.poll(_POLL_S * 1000):
            self._left -= 1
            if self._left <= 0:
                message = f"the chat template takes more than {self._seconds:.3g} s to render these messages"
                raise _WorkerFailure(message)


def _frame(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def _end_all(workers: set[_Worker]) -> None:
    """End all workers: a finalizer, for when the owner is collected or the process exits."""
    for worker in tuple(workers):
        worker.end()
    workers.clear()
