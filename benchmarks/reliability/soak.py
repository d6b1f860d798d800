"""R40: hours of mixed load in minutes, with a trainer that frees and takes the memory: nothing may grow."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness import Check, Finding, Lab, Server, greedy, megabytes, say
from queueing import COMPLETIONS, impatient
from wires import JSON, Closed

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
Kind = Literal["left", "bad", "stream", "tokenize", "whole"]
MIXTURE: dict[Kind, float] = {"left": 0.10, "bad": 0.05, "stream": 0.35, "tokenize": 0.10, "whole": 0.40}
"""Part of the requests that is of each kind."""
BATCH = 8
"""Samples that the server runs at once."""
MAX_PROMPT, MAX_NEW, MAX_WORDS = 60, 12, 2000
"""Most tokens of a prompt and of an answer, and words of a text to tokenize."""
LEFT_NEW = 400
"""Tokens of an answer that its client does not wait for."""
WARM_UP_NEW = 32
"""Tokens of an answer in `warm_up`: enough for a whole batch to run at the same time."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of the mixture, and what its client does."""

    kind: Kind
    body: JSON
    """Of a completion, of /tokenize, or of neither."""
    patience_s: float = 0.5
    """After which a client of kind "left" closes the connection."""


def random_visit(lab: Lab, chance: random.Random) -> Visit:
    """Return a request of the mixture, of random size."""
    (kind,) = chance.choices(list(MIXTURE), list(MIXTURE.values()))
    body = body_of(
        kind,
        prompt=lab.prompt(chance.randint(1, MAX_PROMPT)),
        max_tokens=chance.randint(1, MAX_NEW),
        num_words=chance.randint(1, MAX_WORDS),
        num_samples=chance.choice((1, 1, 2)),
        bad=chance.choice(BAD),
    )
    return Visit(kind=kind, body=body, patience_s=chance.uniform(0.01, 0.5))


def largest_visits(lab: Lab, kind: Kind) -> list[Visit]:
    """Return the largest requests of a kind, or every bad one, enough to fill the server's batch."""
    return [
        Visit(
            kind=kind,
            body=body_of(
                kind,
                prompt=lab.prompt(MAX_PROMPT),
                max_tokens=WARM_UP_NEW,
                num_words=MAX_WORDS,
                num_samples=2,
                bad=BAD[number % len(BAD)],
            ),
        )
        for number in range(BATCH)
    ]


def body_of(kind: Kind, *, prompt: Sequence[int], max_tokens: int, num_words: int, num_samples: int, bad: JSON) -> JSON:
    """Return the body of a request; each kind uses the arguments that concern it."""
    if kind == "left":
        return {**greedy(prompt, LEFT_NEW), "stream": True}
    if kind == "bad":
        return bad
    if kind == "stream":
        return {**greedy(prompt, max_tokens), "temperature": 1, "logprobs": 2}
    if kind == "tokenize":
        return {"prompt": "word " * num_words}
    return {**greedy(prompt, max_tokens), "n": num_samples}


async def send(server: Server, visit: Visit, diary: Diary) -> None:
    """Send a request and count how it went."""
    try:
        if visit.kind == "left":
            await impatient(server, visit.body, visit.patience_s)
            diary.note("left")
        elif visit.kind == "stream":
            stream = await server.stream(visit.body)
            diary.note("stream" if stream.is_done and stream.error is None else "broken stream")
        else:
            path = "/tokenize" if visit.kind == "tokenize" else COMPLETIONS
            diary.note(str((await server.ask(path, visit.body)).status))
    except (Closed, OSError, RuntimeError, TimeoutError) as error:
        diary.note(type(error).__name__)


async def warm_up(lab: Lab, server: Server, diary: Diary) -> None:
    """Bring the server's memory to its high-water mark: send whole batches of the largest requests of the mixture.

    The engine keeps buffers for its largest step so far. glibc keeps what that step's temporaries took: when a large
    block is freed it raises its thresholds for mmap and trim. Eight rows with `logprobs` need most, 7.9 MB in
    `logprobs.top_logprobs`, which casts masks [rows, vocabulary] to int64. Under random load the largest step comes
    late: without the warm-up RSS rose by 6.0 MB after 6 minutes, by 3.7 MB after 18, and was flat between. With it the
    slope measures leaks only.
    """
    for kind in MIXTURE:
        await asyncio.gather(*(send(server, visit, diary) for visit in largest_visits(lab, kind)))
    for turn in range(len(TRAINER)):  # what runs computes its K/V again, in the largest steps
        visits = [visit for kind in MIXTURE for visit in largest_visits(lab, kind)]
        sent = asyncio.gather(*(send(server, visit, diary) for visit in visits))
        await asyncio.sleep(ASLEEP_S)
        await take_turn(server, diary, turn)
        await sent


async def train(server: Server, diary: Diary, ends_at: float) -> None:
    """Free the memory and take it again until that time, in turns by each pair of routes, while requests run."""
    turn = 0
    while time.monotonic() + REST_S < ends_at:
        await asyncio.sleep(REST_S)
        diary.is_whole = False
        await take_turn(server, diary, turn)
        await asyncio.sleep(PAGES_S)
        diary.is_whole = True
        turn += 1


async def take_turn(server: Server, diary: Diary, turn: int) -> None:
    """Free the memory, or pause, and take it again half a second later."""
    begin, end = TRAINER[turn % len(TRAINER)]
    for path, body in (begin, end):
        reply = await server.ask(path, body)
        if reply.status != 200:
            diary.note(f"{path} {reply.status}")
        if (path, body) == begin:
            await asyncio.sleep(ASLEEP_S)
            if "pause" not in path:
                diary.asleep.append((server.rss, server.virtual))
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
    """Mixed load with clients that leave and bad requests, measured after `warm_up`."""
    chance, diary = random.Random(40), Diary()
    seconds = lab.minutes * 60
    env = {**os.environ, "NANO_INFERENCE_ENABLE_RL": "true"}
    options = {"--max-batch-size": str(BATCH), "--max-queued-requests": "64"}
    async with lab.server(options, env=env) as server:
        files = server.num_files
        await warm_up(lab, server, diary)
        say(f"  R40 warm: {server.rss / 1e6:.0f} MB, {diary.statuses}")
        began = time.monotonic()
        trainer = asyncio.create_task(train(server, diary, began + seconds))
        visits: set[asyncio.Task[None]] = set()
        sent = 0
        while (now := time.monotonic() - began) < seconds:
            if len(visits) < 200:
                visits.add(asyncio.create_task(send(server, random_visit(lab, chance), diary)))
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
