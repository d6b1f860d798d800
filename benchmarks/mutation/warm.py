"""A process that has imported what all tests import, and forks one child for each run of pytest.

    python benchmarks/mutation/warm.py

Reads one JSON object a line: {"tree": checkout, "package": directory with a changed copy of the package, "tests":
names, "limit_s": seconds}. Answers with one: {"code": exit status, -1 past the limit; "output": the end of what pytest
printed}. Importing torch and Transformers takes longer than most tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    """Import, then answer until standard input ends."""
    import hypothesis
    import pytest
    import torch
    import transformers

    assert all((hypothesis, pytest, torch, transformers))
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Fork a child that runs pytest; wait for it, and end it and its children past the limit."""
    with tempfile.TemporaryDirectory() as home:
        output = Path(home) / "output"
        child = os.fork()
        if not child:
            os.setsid()
            try:
                code = run_pytest(job, Path(home), output)
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        deadline = time.monotonic() + job["limit_s"]
        while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        if done[0]:
            code = os.waitstatus_to_exitcode(done[1])
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = -1
        return {"code": code, "output": output.read_text(errors="replace")[-4000:]}


def run_pytest(job: dict[str, Any], home: Path, output: Path) -> int:
    """Run the tests in this process, on the changed package; return pytest's exit status."""
    import pytest

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(job["tree"])
    sys.path[:0] = [job["package"], job["tree"], str(HERE)]
    selected = home / "tests.json"
    selected.write_text(json.dumps(job["tests"]))
    os.environ |= {
        "PYTHONPATH": os.pathsep.join((job["package"], job["tree"], str(HERE))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "REACH_RUN": str(selected),
    }
    sys.dont_write_bytecode = True
    files = dict.fromkeys(name.partition("::")[0] for name in job["tests"])
    options = ["-xq", "-n", "0", "-p", "no:cacheprovider", "-p", "reach", "--no-header", "--tb=line", "--assert=plain"]
    return int(pytest.main([*options, *files]))


if __name__ == "__main__":
    main()
