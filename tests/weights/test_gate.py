"""The turns that a gathering thread and the steps take."""

from __future__ import annotations

import threading
from pkgutil import resolve_name

import pytest

from nano_inference import SamplingParams
from nano_inference.weights.gate import StepGate
from tests.weights.pairs import PIECES, OpenEngine, Pair


def test_the_thread_waits_while_a_step_runs_and_no_longer() -> None:
    gate, passed = StepGate(share=100), threading.Event()
    gate.begin_step()
    thread = threading.Thread(target=lambda: (gate.wait_for_turn(10), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    gate.end_step()
    assert passed.wait(10)


def test_a_step_lets_the_thread_copy_its_share_first() -> None:
    gate, begun = StepGate(share=100), threading.Event()
    copied: list[int] = []

    def gather() -> None:
        gate.wait_for_turn(0)
        begun.set()
        for _ in range(50):
            gate.wait_for_turn(10)
            copied.append(10)
        gate.finish()

    gate.begin_step()
    gate.end_step()
    gate._step_seconds = 1000.0  # as long as it may wait from here on
    hold = threading.Thread(target=gather, daemon=True)
    hold.start()
    assert begun.wait(10)
    gate.begin_step()
    assert sum(copied) >= 90, "the share, but for a piece on its way"
    gate.end_step()
    hold.join(10)
    gate.begin_step()  # the thread is done: nobody waits for it
    assert sum(copied) == 500


@pytest.mark.parametrize(("kernels", "looked_through"), PIECES.items())
def test_a_whole_update_is_copied_during_no_step(
    kernels: str, looked_through: str, untied: Pair, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(untied, kernels=kernels)
    runner = engine.parts.runner
    is_running = threading.Event()
    touched: dict[int, int] = {}
    num_steps, num_pieces = 0, 0
    run, look = runner.run, resolve_name(looked_through)

    def running(*step: object) -> object:
        nonlocal num_steps
        num_steps += 1
        is_running.set()
        try:
            return run(*step)  # type: ignore[arg-type]
        finally:
            is_running.clear()

    def watched(*arguments: object) -> object:
        nonlocal num_pieces
        num_pieces += 1
        if is_running.is_set():
            touched[num_steps] = touched.get(num_steps, 0) + 1
        return look(*arguments)

    runner.run = running  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(looked_through, watched)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.update_weights(untied.named())
    while engine.has_pending():
        engine.step()
    engine.finish_update()
    assert num_pieces > 10
    assert max(touched.values(), default=0) <= 1, "more than the piece that was on its way when a step began"
