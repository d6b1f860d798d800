"""Measure the time of `--help` for every command: `python benchmarks/help_time.py [--repeat 7]`.

Each runs in a new process; the limit is 0.3 s. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

LIMIT_S = 0.3
COMMANDS = (
    *("", "chat", "generate", "serve", "bench", "tokenize", "doctor", "completion"),
    *("models", "models list", "models pull", "models info", "models export", "models rm"),
)


def seconds(words: list[str]) -> float:
    """Return the seconds that one help page takes, from start to exit."""
    argv = [sys.executable, "-P", "-m", "nano_inference", *words, "--help"]
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Print a table of medians and ranges; the exit code is 1 when a median is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7, help="runs of each, after one that is not counted")
    repeat = parser.parse_args().repeat
    results = {}
    print(f"{'nano-inference ... --help':<28}{'median':>9}{'min':>9}{'max':>9}   (s)")
    for command in COMMANDS:
        times = [seconds(command.split()) for _ in range(repeat + 1)][1:]
        results[command or "(none)"] = statistics.median(times)
        print(f"{command or '(none)':<28}{statistics.median(times):>9.3f}{min(times):>9.3f}{max(times):>9.3f}")
    slow = [command for command, median in results.items() if median > LIMIT_S]
    print(json.dumps({"limit_s": LIMIT_S, "median_s": results, "slow": slow}))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
