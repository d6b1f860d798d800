"""Record the answers of upstream's calculator to random expressions and attacks (benchmarks/nanochat_calculator).

Argument: a checkout of karpathy/nanochat. Writes answers.json, with the differences of this package's calculator, and
prints those that no documented bound explains. Upstream evaluates Python code: its process has a limit of memory.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path


def main() -> int:
    """Record; return 1 if a difference is not explained by a documented bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", help="the checkout's commit, if it is not a repository")
    wish = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record = runpy.run_module("benchmarks.nanochat_calculator.record")["record"]
    return int(record(wish.checkout, wish.commit))


if __name__ == "__main__":
    sys.exit(main())
