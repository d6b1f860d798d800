"""Golden files: what an engine gave on one instruction set, with one compiler and one torch.

Torch computes the rotary tables, the draws that the kernels do not have, and the random weights, so its version and its
vector instructions are part of the key, and a case whose weights differ from the recorded ones is not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from nano_inference.config import KernelsName
from nano_inference.executors.cpu.compile import Isa, best_isa, cpu_flags, find_compiler, options
from recording.streams import Recording

FOLDER = Path(__file__).parents[1] / "golden"


def machine_key(kernels: KernelsName) -> str:
    """Return this machine's instruction set, compiler and torch as a file's name. Raises `CannotCompile`."""
    isa = best_isa(cpu_flags()) if kernels == "auto" else cast(Isa, kernels)
    has_vnni = any(option.endswith("vnni") for option in options(isa, cpu_flags()))
    version, vectors = re.sub(r"\+.*", "", torch.__version__), torch.backends.cpu.get_cpu_capability().lower()
    command = [find_compiler(os.environ), "-dM", "-E", "-x", "c", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    macros = dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))
    name, parts = "gcc", ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")
    if "__clang__" in macros:
        name, parts = "clang", ("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
    compiler = f"{name}-{'.'.join(macros[part] for part in parts)}"
    return f"{isa}{'-vnni' if has_vnni else ''}_{compiler}_torch-{version}-{vectors}"


def entry_of(recording: Recording, weights: str) -> dict[str, Any]:
    """Return the golden entry of one case: digests of weights and streams, some first tokens."""
    whole = hashlib.sha256((recording.error or "").encode())
    for one in recording.streams:
        floats = {name: [value.hex() for value in values] for name, values in one.floats.items()}
        whole.update(json.dumps([one.label, one.ids, floats, one.finish], sort_keys=True).encode())
    drawn = [(one.ids["tokens"], one.floats["logprobs"]) for one in recording.streams if one.ids["tokens"]][:4]
    first = [f"{tokens[0]} {logprobs[0].hex()}" for tokens, logprobs in drawn]
    return {"weights": weights[:16], "sha256": whole.hexdigest(), "first": first}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a golden file; none if there is no file."""
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    return entries


def write(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write entries, a line for each case; entries of cases that were not run stay."""
    whole = {**read(path), **entries}
    lines = [f"{json.dumps(name)}: {json.dumps(whole[name])}" for name in sorted(whole)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def difference(entry: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> str | None:
    """Return how a case differs from its golden entry, or None."""
    if recorded is None:
        return "no golden entry: run with --record"
    if entry["weights"] != recorded["weights"]:
        return "the weights differ from the recorded ones: this torch draws other random numbers"
    if entry["sha256"] == recorded["sha256"]:
        return None
    for index, (mine, other) in enumerate(zip(entry["first"], recorded["first"], strict=False)):
        if mine != other:
            return f"sample {index}: token 0: {mine} here, {other} recorded"
    return "the digest differs; the first tokens of the first samples are the same"
