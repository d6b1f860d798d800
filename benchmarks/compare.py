"""This engine and its peers on the same workloads, side by side in one run.

    python benchmarks/compare.py                               # this engine and Transformers
    python benchmarks/compare.py --vllm-python VENV/bin/python --openvino-python VENV/bin/python \\
        --llama-server BUILD/bin/llama-server --llama-models DIRECTORY --repeat 3 --chart peers.png
    python benchmarks/compare.py --workloads rollout,serve --engines nano,openvino

Each engine is a process of its own, in an environment of its own. They take turns, repetition by repetition, and all
but the one whose turn it is are stopped, so that a machine whose speed drifts is unfair to nobody. Everybody runs every
workload once; then this engine and the fastest peers (in floating point, and of any precision) run it `--repeat` - 1
more times. `serve` is 32 streaming chats of 64 tokens over HTTP. Prints rows, ratios and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import chat_servers, report
from peers.chat_servers import ChatServer
from peers.report import Cells
from peers.roster import FLOAT, QUANTISED, Plan, add_flags, plan_all

from nano_inference.workloads import WORKLOADS, Measure, Workload

WARM_UP_REPETITION = 99
Figures = dict[str, tuple[str, float]]
"""What one turn gave: for each table it belongs to, unit and value."""


@dataclass
class Worker:
    """Owns a worker process and what it starts."""

    plan: Plan
    process: subprocess.Popen[str]
    version: str

    def ask(self, workload: Workload) -> Measure:
        """Run one workload, with the worker running for as long as it takes."""
        assert self.process.stdin and self.process.stdout
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps(asdict(workload)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the worker ended"}
        self.pause()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return Measure(
            seconds=answer["seconds"],
            first_token_seconds=tuple(answer["first_token_seconds"]),
            new_tokens=workload.total_new,
            prompt_tokens=workload.total_prompt,
        )

    def pause(self) -> None:
        """Stop every thread of the worker until it is asked again."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """End the worker and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(plan: Plan, threads: int) -> Worker | None:
    """Start a worker and wait until it has loaded the model; None, and a line that says so, when it cannot."""
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"} | plan.environment
    process = subprocess.Popen(
        plan.worker,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        process.wait()
        print(f"{plan.name}: the worker did not start; run {plan.worker[1]} by hand to see why", flush=True)
        return None
    worker = Worker(plan, process, json.loads(line)["ready"])
    worker.pause()
    return worker


def in_turns(
    plans: list[Plan], tables: list[str], turn: Callable[[Plan, int], Figures], repeat: int
) -> dict[str, Cells]:
    """Let everybody have a turn, then ours and the fastest peers the others; the first table says who is fastest."""
    values: dict[str, dict[str, list[float]]] = {table: {} for table in tables}
    cells: dict[str, Cells] = {table: {} for table in tables}
    chosen = plans
    for repetition in range(repeat):
        for plan in chosen:
            try:
                figures = turn(plan, repetition)
            except (RuntimeError, OSError) as error:
                for table in tables:
                    cells[table].setdefault(plan.name, {"error": str(error)})
                continue
            for table, (unit, value) in figures.items():
                values[table].setdefault(plan.name, []).append(value)
                cells[table][plan.name] = report.cell(unit, values[table][plan.name])
        if not repetition:
            best = {
                report.fastest(tables[0], cells[tables[0]], plans, kinds) for kinds in ((FLOAT,), (FLOAT, QUANTISED))
            }
            chosen = [plan for plan in plans if plan.is_ours or plan.name in best]
    for table in tables:
        report.print_cells(table, cells[table])
    return cells


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


def compare(workers: list[Worker], names: list[str], repeat: int) -> dict[str, Cells]:
    """Run the workloads but `serve`."""
    table: dict[str, Cells] = {}
    by_name = {worker.plan.name: worker for worker in workers}
    for make in (w for w in WORKLOADS if w.__name__ in names):
        name = make.__name__

        def turn(plan: Plan, repetition: int, make: Callable[[int], Workload] = make, name: str = name) -> Figures:
            worker = by_name[plan.name]
            if not repetition:
                worker.ask(short(make(WARM_UP_REPETITION)))
            return {name: worker.ask(make(repetition)).headline(name)}

        table |= in_turns([w.plan for w in workers if w.plan.takes(name)], [name], turn, repeat)
    return table


def compare_servers(plans: list[Plan], repeat: int) -> dict[str, Cells]:
    """Run `serve` on every engine that has a server; each starts when its first turn comes."""
    servers: dict[str, ChatServer] = {}

    def turn(plan: Plan, repetition: int) -> Figures:
        figures: Figures = {}
        if plan.name in servers:
            servers[plan.name].resume()
        else:
            servers[plan.name] = chat_servers.start(plan)
            chat_servers.warm_up(servers[plan.name])
            figures["serve ready"] = ("s", servers[plan.name].ready_seconds)
        try:
            rate, first = chat_servers.measure(servers[plan.name], repetition)
        finally:
            servers[plan.name].pause()
        return {"serve": ("tok/s", rate), "serve TTFT": ("ms, median", 1000 * first)} | figures

    try:
        able = [plan for plan in plans if plan.takes("serve")]
        return in_turns(able, ["serve", "serve TTFT", "serve ready"], turn, repeat)
    finally:
        end_all(servers.values())


def end_all(processes: Iterable[Worker | ChatServer]) -> None:
    """End them; those that are stopped as well."""
    for process in processes:
        process.end()


def processor() -> str:
    """Return the processor's name."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for; return everything that the last line tells."""
    names, wanted = arguments.workloads.split(","), [name for name in arguments.engines.split(",") if name]
    plans = [plan for plan in plan_all(arguments) if not wanted or any(part in plan.name for part in wanted)]
    table: dict[str, Cells] = {}
    workers: list[Worker] = []
    try:
        if set(names) - {"serve"}:
            for plan in (plan for plan in plans if any(plan.takes(name) for name in names if name != "serve")):
                worker = start(plan, arguments.threads)
                workers += [worker] if worker else []
            table |= compare(workers, names, arguments.repeat)
    finally:
        end_all(workers)
    if "serve" in names:
        table |= compare_servers(plans, arguments.repeat)
    ratios = report.ratios(table, plans)
    report.print_ratios(ratios)
    if arguments.chart:
        report.draw(table, arguments.chart)
    return {
        "processor": processor(),
        "threads": arguments.threads,
        "versions": {worker.plan.name: worker.version for worker in workers},
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
    parser.add_argument("--chart", type=Path, help="file for bar charts (needs matplotlib)")
    add_flags(parser)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
