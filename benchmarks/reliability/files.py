"""R51–R53: memory over sleep and wake, hostile working directories, and damaged caches of compiled kernels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness import Check, Finding, Lab, Server, greedy, megabytes
from queueing import COMPLETIONS

CACHE_BYTES = 256 << 20
CYCLES = 20
WARM_UP = 2
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
MODULES = ("random", "json", "tempfile", "ssl", "pip", "torch", "numpy", "typing", "sitecustomize", "usercustomize")
PROGRAMS = ("cc", "gcc", "clang", "as", "ld", "python", "python3", "pip")
HEADERS = ("stdint.h", "immintrin.h", "math.h", "specs")


async def memory(server: Server) -> tuple[int, int]:
    """Return resident and virtual bytes, once the resident ones have stopped changing."""
    last = -1
    for _ in range(200):
        now = server.rss
        if abs(now - last) < 1 << 20:
            break
        last = now
        await asyncio.sleep(0.1)
    return server.rss, server.virtual


def growth(values: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return how much resident and virtual memory grew from the first to the last."""
    return values[-1][0] - values[0][0], values[-1][1] - values[0][1]


async def r51(lab: Lab) -> Finding:
    """Sleep and wake over HTTP, with requests between."""
    awake, asleep = [], []
    env = {**os.environ, "NANO_INFERENCE_ENABLE_RL": "true"}
    async with lab.server({"--kv-cache-bytes": str(CACHE_BYTES)}, env=env) as server:
        for _ in range(WARM_UP + CYCLES):
            await server.ask(COMPLETIONS, greedy(lab.prompt(200), 8))
            awake.append(await memory(server))
            await server.ask(RELEASE, {})
            asleep.append(await memory(server))
            await server.ask(RESUME, {})
    up, down = growth(awake[WARM_UP:]), growth(asleep[WARM_UP:])
    freed = [min(a[0] - b[0], a[1] - b[1]) for a, b in zip(awake, asleep, strict=True)][WARM_UP:]
    figures = {
        "cycles": CYCLES,
        "cache MB": megabytes(CACHE_BYTES),
        "awake RSS MB": f"{megabytes(awake[WARM_UP][0])} → {megabytes(awake[-1][0])}",
        "awake VSZ MB": f"{megabytes(awake[WARM_UP][1])} → {megabytes(awake[-1][1])}",
        "asleep RSS MB": f"{megabytes(asleep[WARM_UP][0])} → {megabytes(asleep[-1][0])}",
        "asleep VSZ MB": f"{megabytes(asleep[WARM_UP][1])} → {megabytes(asleep[-1][1])}",
        "least freed MB": megabytes(min(freed)),
    }
    is_ok = max(*up, *down) <= 16 << 20 and min(freed) >= CACHE_BYTES * 0.9
    return Finding(figures=figures, is_ok=is_ok)


# ---- hostile working directories ------------------------------------------------------------------------------------


def hostile(place: Path) -> Path:
    """Fill a directory with modules, programs and headers that leave a mark when they are run or read."""
    place.mkdir()
    for name in MODULES:
        (place / f"{name}.py").write_text(f"open({str(place / 'ran')!r}, 'a').write('{name} ')\n")
    for name in PROGRAMS:
        (place / name).write_text(f"#!/bin/sh\necho {name} >> {place / 'ran'}\nexit 1\n")
        (place / name).chmod(0o755)
    for name in HEADERS:
        (place / name).write_text("#error from the current directory\n")
    return place


def shadowing(place: Path) -> Path:
    """Fill a directory with folders named like models, whose files are FIFOs."""
    place.mkdir()
    for name in ("default", "smollm2-135m-instruct", "calculator"):
        (place / name).mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            os.mkfifo(place / name / file)
    return place


async def answers(lab: Lab, cwd: Path, env: Mapping[str, str]) -> bool:
    """Whether a server that is started in a directory answers from the usual model."""
    async with lab.server({}, cwd=cwd, env=env) as server:
        reply = await server.ask(COMPLETIONS, greedy(lab.prompt(12), 4))
    return reply.status == 200 and not server.has_traceback


async def r52(lab: Lab) -> Finding:
    """The first use of everything that starts a child process, in two directories that try to take part in it."""
    first, second = hostile(lab.scratch / "hostile"), shadowing(lab.scratch / "shadowing")
    cache = lab.scratch / "fresh-cache"
    env = {**os.environ, "PATH": f".:{os.environ['PATH']}", "CPATH": ".", "LIBRARY_PATH": ":"}
    link_models(cache, env)
    fresh = {**env, "NANO_INFERENCE_CACHE": str(cache)}
    is_first = await answers(lab, first, fresh)
    has_compiled = any((cache / "kernels").glob("*.so"))
    code = (
        "import sys, pathlib; from nano_inference.loading.downloads import pip_download as d; "
        "d('x==1', pathlib.Path(sys.argv[1]))"
    )
    place = lab.scratch / "download"
    place.mkdir()
    pip, _ = await call([sys.executable, "-P", "-c", code, str(place)], first, {**fresh, "PIP_NO_INDEX": "1"})
    module, text = await call([sys.executable, "-P", "-m", "nano_inference", "doctor"], first, fresh)
    ran = (first / "ran").read_text() if (first / "ran").exists() else ""
    is_second = await answers(lab, second, fresh)
    figures = {
        "modules, programs, headers": len(MODULES) + len(PROGRAMS) + len(HEADERS),
        "run or read of them": ran.strip() or 0,
        "kernels compiled there": str(has_compiled),
        "pip refused the name by itself": str(pip == 1),
        "doctor": module,
        "served among folders named like models": str(is_second),
    }
    is_ok = is_first and has_compiled and not ran and pip == 1 and module == 0 and "Traceback" not in text
    return Finding(figures=figures, is_ok=is_ok and is_second, note="kernels, pip, doctor, serve; a cache of its own")


def link_models(cache: Path, env: Mapping[str, str]) -> None:
    """Put the fetched models of the usual cache into another one, which has no kernels."""
    from nano_inference.loading.catalog import default_cache

    cache.mkdir(mode=0o700, exist_ok=True)
    for file in default_cache(env).glob("*.gguf"):
        with contextlib.suppress(FileExistsError):
            (cache / file.name).symlink_to(file)


async def call(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it wrote to stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=dict(env), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(600):
        _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode(errors="replace")


# ---- damaged caches -------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def closed(path: Path) -> None:
    """Put a file where the directory of compiled kernels would be."""
    folder = path.parent
    path.unlink()
    folder.rmdir()
    folder.write_text("")


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 3),
    "one page": lambda path: os.truncate(path, resource.getpagesize()),
    "one bit": flip,
    "writable by others": lambda path: path.chmod(0o777),
    "directory writable by others": lambda path: path.parent.chmod(0o777),
    "a file in place of the directory": closed,
}


async def code_here(lab: Lab, cache: Path, temporary: Path) -> str:
    """Return which code computes in a process with that cache, or how the process ended."""
    show = "print(kernels_here()['code'], file=sys.stderr)"
    code = f"import sys; from nano_inference.build import kernels_here; {show}"
    env = {**os.environ, "NANO_INFERENCE_CACHE": str(cache), "TMPDIR": str(temporary)}
    status, err = await call([sys.executable, "-P", "-c", code], lab.scratch, env)
    if status < 0:
        return signal.Signals(-status).name
    return (err.split() or ["nothing"])[-1] if status == 0 else f"exit {status}"


async def r53(lab: Lab) -> Finding:
    """Starts on a cache whose compiled kernels are damaged, or that others could write."""
    figures: dict[str, object] = {}
    whole, temporary = lab.scratch / "whole-cache", lab.scratch / "temporary"
    temporary.mkdir()
    usual = await code_here(lab, whole, temporary)
    is_ok = usual in ("avx512", "avx2", "generic")
    for number, (name, damage) in enumerate(DAMAGES.items()):
        cache = lab.scratch / f"cache-{number}"
        shutil.copytree(whole, cache)
        damage(next((cache / "kernels").glob("*.so")))
        codes = [await code_here(lab, cache, temporary) for _ in range(2)]
        left = len(list(temporary.iterdir()))
        figures[name] = f"{', '.join(codes)}; {left} left in the temporary folder"
        is_ok = is_ok and set(codes) == {usual} and not left
    return Finding(figures=figures, is_ok=is_ok, note="what computes at two starts after the damage")


CHECKS = (
    Check("R51", f"sleep/wake for {CYCLES} cycles", "RSS, VSZ + ≤ 16 MB; asleep less by ≥ 90 % of the cache", r51),
    Check("R52", "2 hostile working directories", "nothing of them is run; all work", r52),
    Check(
        "R53", "corrupted kernel caches", "every start computes with kernels; nothing is left behind", r53, is_slow=True
    ),
)
