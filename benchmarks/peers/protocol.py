"""The protocol of peers' workers: a workload per line of JSON on stdin, a measurement per line on stdout.

A worker is a process in its engine's environment; it imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Request = dict[str, Any]
"""prompt (ids), new_tokens, num_samples, temperature."""
Run = Callable[[list[Request]], tuple[float | None, int]]
"""Runs requests together; returns the moment of the first token (time.perf_counter), and how many tokens came."""


def run_workload(run: Run, workload: dict[str, Any]) -> dict[str, Any]:
    """Time one workload: all prompts together, or one after another."""
    same = {name: workload[name] for name in ("num_samples", "temperature")}
    sizes = zip(workload["prompts"], workload["new_tokens"], strict=True)
    asked = [{"prompt": prompt, "new_tokens": new_tokens, **same} for prompt, new_tokens in sizes]
    begin = time.perf_counter()
    firsts, total = [], 0
    for group in [[request] for request in asked] if workload["one_by_one"] else [asked]:
        start = time.perf_counter()
        first, count = run(group)
        firsts.append((first or time.perf_counter()) - start)
        total += count
    seconds = time.perf_counter() - begin
    wanted = sum(request["new_tokens"] * request["num_samples"] for request in asked)
    if total != wanted:
        raise RuntimeError(f"{total} tokens came, {wanted} were asked for")
    return {"seconds": seconds, "first_token_seconds": firsts}


def take_stdout() -> TextIO:
    """Return stdout for answers alone; what libraries print goes to stderr from now on.

    To be called before they are imported: some speak while they load.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def serve(run: Run, version: str, out: TextIO) -> None:
    """Say that the model is loaded, then answer workloads from stdin until it closes."""
    print(json.dumps({"ready": version}), file=out, flush=True)
    while line := sys.stdin.readline():
        try:
            answer = run_workload(run, json.loads(line))
        except Exception as error:  # a peer that cannot do one workload may do the next
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=out, flush=True)
