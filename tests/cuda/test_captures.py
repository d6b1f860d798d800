"""What `CapturedStepper` asks of CUDA, without a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from nano_inference.executors.cuda.decode import CapturedStepper, StepKey

CUDA = torch.device("cuda", 0)
KEY = StepKey(4, 1, False, False, False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a stand-in for CUDA graphs."""
    found: list[str] = []

    class Graph:
        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            found.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            found.append("end")

        def replay(self) -> None:
            found.append("replay")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            pass

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("torch.cuda.graph and empty_cache free memory that the next update needs")

    for name, stand_in in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda device: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": forbidden,
        "empty_cache": forbidden,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def test_a_capture_frees_no_memory(calls: list[str]) -> None:
    stepper = CapturedStepper(lambda key: calls.append("step"), CUDA)
    stepper.replay(KEY)
    stepper.replay(KEY)
    assert calls == ["step", "begin pool thread_local", "step", "end", "replay"]


def test_a_step_that_fails_ends_its_capture_and_is_captured_later(calls: list[str]) -> None:
    errors = [None, torch.OutOfMemoryError("full"), None, None]

    def step(key: StepKey) -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    stepper = CapturedStepper(step, CUDA)
    with pytest.raises(torch.OutOfMemoryError):
        stepper.replay(KEY)
    stepper.replay(KEY)
    stepper.replay(KEY)
    assert calls == ["begin pool thread_local", "end", "begin pool thread_local", "end", "replay"]
