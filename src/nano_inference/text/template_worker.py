"""The worker process that renders templates which are not known: limits on itself, then one rendering per request.

Frames on stdin and stdout: a length of eight bytes, then that many. The first frame is the templates, each later one
a request, both JSON; each reply is one letter for its kind and a text. The process ends when stdin does. It imports
neither torch nor tokenizers, opens no file and has no terminal.
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
"""CPU seconds of one rendering, its JSON included; a chat of 10 KB takes 0.001. SIGPROF ends the process."""
BYTES_PER_CPU_S = 512 << 10
"""A request of so many bytes adds a CPU second; one of 4 MB with a slow template takes 2.5."""
MAX_MEMORY = 512 << 20
"""Bytes of address space of the whole process, of which Python and MiniJinja take 50 MB (not enforced on macOS)."""
HEADER = struct.Struct(">Q")
TEXT, REFUSED, LIMIT, MEMORY = b"t", b"r", b"l", b"m"
"""Kinds of reply: the text; what `BadRequest` says; the reason of a `TemplateLimit`; memory ran out."""


def main() -> None:
    """Serve stdin until it ends."""
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
    """Return the CPU seconds that a request of that many bytes may take."""
    return BASE_CPU_S + size / BYTES_PER_CPU_S


def _answer(environment: minijinja.Environment, templates: Templates, request: bytes) -> bytes:
    """Return the reply to one request."""
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
    """Bound memory, forbid writing to files and core dumps; leave its end to stdin and to the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limits = ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0))
    for what, most in limits:
        try:
            resource.setrlimit(what, (most, most))
        except (ValueError, OSError):  # a lower hard limit is already set, or the system has none of this kind
            continue


def _read_frame(source: BinaryIO) -> bytes | None:
    """Return the next frame, None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    data = source.read(size)
    return data if len(data) == size else None
