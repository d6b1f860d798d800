"""Measure the CUDA executor on one GPU, with random weights at the sizes of published models; no network is needed.

    python benchmarks/cuda.py [--only SECTION,…] [--model NAME] [--out FILE.json] [--seconds 580] [--peers DIR]
    python benchmarks/cuda.py --dry

Needs torch, triton, numpy, safetensors and tokenizers; the package itself is imported from this checkout. Sections, in
this order, so that a run that is cut off has the most important figures:

- ceilings: bytes a second of a copy on the device, operations a second of a bfloat16 product
- engine: for Qwen2.5-0.5B nano-vllm's bench.py (256 requests, seed 0, 100 to 1,024 tokens in and out, temperature 0.6),
  one request, both again with `deterministic`, an update under a full batch, and samples of shared prompts of 1,024
  tokens, with and without reading their keys once; bench.py and one request for the three other models
- kernels: single launches and their share of the ceilings
- profile: for each model, which kernels take the time of a decode step, and which are neither ours nor cuBLAS's
- nanochat: d12 and d20 by the arithmetic of its scripts/infer_bench.py, with 1 to 128 rows (needs tiktoken)
- peers: bench.py by Transformers' continuous batching, and by the engines of `--peers DIR`: each of vllm, nano-vllm and
  mini-sglang that is an environment DIR/ENGINE, on the checkpoints DIR/MODEL; decode attention by DIR/flashinfer

Each figure is printed when it is known, with its bar (docs/cuda.md) and roofline where there is one, and written to
the JSON file. Each model of a section runs in its own process: an error in a kernel spoils that process only. After
180 seconds, or after `--seconds` in total, the running process is stopped; what is left is named. `--dry` runs every
line on a CPU, with tiny models and the plain kernels; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SECONDS = 580.0


def main() -> int:
    """Run `cuda_parts.sections`, found from the checkout: in this file's directory, torch would import it as `cuda`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="run every line on a CPU; figures mean nothing")
    parser.add_argument("--only", default="", help="sections, with commas")
    parser.add_argument("--model", default="", help="of what is measured for each model, only this one's")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="environments of other engines, and checkpoints")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which nothing runs any more")
    given = parser.parse_args()
    root = Path(__file__).parents[1]
    sys.path[0] = str(root)
    sys.path.insert(1, str(root / "src"))
    from benchmarks.cuda_parts.sections import run_sections

    return run_sections(given)


if __name__ == "__main__":
    raise SystemExit(main())
