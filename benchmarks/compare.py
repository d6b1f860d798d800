"""Compare this engine with its peers on the same workloads, in one run.

    python benchmarks/compare.py                               # this engine and Transformers
    python benchmarks/compare.py --vllm-python VENV/bin/python --openvino-python VENV/bin/python \\
        --llama-server BUILD/bin/llama-server --llama-models DIRECTORY --repeat 3 --chart peers.png
    python benchmarks/compare.py --workloads rollout,serve --engines nano,openvino --json result.json --markdown

Each engine is a process with its own environment. Engines take turns, and all others are stopped meanwhile, so a drift
of the machine's speed affects all equally. Each engine runs every workload once; then this engine and the fastest peers
(in floating point, and of any precision) repeat it `--repeat` times, as does a peer that becomes the fastest. A peer
with fewer results (no log-probabilities in `rollout`) is shown but not compared. `serve` is 32 streaming chats of 64
tokens over HTTP; `serve ready` is the time from the start of the process to the first 200 of /health, and a server that
is ready within 15 s is restarted for each turn. A peer that ends, or hangs for `--limit` seconds, has an error instead
of a figure; its output is in the file named. Prints rows, ratios and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import chat_servers, report, worker
from peers.chat_servers import ChatServer
from peers.machine import processor
from peers.report import Cells
from peers.roster import Plan, add_flags, plan_all
from peers.worker import Logs, Worker
from workloads import WORKLOADS, Workload

WARM_UP_REPETITION = 99
RESTART_SECONDS = 15.0
"""Servers that are ready sooner start anew for each turn, so that this has a median too."""
SERVE_TABLES = ("serve", "serve TTFT", "serve ready")
Figures = dict[str, tuple[str, float]]
"""What one turn gave: for each table it belongs to, unit and value."""
Turn = Callable[[Plan, int], Figures]


@dataclass
class Score:
    """What turns gave so far: a value for each turn, engine and table, and who failed."""

    tables: list[str]
    cells: dict[str, Cells] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def take(self, plan: Plan, turn: Turn) -> None:
        """Let an engine have its next turn; when it fails, it has had its last."""
        number = self.turns.get(plan.name, 0)
        self.turns[plan.name] = number + 1
        try:
            figures = turn(plan, number)
        except (RuntimeError, OSError) as error:
            self.failed.add(plan.name)
            for table in self.tables:
                self.cells.setdefault(table, {}).setdefault(plan.name, {})["error"] = str(error)
            print(f"{plan.name}: {error}", flush=True)
            return
        for table, (unit, value) in figures.items():
            of_table = self.cells.setdefault(table, {})
            values = of_table.get(plan.name, {}).get("values", [])
            of_table[plan.name] = report.cell(unit, [*values, value])

    def contenders(self, plans: list[Plan]) -> list[Plan]:
        """Return ours and who is fastest now, in any table and among any precisions."""
        best = {
            report.fastest(table, self.cells.get(table, {}), plans, precisions)
            for table in self.tables
            for precisions in report.KINDS.values()
        }
        return [plan for plan in plans if plan.is_ours or plan.name in best]


def in_turns(plans: list[Plan], tables: Iterable[str], turn: Turn, repeat: int) -> dict[str, Cells]:
    """Let everybody have a turn, then ours and the fastest peers until each of these has had `repeat`."""
    score = Score(list(tables))
    for plan in plans:
        score.take(plan, turn)
    while due := [
        plan for plan in score.contenders(plans) if score.turns[plan.name] < repeat and plan.name not in score.failed
    ]:
        for plan in due:
            score.take(plan, turn)
    for table in score.tables:
        report.print_cells(table, score.cells.get(table, {}), plans)
    return {table: score.cells.get(table, {}) for table in score.tables}


def short(workload: Workload) -> Workload:
    """Return a little work of the same kind, for engines that prepare themselves when they first see it."""
    prompts = tuple(prompt[:32] for prompt in workload.prompts[:2])
    return Workload(
        name="warm-up",
        prompts=prompts,
        new_tokens=(8,) * len(prompts),
        num_samples=workload.num_samples,
        temperature=workload.temperature,
        one_by_one=workload.one_by_one,
    )


class Workers:
    """Owns a worker for each plan; one that ended starts again for the next workload, one that hung does not."""

    def __init__(self, start_worker: Callable[[Plan], Worker]) -> None:
        """`start_worker` returns a plan's worker, or raises `RuntimeError` or `OSError`."""
        self.versions: dict[str, str] = {}
        self._start_worker = start_worker
        self._workers: dict[str, Worker] = {}
        self._refused: dict[str, str] = {}
        """Why a worker is not started again."""

    def start(self, plan: Plan) -> None:
        """Start a worker, unless it runs or has been given up."""
        before = self._workers.get(plan.name)
        if plan.name in self._refused or (before and (before.is_alive or before.has_hung)):
            return
        try:
            found = self._start_worker(plan)
        except (RuntimeError, OSError) as error:
            self._refused[plan.name] = f"it does not start: {error}"
            return
        self._workers[plan.name] = found
        self.versions[plan.name] = found.version

    def turn(self, plan: Plan, name: str, make: Callable[[int], Workload], repetition: int) -> Figures:
        """Run a workload on a plan's worker. Raises `RuntimeError` when there is none or it fails."""
        if not repetition:
            self.start(plan)
        if plan.name in self._refused:
            raise RuntimeError(self._refused[plan.name])
        if not repetition:
            self._workers[plan.name].ask(short(make(WARM_UP_REPETITION)))
        return {name: self._workers[plan.name].ask(make(repetition)).headline(name)}

    def end(self) -> None:
        """End them all."""
        for one in self._workers.values():
            one.end()


def compare(plans: list[Plan], workers: Workers, names: list[str], repeat: int) -> dict[str, Cells]:
    """Run the workloads but `serve`."""
    table: dict[str, Cells] = {}
    for make in (w for w in WORKLOADS if w.__name__ in names):
        name = make.__name__

        def turn(plan: Plan, repetition: int, make: Callable[[int], Workload] = make, name: str = name) -> Figures:
            return workers.turn(plan, name, make, repetition)

        table |= in_turns([plan for plan in plans if plan.takes(name)], [name], turn, repeat)
    return table


class Servers:
    """Owns a server for each plan, stopped but for its turns."""

    def __init__(self, limit: float, logs: Logs) -> None:
        self._limit, self._logs = limit, logs
        self._servers: dict[str, ChatServer] = {}

    def turn(self, plan: Plan, repetition: int) -> Figures:
        """Run the chats, on a server that has just started or that took longer to start than is worth a repetition."""
        figures: Figures = {}
        server = self._servers.get(plan.name)
        is_fresh = server is None or server.ready_seconds < RESTART_SECONDS
        if server is None or is_fresh:
            server = self._restart(plan)
            figures["serve ready"] = ("s", server.ready_seconds)
        try:
            if is_fresh:
                server.warm_up()
            else:
                server.resume()
            rate, first = server.measure(repetition)
        finally:
            server.pause()
        return {"serve": ("tok/s", rate), "serve TTFT": ("ms, median", 1000 * first)} | figures

    def _restart(self, plan: Plan) -> ChatServer:
        if plan.name in self._servers:
            self._servers.pop(plan.name).end()
        found = chat_servers.start(plan, self._logs.file(f"{plan.name} server"), self._limit)
        self._servers[plan.name] = found
        return found

    def end(self) -> None:
        """End them all."""
        for one in self._servers.values():
            one.end()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements; return the values of the last line."""
    names, wanted = arguments.workloads.split(","), [name for name in arguments.engines.split(",") if name]
    plans = [plan for plan in plan_all(arguments) if not wanted or any(part in plan.name for part in wanted)]
    logs = Logs()
    print(f"workers and servers write to {logs.directory}", flush=True)
    table: dict[str, Cells] = {}

    def start_worker(plan: Plan) -> Worker:
        return worker.start(plan, arguments.threads, logs.file(plan.name), arguments.limit)

    workers, servers = Workers(start_worker), Servers(arguments.limit, logs)
    try:
        table |= compare(plans, workers, names, arguments.repeat)
    finally:
        workers.end()
    if "serve" in names:
        try:
            able = [plan for plan in plans if plan.takes("serve")]
            table |= in_turns(able, SERVE_TABLES, servers.turn, arguments.repeat)
        finally:
            servers.end()
    ratios = report.ratios(table, plans)
    report.print_ratios(ratios)
    if arguments.markdown:
        print(f"\n{report.markdown(table, plans)}\n")
    if arguments.chart:
        report.draw(table, plans, arguments.chart)
    return {
        "processor": processor(),
        "threads": arguments.threads,
        "versions": workers.versions,
        "precision": {plan.name: plan.precision for plan in plans},
        "table": table,
        "ratios": ratios,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join([*(w.__name__ for w in WORKLOADS), "serve"]))
    parser.add_argument("--engines", default="", help="comma-separated parts of engines' names; default: all")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a start or a turn is given up")
    parser.add_argument("--chart", type=Path, help="file for a bar chart, PNG (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="file for the result, beside the last line")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    add_flags(parser)
    arguments = parser.parse_args()
    output = json.dumps(run(arguments))
    if arguments.json:
        arguments.json.write_text(output + "\n")
    print(output)


if __name__ == "__main__":
    main()
