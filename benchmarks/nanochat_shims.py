"""Run upstream nanochat's own tests and scripts on a CPU, with each set of shims of docs/nanochat.md.

    python benchmarks/nanochat_shims.py --checkout PATH/nanochat [--only chat_cli,test_engine]

Each set replaces modules in a copy of the checkout. A tiny random model, a tokenizer of bytes and a few rows of each
data set are written where upstream reads them, so nothing is downloaded. A script that prints numbers or a text is
compared with upstream alone. Needs pytest, pyarrow, requests, PyYAML and rustbpe, as upstream; wandb is replaced by an
empty module.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.nanochat.tiny import model_config, state_dict, write_checkpoint, write_tokenizer  # noqa: E402

PAGE_SHIM = re.compile(r"```python\n(# nanochat/(\w+)\.py\n(?:.*\n)+?)```")
SETS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "engine": ("engine",),
    "engine, common, tokenizer": ("engine", "common", "tokenizer"),
    "engine, checkpoint_manager": ("engine", "checkpoint_manager"),
    "all five": ("engine", "checkpoint_manager", "common", "tokenizer", "gpt"),
}
CPU = "--device-type=cpu"
SMALL = (CPU, "--device-batch-size=1", "--num-iterations=2", "--eval-every=1", "--eval-tokens=512")
RUNS: Mapping[str, tuple[str, ...]] = {
    **{
        f"tests/test_{name}": ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_{name}.py")
        for name in (*("engine", "tokenizer", "attention_fallback", "optim", "execution", "tasks"),)
    },
    "nanochat.engine": ("-m", "nanochat.engine"),
    "chat_cli": ("-m", "scripts.chat_cli", "-p", "hello", CPU),
    "chat_eval": ("-m", "scripts.chat_eval", "-i", "sft", "-x", "2", "-m", "16", CPU),
    "base_eval": (
        *("-m", "scripts.base_eval", "--eval=bpb,sample", "--device-batch-size=1", "--split-tokens=512", CPU),
    ),
    "chat_rl": (
        *("-m", "scripts.chat_rl", "--examples-per-step=1", "--num-samples=2", "--device-batch-size=2"),
        *("--max-new-tokens=8", "--eval-examples=1", CPU),
    ),
    "chat_sft": (
        *("-m", "scripts.chat_sft", *SMALL, "--total-batch-size=256", "--chatcore-every=-1", "--load-optimizer=0"),
    ),
    "base_train": (
        *("-m", "scripts.base_train", *SMALL, "--depth=2", "--head-dim=16", "--aspect-ratio=32", "--max-seq-len=256"),
        *("--total-batch-size=256", "--core-metric-every=-1", "--sample-every=1", "--model-tag=new"),
    ),
    "infer_bench": ("-m", "scripts.infer_bench"),
}
FACTS = re.compile(r"bpb: [\d.]+|loss: [\d.]+|accuracy: [\d.]+%?|Reward: [-\d.]+|Assistant: .*|Match: True")
MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
ROWS: Mapping[str, dict[str, Any]] = {
    "openai--gsm8k/main": {"question": "What is 2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"},
    "cais--mmlu/all": {"question": "2+2?", "choices": ["1", "2", "3", "4"], "answer": 3, "subject": "sums"},
    "openai--openai_humaneval/openai_humaneval": {
        **{"prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n"},
        "test": "def check(f):\n    assert f() == 1\n",
    },
    "HuggingFaceTB--smol-smoltalk/default": {"messages": MESSAGES},
    **{
        f"allenai--ai2_arc/{name}": {
            **{"question": "2+2?", "answerKey": "B", "choices": {"text": ["3", "4"], "label": ["A", "B"]}},
        }
        for name in ("ARC-Easy", "ARC-Challenge")
    },
}
"""Directory of a data set -> one of its rows."""


def shims() -> dict[str, str]:
    """Return the text of each replacement: as on the page, else one line."""
    page = (ROOT / "docs" / "nanochat.md").read_text(encoding="utf-8")
    plain = {name: f"from nano_inference.nanochat.{name} import *\n" for name in SETS["all five"]}
    return plain | {name: text for text, name in PAGE_SHIM.findall(page)}


def write_base(base: Path) -> None:
    """Write nanochat's base directory: tokenizer, checkpoints, texts, data sets."""
    write_tokenizer(base / "tokenizer")
    config = model_config("G4")
    for name in ("base_checkpoints", "chatsft_checkpoints"):
        meta = {"user_config": {}, "max_seq_len": 256, "device_batch_size": 1, "total_batch_size": 256}
        write_checkpoint(base / name / "d4", "G4", config=config, state=state_dict("G4", config), meta=meta)
    texts = pa.table({"text": [f"{number} and {number * 7} are numbers. " * 9 for number in range(64)]})
    (base / "base_data_climbmix").mkdir(parents=True)
    for number in range(2):
        parquet.write_table(texts, base / "base_data_climbmix" / f"shard_{number:05d}.parquet")
    for name, row in ROWS.items():
        for split in ("train", "test", "validation", "auxiliary_train", "dev"):
            directory = base / "task_data" / name / split
            directory.mkdir(parents=True)
            num_rows = 5300 if split == "test" else 8  # chat_sft takes the first 5200 of MMLU
            parquet.write_table(pa.Table.from_pylist([row] * num_rows), directory / "00000.parquet")
            (directory / "manifest.json").write_text(json.dumps(["00000.parquet"]))


def run(checkout: Path, replaced: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[int, str, str]:
    """Run Python in a copy of the checkout with some modules replaced; return status, stdout and stderr."""
    with tempfile.TemporaryDirectory() as directory:
        copy, base = Path(directory, "checkout"), Path(directory, "base")
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "dev"))
        write_base(base)
        (copy / "wandb.py").touch()
        texts = shims()
        for name in replaced:
            (copy / "nanochat" / f"{name}.py").write_text(texts[name])
        paths = os.pathsep.join([str(copy), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "NANOCHAT_BASE_DIR": str(base), "CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout, done.stderr


def outcome(status: int, out: str, error: str, alone: list[str]) -> tuple[str, list[str]]:
    """Return a cell of the table, and the facts that a script printed."""
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)[^\n]*?(?= in )", out)
    if counts:
        return counts[-1], []
    facts = FACTS.findall(out)
    if status:
        lines = [line for line in error.splitlines() if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
        return f"`{(lines or ['failed'])[-1][:100]}`", facts
    if not alone:
        return "runs", facts
    return "runs, equal" if facts == alone else f"runs, {facts} for {alone}", facts


def main() -> None:
    """Print a row for each test and script, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a working tree of karpathy/nanochat")
    parser.add_argument("--only", default=",".join(RUNS), help="comma-separated tests and scripts")
    wish = parser.parse_args()
    print(f"| | {' | '.join(SETS)} |\n|---|{'---|' * len(SETS)}", flush=True)
    for name in wish.only.split(","):
        cells: list[str] = []
        alone: list[str] = []
        for replaced in SETS.values():
            cell, facts = outcome(*run(wish.checkout, replaced, RUNS[name]), alone)
            alone = alone or facts
            cells.append(cell)
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
