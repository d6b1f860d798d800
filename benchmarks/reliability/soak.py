"""R40: hours of mixed load in minutes, with a trainer that frees and takes the memory: nothing may grow."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, field

from harness import JSON, Check, Closed, Finding, Lab, Server, greedy, megabytes, say
from queueing import COMPLETIONS, impatient

RATE = 4.0
REST_S = 10.0
"""Between two times that the trainer puts the engine to sleep."""
ASLEEP_S = 0.5
PAGES_S = 3.0
"""In which the pages of the cache are brought in again."""
TRAINER: tuple[tuple[tuple[str, JSON], tuple[str, JSON]], ...] = (
    (("/sleep?level=1&mode=keep", {}), ("/wake_up", {})),
    (("/release_memory_occupation", {}), ("/resume_memory_occupation", {})),
    (("/release_memory_occupation", {"tags": ["kv_cache"]}), ("/resume_memory_occupation", {"tags": ["kv_cache"]})),
    (("/pause?mode=keep&clear_cache=true", {}), ("/resume", {})),
)
"""What the trainer does in turns, and what ends it. Requests stay, and compute their K/V again."""
ABORTS, INVALID = 0.10, 0.05
BAD: tuple[JSON, ...] = (
    {"prompt": 5},
    {"prompt": "a", "temperature": 99},
    {"prompt": "a", "n": 0},
    {"prompt": "a", "model": "nothing"},
    {"prompt": "word " * 5000},
    {},
)


@dataclass(slots=True)
class Diary:
    """What a soak saw."""

    statuses: dict[str, int] = field(default_factory=dict)
    rss: list[tuple[float, int]] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    asleep: list[tuple[int, int]] = field(default_factory=list)
    """Resident and virtual bytes while the memory of the KV cache was given back."""
    virtual: list[tuple[float, int]] = field(default_factory=list)
    is_whole: bool = True
    """Whether the KV cache has its memory, and its pages have had time to come back: only then is memory compared."""

    def note(self, status: str) -> None:
        """Count how one request went."""
        self.statuses[status] = self.statuses.get(status, 0) + 1


async def visit(lab: Lab, server: Server, chance: random.Random, diary: Diary) -> None:
    """Send one request of the mixture."""
    kind = chance.random()
    body = greedy(lab.prompt(chance.randint(1, 60)), chance.randint(1, 12))
    try:
        if kind < ABORTS:
            await impatient(server, {**body, "max_tokens": 400, "stream": True}, chance.uniform(0.01, 0.5))
            diary.note("left")
        elif kind < ABORTS + INVALID:
            diary.note(str((await server.ask(COMPLETIONS, chance.choice(BAD))).status))
        elif kind < 0.5:
            stream = await server.stream({**body, "temperature": 1, "logprobs": 2})
            diary.note("stream" if stream.is_done and stream.error is None else "broken stream")
        elif kind < 0.6:
            text = "word " * chance.randint(1, 2000)
            diary.note(str((await server.ask("/tokenize", {"prompt": text})).status))
        else:
            diary.note(str((await server.ask(COMPLETIONS, {**body, "n": chance.choice((1, 1, 2))})).status))
    except (Closed, OSError, RuntimeError, TimeoutError) as error:
        diary.note(type(error).__name__)


async def train(server: Server, diary: Diary, ends_at: float) -> None:
    """Free the memory and take it again until that time, in turns by each pair of routes, while requests run."""
    turn = 0
    while time.monotonic() + REST_S < ends_at:
        await asyncio.sleep(REST_S)
        begin, end = TRAINER[turn % len(TRAINER)]
        diary.is_whole = False
        for path, body in (begin, end):
            reply = await server.ask(path, body)
            if reply.status != 200:
                diary.note(f"{path} {reply.status}")
            if (path, body) == begin:
                await asyncio.sleep(ASLEEP_S)
                if "pause" not in path:
                    diary.asleep.append((server.rss, server.virtual))
        await asyncio.sleep(PAGES_S)
        diary.is_whole = True
        turn += 1
        diary.note("2xx of the trainer")


def slope(points: list[tuple[float, int]]) -> float:
    """Return the least-squares slope of (seconds, bytes), in MB in ten minutes."""
    if len(points) < 3:
        return float("nan")
    times, sizes = zip(*points, strict=True)
    middle, mean = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((t - middle) ** 2 for t in times)
    covered = sum((t - middle) * (s - mean) for t, s in points)
    return float(covered / spread) * 600 / 1e6


def spread(sizes: list[int]) -> str:
    """Return the median of the first and of the last third, in MB."""
    third = max(1, len(sizes) // 3)
    return f"{megabytes(middle(sizes[:third]))} → {megabytes(middle(sizes[-third:]))}"


def middle(sizes: list[int]) -> float:
    """Return the median, 0 of nothing."""
    return statistics.median(sizes) if sizes else 0.0


async def r40(lab: Lab) -> Finding:
    """Mixed load with clients that leave and requests that are none."""
    chance, diary = random.Random(40), Diary()
    seconds = lab.minutes * 60
    env = {**os.environ, "NANO_INFERENCE_ENABLE_RL": "true"}
    async with lab.server({"--max-queued-requests": "64"}, env=env) as server:
        files = server.num_files
        began = time.monotonic()
        trainer = asyncio.create_task(train(server, diary, began + seconds))
        visits: set[asyncio.Task[None]] = set()
        sent = 0
        while (now := time.monotonic() - began) < seconds:
            if len(visits) < 200:
                visits.add(asyncio.create_task(visit(lab, server, chance, diary)))
            sent += 1
            visits = {task for task in visits if not task.done()}
            if sent % 20 == 0 and diary.is_whole:
                diary.rss.append((now, server.rss))
                diary.virtual.append((now, server.virtual))
                diary.threads.append(server.num_threads)
            if sent % 1200 == 0:
                say(f"  R40 {now / 60:.0f} min: {server.rss / 1e6:.0f} MB, {diary.statuses}")
            await asyncio.sleep(max(0.0, sent / RATE - (time.monotonic() - began)))
        await asyncio.gather(*visits, trainer)
        await server.until_load(timeout=300)
        metrics, tracebacks, left = await server.metrics(), server.has_traceback, server.num_files - files
    held, refused = metrics.held, metrics.value("http_requests_total", 'status="5xx"')
    warm = [point for point in diary.rss if point[0] >= seconds / 3]
    threads = diary.threads[len(diary.threads) // 3 :]
    figures = {
        "minutes": round(lab.minutes, 1),
        "requests": sent,
        "went": str(diary.statuses),
        "5xx": refused,
        "RSS MB": megabytes(diary.rss[-1][1]) if diary.rss else 0,
        "MB in 10 min": round(slope(warm), 2),
        "VSZ MB in 10 min": round(slope([point for point in diary.virtual if point[0] >= seconds / 3]), 2),
        "sleeps": len(diary.asleep),
        "asleep RSS MB": spread([rss for rss, _ in diary.asleep]),
        "asleep VSZ MB": spread([virtual for _, virtual in diary.asleep]),
        "threads": f"{min(threads, default=0)}–{max(threads, default=0)}",
        "files more": left,
        "running, waiting, kv": str(held),
    }
    odd = {name for name in diary.statuses if not (name in ("left", "stream") or name[0] in "24")}
    is_steady = slope(warm) <= 1 and max(threads) - min(threads) <= 1 and left <= 2
    is_ok = is_steady and refused == 0 and not odd and held == (0, 0, 0) and not tracebacks
    note = "tasks of asyncio are not visible from outside; open files and the load returning to 0 stand for them"
    return Finding(figures=figures, is_ok=is_ok, note=note)


CHECKS = (
    Check(
        "R40",
        "mixed load of 4 rps, 10 % leave, 5 % invalid; KV memory freed every 10 s",
        "RSS + ≤ 1 MB in 10 min; files constant, threads ± 1 (cache pages); 0 × 5xx",
        r40,
        is_slow=True,
    ),
)
