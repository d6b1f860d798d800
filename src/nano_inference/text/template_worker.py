"""The worker process that renders unknown templates: it limits its own resources, then renders once per request.

Frames on stdin and stdout: a length in eight bytes, then the content. The first frame contains the templates, each
later one a request, both as JSON; a reply is one byte for its kind, then a text. The process ends when stdin is closed.
It imports neither torch nor tokenizers, opens no file and has no terminal.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import BinaryIO

import minijinja

from nano_inference.text.rendering import compile_templates, run
from nano_inference.text.templates import TemplateLimit, Templates
from nano_inference.types import BadRequest

BASE_CPU_S = 2.0
"""Limit on the CPU seconds of a short rendering, including JSON; a chat of 10 KB takes 0.001. Enforced by SIGPROF."""
BYTES_PER_CPU_S = 512 << 10
"""Bytes of a request that raise its limit by one CPU second; one of 4 MB with a slow template takes 2.5 seconds."""
MAX_MEMORY = 512 << 20
"""Limit on the process's address space in bytes; Python and MiniJinja take 50 MB (not enforced on macOS)."""
HEADER = struct.Struct(">Q")
TEXT, REFUSED, LIMIT, MEMORY = b"t", b"r", b"l", b"m"
"""Kinds of reply: the rendered text; the message of a `BadRequest`; the reason of a `TemplateLimit`; out of memory."""


def main() -> None:
    """Answer the requests on stdin until it is closed."""
    _limit_process()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _read_frame(source)
    if first is None:
        return
    templates = Templates(**json.loads(first))
    environment = compile_templates(templates)
    while (request := _read_frame(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s(len(request)))
        reply = _answer(environment, templates, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(HEADER.pack(len(reply)) + reply)
        sink.flush()


def max_cpu_s(size: int) -> float:
    """Return the limit on CPU seconds for a request of `size` bytes."""
    return BASE_CPU_S + size / BYTES_PER_CPU_S


def _answer(environment: minijinja.Environment, templates: Templates, request: bytes) -> bytes:
    try:
        name, data = json.loads(request)
        return TEXT + run(environment, templates, name, data).encode("utf-8", "surrogatepass")
    except TemplateLimit as error:
        return LIMIT + error.reason.encode("utf-8", "replace")
    except BadRequest as error:
        return REFUSED + str(error).encode("utf-8", "replace")
    except MemoryError:
        return MEMORY


def _limit_process() -> None:
    """Limit memory, forbid file writes and core dumps, and ignore signals (the parent or stdin ends the process)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limits = ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0))
    for what, most in limits:
        try:
            resource.setrlimit(what, (most, most))
        except (ValueError, OSError):  # a lower hard limit is set, or the system lacks this limit
            continue


def _read_frame(source: BinaryIO) -> bytes | None:
    """Return the content of the next frame, None at the end of the stream."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    data = source.read(size)
    return data if len(data) == size else None
