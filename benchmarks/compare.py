"""Compare this engine with its peers on the same workloads, in one run.

    python benchmarks/compare.py                               # this engine and Transformers
    python benchmarks/compare.py --vllm-python VENV/bin/python --openvino-python VENV/bin/python \\
        --llama-server BUILD/bin/llama-server --llama-models DIRECTORY --repeat 3
    python benchmarks/compare.py --workloads rollout,serve --engines nano,openvino

Each engine is a process with its own environment. Engines take turns, and all others are stopped meanwhile, so a drift
of the machine's speed affects all equally. Each engine runs every workload once; then this engine and the fastest peers
(in floating point, and of any precision) repeat it `--repeat` times, as does a peer that becomes the fastest. `serve`:
32 streaming chats of 64 tokens over HTTP; `serve ready` is the time from the start of the process to the first 200 of
/health, and a server that is ready within 15 s is restarted for each turn. A peer that ends, or hangs for `--limit`
seconds, has an error instead of a figure; its output is in the file named. Prints rows, a Markdown table with ratios to
the fastest peers, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import processor
from peers import chat_servers, report
from peers.chat_servers import ChatServer
from peers.process import Worker, start_worker
from peers.report import Cells
from peers.roster import Plan, add_flags, plan_all
from workloads import WORKLOADS, Workload

WARM_UP_REPETITION = 99
RESTART_SECONDS = 15.0
"""Servers that are ready sooner start anew for each turn, so that this has a median too."""
SERVE_TABLES = ("serve", "serve TTFT", "serve ready")
Figures = dict[str, tuple[str, float]]
"""Results of one turn: for each table it belongs to, unit and value."""
Turn = Callable[[Plan, int], Figures]


def in_turns(plans: list[Plan], tables: Sequence[str], turn: Turn, repeat: int) -> dict[str, Cells]:
    """Give every engine a turn, then ours and the fastest peers until each of these has had `repeat`."""
    table: dict[str, Cells] = {name: {} for name in tables}
    num_turns = {plan.name: 0 for plan in plans}
    failed: set[str] = set()

    def take(plan: Plan) -> None:
        num_turns[plan.name] += 1
        try:
            figures = turn(plan, num_turns[plan.name] - 1)
        except (RuntimeError, OSError) as error:
            failed.add(plan.name)
            print(f"{plan.name}: {error}", flush=True)
            for cells in table.values():
                cells.setdefault(plan.name, {})["error"] = str(error)
            return
        for name, (unit, value) in figures.items():
            values = table[name].get(plan.name, {}).get("values", [])
            table[name][plan.name] = report.cell(unit, [*values, value])

    def due() -> list[Plan]:
        kinds = report.KINDS.values()
        best = {report.fastest(name, cells, plans, kind) for name, cells in table.items() for kind in kinds}
        able = [plan for plan in plans if plan.name not in failed and num_turns[plan.name] < repeat]
        return [plan for plan in able if plan.is_ours or plan.name in best]

    for plan in plans:
        take(plan)
    while again := due():
        for plan in again:
            take(plan)
    for name, cells in table.items():
        report.print_cells(name, cells)
    return table


@dataclass
class Workers:
    """Owns a worker for each plan; one that ended starts again for the next workload."""

    start: Callable[[Plan], Worker]
    """Raises `RuntimeError` or `OSError`."""
    running: dict[str, Worker] = field(default_factory=dict)

    def turn(self, plan: Plan, name: str, repetition: int) -> Figures:
        """Run a workload on a plan's worker. Raises `RuntimeError` or `OSError` if there is none or it fails."""
        make, worker = WORKLOADS[name], self.running.get(plan.name)
        if worker is None or (repetition == 0 and not worker.is_alive):
            worker = self.running[plan.name] = self.start(plan)
        if repetition == 0:  # engines prepare themselves for a kind of work when they first get it
            worker.ask(short(make(WARM_UP_REPETITION)))
        return {name: worker.ask(make(repetition)).headline(name)}


def short(workload: Workload) -> Workload:
    """Return a little work of the same kind."""
    prompts = tuple(prompt[:32] for prompt in workload.prompts[:2])
    return replace(workload, prompts=prompts, new_tokens=(8,) * len(prompts))


@dataclass
class Servers:
    """Owns a server for each plan, stopped except in its turns."""

    start: Callable[[Plan], ChatServer]
    running: dict[str, ChatServer] = field(default_factory=dict)

    def turn(self, plan: Plan, repetition: int) -> Figures:
        """Run the chats, on a new server unless one takes long to start."""
        figures: Figures = {}
        server = self.running.get(plan.name)
        is_new = server is None or server.ready_seconds < RESTART_SECONDS
        if server is None or is_new:
            if server is not None:
                self.running.pop(plan.name).end()
            server = self.running[plan.name] = self.start(plan)
            figures["serve ready"] = ("s", server.ready_seconds)
        try:
            if is_new:
                server.warm_up()
            else:
                server.resume()
            rate, first = server.measure(repetition)
        finally:
            server.pause()
        return {"serve": ("tok/s", rate), "serve TTFT": ("ms, median", 1000 * first)} | figures


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements; return the values of the last line."""
    names, wanted = arguments.workloads.split(","), [name for name in arguments.engines.split(",") if name]
    plans = [plan for plan in plan_all(arguments) if not wanted or any(part in plan.name for part in wanted)]
    logs, limit = Path(tempfile.mkdtemp(prefix="compare-")), arguments.limit
    print(f"workers and servers write to {logs}", flush=True)

    def log(name: str) -> Path:
        return logs / (re.sub(r"[^A-Za-z0-9.]+", "-", name) + ".log")

    workers = Workers(lambda plan: start_worker(plan, arguments.threads, log(plan.name), limit))
    servers = Servers(lambda plan: chat_servers.start(plan, log(f"{plan.name} server"), limit))
    table: dict[str, Cells] = {}
    try:
        for name in (name for name in WORKLOADS if name in names):
            turn: Turn = lambda plan, number, name=name: workers.turn(plan, name, number)  # noqa: E731
            table |= in_turns(plans, [name], turn, arguments.repeat)
        for one in workers.running.values():
            one.end()
        if "serve" in names:
            table |= in_turns([plan for plan in plans if plan.server], SERVE_TABLES, servers.turn, arguments.repeat)
    finally:
        for peer in (*workers.running.values(), *servers.running.values()):
            peer.end()
    ratios = report.ratios(table, plans)
    print(f"\n{report.markdown(ratios, [plan.name for plan in plans if plan.is_ours])}\n")
    return {
        "processor": processor(),
        "threads": arguments.threads,
        "versions": {name: one.version for name, one in workers.running.items()},
        "precision": {plan.name: plan.precision for plan in plans},
        "table": table,
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join([*WORKLOADS, "serve"]))
    parser.add_argument("--engines", default="", help="comma-separated parts of engines' names; default: all")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a start or a turn is given up")
    add_flags(parser)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
