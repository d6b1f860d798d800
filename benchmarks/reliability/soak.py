"""R40: hours of mixed load in minutes, with a trainer that frees and takes the memory: nothing may grow."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from clients import impatient
from lab import COMPLETIONS, JSON, NOTHING, Finding, Lab, Server, greedy, megabytes

RATE = 4.0
"""Requests a second."""
REST_S, ASLEEP_S, PAGES_S = 10.0, 0.5, 3.0
"""Between two turns of the trainer; within one; until the pages of the cache are back."""
TRAINER: tuple[tuple[tuple[str, JSON], tuple[str, JSON]], ...] = (
    (("/sleep?level=1&mode=keep", {}), ("/wake_up", {})),
    (("/release_memory_occupation", {}), ("/resume_memory_occupation", {})),
    (("/release_memory_occupation", {"tags": ["kv_cache"]}), ("/resume_memory_occupation", {"tags": ["kv_cache"]})),
    (("/pause?mode=keep&clear_cache=true", {}), ("/resume", {})),
)
"""What the trainer does in turns, and what ends it. Requests stay, and compute their K/V again."""
MIXTURE = {"left": 0.10, "bad": 0.05, "stream": 0.35, "tokenize": 0.10, "whole": 0.40}
"""Part of the requests that is of each kind."""
BATCH, MAX_PROMPT, MAX_NEW, MAX_WORDS = 8, 60, 12, 2000
BAD: tuple[JSON, ...] = (
    *({"prompt": 5}, {"prompt": "a", "temperature": 99}, {"prompt": "a", "n": 0}, {"prompt": "a", "model": "nothing"}),
    *({"prompt": "word " * 5000}, {}),
)


@dataclass(slots=True)
class Diary:
    """What a soak saw: how requests ended, (seconds, bytes) of the process, threads."""

    ends: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    is_whole: bool = True
    """The KV cache has its memory: only then is memory compared."""


def body_of(kind: str, prompt: Sequence[int], max_tokens: int, num_words: int, bad: JSON) -> JSON:
    """Return the body of a request."""
    if kind == "bad":
        return bad
    if kind == "tokenize":
        return {"prompt": "word " * num_words}
    if kind == "stream":
        return {**greedy(prompt, max_tokens), "temperature": 1, "logprobs": 2}
    return {**greedy(prompt, 400), "stream": True} if kind == "left" else greedy(prompt, max_tokens)


async def send(server: Server, kind: str, body: JSON, patience_s: float, diary: Diary) -> None:
    """Send a request and count how it ended."""
    try:
        if kind == "left":
            await impatient(server, body, patience_s)
            diary.ends["left"] += 1
        elif kind == "stream":
            stream = await server.stream(body)
            diary.ends["stream" if stream.is_done and stream.error is None else "broken stream"] += 1
        else:
            path = "/tokenize" if kind == "tokenize" else COMPLETIONS
            diary.ends[str((await server.ask(path, body)).status)] += 1
    except (OSError, RuntimeError) as error:
        diary.ends[type(error).__name__] += 1


async def take_turn(server: Server, diary: Diary, turn: int) -> None:
    """Free the memory, or pause, and take it again half a second later."""
    for path, body in TRAINER[turn % len(TRAINER)]:
        reply = await server.ask(path, body)
        diary.ends["2xx of the trainer" if reply.status == 200 else f"{path} {reply.status}"] += 1
        if path.startswith(("/sleep", "/release", "/pause")):
            await asyncio.sleep(ASLEEP_S)


async def warm_up(lab: Lab, server: Server, diary: Diary) -> None:
    """Bring the server's memory to its high-water mark with whole batches of the largest requests.

    The engine keeps buffers for its largest step so far, and glibc what that step's temporaries took. Under random load
    the largest step comes late: without the warm-up RSS rose by 6.0 MB after 6 minutes, by 3.7 MB after 18, and was
    flat between. With it the slope measures leaks only.
    """
    for turn in range(len(TRAINER)):  # what runs computes its K/V again, in the largest steps
        visits = [
            send(server, kind, body_of(kind, lab.prompt(MAX_PROMPT), 32, MAX_WORDS, BAD[number % len(BAD)]), 0.5, diary)
            for kind in MIXTURE
            for number in range(BATCH)
        ]
        sent = asyncio.gather(*visits)
        await asyncio.sleep(ASLEEP_S)
        await take_turn(server, diary, turn)
        await sent


async def train(server: Server, diary: Diary, ends_at: float) -> None:
    """Free the memory and take it again until that time, while requests run."""
    turn = 0
    while time.monotonic() + REST_S < ends_at:
        await asyncio.sleep(REST_S)
        diary.is_whole = False
        await take_turn(server, diary, turn)
        await asyncio.sleep(PAGES_S)
        diary.is_whole = True
        turn += 1


async def r40(lab: Lab) -> Finding:
    """Mixed load of 4 rps, 10 % leave, KV memory freed every 10 s: RSS + ≤ 1 MB in 10 min; files constant; no 5xx."""
    chance, diary, seconds = random.Random(40), Diary(), lab.minutes * 60
    async with lab.server({"--max-queued-requests": "64", "--enable-rl": ""}) as server:
        files = server.count("fd")
        await warm_up(lab, server, diary)
        began, sent = time.monotonic(), 0
        trainer = asyncio.create_task(train(server, diary, began + seconds))
        visits: set[asyncio.Task[None]] = set()
        while (now := time.monotonic() - began) < seconds:
            (kind,) = chance.choices(list(MIXTURE), list(MIXTURE.values()))
            sizes = [chance.randint(1, most) for most in (MAX_PROMPT, MAX_NEW, MAX_WORDS)]
            body = body_of(kind, lab.prompt(sizes[0]), sizes[1], sizes[2], chance.choice(BAD))
            if len(visits) < 200:
                visits.add(asyncio.create_task(send(server, kind, body, chance.uniform(0.01, 0.5), diary)))
            sent += 1
            visits = {task for task in visits if not task.done()}
            if sent % 20 == 0 and diary.is_whole:
                diary.rss.append((now, server.memory()))
                diary.threads.append(server.count("task"))
            await asyncio.sleep(max(0.0, sent / RATE - (time.monotonic() - began)))
        await asyncio.gather(*visits, trainer)
        await server.until_load(timeout=300)
        held, left = await server.held(), server.count("fd") - files
        refused = await server.metric("http_requests_total", 'status="5xx"')
        has_traceback = any("Traceback" in line for line in server.lines)
    rss, threads = (points[len(points) // 3 :] for points in (diary.rss, diary.threads))
    slope = statistics.linear_regression(*zip(*rss, strict=True)).slope * 600 / 1e6  # MB in ten minutes
    figures = {
        "minutes": lab.minutes,
        "requests": sent,
        "ended": dict(diary.ends),
        "5xx": refused,
        "RSS MB": [megabytes(size) for _, size in (diary.rss[:1] + diary.rss[-1:])],
        "MB in 10 min": round(slope, 2),
        "threads": (min(threads), max(threads)),
        "files more": left,
        "held": held,
    }
    odd = {name for name in diary.ends if not (name in ("left", "stream") or name[0] in "24")}
    is_steady = slope <= 1 and max(threads) - min(threads) <= 1 and left <= 2
    return figures, is_steady and refused == 0 and not odd and held == NOTHING and not has_traceback
