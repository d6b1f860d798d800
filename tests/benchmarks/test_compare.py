"""How engines are compared: which of them have further turns, what ratios mean, and what a failing peer costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import compare  # noqa: E402
from peers import chat_servers, report, roster  # noqa: E402
from peers.chat_servers import ChatServer  # noqa: E402
from peers.process import Peer, Worker, start_worker  # noqa: E402
from peers.roster import FLOAT, QUANTISED, Plan  # noqa: E402
from workloads import Workload  # noqa: E402

OURS = Plan(name="nano-inference gguf", is_ours=True)
SLOW = Plan(name="slow")
FAST = Plan(name="fast")
SMALL = Plan(name="small", precision=QUANTISED)
PLANS = [OURS, SLOW, FAST, SMALL]
RATES = {OURS.name: 30.0, SLOW.name: 10.0, FAST.name: 20.0, SMALL.name: 40.0}


def test_every_engine_has_a_turn_and_then_ours_and_the_fastest_of_each_precision() -> None:
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


def test_an_engine_that_becomes_the_fastest_has_as_many_turns() -> None:
    def turn(plan: Plan, repetition: int) -> compare.Figures:
        return {"decode1": ("tok/s", 1.0 if plan is FAST and repetition else RATES[plan.name])}

    cells = compare.in_turns(PLANS, ["decode1"], turn, 3)["decode1"]
    assert report.fastest("decode1", cells, PLANS, (FLOAT,)) == SLOW.name
    assert [len(cells[plan.name]["values"]) for plan in PLANS] == [3, 3, 3, 3]


def test_the_fastest_of_every_table_has_further_turns() -> None:
    def turn(plan: Plan, repetition: int) -> compare.Figures:
        ready = {"serve ready": ("s", RATES[plan.name])} if not repetition else {}
        return {"serve": ("tok/s", RATES[plan.name])} | ready

    tables = compare.in_turns(PLANS, ["serve", "serve ready"], turn, 2)
    assert report.fastest("serve ready", tables["serve ready"], PLANS, (FLOAT,)) == SLOW.name
    assert {name: len(one["values"]) for name, one in tables["serve"].items()} == dict.fromkeys(RATES, 2)


@pytest.mark.parametrize(("failing", "values"), [(0, None), (1, [20.0])])
def test_a_failed_engine_has_no_further_turn_and_keeps_its_figures(failing: int, values: list[float] | None) -> None:
    asked: list[int] = []

    def turn(plan: Plan, repetition: int) -> compare.Figures:
        asked.extend([repetition] if plan is FAST else [])
        if plan is FAST and repetition == failing:
            raise RuntimeError("hung")
        return {"decode1": ("tok/s", RATES[plan.name])}

    cells = compare.in_turns(PLANS, ["decode1"], turn, 3)["decode1"]
    assert (cells[FAST.name].get("values"), cells[FAST.name]["error"]) == (values, "hung")
    assert asked == list(range(failing + 1)) and len(cells[OURS.name]["values"]) == 3


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


def planned(*flags: str) -> dict[str, Plan]:
    """Return the plans that these flags name, for models that need not exist."""
    parser = argparse.ArgumentParser()
    roster.add_flags(parser)
    parser.set_defaults(threads=2, llama_server="")
    plans = roster.plans_for(parser.parse_args(flags), Path("/model.gguf"), Path("/float32"))
    return {plan.name: plan for plan in plans}


def test_rows_of_this_engine_are_named_by_label_model_and_dtype() -> None:
    plans = planned("--ours", "eight=/models/a:b.gguf:int8,f=float32:auto")
    eight, float32 = plans["nano-inference eight"], plans["nano-inference f"]
    assert (eight.worker[2:], float32.worker[2]) == (("/models/a:b.gguf", "2", "int8"), "/float32")
    assert [eight.precision, float32.precision] == [QUANTISED, FLOAT]
    with pytest.raises(SystemExit, match="label=model:dtype"):
        planned("--ours", "default")


def test_models_of_llama_cpp_are_found_by_the_precision_in_their_names(tmp_path: Path) -> None:
    for name in ("m.f32.gguf", "M.Q8_0.gguf", "m.q2_k.gguf", "m.gguf"):
        (tmp_path / name).touch()
    plans = planned("--llama-server", "any", "--llama-models", str(tmp_path))
    found = {name.split()[1]: plan.worker[2] for name, plan in plans.items() if name.startswith("llama.cpp")}
    assert found == {"f32": f"{tmp_path}/m.f32.gguf", "q8_0": f"{tmp_path}/M.Q8_0.gguf", "q4_1": "/model.gguf"}


def test_chats_differ_from_the_first_words() -> None:
    prompts = [*chat_servers.chat_prompts(0), *chat_servers.chat_prompts(1)]
    assert len({prompt[: prompt.index(")")] for prompt in prompts}) == 2 * chat_servers.CHATS


def test_a_table_for_a_page_has_our_rows_and_the_fastest_peers() -> None:
    second = Plan(name="nano-inference int8", is_ours=True, precision=QUANTISED)
    cells = {name: report.cell("tok/s", [rate]) for name, rate in (RATES | {second.name: 60.0}).items()}
    rows = report.ratios({"decode1": cells, "serve": {}}, [OURS, second, SLOW, FAST, SMALL])
    assert report.markdown(rows, [OURS.name, second.name]).splitlines() == [
        "| workload | gguf | int8 | fastest peer, floating point | fastest peer, any precision |",
        "| --- | --- | --- | --- | --- |",
        "| `decode1`: 32 in, 128 out | 30.0 tok/s | 60.0 tok/s | 20.0 fast (1.50x, 3.00x) "
        "| 40.0 small (0.75x, 1.50x) |",
    ]


TINY = Workload(prompts=([1, 2],), new_tokens=(3,))
TALKING = f"""
import sys
sys.path.insert(0, {BENCHMARKS + "/peers"!r})
from protocol import serve, take_stdout
out = take_stdout()
print("a library speaks while it loads", flush=True)
serve(lambda requests: (None, sum(one["new_tokens"] * one["num_samples"] for one in requests)), "9", out)
"""
SILENT = """
import sys
print('{"ready": "1"}', flush=True)
print("what is the matter", file=sys.stderr, flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[Peer]]:
    """What a test starts is ended after it."""
    found: list[Peer] = []
    yield found
    for one in found:
        one.end()


def worker_of(code: str, log: Path) -> Worker:
    return start_worker(Plan(name="peer", worker=(sys.executable, "-c", code)), 1, log, 60)


def test_a_worker_answers_whatever_libraries_print(tmp_path: Path, started: list[Peer]) -> None:
    one = worker_of(TALKING, tmp_path / "log")
    started.append(one)
    assert one.version == "9" and one.ask(TINY).workload is TINY
    assert "a library speaks" in (tmp_path / "log").read_text()


def test_a_worker_that_ended_or_hangs_is_reported_with_its_log(tmp_path: Path, started: list[Peer]) -> None:
    one = worker_of(SILENT, tmp_path / "log")
    started.append(one)
    with pytest.raises(RuntimeError, match=f"ended.*{tmp_path}/log"):
        one.ask(TINY)
    assert "what is the matter" in (tmp_path / "log").read_text()
    two = worker_of(SILENT + "sys.stdin.readline()\nsys.stdin.read()", tmp_path / "log")
    started.append(two)
    two.limit = 0.1
    with pytest.raises(RuntimeError, match="no answer after"):
        two.ask(TINY)
    assert not two.is_alive
    with pytest.raises(RuntimeError, match="the worker said b'hello"):
        worker_of("print('hello', flush=True); input()", tmp_path / "log")


def test_a_worker_that_ended_starts_again_for_the_next_workload(tmp_path: Path, started: list[Peer]) -> None:
    def start(plan: Plan) -> Worker:
        started.append(start_worker(plan, 1, tmp_path / plan.name, 60))
        return started[-1]  # type: ignore[return-value]

    workers = compare.Workers(start)
    plan = Plan(name="peer", worker=(sys.executable, "-c", TALKING))
    assert "rollout" in workers.turn(plan, "rollout", 0)
    workers.running["peer"].end()
    with pytest.raises(RuntimeError, match="ended"):
        workers.turn(plan, "rollout", 1)
    assert "rollout" in workers.turn(plan, "rollout", 0)


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        Handler.asked += self.path == "/health"
        self.reply(200 if Handler.asked > 2 else 503, json.dumps({"data": [{"id": f"m{Handler.asked}"}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["model"] == "m3"
        events = [{"choices": [{"delta": {"content": WORDS}}]}, {"choices": [], "usage": {"completion_tokens": 64}}]
        self.reply(200, b"".join(b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events))

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start_server(code: str, log: Path, limit: float = 60) -> ChatServer:
    return chat_servers.start(Plan(name="peer", server=(sys.executable, "-c", code, "{port}")), log, limit)


def test_a_server_is_ready_at_the_first_healthy_answer_and_measured(tmp_path: Path, started: list[Peer]) -> None:
    server = start_server(SERVER.replace("WORDS", "'words'"), tmp_path / "log")
    started.append(server)
    assert server.model == "m3", "the third answer was the first healthy one"
    server.warm_up()
    server.pause()
    server.resume()
    rate, first = server.measure(0)
    assert rate > 0 and first > 0


def test_a_failed_server_is_reported_with_its_log(tmp_path: Path, started: list[Peer]) -> None:
    log = tmp_path / "log"
    silent = start_server(SERVER.replace("WORDS", "''"), log)
    started.append(silent)
    with pytest.raises(RuntimeError, match=f"no words came.*{log}"):
        silent.measure(0)
    short = start_server(
        SERVER.replace("WORDS", "'words'").replace('"completion_tokens": 64', '"completion_tokens": 63'), log
    )
    started.append(short)
    with pytest.raises(RuntimeError, match="2016 tokens came, 2048 were asked for"):
        short.measure(0)
    silent.pause()
    silent.limit = 0.1
    with pytest.raises(RuntimeError, match=f"not answered after.*{log}"):
        silent.warm_up()
    assert silent.process.poll() is not None, "a server that hangs is ended"
    with pytest.raises(RuntimeError, match=f"ended before.*{log}"):
        start_server("raise SystemExit('no such model')", log)
    assert "no such model" in log.read_text()
    with pytest.raises(RuntimeError, match="not ready after"):
        start_server("import signal; signal.pause()", log, 0.05)
