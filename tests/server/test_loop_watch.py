"""The watchdog of the event loop: a loop that stops ends the process, one that was frozen does not.

Each case is a process of its own with a limit: what is watched for is a process that never ends.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

from nano_inference.server.loop_watch import LoopWatchdog

GUARD_S = 120
"""Seconds until a process is frozen."""
START = """
import asyncio, json, signal, sys
from nano_inference.server.loop_watch import LoopWatchdog
async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, loop.stop)
    watchdog = LoopWatchdog(loop, limit_s={limit}).start()
    await asyncio.sleep(0.1)
    print("ready", flush=True)
{body}
    watchdog.close()
    print("closed", flush=True)
asyncio.run(main())
"""
NATIVE = """
    data = [0]
    for _ in range(40):
        data = [data, data]
    json.dumps(data)
"""
"""Native code that holds the GIL, on the loop."""


def process(body: str, limit: float = 1.0) -> subprocess.Popen[str]:
    """Start a process whose loop runs `body`."""
    code = START.format(body=body, limit=limit)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, stdin=pipe, text=True)


def ended(body: str, limit: float = 1.0) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a process that ends by itself."""
    with process(body, limit) as one:
        try:
            out, errors = one.communicate(timeout=GUARD_S)
        finally:
            one.kill()
    return one.returncode, out, errors


def test_blocked_callback_ends_process_with_stack_dump() -> None:
    code, out, errors = ended("    while True: pass")
    assert (code, out) == (1, "ready\n")
    assert errors.count("the event loop has not run for 1 seconds; the process ends") == 1
    assert "Thread 0x" in errors and "in main" in errors


def test_native_code_holding_gil_ends_process_with_stack_dump() -> None:
    code, out, errors = ended(NATIVE, limit=0.2)  # seconds of CPU time: nine times as many on two cores
    assert (code, out) == (-signal.SIGPROF, "ready\n")
    assert "Thread 0x" in errors and "in dumps" in errors


def test_blocked_loop_ends_although_sigterm_is_not_handled() -> None:
    with process("    sys.stdin.readline()", limit=0.5) as one:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
        one.send_signal(signal.SIGTERM)
        try:
            assert one.wait(GUARD_S) == 1
        finally:
            one.kill()


def test_running_loop_is_not_ended_and_close_stops_watchdog() -> None:
    threads = set(threading.enumerate())

    async def watched() -> None:
        watchdog = LoopWatchdog(asyncio.get_running_loop(), limit_s=60).start()
        await asyncio.sleep(0.5)
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
        watchdog.close()

    asyncio.run(watched())
    assert set(threading.enumerate()) == threads and signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_process_frozen_longer_than_limit_resumes() -> None:
    limit = 2.0
    with process("    await loop.run_in_executor(None, sys.stdin.readline)", limit) as one:
        assert one.stdout is not None and one.stdin is not None and one.stdout.readline() == "ready\n"
        one.send_signal(signal.SIGSTOP)
        threading.Event().wait(limit * 1.25)  # the case itself: the clock advances by more than the limit
        one.send_signal(signal.SIGCONT)
        threading.Event().wait(limit / 2)
        assert one.poll() is None
        out, errors = one.communicate("\n", timeout=GUARD_S)
    assert (one.returncode, out, errors) == (0, "closed\n", "")
