"""How engines are compared: who takes further turns, what ratios mean, and how rows are named."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import compare  # noqa: E402
from peers import chat_servers, report, roster  # noqa: E402
from peers.roster import FLOAT, QUANTISED, Plan  # noqa: E402

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


def test_an_engine_that_fails_is_told_and_stops_nobody() -> None:
    def turn(plan: Plan, repetition: int) -> compare.Figures:
        if plan is FAST:
            raise RuntimeError("no room")
        return {"decode1": ("tok/s", RATES[plan.name])}

    cells = compare.in_turns(PLANS, ["decode1"], turn, 2)["decode1"]
    assert cells[FAST.name] == {"error": "no room"}
    assert len(cells[SLOW.name]["values"]) == 2


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


def test_rows_of_this_engine_are_named_by_label_model_and_dtype() -> None:
    plan = roster._ours("eight=/models/a:b.gguf:int8", "/float32", "2")
    assert plan.name == "nano-inference eight"
    assert plan.worker[2:] == ("/models/a:b.gguf", "2", "int8")
    assert roster._ours("f=float32:auto", "/float32", "2").worker[2] == "/float32"
    with pytest.raises(SystemExit, match="label=model:dtype"):
        roster._ours("default", "/float32", "2")


def test_a_row_without_logprobs_runs_only_what_asks_for_them() -> None:
    full, plain = roster._llama("llama-server", "q8_0", "m.gguf", "2")
    assert [full.precision, roster._llama("llama-server", "f32", "m.gguf", "2")[0].precision] == [QUANTISED, FLOAT]
    assert [full.takes(name) for name in ("rollout", "decode1", "serve")] == [True, True, True]
    assert [plain.takes(name) for name in ("rollout", "decode1", "serve")] == [True, False, False]


def test_models_are_found_by_the_precision_in_their_names(tmp_path: Path) -> None:
    for name in ("m.f32.gguf", "M.Q8_0.gguf", "m.q2_k.gguf", "m.gguf"):
        (tmp_path / name).touch()
    assert set(roster._converted(str(tmp_path))) == {"f32", "q8_0"}


def test_chats_differ_from_the_first_words() -> None:
    prompts = [*chat_servers.chat_prompts(0), *chat_servers.chat_prompts(1)]
    assert len({prompt[: prompt.index(")")] for prompt in prompts}) == 2 * chat_servers.CHATS


def test_flags_can_be_read() -> None:
    parser = argparse.ArgumentParser()
    roster.add_flags(parser)
    assert parser.parse_args([]).vllm_python == ""


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = {name: report.cell("tok/s", [rate, rate + 1]) for name, rate in RATES.items()} | {"x": {"error": "no"}}
    report.draw({"decode1": cells, "none": {"x": {"error": "no"}}}, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000
