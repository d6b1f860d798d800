"""`StepGate`: the staging thread copies between steps."""

from __future__ import annotations

import threading
from pkgutil import resolve_name

import pytest
import torch

from nano_inference import SamplingParams
from nano_inference.weights.gate import StepGate
from tests.weights.pairs import PIECES, OpenEngine, Pair


def test_staging_thread_waits_until_the_step_ends() -> None:
    gate, passed = StepGate(share=100), threading.Event()
    gate.begin_step()
    thread = threading.Thread(target=lambda: (gate.wait_for_turn(10), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    gate.end_step()
    assert passed.wait(10)


def test_step_starts_after_the_thread_copied_its_share() -> None:
    now = [0.0]
    gate, started = StepGate(share=100, clock=lambda: now[0]), threading.Event()
    copied: list[int] = []

    def gather() -> None:
        gate.wait_for_turn(0)
        started.set()
        for _ in range(50):
            gate.wait_for_turn(10)
            copied.append(10)
        gate.finish()

    gate.begin_step()
    now[0] = 1000.0  # so that the wait does not end by timeout
    gate.end_step()
    hold = threading.Thread(target=gather, daemon=True)
    hold.start()
    assert started.wait(10)
    gate.begin_step()
    assert sum(copied) >= 90, "the share, except a piece in progress"
    gate.end_step()
    hold.join(10)
    gate.begin_step()  # does not wait: the thread is done
    assert sum(copied) == 500


@pytest.mark.parametrize(("kernels", "checked"), PIECES.items())
def test_no_piece_of_an_update_starts_during_a_step(
    kernels: str, checked: str, untied: Pair, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(untied, kernels=kernels)
    runner = engine.parts.runner
    is_running = threading.Event()
    copied_during: dict[int, int] = {}
    num_steps, num_pieces = 0, 0
    run, look = runner.run, resolve_name(checked)

    def running(*step: object) -> object:
        nonlocal num_steps
        num_steps += 1
        is_running.set()
        try:
            return run(*step)  # type: ignore[arg-type]
        finally:
            is_running.clear()

    def counting(*arguments: object) -> object:
        nonlocal num_pieces
        if isinstance(values := arguments[-1], torch.Tensor) and values.dim() == 2 and values.size(0) == 1:
            return look(*arguments)  # no piece: the first row of a weight, by which its format is guessed
        num_pieces += 1
        if is_running.is_set():
            copied_during[num_steps] = copied_during.get(num_steps, 0) + 1
        return look(*arguments)

    runner.run = running  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(checked, counting)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.update_weights(untied.named())
    while engine.has_pending():
        engine.step()
    engine.finish_update()
    assert num_pieces > 10
    assert max(copied_during.values(), default=0) <= 1, "more than the piece in progress when a step started"
