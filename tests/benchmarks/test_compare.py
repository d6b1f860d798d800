"""How engines are compared: who takes further turns, what ratios mean, and how rows are named."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import compare  # noqa: E402
from peers import chat_servers, report, worker  # noqa: E402
from peers.chat_servers import ChatServer  # noqa: E402
from peers.roster import FLOAT, QUANTISED, Plan  # noqa: E402
from peers.worker import Worker  # noqa: E402
from workloads import Workload  # noqa: E402

OURS = Plan(name="nano-inference gguf", is_ours=True)
SLOW = Plan(name="slow")
FAST = Plan(name="fast")
SMALL = Plan(name="small", precision=QUANTISED)
PLANS = [OURS, SLOW, FAST, SMALL]
RATES = {OURS.name: 30.0, SLOW.name: 10.0, FAST.name: 20.0, SMALL.name: 40.0}


def test_everybody_has_a_turn_and_then_ours_and_the_fastest_of_each_precision() -> None:
    turns: list[tuple[str, int]] = []

    def turn(plan: Plan, repetition: int) -> compare.Figures:
        turns.append((plan.name, repetition))
        return {"decode1": ("tok/s", RATES[plan.name] + repetition)}

    cells = compare.in_turns(PLANS, ["decode1"], turn, 3)["decode1"]
    names = [plan.name for plan in PLANS]
    again = [OURS.name, FAST.name, SMALL.name]
    assert turns == [(name, 0) for name in names] + [(name, number) for number in (1, 2) for name in again]
    assert cells[OURS.name] == {"unit": "tok/s", "median": 31, "min": 30, "max": 32, "values": [30, 31, 32]}
    assert cells[SLOW.name]["values"] == [10]


def test_failed_engine_is_reported_and_others_run() -> None:
    def turn(plan: Plan, repetition: int) -> compare.Figures:
        if plan is FAST:
            raise RuntimeError("no room")
        return {"decode1": ("tok/s", RATES[plan.name])}

    cells = compare.in_turns(PLANS, ["decode1"], turn, 2)["decode1"]
    assert cells[FAST.name] == {"error": "no room"}
    assert len(cells[SLOW.name]["values"]) == 2


def test_a_failure_after_the_first_turn_keeps_what_was_measured_and_ends_the_turns() -> None:
    asked: list[int] = []

    def turn(plan: Plan, repetition: int) -> compare.Figures:
        if plan is FAST:
            asked.append(repetition)
            if repetition:
                raise RuntimeError("hung")
        return {"decode1": ("tok/s", RATES[plan.name])}

    cells = compare.in_turns(PLANS, ["decode1"], turn, 3)["decode1"]
    assert (cells[FAST.name]["median"], cells[FAST.name]["error"], asked) == (20.0, "hung", [0, 1])
    assert len(cells[OURS.name]["values"]) == 3


def test_program_that_lacks_a_feature_is_never_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    plans = [*PLANS, Plan(name="plain", precision=QUANTISED, lacks=("rollout",))]
    cells = {name: report.cell("", [rate]) for name, rate in (RATES | {"plain": 99.0}).items()}
    assert report.fastest("rollout", cells, plans, (FLOAT, QUANTISED)) == SMALL.name
    assert report.fastest("decode1", cells, plans, (FLOAT, QUANTISED)) == "plain"
    report.print_cells("rollout", cells, plans)
    assert "not compared" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("decode1", {"float": ("fast", 1.5), "any": ("small", 0.75)}),
        ("sharedprefix", {"float": ("slow", 1 / 3), "any": ("slow", 1 / 3)}),
    ],
)
def test_a_ratio_above_one_says_that_ours_is_better(workload: str, expected: dict[str, tuple[str, float]]) -> None:
    cells = {name: report.cell("", [rate]) for name, rate in RATES.items()}
    (row,) = report.ratios({workload: cells}, PLANS)
    assert {key: (row[key]["peer"], row[key]["ratio"]) for key in ("float", "any")} == {
        key: (peer, pytest.approx(ratio)) for key, (peer, ratio) in expected.items()
    }


def test_a_ratio_has_its_own_worst_and_best() -> None:
    cells = {OURS.name: report.cell("", [20.0, 30.0, 40.0]), FAST.name: report.cell("", [8.0, 10.0, 12.0])}
    higher, lower = report.ratios({"decode1": cells, "serve TTFT": cells}, PLANS)
    assert [higher["float"][key] for key in ("low", "ratio", "high")] == pytest.approx([20 / 12, 3, 40 / 8])
    assert [lower["any"][key] for key in ("low", "ratio", "high")] == pytest.approx([8 / 40, 1 / 3, 12 / 20])
    assert [higher[key] for key in ("median", "min", "max", "runs")] == [30, 20, 40, 3]
    assert [higher["float"][key] for key in ("median", "min", "max", "runs")] == [10, 8, 12, 3]


TINY = Workload(name="tiny", prompts=((1, 2),), new_tokens=(3,))
TALKING = f"""
import sys
sys.path.insert(0, {BENCHMARKS + "/peers"!r})
from protocol import serve, take_stdout
out = take_stdout()
print("a library speaks while it loads", flush=True)
serve(lambda requests: (None, sum(request["new_tokens"] for request in requests)), "9", out)
"""
SILENT = """
import sys
print('{"ready": "1"}', flush=True)
print("what is the matter", file=sys.stderr, flush=True)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Worker | ChatServer]]:
    """What a test starts is ended after it."""
    found: list[Worker | ChatServer] = []
    yield found
    for one in found:
        one.end()


def start_worker(code: str, log: Path) -> Worker:
    return worker.start(Plan(name="peer", worker=(sys.executable, "-c", code)), 1, log, 60)


def test_a_worker_answers_whatever_libraries_print(tmp_path: Path, started: list[Worker]) -> None:
    one = start_worker(TALKING, tmp_path / "log")
    started.append(one)
    assert (one.version, one.ask(TINY).new_tokens) == ("9", 3)
    assert "a library speaks" in (tmp_path / "log").read_text()


def test_ended_or_hanging_worker_is_reported_with_its_log(tmp_path: Path, started: list[Worker]) -> None:
    one = start_worker(SILENT, tmp_path / "log")
    started.append(one)
    with pytest.raises(RuntimeError, match=f"ended.*{tmp_path}/log"):
        one.ask(TINY)
    assert "what is the matter" in (tmp_path / "log").read_text()
    two = start_worker(SILENT + "sys.stdin.readline()\nsys.stdin.read()", tmp_path / "log")
    started.append(two)
    two.limit = 0.1
    with pytest.raises(RuntimeError, match="no answer after"):
        two.ask(TINY)
    assert two.has_hung and not two.is_alive
    with pytest.raises(RuntimeError, match="the worker said b'hello"):
        start_worker("print('hello', flush=True); input()", tmp_path / "log")


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            Handler.asked += 1
            self.reply(200 if Handler.asked > 2 else 503, b"")
        else:
            self.reply(200, json.dumps({"data": [{"id": "m"}], "asked": Handler.asked}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        events = [{"choices": [{"delta": {"content": "words"}}]}, {"choices": [], "usage": {"completion_tokens": 64}}]
        assert asked["model"] == "m"
        self.reply(200, b"".join(b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events))

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_ready_at_the_first_healthy_answer_and_measured(
    tmp_path: Path, started: list[Worker | ChatServer]
) -> None:
    plan = Plan(name="peer", server=(sys.executable, "-c", SERVER, "{port}"))
    server = chat_servers.start(plan, tmp_path / "log", 60)
    started.append(server)
    with urlopen(f"http://127.0.0.1:{server.port}/v1/models", timeout=60) as reply:
        assert (server.model, json.load(reply)["asked"]) == ("m", 3)
    server.warm_up()
    server.pause()
    server.resume()
    rate, first = server.measure(0)
    assert rate > 0 and first > 0
