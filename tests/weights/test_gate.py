"""`StepGate`: the staging thread copies between steps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nano_inference import SamplingParams
from nano_inference.build import EngineParts
from nano_inference.executors.protocol import Executor
from nano_inference.weights.gate import StepGate
from nano_inference.weights.sync import WeightSyncManager
from tests.weights.pairs import InPieces, OpenEngine, Pair


def test_staging_thread_waits_until_the_step_ends() -> None:
    gate, passed = StepGate(share=100), threading.Event()
    gate.begin_step()
    thread = threading.Thread(target=lambda: (gate.wait_for_turn(10), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    gate.end_step()
    assert passed.wait(60)


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
    assert started.wait(60)
    gate.begin_step()
    assert sum(copied) >= 90, "the share, except a piece in progress"
    gate.end_step()
    hold.join(60)
    gate.begin_step()  # does not wait: the thread is done
    assert sum(copied) == 500


class Watched:
    """An executor that counts its steps, and the pieces of an update that start in each; it gives them time to."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.is_running, self._are_two = threading.Event(), threading.Event()
        self.num_steps = self.num_pieces = 0
        self.started_during: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *step: Any) -> Any:
        self.num_steps += 1
        self.is_running.set()
        try:
            result = self._inner.run(*step)
            self._are_two.wait(0.005)
            return result
        finally:
            self.is_running.clear()

    def start_piece(self) -> None:
        self.num_pieces += 1
        if self.is_running.is_set():
            self.started_during[self.num_steps] += 1
            if self.started_during[self.num_steps] > 1:
                self._are_two.set()


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_no_piece_of_an_update_starts_during_a_step(kernels: str, untied: Pair, open_engine: OpenEngine) -> None:
    seen: list[Any] = []

    def watched(parts: EngineParts) -> EngineParts:
        assert parts.executor is not None
        seen.append(Watched(parts.executor))
        weights: Any = InPieces(parts.executor, seen[0].start_piece)
        return replace(parts, runner=seen[0], weights=WeightSyncManager(weights))

    engine = open_engine(untied, watched, kernels=kernels)
    (watch,) = seen
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    is_over = threading.Event()

    def during_steps() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in untied.named().items():
            while not watch.is_running.wait(0.01) and not is_over.is_set():
                pass
            yield pair

    engine.update_weights(during_steps())
    while engine.has_pending():
        engine.step()
    is_over.set()
    engine.finish_update()
    assert watch.num_pieces > 10 and watch.num_steps > 10
    assert max(watch.started_during.values(), default=0) <= 1, "more than the piece in progress when a step started"
