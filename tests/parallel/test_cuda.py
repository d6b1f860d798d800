"""Ranks on the CUDA executor, with plain kernels on CPU tensors: against one process with the same kernels."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.executors.cuda.decode import StepKey
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.ranks import Ranks
from nano_inference.executors.protocol import Executor
from nano_inference.parallel import opening
from nano_inference.parallel.links import Group
from nano_inference.types import EngineDead
from tests.cuda.engines import open_cuda
from tests.cuda.plain import plain_kernels
from tests.cuda.strict import Recorder, Strict
from tests.cuda.test_executor import KINDS, TIGHT
from tests.engine.test_lookahead import run_all
from tests.forking import ROOT
from tests.parallel.ranks import leading, open_ranks
from tests.parallel.test_engine import TOLERANCE, assert_same, config_of, divisions, shorter, write_model
from tests.parallel.test_processes import SOON_S, has_ended
from tests.parallel.test_updates import weights_of

pytestmark = pytest.mark.slow

PREEMPTED = {"kv_cache_bytes": 96 << 10, "cache_type": "paged", "speculation": "ngram"}
LONG = SamplingParams(max_tokens=50, seed=3, ignore_eos=True)


@pytest.mark.parametrize(("name", "size"), divisions())
def test_every_family_is_the_undivided_one(name: str, size: int, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    config = config_of(tmp_path, lookahead=4)
    with open_cuda(tmp_path, config) as whole:
        vocab_size, longest = whole.parts.vocab_size, whole.parts.max_model_len - 40
        rng = random.Random(2)
        prompts = [[rng.randrange(vocab_size) for _ in range(count)] for count in (1, 2, 17, min(150, longest))]
        params = [SamplingParams(max_tokens=6, seed=i, temperature=float(i % 3 > 0), logprobs=2) for i in range(4)]
        right, scores, embedded = whole.generate(prompts, params), whole.score(prompts[2:]), whole.embed(prompts[3])
    with open_ranks(replace(config, tensor_parallel=size), kernels=plain_kernels()) as engine:
        assert engine.parts.code == "cuda"
        assert_same(engine.generate(prompts, params), right)
        for one, other in zip(engine.score(prompts[2:]), scores, strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE)
        assert engine.embed(prompts[3]) == pytest.approx(embedded, abs=TOLERANCE)


@pytest.mark.parametrize(("lookahead", "options"), [(1, {}), (16, TIGHT), (3, PREEMPTED)])
def test_every_kind_of_request_is_the_undivided_one(lookahead: int, options: dict[str, Any], tiny: Path) -> None:
    config = config_of(tiny, lookahead=lookahead, **options)
    requests = [replace(one, params=shorter(one.params)) for one in KINDS]
    with open_cuda(tiny, replace(config, kv_cache_bytes=16 << 20)) as whole:
        right, _ = run_all(whole, requests)
    with open_ranks(replace(config, tensor_parallel=2), kernels=plain_kernels()) as engine:
        mine, stats = run_all(engine, requests)
    assert_same(mine, right)
    assert any(step.num_sampled > step.num_rows for step in stats) == (lookahead > 1)
    assert any(step.num_preempted for step in stats) == (options is PREEMPTED)


def test_a_window_launches_the_same_on_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, products, exchanges and the copy of gathered logits: what a CUDA graph can record.

    Rank 0 sends one message a window.
    """
    steppers: list[Strict] = []
    sent: list[str] = []
    broadcast = Group.broadcast

    def counted(group: Group, command: str, *arguments: Any) -> None:
        sent.append(command)
        broadcast(group, command, *arguments)

    monkeypatch.setattr(Group, "broadcast", counted)

    def strict(*given: Any, ranks: Ranks) -> CudaExecutor:
        recorder = Recorder()

        def stepper(step: Callable[[StepKey], None], device: torch.device) -> Strict:
            steppers.append(Strict(step, recorder, None, may_copy=True))
            return steppers[-1]

        *first, _, limits = given
        exchange = recorder.wrapped(ranks.exchange)
        exchange.size = ranks.exchange.size
        return CudaExecutor(*first, recorder.kernels, limits, stepper, replace(ranks, exchange=exchange))

    monkeypatch.setattr(opening, "CudaExecutor", strict)
    write_model("gemma2", tmp_path)
    with open_ranks(config_of(tmp_path, tensor_parallel=2, lookahead=4), kernels=plain_kernels()) as engine:
        engine.generate([[1, 2, 3], [5]], replace(LONG, logprobs=1))
    own, other = steppers
    assert own.seen.keys() == other.seen.keys() and own.num_replays == other.num_replays > 45
    assert sent.count("run") <= 2 + own.num_replays // 4


def test_deterministic_bits_depend_neither_on_the_batch_nor_on_chunks_nor_on_windows(tmp_path: Path) -> None:
    """Four ranks, whose sums an all-reduce adds in an order that depends on a value's place in the message."""
    write_model("gemma2", tmp_path)
    prompts = [[index * 7 % 160] * (20 + index) for index in range(4)]

    def bits(engine: InferenceEngine, some: list[list[int]]) -> list[Any]:
        params = [replace(LONG, seed=len(prompt), max_tokens=6, logprobs=2) for prompt in some]
        found = engine.generate(some, params)
        return [(one.completion_tokens, one.logprobs, one.top_logprobs) for one in found]

    config = config_of(tmp_path, tensor_parallel=4, deterministic=True)
    with open_ranks(replace(config, lookahead=1), kernels=plain_kernels()) as engine:
        alone = [bits(engine, [prompt])[0] for prompt in prompts]
    with open_ranks(replace(config, lookahead=5, max_tokens_per_batch=13), kernels=plain_kernels()) as engine:
        assert bits(engine, prompts) == alone


def test_an_update_overwrites_each_rank_s_part_between_two_windows(tiny: Path) -> None:
    config, new, places = config_of(tiny, tensor_parallel=2, lookahead=4), weights_of(tiny, 1.25), []

    def addresses(executor: Executor) -> list[int]:
        return [tensor.data_ptr() for _, tensor in executor.weights.values()]

    def changed(own: Executor) -> Executor:
        places.append((own, addresses(own)))
        return own

    with open_cuda(tiny, replace(config, tensor_parallel=1)) as whole:
        old = whole.generate([[1, 2, 3]], LONG)[0]
        whole.update_weights(new, blocking=True)
        right, checksum = whole.generate([[1, 2, 3]], LONG), whole.weights_checksum()
    with open_ranks(config, kernels=plain_kernels(), changed=changed) as engine:
        request = engine.add_request([1, 2, 3], LONG, claim=True)
        for _ in range(5):
            engine.tick()
        assert engine.update_weights(new, on_running="keep", blocking=True) == 1
        engine.wait_for_any([request])
        (sample,) = engine.collect(request)
        count = list(sample.token_versions).count(0)
        assert 5 < count < 50 and sample.completion_tokens[:count] == old.completion_tokens[:count]
        assert engine.weights_checksum() == checksum
        assert_same(engine.generate([[1, 2, 3]], LONG), right)
        ((own, before),) = places
        assert addresses(own) == before


def test_interrupts_pauses_and_copies_leave_the_ranks_in_step(tiny: Path) -> None:
    """The first request ends early and leaves a slot empty, which rank 0 must not use for others alone."""
    asked, params = [[size] * size for size in (5, 1, 2, 3)], [replace(LONG, max_tokens=2), *(LONG,) * 3]
    with open_ranks(config_of(tiny, tensor_parallel=2, lookahead=4), kernels=plain_kernels()) as engine:
        assert engine.parts.executor is not None
        engine.parts.executor.warm_up(lambda done, total: None)
        right = engine.generate(asked, params)
        ids = [engine.add_request(*one, claim=True) for one in zip(asked, params, strict=True)]
        engine.tick()
        for _ in range(2):
            engine.tick()
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    engine.tick()
            timer.join()
        while engine.has_pending():
            engine.tick()
        assert_same([engine.collect(one)[0] for one in ids], right)
        engine.pause()
        engine.sleep()
        engine.wake()
        engine.resume()
        with engine.copy() as copy:
            assert_same(copy.generate(asked, params), right)
        assert_same(engine.generate(asked, params), right)


@pytest.mark.parametrize("num_tokens", [1, 3], ids=["window", "pass"])
def test_memory_that_runs_out_on_one_rank_ends_the_engine(num_tokens: int, tiny: Path) -> None:
    """That rank must not compute the step in halves, which the others would not."""
    kernels = plain_kernels()
    operate = SimpleNamespace(**{name: one for name, one in vars(kernels.operate).items() if callable(one)})

    def embed(out_TW: Tensor, *given: Any) -> None:
        if threading.current_thread().name.startswith("rank-0") and out_TW.size(0) == num_tokens:
            raise torch.OutOfMemoryError("full")
        kernels.operate.embed(out_TW, *given)

    operate.embed = embed
    opened = open_ranks(config_of(tiny, tensor_parallel=2), kernels=replace(kernels, operate=operate))
    with opened as engine, pytest.raises(EngineDead, match="MemoryError: a step needs more memory than there is"):
        engine.generate([[1, 2, 3]], LONG)


_RANK = """
import json, sys
from pathlib import Path
from nano_inference import EngineConfig
from tests.cuda.plain import plain_kernels
from tests.parallel.ranks import serve
serve(1, Path(sys.argv[1]), EngineConfig.from_dict(json.loads(sys.argv[2])), kernels=plain_kernels())
"""


@pytest.mark.parametrize("waits_on_device", [False, True])
def test_a_killed_rank_ends_the_engine(waits_on_device: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the host waits for a device whose kernels wait for that rank: an abort of the group ends them."""
    config, kernels = config_of(tiny, tensor_parallel=2, lookahead=4), plain_kernels()
    may_kill, is_aborted = threading.Event(), threading.Event()
    add, gather = Group.add_in_place, Group.gather_into

    def killing(group: Group, x: Tensor) -> None:
        if may_kill.is_set():
            rank.kill()
            is_aborted.wait()
        else:
            add(group, x)

    if waits_on_device:
        monkeypatch.setattr(Group, "add_in_place", killing)
        monkeypatch.setattr(Group, "gather_into", lambda group, out, x: may_kill.is_set() or gather(group, out, x))
        monkeypatch.setattr(Group, "abort", lambda group: is_aborted.set())
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-c", _RANK, directory, json.dumps(config.to_dict())]
        with subprocess.Popen(command, cwd=ROOT) as rank:
            has_lost = partial(has_ended, rank.pid)
            with leading(Path(directory), config, kernels=kernels, has_lost=has_lost) as engine:
                engine.add_request([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
                engine.tick()
                may_kill.set()
                if not waits_on_device:
                    rank.kill()
                start = time.monotonic()
                with pytest.raises(EngineDead, match="rank 0 of 2 lost another rank"):
                    while True:
                        engine.tick()
                assert time.monotonic() - start < SOON_S
                assert not engine.is_alive
